"""One tensor from the checkpoint into every output: decode, reorder, encode.

Rows are independent of each other, so threads change nothing but the time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from dflash2_gguf.convert.dequantize import (
    Parts,
    ReadRows,
    decode_columns,
    read_part,
    row_bytes,
    row_reader,
)
from dflash2_gguf.convert.quantize import (
    Bytes,
    Floats,
    encode_rows,
    rope_halves,
    stored_values,
    to_float32,
)
from dflash2_gguf.convert.source import Checkpoint, read_tensor
from dflash2_gguf.convert.tensors import PlannedTensor
from dflash2_gguf.convert.vocab_map import token_ids
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.ggml_types import GGMLType
from dflash2_gguf.gguf_schema import Role

__all__ = ["Output", "piece_bytes", "transfer"]

_PIECE_BYTES = 4 << 20  # of the source, read at a time
# of them, converted at a time by one thread: as floats they still fit a core's cache
_SLICE_BYTES = 1 << 18
_MAX_THREADS = 8

_PARTIAL = "the download probably stopped half-way: fetch the checkpoint again"

# the type a tensor gets in one output, and what takes its rows: first row and their bytes
Output = tuple[GGMLType, Callable[[int, Bytes], None]]


def piece_bytes(tensor: PlannedTensor | None) -> int:
    """Whole rows, and whole heads where rows of a head are reordered; None is only read over."""
    return _PIECE_BYTES if tensor is None else _whole_units(tensor, _PIECE_BYTES)


def _whole_units(tensor: PlannedTensor, nbytes: int) -> int:
    row = row_bytes(tensor.weight, tensor.n_cols)
    unit = row * (tensor.rope_dim if tensor.n_rows > 1 and tensor.rope_dim else 1)
    return max(1, nbytes // unit) * unit


def transfer(
    tensor: PlannedTensor,
    checkpoint: Checkpoint,
    pieces: Iterator[memoryview],
    outputs: Sequence[Output],
    *,
    n_vocab: int,
    importance: Floats | None = None,
) -> None:
    """Write all rows of ``tensor`` to every output; ``importance`` of its columns, if known.

    Raises CheckpointError for values that no drafter has: NaN, infinite, all zero, or a map of
    tokens that is none.
    """
    if tensor.spec.role is Role.VOCAB_MAP:
        _transfer_map(tensor, checkpoint, pieces, outputs, n_vocab)
        return
    weight = tensor.weight
    parts: Parts = {
        role: read_part(part, read_tensor(checkpoint, part)) for role, part in weight.parts.items()
    }
    shape = (tensor.n_source_rows, tensor.n_cols)
    any_value = False
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        if weight.by_columns:
            work = _Work(tensor, outputs, importance)
            unit, raw, row = max(1, tensor.rope_dim), b"".join(pieces), 0
            for values in decode_columns(weight, raw, parts, shape, unit=unit):
                any_value |= work.convert(row, values)
                row += len(values)
        else:
            work = _Work(tensor, outputs, importance, row_reader(weight, parts, shape))
            row, row_size = 0, row_bytes(weight, tensor.n_cols)
            step = _whole_units(tensor, _SLICE_BYTES)
            for piece in pieces:
                slices = [
                    (row + at // row_size, piece[at : at + step])
                    for at in range(0, len(piece), step)
                ]
                any_value |= any(list(pool.map(work.convert_stored, *zip(*slices, strict=True))))
                row += len(piece) // row_size
    if not any_value:
        raise CheckpointError(f"tensor {tensor.source.stored_name} is all zeros", _PARTIAL)


def _transfer_map(
    tensor: PlannedTensor,
    checkpoint: Checkpoint,
    pieces: Iterator[memoryview],
    outputs: Sequence[Output],
    n_vocab: int,
) -> None:
    source, raw = tensor.source, b"".join(pieces)
    if checkpoint.kind != "gguf":  # a GGUF file holds ids already
        raw = token_ids(raw, source.dtype, n_vocab, source.stored_name).astype("<i8").tobytes()
    for _, write in outputs:
        write(0, np.frombuffer(raw, dtype=np.uint8))


@dataclass(frozen=True)
class _Work:
    """What is done to some rows of a tensor. Both ways return whether a value is not zero."""

    tensor: PlannedTensor
    outputs: Sequence[Output]
    importance: Floats | None
    read: ReadRows | None = None

    def convert_stored(self, row: int, raw: memoryview) -> bool:
        """Rows from ``row`` on, as they are stored."""
        tensor, dtype = self.tensor, self.tensor.source.dtype
        if self.read is None:
            raise ValueError(f"{tensor.source.stored_name} is stored by columns")
        if tensor.rope_dim or tensor.weight.form not in ("plain", "ggml"):
            return self.convert(row, self.read(raw, row))
        copies = all(kind.name == dtype for kind, _ in self.outputs)
        if tensor.weight.form == "plain" and copies and tensor.kept is None and tensor.row < 0:
            finite, any_value = stored_values(raw, dtype)
            self._require(finite)
            for _, write in self.outputs:
                write(row, np.frombuffer(raw, dtype=np.uint8))
            return any_value
        return self.convert(row, self.read(raw, row), raw)

    def convert(self, row: int, values: Floats, stored: memoryview | None = None) -> bool:
        """Rows from ``row`` on; ``stored`` are their bytes where those can be written."""
        tensor = self.tensor
        raw = None if stored is None else np.frombuffer(stored, dtype=np.uint8)
        if tensor.kept is not None:
            first, end = np.searchsorted(tensor.kept, (row, row + len(values)))
            chosen = tensor.kept[first:end] - row
            if raw is not None:
                raw = raw.reshape(len(values), -1)[chosen].reshape(-1)
            row, values = int(first), values[chosen]
            if not chosen.size:
                return False
        if row <= tensor.row < row + len(values) and tensor.values is not None:
            values[tensor.row - row] = _rounded(tensor.values, tensor.source.dtype)
            raw = None
        if tensor.rope_dim:
            values = rope_halves(values, tensor.rope_dim)
        self._require(bool(np.isfinite(values).all()))
        for kind, write in self.outputs:
            if raw is not None and kind.name == tensor.source.dtype:
                write(row, raw)
            else:
                name = tensor.source.stored_name
                write(row, encode_rows(values, kind, name, self.importance))
        return bool(values.any())

    def _require(self, finite: bool) -> None:
        if not finite:
            name = self.tensor.source.stored_name
            raise CheckpointError(f"tensor {name} has NaN or infinite values", _PARTIAL)


def _rounded(values: Floats, dtype: str) -> Floats:
    """As upstream, which puts the vector into the table and converts that."""
    if dtype not in ("F16", "BF16"):
        return values
    stored = encode_rows(values[None], GGMLType[dtype], dtype).tobytes()
    return to_float32(memoryview(stored), dtype)
