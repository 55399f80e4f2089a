"""The header of a safetensors file, read without trusting any number in it.

Format (safetensors README): u64 header length, a JSON object of {name: {dtype, shape,
data_offsets}}, then the data. Offsets must cover the data without overlap and without holes.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dflash2_gguf.errors import CheckpointError

__all__ = ["DTYPE_BYTES", "SafetensorsHeader", "StoredTensor", "read_header"]

# the limit of the safetensors library itself
MAX_HEADER_BYTES = 100_000_000
_MAX_DIMS = 8

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}

_HINT = "the file is damaged or its download stopped: fetch it again"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies: ``begin`` and ``nbytes`` count from the start of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class SafetensorsHeader:
    """A checked header; tensors in the order of their data."""

    path: Path
    data_start: int
    tensors: tuple[StoredTensor, ...]


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"broken safetensors file {path.name}: {what}", _HINT)


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of ``path``; CheckpointError names what is wrong with it."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = _header_length(path, file.read(8), size)
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    entries = _parse_json(path, text)
    tensors = sorted(
        (_entry(path, name, value) for name, value in entries if name != "__metadata__"),
        key=lambda tensor: (tensor.begin, tensor.nbytes),
    )
    _check_cover(path, tensors, size - 8 - length)
    return SafetensorsHeader(path=path, data_start=8 + length, tensors=tuple(tensors))


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < 8:
        raise _broken(path, f"it has {size} bytes")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise _broken(path, f"its header claims {length} bytes")
    if length > size - 8:
        raise _broken(path, f"its header claims {length} bytes, the file has {size}")
    return int(length)


def _parse_json(path: Path, text: bytes) -> list[tuple[str, Any]]:
    try:
        pairs = json.loads(text.decode("utf-8"), object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not JSON ({type(error).__name__})") from None
    if not text.startswith(b"{") or not isinstance(pairs, list):
        raise _broken(path, "its header is not a JSON object")
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise _broken(path, f"its header lists {twice!r} twice")
    return pairs


def _sizes(value: object) -> list[int] | None:
    """A list of numbers that fit 64 bits and are few enough to multiply, None for anything else."""
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        return None
    return value if all(type(n) is int and 0 <= n < 2**63 for n in value) else None


def _entry(path: Path, name: str, value: Any) -> StoredTensor:
    fields = dict(value) if _is_pairs(value) else {}
    dtype, shape = fields.get("dtype"), _sizes(fields.get("shape"))
    offsets = _sizes(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise _broken(path, f"the entry of tensor {name!r} is malformed")
    if dtype not in DTYPE_BYTES:
        raise _broken(path, f"tensor {name!r} has the unknown dtype {dtype!r}")
    begin, end = offsets
    nbytes = prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != nbytes:
        raise _broken(
            path,
            f"tensor {name!r} ({dtype} {shape}) needs {nbytes} bytes, not {end - begin}",
        )
    return StoredTensor(name=name, dtype=dtype, shape=tuple(shape), begin=begin, nbytes=nbytes)


def _is_pairs(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, tuple) and len(item) == 2 for item in value
    )


def _check_cover(path: Path, tensors: list[StoredTensor], available: int) -> None:
    at = 0
    for tensor in tensors:
        if tensor.begin < at:
            raise _broken(path, f"tensor {tensor.name!r} overlaps the one before it")
        if tensor.begin > at:
            raise _broken(path, f"{tensor.begin - at} unused bytes before tensor {tensor.name!r}")
        at = tensor.begin + tensor.nbytes
    if at > available:
        raise _broken(path, f"it is truncated, {at - available} of {at} data bytes are missing")
    if at < available:
        raise _broken(path, f"{available - at} unused bytes after the last tensor")
