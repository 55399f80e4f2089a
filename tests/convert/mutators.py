"""Changes to small valid files that keep their structure in sight: JSON, safetensors, torch.

Every choice comes from the given random generator, so a seed repeats a file byte for byte.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from random import Random
from typing import Any

__all__ = [
    "NUMBERS",
    "ROOM",
    "STRINGS",
    "Words",
    "changed_shape",
    "json_file",
    "near",
    "raw_bytes",
    "safetensors_file",
    "spoilt",
    "torch_file",
]

# as many bytes as a mutated file may get where tables and data are made to fit again
ROOM = 1 << 20
NUMBERS = [
    *(0, 1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 255, 256, 4096, 65535),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**50, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
]
STRINGS = [
    *("", "a", "\x00", "a\nb", "\x1b[31m", "\ud800", "\uffff", "x" * 5000, "0", "-1", "1e999"),
    *("../outside.safetensors", "../../outside/secret.safetensors", "/etc/hosts", "..", "."),
    *("..\\x.safetensors", "C:x.safetensors", "a/b.safetensors", "\x00.safetensors"),
    ".safetensors",
]


def _deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


_HOSTILE: list[Any] = [
    *(None, True, False, [], {}, [[]], [None], [{}], {"": None}, {"a": {"b": []}}, [0] * 3000),
    *(-1, -(2**31), -(2**63), 10**30, 10**400, 0.5, -0.5, 1e-300, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), _deep(60)),
    *NUMBERS,
    *STRINGS,
]


@dataclass(frozen=True, kw_only=True)
class Words:
    """Names and values of valid files, which mutations put where they do not belong."""

    keys: Sequence[str]
    values: Sequence[Any] = ()


def raw_bytes(rng: Random, data: bytes) -> bytes:
    """One change that knows nothing of the format."""
    if not data:
        return rng.randbytes(rng.randrange(1, 40))
    at, length = near(rng, len(data)), rng.choice((1, 1, 2, 4, 8, 64))
    piece = data[at : at + length]
    number = struct.pack("<Q", rng.choice(NUMBERS))
    return rng.choice(
        (
            data[:at],
            data[:at] + rng.randbytes(len(piece)) + data[at + len(piece) :],
            data[:at] + number[: len(piece)] + data[at + min(8, len(piece)) :],
            data[:at] + rng.randbytes(length) + data[at:],
            data[:at] + data[at + length :],
            data[:at] + piece * rng.choice((2, 3, 50)) + data[at + len(piece) :],
            data + rng.randbytes(length),
            bytes(len(data)),
        )
    )


def near(rng: Random, size: int) -> int:
    """A place in a file, more often near its start, where the headers are."""
    return min(size - 1, int(size * rng.random() ** rng.choice((1, 2, 4))))


# --- JSON


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with a key or index of it, at any depth."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(pairs):
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def _tweaked(rng: Random, value: Any) -> Any:
    """A value of the same kind that is a little off."""
    if isinstance(value, bool) or value is None:
        return rng.choice((True, False, None, 0, 1, "true"))
    if isinstance(value, (int, float)):
        return rng.choice(
            (value + 1, value - 1, value * 2, -value, float(value), str(value), [value], value // 2)
        )
    if isinstance(value, str):
        other = rng.choice(STRINGS)
        return rng.choice((value + other, value[:-1], value.upper(), other + value, [value]))
    if isinstance(value, list):
        return rng.choice((value[:-1], value * 2, value[::-1], value * 300, [value], value[1:]))
    return rng.choice(
        (list(value), [[key, item] for key, item in value.items()], {**value, "": value}, [value])
    )


def _change_tree(rng: Random, tree: Any, words: Words) -> None:
    places = list(_places(tree))
    if not places:
        return
    holder, key = rng.choice(places)
    action = rng.randrange(6)
    if action == 0:
        holder[key] = rng.choice(_HOSTILE)
    elif action == 1:
        holder[key] = _tweaked(rng, holder[key])
    elif action == 2:
        del holder[key]
    elif action == 3:
        other, place = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[place])) if place in _keys(other) else None
    elif isinstance(holder, dict) and words.keys:
        name = rng.choice(words.keys)
        if action == 4:
            holder[name] = holder.pop(key)
        else:
            holder[name] = rng.choice((*_HOSTILE, *words.values))


def _keys(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else range(len(holder))


def json_file(rng: Random, data: bytes, words: Words) -> bytes:
    """A JSON text with one to four nodes changed, or its text."""
    if rng.random() < 0.06:
        return _text(rng, data)
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        _change_tree(rng, tree, words)
    return json.dumps(tree, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")


def _text(rng: Random, data: bytes) -> bytes:
    key = data[1 : data.index(b":") + 1]
    return rng.choice(
        (
            raw_bytes(rng, data),
            b"\xef\xbb\xbf" + data,
            data.decode().encode("utf-16"),
            b"[" * rng.choice((900, 100000)),
            b'{"a":' * 3000,
            b"{" + key + b" 1, " + data[1:],
            data[:-1] + b', "x": ' + b"9" * 5000 + b"}",
            data[:-1] + b', "x": 1e99999}',
            data.replace(b"1", b"\xff", 1),
            b"null",
        )
    )


# --- safetensors

_DTYPES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "F8_E4M3": 1, "BOOL": 1}


def safetensors_file(rng: Random, data: bytes, words: Words) -> bytes:
    """A file with its header changed; half of the time the data is made to fit the table again."""
    (length,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    action = rng.random()
    if action < 0.1:
        return raw_bytes(rng, data)
    if action < 0.15:
        return struct.pack("<Q", rng.choice(NUMBERS)) + data[8:]
    if action < 0.25:
        return data[: 8 + length] + spoilt(rng, body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change_entry(rng, header, words)
    if rng.random() < 0.5:
        header, body = _fitted(header, body)
    text = json.dumps(header).encode()
    text += b" " * rng.choice((0, 0, 0, 5))
    return struct.pack("<Q", len(text)) + text + body


def spoilt(rng: Random, body: bytes) -> bytes:
    """Weights that are no numbers, in a part or everywhere."""
    at, pattern = near(rng, len(body) or 1), rng.choice((b"\xff", b"\x80\x7f", b"\x00"))
    length = rng.choice((4, 64, len(body)))
    return (body[:at] + pattern * length + body[at + length * len(pattern) :])[: len(body)]


def _change_entry(rng: Random, header: dict[str, Any], words: Words) -> None:
    names = [name for name in header if isinstance(header[name], dict) and "shape" in header[name]]
    action = rng.randrange(6)
    if action == 0 or not names:
        _change_tree(rng, header, words)
        return
    name = rng.choice(names)
    entry = header[name]
    if action == 1:
        header[rng.choice((*words.keys, *STRINGS))] = header.pop(name)
    elif action == 2:
        entry["dtype"] = rng.choice((*_DTYPES, "F64", "F4", "x", ""))
    elif action == 3:
        entry["shape"] = changed_shape(rng, entry["shape"])
    elif action == 4:
        header[rng.choice((*words.keys, f"{name}_scale", f"model.{name}"))] = dict(entry)
    else:
        entry["data_offsets"] = [rng.choice(NUMBERS), rng.choice(NUMBERS)]


def changed_shape(rng: Random, shape: Any) -> list[Any]:
    if not isinstance(shape, list) or not shape:
        return [rng.choice(NUMBERS)]
    at, changed = rng.randrange(len(shape)), list(shape)
    changed[at] = rng.choice((*NUMBERS, -1, None, 2.0))
    other = prod(n for n in shape if isinstance(n, int))
    return rng.choice(
        (changed, changed, shape[::-1], [other], [1, *shape], [*shape, 1], [], [0, 2**62], [1] * 70)
    )


def _size(entry: Any) -> int | None:
    """Bytes that a table's entry needs, None where it is no entry or does not fit the room."""
    shape, dtype = (entry.get("shape"), entry.get("dtype")) if isinstance(entry, dict) else (0, 0)
    if not isinstance(shape, list) or not isinstance(dtype, str) or dtype not in _DTYPES:
        return None
    if any(type(n) is not int or n < 0 for n in shape):
        return None
    size = prod(shape) * _DTYPES[dtype]
    return size if size <= ROOM else None


def _fitted(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """The table with offsets that cover the data, and data of that length."""
    at, kept = 0, {}
    for name, entry in header.items():
        size = _size(entry)
        if size is not None and at + size <= ROOM:
            kept[name] = {**entry, "data_offsets": [at, at + size]}
            at += size
    return kept, (body * (at // max(1, len(body)) + 1))[:at].ljust(at, b"\0")


# --- torch


def torch_file(rng: Random, state: dict[str, Any]) -> bytes:
    """``state`` saved by torch with entries changed: of other kinds, or larger than their data."""
    import torch

    state = dict(state)
    for _ in range(rng.choice((1, 1, 2))):
        key = rng.choice(list(state)) if state else ""
        action = rng.randrange(5)
        if action == 0:
            state.pop(key, None)
        elif action == 1:
            state[rng.choice((*STRINGS, 5, None, key))] = state.get(key)
        elif action == 2:
            state[key] = rng.choice((None, 0, -1, 2**70, "x", 0.5, [], {}, float("nan"), state))
        else:
            state[key] = _strange_tensor(rng, torch, state.get(key))
    file = io.BytesIO()
    torch.save(rng.choice((state, state, state, state, list(state.values()), None)), file)
    data = file.getvalue()
    return raw_bytes(rng, data) if rng.random() < 0.3 else data


def _strange_tensor(rng: Random, torch: Any, tensor: Any) -> Any:
    dtypes = ("float16", "float64", "bool", "complex64", "int8", "int64", "float8_e4m3fn")
    number = rng.choice((float("nan"), float("inf"), 1e39, 3.0, -1.0))
    makers: list[Callable[[], Any]] = [
        lambda: torch.zeros(1).expand(2 ** rng.choice((20, 40, 50))),
        lambda: torch.tensor(number),
        lambda: torch.tensor([number] * 32),
        lambda: torch.zeros(32, dtype=getattr(torch, rng.choice(dtypes))),
        lambda: torch.tensor(3, dtype=getattr(torch, rng.choice(dtypes[:-1]))),
        lambda: torch.zeros(32).to_sparse(),
        lambda: torch.zeros(4, 32).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.zeros(32), 0.1, 0, torch.qint8),
        lambda: torch.zeros(32, device="meta"),
        lambda: torch.zeros(64)[::2],
        lambda: torch.zeros(0),
        lambda: torch.zeros(2**16, 0),
        lambda: torch.nn.Parameter(torch.zeros(32)),
        lambda: torch.zeros(32, 1).t(),
        lambda: torch.zeros(32).storage(),
        lambda: torch.conj(torch.ones(32, dtype=torch.complex64)),
        lambda: torch._neg_view(torch.ones(32)),
    ]
    if isinstance(tensor, torch.Tensor) and tensor.dim() and rng.random() < 0.3:
        return rng.choice((tensor[:-1], tensor.half(), tensor.t() if tensor.dim() == 2 else tensor))
    return rng.choice(makers)()
