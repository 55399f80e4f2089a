"""Changes to small valid GGUF files that keep their structure in sight."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from math import prod
from random import Random
from typing import Any

import gguf

from tests.convert.mutators import (
    NUMBERS,
    ROOM,
    STRINGS,
    Words,
    changed_shape,
    near,
    raw_bytes,
    spoilt,
)

__all__ = ["gguf_file", "names_in_gguf"]

_SCALARS = dict(zip(range(13), (1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8), strict=True))
_STRING, _ARRAY = 8, 9


@dataclass
class _Tensor:
    name: str
    dims: list[int]
    kind: int
    offset: int


@dataclass
class _Model:
    """A file taken apart. ``counts`` override the two numbers of the header."""

    values: list[tuple[str, int, bytes]]
    tensors: list[_Tensor]
    data: bytes
    version: int = 3
    counts: tuple[int, int] | None = None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def string(self) -> str:
        return self.take(self.number("<Q")).decode()

    def skip(self, kind: int, count: int) -> None:
        if kind == _STRING:
            for _ in range(count):
                self.string()
        elif kind == _ARRAY:
            for _ in range(count):
                self.skip(self.number("<I"), self.number("<Q"))
        else:
            self.take(_SCALARS[kind] * count)


def _parsed(data: bytes) -> _Model:
    reader = _Reader(data)
    reader.take(4)
    version, n_tensors, n_values = (reader.number(form) for form in ("<I", "<Q", "<Q"))
    values, tensors, alignment = [], [], 32
    for _ in range(n_values):
        key, kind = reader.string(), reader.number("<I")
        start = reader.at
        reader.skip(kind, 1)
        values.append((key, kind, data[start : reader.at]))
        if key == "general.alignment":
            alignment = struct.unpack("<I", values[-1][2])[0]
    for _ in range(n_tensors):
        name, n_dims = reader.string(), reader.number("<I")
        dims = [reader.number("<Q") for _ in range(n_dims)]
        tensors.append(_Tensor(name, dims, reader.number("<I"), reader.number("<Q")))
    start = -(-reader.at // alignment) * alignment
    return _Model(values=values, tensors=tensors, data=data[start:], version=version)


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _written(model: _Model) -> bytes:
    n_tensors, n_values = model.counts or (len(model.tensors), len(model.values))
    parts = [b"GGUF", struct.pack("<IQQ", model.version, n_tensors, n_values)]
    parts += [_string(key) + struct.pack("<I", kind) + raw for key, kind, raw in model.values]
    for tensor in model.tensors:
        dims = struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
        parts.append(_string(tensor.name) + dims + struct.pack("<IQ", tensor.kind, tensor.offset))
    head = b"".join(parts)
    return head + bytes(-len(head) % 32) + model.data


def names_in_gguf(data: bytes) -> list[str]:
    """Keys and tensor names of a valid file."""
    model = _parsed(data)
    return [key for key, _, _ in model.values] + [tensor.name for tensor in model.tensors]


def gguf_file(rng: Random, data: bytes, words: Words) -> bytes:
    """A file with values or its table changed; half of the time tensors are laid out again."""
    if rng.random() < 0.08:
        return raw_bytes(rng, data)
    model = _parsed(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        rng.choice((_change_value, _change_value, _change_tensor, _change_file))(rng, model, words)
    if rng.random() < 0.5:
        _lay_out(model)
    return _written(model)


def _payload(rng: Random, kind: int, depth: int = 0) -> bytes:
    """The bytes of a value of this kind."""
    if kind == _STRING:
        return _string(rng.choice(STRINGS))
    if kind != _ARRAY:
        number = struct.pack("<Q", rng.choice(NUMBERS))
        floats = struct.pack("<f", rng.choice((0.0, -1.0, 0.5, float("nan"), float("inf"), 1e38)))
        return rng.choice((number, number, floats + floats))[: _SCALARS.get(kind, 4)]
    item, count = rng.choice((0, 4, 5, 6, 7, 8, 9, 11, 12)), rng.choice((0, 1, 2, 3, 6, 24))
    if item == _ARRAY and depth > rng.choice((2, 12)):
        item = 4
    claimed = count if rng.random() < 0.8 else rng.choice(NUMBERS)
    raw = b"".join(_payload(rng, item, depth + 1) for _ in range(min(count, 2) if depth else count))
    return struct.pack("<IQ", item, claimed) + raw


def _change_value(rng: Random, model: _Model, words: Words) -> None:
    if not model.values:
        return
    at, action = rng.randrange(len(model.values)), rng.randrange(8)
    key, kind, raw = model.values[at]
    other = rng.choice(model.values)
    new = rng.choice((*range(13), 13, 99))
    if action == 0:
        model.values[at] = (key, kind, _payload(rng, kind))
    elif action == 1:
        model.values[at] = (key, new, _payload(rng, new))
    elif action == 2:
        model.values[at] = (key, other[1], other[2])
    elif action == 3:
        model.values[at] = (rng.choice(words.keys), kind, raw)
    elif action == 4:
        del model.values[at]
    elif action == 5:
        model.values.insert(at, (rng.choice((*words.keys, *STRINGS)), new, _payload(rng, new)))
    elif action == 6 and kind == _ARRAY:
        item, count = struct.unpack_from("<IQ", raw)
        count = rng.choice((count + 1, max(0, count - 1), *NUMBERS))
        model.values[at] = (key, kind, struct.pack("<IQ", item, count) + raw[12:])
    else:
        model.values[at] = (key, kind, raw_bytes(rng, raw))


def _change_tensor(rng: Random, model: _Model, words: Words) -> None:
    if not model.tensors:
        return
    at, action = rng.randrange(len(model.tensors)), rng.randrange(8)
    tensor = model.tensors[at] = replace(model.tensors[at])
    if action == 0:
        tensor.name = rng.choice((*words.keys, *STRINGS))
    elif action == 1:
        tensor.dims = [n for n in changed_shape(rng, tensor.dims) if type(n) is int and n >= 0]
    elif action == 2:
        tensor.kind = rng.choice((*range(42), 255, 2**31))
    elif action == 3:
        tensor.offset = rng.choice((*NUMBERS, tensor.offset + 1, model.tensors[0].offset))
    elif action == 4:
        del model.tensors[at]
    elif action == 5:
        model.tensors.append(replace(tensor, name=rng.choice((tensor.name, *words.keys))))
    elif action == 6:
        other = rng.choice(model.tensors)
        tensor.dims, tensor.kind, tensor.offset = list(other.dims), other.kind, other.offset
    else:
        rng.shuffle(model.tensors)


def _change_file(rng: Random, model: _Model, words: Words) -> None:
    action = rng.randrange(6)
    counts = (len(model.tensors), len(model.values))
    if action == 0:
        model.counts = (rng.choice(NUMBERS), counts[1])
    elif action == 1:
        model.counts = (counts[0], rng.choice(NUMBERS))
    elif action == 2:
        model.version = rng.choice((0, 1, 2, 4, 2**24, 2**32 - 1))
    elif action == 3:
        alignment = struct.pack("<I", rng.choice((0, 1, 8, 33, 64, 4096, 2**20, 2**31, 2**32 - 1)))
        model.values.append(("general.alignment", 4, alignment))
    elif action == 4:
        model.data = spoilt(rng, model.data)
    else:
        model.data = model.data[: near(rng, len(model.data) + 1)]


def _lay_out(model: _Model) -> None:
    """Put all tensors whose size is known and small one after another."""
    at = 0
    for i, tensor in enumerate(model.tensors):
        sizes = gguf.GGML_QUANT_SIZES.get(_kind(tensor.kind))
        size = prod(tensor.dims) * sizes[1] // sizes[0] if sizes else 0
        if at + size <= ROOM:
            model.tensors[i] = replace(tensor, offset=at)
            at = -(-(at + size) // 32) * 32
    data = model.data or b"\0"
    model.data = (data * (at // len(data) + 1))[:at]


def _kind(number: int) -> Any:
    try:
        return gguf.GGMLQuantizationType(number)
    except ValueError:
        return None
