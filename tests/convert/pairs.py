"""A right pair of small GGUF files, and copies of it with single things changed.

Small files are written by the ``gguf`` package; weights of large models are holes in the file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.convert import checkpoints

__all__ = ["Edit", "edit", "write_holes", "write_right_drafter", "write_right_target"]

GOLDEN = Path(__file__).parent / "golden" / "tiny-bf16.gguf"


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Changes to a file: values to set (None removes one), tensors to drop, rename, cast, add.

    maps: tensors of so many token ids. as_given: values have the type of what is given here, not
    the one they had. cut: bytes at the end that are lost.
    """

    set: Mapping[str, Any] = field(default_factory=dict)
    drop: Sequence[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, gguf.GGMLQuantizationType] = field(default_factory=dict)
    add: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    maps: Mapping[str, int] = field(default_factory=dict)
    as_given: bool = False
    cut: int = 0


def write_right_target(path: Path, **options: Any) -> Path:
    """The target of ``write_right_drafter`` with its embeddings, which serve as head."""
    bare = checkpoints.write_target(path.with_name(f"{path.name}.bare"), **options)
    n_vocab = options.get("n_vocab", checkpoints.N_VOCAB)
    n_embd = options.get("n_embd", 32)
    return edit(bare, path, Edit(add={"token_embd.weight": (n_vocab, n_embd)}))


def write_right_drafter(path: Path) -> Path:
    """The drafter of ``tests/convert/golden`` with a licence, so that nothing is left to say."""
    return edit(GOLDEN, path, Edit(set={"general.license": "apache-2.0"}))


def edit(source: Path, path: Path, changes: Edit) -> Path:
    """Copy a GGUF file with changes."""
    reader = gguf.GGUFReader(source)
    values = {name: f for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    arch = changes.set.get("general.architecture", values["general.architecture"].contents())
    writer = gguf.GGUFWriter(path, arch)
    for name, kept in values.items():
        if name not in {"general.architecture", *changes.set}:
            sub_type = kept.types[1] if len(kept.types) > 1 else None
            writer.add_key_value(name, kept.contents(), kept.types[0], sub_type)
    for name, value in changes.set.items():
        if name != "general.architecture" and value is not None:
            _add(writer, name, value, {} if changes.as_given else values)
    for tensor in reader.tensors:
        if tensor.name not in changes.drop:
            _copy(writer, tensor, changes)
    for name, shape in changes.add.items():
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    for name, count in changes.maps.items():
        writer.add_tensor(name, np.arange(count, dtype=np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if changes.cut:
        path.write_bytes(path.read_bytes()[: -changes.cut])
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any, values: Mapping[str, Any]) -> None:
    """Of the type that the value had, or the one that upstream's converter gives its kind."""
    types = gguf.GGUFValueType
    kinds = {bool: types.BOOL, int: types.UINT32, float: types.FLOAT32, str: types.STRING}
    if isinstance(value, list):
        inner = values[name].types[1] if name in values else kinds[type(value[0])]
        if name not in values and isinstance(value[0], int):
            inner = types.INT32
        writer.add_key_value(name, value, types.ARRAY, inner)
    else:
        writer.add_key_value(name, value, kinds[type(value)])


def _copy(writer: gguf.GGUFWriter, tensor: gguf.ReaderTensor, changes: Edit) -> None:
    kind = changes.cast.get(tensor.name, tensor.tensor_type)
    data = tensor.data
    if kind != tensor.tensor_type:
        shape = tuple(reversed(tensor.shape.tolist()))
        data = gguf.quantize(gguf.dequantize(data, tensor.tensor_type).reshape(shape), kind)
    writer.add_tensor(changes.rename.get(tensor.name, tensor.name), data, raw_dtype=kind)


def write_holes(
    path: Path,
    values: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A GGUF file of tensors with nothing in them, whatever its size; F32 where no kind is given.

    ``values``: plain ones, or as ``dflash2_gguf.convert.gguf_values`` encodes them. Spelled out
    byte by byte: the gguf package takes seconds for vocabularies of a real size.
    """
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(values))
    head += b"".join(_string(name) + _encoded(value) for name, value in values.items())
    size = 0
    for name, shape in shapes.items():
        kind = (kinds or {}).get(name, gguf.GGMLQuantizationType.F32)
        per_block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", kind, size)
        size += -(-(prod(shape) // per_block * nbytes) // 32) * 32
    with path.open("wb") as file:
        file.write(head)
        file.truncate(-(-len(head) // 32) * 32 + size)
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _encoded(value: Any) -> bytes:
    """Type and value."""
    types = gguf.GGUFValueType
    match value:
        case str():
            return struct.pack("<I", types.STRING) + _string(value)
        case bool():
            return struct.pack("<I?", types.BOOL, value)
        case int():
            return struct.pack("<II", types.UINT32, value)
        case float():
            return struct.pack("<If", types.FLOAT32, value)
        case [str(), *_]:
            items = b"".join(map(_string, value))
            return struct.pack("<IIQ", types.ARRAY, types.STRING, len(value)) + items
        case list():
            numbers = struct.pack(f"<{len(value)}i", *value)
            return struct.pack("<IIQ", types.ARRAY, types.INT32, len(value)) + numbers
    encoded: bytes = value.encode()
    return encoded
