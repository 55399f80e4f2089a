"""Quantized weights of checkpoints back to 32-bit floats, rows at a time.

Arithmetic and order are those of upstream's ``conversion/base.py:dequant_model`` where that reads
the format, so the values are the same to the bit; AWQ's order of packing is AutoAWQ's
(``awq/utils/packing_utils.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from dflash2_gguf.convert.quantize import Floats, to_float32
from dflash2_gguf.convert.source import SourceTensor
from dflash2_gguf.convert.stored_weights import StoredWeight
from dflash2_gguf.errors import CheckpointError

__all__ = ["Parts", "ReadRows", "decode_columns", "read_part", "row_bytes", "row_reader"]

Array = np.ndarray[Any, np.dtype[Any]]
# scales, zero points, group indices of a weight, by role
Parts = Mapping[str, Array]

_INTEGERS = {"I8": "<i1", "U8": "<u1", "I32": "<i4", "I64": "<i8"}
_FLOATS = ("F32", "F16", "BF16")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of output j of eight within a word
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIN_ROWS = 64  # of a weight stored by columns, decoded at a time


def read_part(tensor: SourceTensor, raw: memoryview) -> Array:
    """Values of a tensor beside a weight.

    Raises CheckpointError for a dtype that none of them has, and for one without values.
    """
    if not tensor.nbytes:
        raise CheckpointError(f"tensor {tensor.stored_name} is empty")
    if tensor.dtype in _FLOATS:
        values: Array = to_float32(raw, tensor.dtype)
    elif tensor.dtype in _INTEGERS:
        values = np.frombuffer(raw, dtype=_INTEGERS[tensor.dtype])
    elif tensor.dtype.startswith("F8_"):
        values = _float8(tensor.dtype)[np.frombuffer(raw, dtype=np.uint8)]
    else:
        raise CheckpointError(f"tensor {tensor.stored_name} is stored as {tensor.dtype}")
    return values.reshape(tensor.shape)


@lru_cache
def _float8(dtype: str) -> Floats:
    """The 256 values of an 8-bit float (OCP 8-bit floating point and microscaling formats)."""
    codes = np.arange(256)
    if dtype == "F8_E8M0":
        return np.where(codes == 255, np.nan, np.exp2(codes - 127.0)).astype(np.float32)
    mantissa_bits, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
    exponent = (codes & 0x7F) >> mantissa_bits
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = (1 + mantissa) * np.exp2(exponent - float(bias))
    values = np.where(exponent > 0, normal, mantissa * np.exp2(1.0 - bias))
    if dtype == "F8_E4M3":
        values = np.where((codes & 0x7F) == 0x7F, np.nan, values)
    else:
        values = np.where(exponent == 31, np.where(mantissa == 0, np.inf, np.nan), values)
    return np.where(codes >= 128, -values, values).astype(np.float32)


def row_bytes(weight: StoredWeight, n_cols: int) -> int:
    """Bytes of a row in the main tensor; whole ones are needed to decode."""
    if weight.by_columns:
        return 1
    shape = weight.main.shape
    return max(1, weight.main.nbytes * (shape[-1] if shape else n_cols) // max(1, prod(shape)))


# values [n, columns] of the bytes of whole rows, and the first one's number; for several threads
ReadRows = Callable[[memoryview, int], Floats]


def row_reader(weight: StoredWeight, parts: Parts, shape: tuple[int, ...]) -> ReadRows:
    """How rows of a weight that is not stored by columns are decoded.

    Raises CheckpointError where the parts do not fit ``shape``.
    """
    if weight.form == "scaled":
        return _scaled(weight, parts, shape)
    if weight.form == "packed":
        return _packed(weight, parts, shape)
    if weight.form == "fp4":
        return _fp4(weight, parts, shape)
    if weight.form == "ggml":
        return _ggml(weight, shape[-1])
    dtype, n_cols = weight.main.dtype, shape[-1]
    return lambda piece, _row: to_float32(piece, dtype).reshape(-1, n_cols)


def _misfit(weight: StoredWeight, role: str, part: Array) -> CheckpointError:
    return CheckpointError(
        f"tensor {weight.name} of {list(weight.shape)} has a {role} of {list(part.shape)}",
        "the quantized checkpoint is damaged or of a kind that is not read",
    )


def _spread(
    weight: StoredWeight, role: str, part: Array, shape: tuple[int, ...]
) -> Callable[[int, int], Array]:
    """A function of (first row, rows) that gives the part's values for each weight of the rows."""
    n_rows, n_cols = shape
    if part.size == 1:
        return lambda _row, _n: part.reshape(1, 1)
    if part.size == n_rows and part.shape[0] == n_rows:
        column = part.reshape(-1, 1)
        return lambda row, n: column[row : row + n]
    if part.ndim != 2:
        raise _misfit(weight, role, part)
    high, wide = weight.scheme.block or (1, 0)
    if part.shape[0] == n_rows and part.shape[1] and n_cols % part.shape[1] == 0:
        high, wide = 1, n_cols // part.shape[1]
    if part.shape != (-(-n_rows // high), -(-n_cols // max(wide, 1))):
        raise _misfit(weight, role, part)

    def rows(row: int, n: int) -> Array:
        """The part's values [n, n_cols] for ``n`` rows from ``row`` on."""
        picked = part[np.arange(row, row + n) // high]
        return np.repeat(picked, wide, axis=1)[:, :n_cols]

    return rows


def _scaled(weight: StoredWeight, parts: Parts, shape: tuple[int, ...]) -> ReadRows:
    """FP8 or INT8, one byte a weight."""
    if len(shape) != 2:
        found = f"{len(shape)} dimension{'s' * (len(shape) != 1)}"
        raise CheckpointError(f"tensor {weight.name} is quantized, it has {found}")
    dtype, n_cols = weight.main.dtype, shape[1]
    scale = _spread(weight, "scale", parts["scale"], shape)
    zeros = _spread(weight, "zero point", parts["zeros"], shape) if "zeros" in parts else None

    def read(piece: memoryview, row: int) -> Floats:
        """(value - zero point) * scale."""
        if dtype == "I8":
            values = np.frombuffer(piece, dtype="<i1").astype(np.float32)
        else:
            values = _float8(dtype)[np.frombuffer(piece, dtype=np.uint8)]
        values = values.reshape(-1, n_cols)
        if zeros is not None:
            values = values - zeros(row, len(values)).astype(np.float32)
        return (values * scale(row, len(values))).astype(np.float32)

    return read


def _packed(weight: StoredWeight, parts: Parts, shape: tuple[int, ...]) -> ReadRows:
    """pack-quantized of compressed-tensors: words of integers along the columns.

    Zero points are packed along the rows instead.
    """
    bits, (n_rows, n_cols) = weight.scheme.bits, shape
    scale = parts["scale"].reshape(n_rows, -1) if parts["scale"].size % n_rows == 0 else None
    if scale is None:
        raise _misfit(weight, "scale", parts["scale"])
    group = _column_groups(weight, parts, n_cols, scale.shape[1])
    zeros = np.full((1, scale.shape[1]), 1 << (bits - 1), dtype=np.int32)
    if "zeros" in parts:
        zeros = _unpack(parts["zeros"].astype(np.int32).T, bits).T[:n_rows]
        if zeros.shape != scale.shape:
            raise _misfit(weight, "zero point", parts["zeros"])
    n_words = weight.main.shape[1]

    def read(piece: memoryview, row: int) -> Floats:
        """(value - zero point) * scale of the column's group."""
        words = np.frombuffer(piece, dtype="<i4").reshape(-1, n_words)
        values = _unpack(words, bits)[:, :n_cols]
        rows = slice(row, row + len(values))
        offset = zeros[rows] if len(zeros) > 1 else zeros
        levels = (values - offset[:, group]).astype(np.float32)
        return (levels * scale[rows][:, group]).astype(np.float32)

    return read


def _unpack(words: Array, bits: int) -> Array:
    """Integers of [n, words] 32-bit words, lowest bits first, as [n, words * 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.int32)
    return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).reshape(len(words), -1)


def _column_groups(weight: StoredWeight, parts: Parts, n_cols: int, n_groups: int) -> Array:
    """The group that each column belongs to."""
    if "groups" in parts:
        found = parts["groups"].astype(np.int64).reshape(-1)
        if len(found) != n_cols or found.min() < 0 or found.max() >= n_groups:
            raise _misfit(weight, "group index", parts["groups"])
        return found
    if n_groups < 1 or n_cols % n_groups:
        raise _misfit(weight, "scale", parts["scale"])
    return np.arange(n_cols) // (n_cols // n_groups)


def _fp4(weight: StoredWeight, parts: Parts, shape: tuple[int, ...]) -> ReadRows:
    """Two E2M1 floats a byte, the lower half first (NVFP4, MXFP4)."""
    scale = parts["scale"]
    if scale.dtype == np.uint8:  # MXFP4 writes its powers of two as plain bytes
        scale = _float8("F8_E8M0")[scale]
    for role, divides in (("global_scale", False), ("global_divisor", True)):
        if role in parts:
            factor = np.float32(parts[role].reshape(-1)[0])
            scale = scale / factor if divides else scale * factor
    spread = _spread(weight, "scale", scale, shape)
    table = np.array([*_E2M1, *(-value for value in _E2M1)], dtype=np.float32)
    n_cols = shape[1]

    def read(piece: memoryview, row: int) -> Floats:
        """Value of the code * scale."""
        raw = np.frombuffer(piece, dtype=np.uint8)
        codes = np.stack([raw & 0xF, raw >> 4], axis=1).reshape(-1, n_cols)
        return (table[codes] * spread(row, len(codes))).astype(np.float32)

    return read


def _ggml(weight: StoredWeight, n_cols: int) -> ReadRows:
    import gguf  # a second to import, and only for quantized GGUF sources

    kind, n_bytes = gguf.GGMLQuantizationType[weight.main.dtype], row_bytes(weight, n_cols)

    def read(piece: memoryview, _row: int) -> Floats:
        """As the ``gguf`` package decodes blocks; they hold their own scales."""
        raw = np.frombuffer(piece, dtype=np.uint8).reshape(-1, n_bytes)
        return np.asarray(gguf.dequantize(raw, kind), dtype=np.float32)

    return read


def decode_columns(
    weight: StoredWeight, raw: bytes, parts: Parts, shape: tuple[int, ...], *, unit: int = 1
) -> Iterator[Floats]:
    """Rows, in order and in multiples of ``unit``, of a weight that is stored by columns.

    AWQ and GPTQ: words of [inputs, outputs], with scale and zero point per group of inputs. Raises
    CheckpointError where the parts do not fit ``shape``.
    """
    words = np.frombuffer(raw, dtype="<i4").reshape(weight.main.shape)
    bits, (n_rows, n_cols) = weight.scheme.bits, shape
    per_word, scale, zeros = 32 // bits, parts["scale"], _unpack(parts["zeros"], bits)
    if weight.form == "awq":
        zeros = _awq_order(zeros, per_word)
    elif weight.scheme.zeros_minus_one:
        zeros = zeros + 1
    if scale.ndim != 2 or scale.shape[1] != n_rows or zeros.shape != scale.shape:
        raise _misfit(weight, "scale", scale)
    group = _column_groups(weight, parts, n_cols, len(scale))
    step = -(-_MIN_ROWS // (per_word * unit)) * per_word * unit
    for row in range(0, n_rows, step):
        rows = slice(row, min(row + step, n_rows))
        if weight.form == "awq":
            levels = _unpack(words[:, rows.start // per_word : -(-rows.stop // per_word)], bits)
            levels = _awq_order(levels, per_word)
        else:
            levels = _unpack(np.ascontiguousarray(words[:, rows].T), bits).T
        values = (levels - zeros[group][:, rows]).astype(np.float32)
        yield np.ascontiguousarray((scale[group][:, rows] * values).T)


def _awq_order(values: Array, per_word: int) -> Array:
    if per_word != len(_AWQ_ORDER):
        raise CheckpointError(
            f"AWQ weights of {32 // per_word} bits are not read", "take the unquantized checkpoint"
        )
    shape = values.shape
    return values.reshape(shape[0], -1, per_word)[:, :, _AWQ_ORDER].reshape(shape)
