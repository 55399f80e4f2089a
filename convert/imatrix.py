"""Importance matrices: what each column of a weight is multiplied with, for ggml's quantizers.

Read as ``llama-quantize --imatrix`` does (``common/imatrix-loader.cpp`` and
``tools/quantize/quantize.cpp:load_imatrix``): GGUF files with ``<tensor>.in_sum2`` and
``<tensor>.counts`` of F32; a column's weight is its sum divided by the count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash2_gguf.convert.gguf_reader import GGUFHeader, TensorEntry, read_gguf
from dflash2_gguf.convert.quantize import Floats
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.ggml_types import GGMLType, ValueType
from dflash2_gguf.gguf_schema import IMATRIX_TYPE, Key, Name

__all__ = ["ImportanceMatrix", "read_imatrix"]

Counts = np.ndarray[Any, np.dtype[np.int64]]

_MAKE_HINT = "make it with `dflash2-convert calibrate` for this drafter"
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class ImportanceMatrix:
    """One file: ``weights`` [n_cols] by tensor, and where it says it is from.

    token_counts [n_vocab]: how often each token was chosen, None in files of other programs.
    """

    path: Path
    datasets: tuple[str, ...]
    n_chunks: int
    weights: dict[str, Floats]
    token_counts: Counts | None = None

    def require_columns(self, columns: Sequence[tuple[str, int]]) -> None:
        """Check that it is of a model with these tensors (name, columns).

        Raises CheckpointError when a tensor has another number of columns, or none is in the file.
        """
        for name, n_cols in columns:
            found = self.weights.get(name)
            if found is not None and found.size != n_cols:
                raise CheckpointError(
                    f"{self.path} has {found.size} columns for {name}, the drafter {n_cols}",
                    _MAKE_HINT,
                )
        if not any(name in self.weights for name, _ in columns):
            raise CheckpointError(
                f"{self.path} has no weight of this drafter, but {_names(list(self.weights))}",
                _MAKE_HINT,
            )

    def missing(self, names: Sequence[str]) -> str | None:
        """One line about those tensors that it does not know, None if there are none."""
        unknown = [name for name in names if name not in self.weights]
        if not unknown:
            return None
        return (
            f"{len(unknown)} of {len(names)} quantized tensors are not in {self.path} "
            f"and go without: {_names(unknown)}"
        )


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Read and check a file.

    Raises CheckpointError for anything but a complete importance matrix with finite weights that
    are not negative.
    """
    header = read_gguf(path)
    if header.text(Key.TYPE) != IMATRIX_TYPE:
        raise CheckpointError(f"{path} is no importance matrix", _MAKE_HINT)
    datasets = header.values.get(Key.IMATRIX_DATASETS)
    n_chunks = header.integer(Key.IMATRIX_CHUNK_COUNT)
    if datasets is None or n_chunks is None or header.integer(Key.IMATRIX_CHUNK_SIZE) is None:
        raise CheckpointError(f"{path} does not say what it was computed with", _MAKE_HINT)
    sums = {
        name.removesuffix(Name.IMATRIX_SUMS)
        for name in header.tensors
        if name.endswith(Name.IMATRIX_SUMS)
    }
    extra = [name for name in header.tensors if not name.endswith(Name.IMATRIX_COUNTS)]
    if not sums or len(extra) != len(sums):
        raise CheckpointError(f"{path} holds other tensors than sums and counts", _MAKE_HINT)
    return ImportanceMatrix(
        path=path,
        datasets=tuple(str(item) for item in datasets.items()),
        n_chunks=n_chunks,
        weights={name: _weights(header, name) for name in sorted(sums)},
        token_counts=_token_counts(header),
    )


def _token_counts(header: GGUFHeader) -> Counts | None:
    value = header.values.get(Key.IMATRIX_TOKEN_COUNTS)
    if value is None:
        return None
    if value.item is not ValueType.UINT32:
        raise CheckpointError(f"{header.path} counts tokens in another type than U32", _MAKE_HINT)
    return np.frombuffer(value.raw, dtype="<u4").astype(np.int64)


def _weights(header: GGUFHeader, name: str) -> Floats:
    """Mean squares of one tensor; columns of a tensor that nothing was seen of weigh 1."""
    sums = _floats(header, name + Name.IMATRIX_SUMS)
    counts = np.rint(_floats(header, name + Name.IMATRIX_COUNTS))
    if counts.size != 1:
        raise CheckpointError(
            f"{header.path} has {counts.size} counts for {name}", "a drafter has no experts"
        )
    if (sums < 0).any() or counts[0] < 0:
        raise CheckpointError(f"{header.path} has negative sums or counts for {name}", _MAKE_HINT)
    # in single precision, as llama-quantize divides
    return sums / counts[0] if counts[0] > 0 else np.ones_like(sums)


def _floats(header: GGUFHeader, name: str) -> Floats:
    tensor: TensorEntry | None = header.tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{header.path} lacks the tensor {name}", _MAKE_HINT)
    if tensor.type is not GGMLType.F32:
        raise CheckpointError(f"{header.path} does not store {name} as F32", _MAKE_HINT)
    with header.path.open("rb") as file:
        file.seek(header.data_offset + tensor.offset)
        values = np.frombuffer(file.read(tensor.nbytes), dtype="<f4").astype(np.float32)
    if not values.size or not np.isfinite(values).all():
        raise CheckpointError(f"{header.path} has NaN or no values in {name}", _MAKE_HINT)
    return values


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
