"""One tensor from the checkpoint into every output: decode, reorder, encode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dflash2_gguf.convert.dequantize import Parts, decode, read_part, row_bytes
from dflash2_gguf.convert.quantize import Bytes, Floats, encode_rows, rope_halves, to_float32
from dflash2_gguf.convert.source import Checkpoint, read_tensor
from dflash2_gguf.convert.tensors import PlannedTensor
from dflash2_gguf.convert.vocab_map import token_ids
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.ggml_types import GGMLType
from dflash2_gguf.gguf_schema import Role

__all__ = ["Output", "piece_bytes", "transfer"]

# source bytes converted at a time; several times as much is alive as floats and temporaries
_PIECE_BYTES = 4 << 20

_PARTIAL = "the download probably stopped half-way: fetch the checkpoint again"

# the type a tensor gets in one output, and what takes its rows: first row and their bytes
Output = tuple[GGMLType, Callable[[int, Bytes], None]]


def piece_bytes(tensor: PlannedTensor | None) -> int:
    """Whole rows, and whole heads where rows of a head are reordered; None is only read over."""
    if tensor is None:
        return _PIECE_BYTES
    row = row_bytes(tensor.weight, tensor.n_cols)
    unit = row * (tensor.rope_dim if tensor.n_rows > 1 and tensor.rope_dim else 1)
    return max(1, _PIECE_BYTES // unit) * unit


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
        source, raw_ids = tensor.source, b"".join(pieces)
        if checkpoint.kind != "gguf":  # a GGUF file holds ids already
            ids = token_ids(raw_ids, source.dtype, n_vocab, source.stored_name)
            raw_ids = ids.astype("<i8").tobytes()
        for _, write in outputs:
            write(0, np.frombuffer(raw_ids, dtype=np.uint8))
        return
    name, row, any_value = tensor.source.stored_name, 0, False
    for stored, values in _values(tensor, checkpoint, pieces):
        raw = stored
        if row <= tensor.row < row + len(values) and tensor.values is not None:
            values[tensor.row - row] = _rounded(tensor.values, tensor.source.dtype)
            raw = None
        if not np.isfinite(values).all():
            raise CheckpointError(f"tensor {name} has NaN or infinite values", _PARTIAL)
        any_value = any_value or bool(values.any())
        for kind, write in outputs:
            as_stored = raw is not None and kind.name == tensor.source.dtype
            data = (
                np.frombuffer(raw, dtype=np.uint8)
                if raw is not None and as_stored
                else encode_rows(values, kind, name, importance)
            )
            write(row, data)
        row += len(values)
    if not any_value:
        raise CheckpointError(f"tensor {name} is all zeros", _PARTIAL)


def _rounded(values: Floats, dtype: str) -> Floats:
    """As upstream, which puts the vector into the table and converts that."""
    if dtype not in ("F16", "BF16"):
        return values
    stored = encode_rows(values[None], GGMLType[dtype], dtype).tobytes()
    return to_float32(memoryview(stored), dtype)


def _values(
    tensor: PlannedTensor, checkpoint: Checkpoint, pieces: Iterator[memoryview]
) -> Iterator[tuple[memoryview | None, Floats]]:
    """Rows as floats, with the bytes they are stored in where those can be written as they are."""
    weight = tensor.weight
    parts: Parts = {
        role: read_part(part, read_tensor(checkpoint, part)) for role, part in weight.parts.items()
    }
    unit = max(1, tensor.rope_dim)
    as_they_are = weight.form in ("plain", "ggml") and not tensor.rope_dim
    if not as_they_are:
        shape = (tensor.n_rows, tensor.n_cols)
        for values in decode(weight, pieces, parts, shape, unit=unit):
            yield None, rope_halves(values, tensor.rope_dim) if tensor.rope_dim else values
        return
    for piece in pieces:
        for values in decode(weight, iter((piece,)), parts, tensor.spec.shape):
            yield piece, values
