"""Metadata values of a GGUF file, encoded and decoded, little-endian.

A value keeps its raw payload, so tokenizers of hundreds of thousands of strings are copied from a
target's file byte for byte without being decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.ggml_types import ValueType

__all__ = ["SCALARS", "Scalar", "Value", "array", "boolean", "f32", "string", "u32"]

Scalar = int | float | bool | str

# struct format per scalar type
SCALARS = {
    ValueType.UINT8: "<B",
    ValueType.INT8: "<b",
    ValueType.UINT16: "<H",
    ValueType.INT16: "<h",
    ValueType.UINT32: "<I",
    ValueType.INT32: "<i",
    ValueType.FLOAT32: "<f",
    ValueType.BOOL: "<?",
    ValueType.UINT64: "<Q",
    ValueType.INT64: "<q",
    ValueType.FLOAT64: "<d",
}


@dataclass(frozen=True, kw_only=True)
class Value:
    """A typed value. ``raw`` is the payload after the type (arrays: and element type and count).

    Arrays of arrays, which llama.cpp refuses to read, are ``is_nested``.
    """

    type: ValueType
    raw: bytes
    item: ValueType | None = None
    count: int = 1

    @property
    def is_nested(self) -> bool:
        """True for an array of arrays."""
        return self.item is ValueType.ARRAY

    def scalar(self) -> Scalar:
        """The value of a scalar or string; a TypeError for arrays."""
        if self.type is ValueType.ARRAY:
            raise TypeError("an array is not a scalar")
        return _decode(self.type, self.raw, 0)[0]

    def items(self) -> list[Scalar]:
        """The elements of an array, of nested ones in a row; a one-element list for a scalar."""
        return [value for _, value in self._leaves()]

    def flat(self) -> Value:
        """A nested array as a plain one: of its elements, as text where their types differ."""
        leaves = list(self._leaves())
        kinds = {kind for kind, _ in leaves}
        if len(kinds) == 1:
            return array(kinds.pop(), [value for _, value in leaves])
        return array(ValueType.STRING, [str(value) for _, value in leaves])

    def _leaves(self) -> Iterator[tuple[ValueType, Scalar]]:
        kind = self.item if self.type is ValueType.ARRAY and self.item is not None else self.type
        # what remains to be read of the arrays around the current place, innermost last
        open_arrays, offset = [(kind, self.count)], 0
        while open_arrays:
            kind, left = open_arrays.pop()
            if not left:
                continue
            open_arrays.append((kind, left - 1))
            if kind is ValueType.ARRAY:
                inner, count = struct.unpack_from("<IQ", self.raw, offset)
                open_arrays.append((ValueType(inner), count))
                offset += 12
            else:
                value, offset = _decode(kind, self.raw, offset)
                yield kind, value

    def encode(self) -> bytes:
        """Type and payload as they stand in a file after the key."""
        if self.type is not ValueType.ARRAY or self.item is None:
            return struct.pack("<I", self.type) + self.raw
        return struct.pack("<IIQ", self.type, self.item, self.count) + self.raw


def _decode(kind: ValueType, raw: bytes, offset: int) -> tuple[Scalar, int]:
    if kind is ValueType.STRING:
        (length,) = struct.unpack_from("<Q", raw, offset)
        start = offset + 8
        return raw[start : start + length].decode("utf-8", errors="replace"), start + length
    form = SCALARS[kind]
    value: Scalar = struct.unpack_from(form, raw, offset)[0]
    return value, offset + struct.calcsize(form)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half a character
        raise CheckpointError(f"{text!r} is no Unicode text", "correct it in its file") from None


def _pack(kind: ValueType, value: Scalar) -> bytes:
    if kind is ValueType.STRING:
        data = _utf8(str(value))
        return struct.pack("<Q", len(data)) + data
    return struct.pack(SCALARS[kind], value)


def u32(value: int) -> Value:
    """An unsigned 32-bit value."""
    return Value(type=ValueType.UINT32, raw=_pack(ValueType.UINT32, value))


def f32(value: float) -> Value:
    """A 32-bit float value."""
    return Value(type=ValueType.FLOAT32, raw=_pack(ValueType.FLOAT32, value))


def boolean(value: bool) -> Value:
    """A boolean value."""
    return Value(type=ValueType.BOOL, raw=_pack(ValueType.BOOL, value))


def string(value: str) -> Value:
    """A UTF-8 string value."""
    return Value(type=ValueType.STRING, raw=_pack(ValueType.STRING, value))


def array(kind: ValueType, values: Sequence[Scalar]) -> Value:
    """An array whose elements all have type ``kind``."""
    raw = b"".join(_pack(kind, value) for value in values)
    return Value(type=ValueType.ARRAY, raw=raw, item=kind, count=len(values))
