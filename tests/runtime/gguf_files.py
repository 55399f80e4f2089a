"""Tiny GGUF files made of exactly the fields a test wants."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash2_gguf.ggml_types import ValueType
from dflash2_gguf.gguf_schema import ARCHITECTURE, Key, arch_key, tensor_name

__all__ = ["SELECTOR", "drafter_fields", "target_fields", "write_gguf"]

SELECTOR = tensor_name("candidate_selector.hidden_projection.weight") or ""

Tensors = Mapping[str, tuple[int, ...]]


def target_fields(**changes: Any) -> dict[str, Any]:
    """Metadata of a small target; a change to None removes the field."""
    fields: dict[str, Any] = {
        Key.ARCHITECTURE: "llama",
        arch_key(Key.Arch.BLOCK_COUNT, arch="llama"): 4,
        arch_key(Key.Arch.EMBEDDING_LENGTH, arch="llama"): 8,
        Key.TOKENS: ["a", "b", "c", "d"],
    }
    return _changed(fields, changes)


def drafter_fields(**changes: Any) -> dict[str, Any]:
    """Metadata of a drafter for ``target_fields()``."""
    fields: dict[str, Any] = {
        Key.ARCHITECTURE: ARCHITECTURE,
        arch_key(Key.Arch.BLOCK_COUNT): 1,
        arch_key(Key.Arch.EMBEDDING_LENGTH): 8,
        arch_key(Key.Arch.RMS_EPS): 1e-5,
        arch_key(Key.Arch.BLOCK_SIZE): 8,
        arch_key(Key.Arch.SELECTOR_RANK): 4,
        arch_key(Key.Arch.SELECTOR_TOP_K): 2,
        arch_key(Key.Arch.CONV_KERNEL_SIZE): 2,
        arch_key(Key.Arch.CONV_GROUP_SIZE): 4,
        arch_key(Key.Arch.TARGET_LAYERS): [1, 4],
        Key.TOKENS: ["a", "b", "c", "d"],
        Key.MASK_TOKEN_ID: 3,
    }
    return _changed(fields, changes)


def write_gguf(
    path: Path, fields: Mapping[str, Any], tensors: Tensors | None = None, *, version: int = 3
) -> Path:
    """Write a GGUF file with F32 tensors of zeros."""
    tensors = tensors or {}
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    for key, value in fields.items():
        out += _string(key) + _typed(value)
    offset = 0
    for name, shape in tensors.items():
        out += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        out += struct.pack("<IQ", 0, offset)
        offset += -(-_bytes(shape) // 32) * 32
    out += b"\0" * (-len(out) % 32)
    for shape in tensors.values():
        out += b"\0" * (-(-_bytes(shape) // 32) * 32)
    path.write_bytes(out)
    return path


def _changed(fields: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    by_end = {key.replace(".", "_"): key for key in fields}
    for name, value in changes.items():
        (key,) = [key for end, key in by_end.items() if end.endswith(name)] or [name]
        fields[key] = value
    return {key: value for key, value in fields.items() if value is not None}


def _bytes(shape: Sequence[int]) -> int:
    size = 4
    for length in shape:
        size *= length
    return size


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", ValueType.STRING) + _string(value)
    if isinstance(value, list):
        kind = ValueType.STRING if isinstance(value[0], str) else ValueType.INT32
        items = b"".join(_string(v) if kind == ValueType.STRING else _int(v) for v in value)
        return struct.pack("<IIQ", ValueType.ARRAY, kind, len(value)) + items
    if isinstance(value, float):
        return struct.pack("<If", ValueType.FLOAT32, value)
    return struct.pack("<I", ValueType.INT32) + _int(value)


def _int(value: int) -> bytes:
    return struct.pack("<i", value)
