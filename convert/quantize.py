"""Weights from checkpoint types to GGUF types, a few rows at a time, from any thread.

Floats are converted by numpy on bit views; quantized types by ggml's own ``ggml_quantize_chunk``,
so the bytes are those of ``llama-quantize``, with and without importance matrix.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from dflash2_gguf.errors import CheckpointError, NativeError
from dflash2_gguf.ggml_types import GGMLType
from dflash2_gguf.libraries import load

__all__ = ["DTYPE_SIZE", "Floats", "encode_rows", "rope_halves", "stored_values", "to_float32"]

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

DTYPE_SIZE = {"F32": 4, "F16": 2, "BF16": 2}
# of a float: its bits as an integer, and those of its exponent, all of which an infinity or NaN has
_BITS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
_FLOATS = ctypes.POINTER(ctypes.c_float)


def to_float32(raw: memoryview, dtype: str) -> Floats:
    """Values of little-endian ``F32``, ``F16`` or ``BF16`` bytes, flat."""
    if dtype == "F32":
        return np.frombuffer(raw, dtype="<f4").astype(np.float32)
    if dtype == "F16":
        return np.frombuffer(raw, dtype="<f2").astype(np.float32)
    if dtype == "BF16":
        bits = np.frombuffer(raw, dtype="<u2").astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    raise ValueError(f"unknown dtype {dtype}")


def stored_values(raw: memoryview, dtype: str) -> tuple[bool, bool]:
    """Of little-endian floats: are all of them finite, is any of them not zero."""
    kind, exponent = _BITS[dtype]
    bits = np.frombuffer(raw, dtype=kind)
    return not bool(((bits & exponent) == exponent).any()), bool((bits << 1).any())


def rope_halves(values: Floats, head_dim: int) -> Floats:
    """Reorder heads from interleaved pairs to halves, the layout llama.cpp rotates.

    ``values`` [n x head_dim, cols], rows of whole heads, or one row [1, head_dim] of a norm
    (``conversion/qwen.py:DFlashModel.modify_tensors``).
    """
    shape = values.shape
    if shape[0] == 1:
        return values.reshape(-1, 2).T.reshape(shape).copy()
    pairs = values.reshape(-1, head_dim // 2, 2, shape[1])
    return pairs.transpose(0, 2, 1, 3).reshape(shape)


def encode_rows(
    values: Floats, kind: GGMLType, name: str, importance: Floats | None = None
) -> Bytes:
    """Bytes of rows [n, cols] as ``kind``; ``importance`` [cols] says what errors count with.

    Raises CheckpointError naming the tensor when a value does not fit a 16-bit float, NativeError
    when ggml is needed and missing.
    """
    if kind is GGMLType.F32:
        return np.ascontiguousarray(values, dtype="<f4").view(np.uint8).reshape(-1)
    if kind is GGMLType.F16:
        with np.errstate(over="ignore"):
            half = values.astype("<f2")
        if not np.isfinite(half).all():
            _refuse_overflow(values, kind, name)
        return half.view(np.uint8).reshape(-1)
    if kind is GGMLType.BF16:
        return _to_bf16(values, name)
    values = np.ascontiguousarray(values, dtype=np.float32)
    if importance is None:
        return _quantize(values, kind, None)
    if importance.shape != values.shape[1:]:
        raise ValueError(f"{name}: rows of {values.shape[1]}, importance of {importance.shape}")
    return _quantize(values, kind, np.ascontiguousarray(importance, dtype=np.float32))


def _refuse_overflow(values: Floats, kind: GGMLType, name: str) -> None:
    raise CheckpointError(
        f"tensor {name} has the value {np.abs(values).max():g}, too large for {kind.name}",
        "choose preset bf16 or f32",
    )


def _to_bf16(values: Floats, name: str) -> Bytes:
    """Round to nearest even, as ``ggml_compute_fp32_to_bf16``; inputs are finite."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    if ((rounded & 0x7F80) == 0x7F80).any():
        _refuse_overflow(values, GGMLType.BF16, name)
    return rounded.astype("<u2").view(np.uint8).reshape(-1)


@lru_cache(maxsize=1)
def _ggml() -> ctypes.CDLL:
    library = load("ggml-base")
    size = ctypes.c_size_t
    int64 = ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        _FLOATS,
        ctypes.c_void_p,
        int64,
        int64,
        int64,
        _FLOATS,
    ]
    library.ggml_quantize_chunk.restype = size
    library.ggml_quantize_init.argtypes = [ctypes.c_int]
    library.ggml_quantize_init.restype = None
    library.ggml_validate_row_data.argtypes = [ctypes.c_int, ctypes.c_void_p, size]
    library.ggml_validate_row_data.restype = ctypes.c_bool
    return library


def _quantize(values: Floats, kind: GGMLType, importance: Floats | None) -> Bytes:
    n_rows, n_cols = values.shape
    out = np.empty(n_rows * kind.row_bytes(n_cols), dtype=np.uint8)
    pointer = values.ctypes.data_as(_FLOATS)
    weights = None if importance is None else importance.ctypes.data_as(_FLOATS)
    _ggml().ggml_quantize_init(int(kind))
    written = _ggml().ggml_quantize_chunk(
        int(kind), pointer, out.ctypes.data, 0, n_rows, n_cols, weights
    )
    if written != out.nbytes:
        raise NativeError(f"ggml wrote {written} bytes of {kind.name} instead of {out.nbytes}")
    if not _ggml().ggml_validate_row_data(int(kind), out.ctypes.data, out.nbytes):
        raise NativeError(f"ggml produced invalid {kind.name} data")
    return out
