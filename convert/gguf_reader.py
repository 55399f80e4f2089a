"""Read the header of a GGUF file: metadata and tensor table, every length checked first.

Tensor data is never touched, so a 300 GB target costs what its tokenizer costs.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

from dflash2_gguf.convert.gguf_values import SCALARS, Scalar, Value
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.ggml_types import GGMLType, ValueType
from dflash2_gguf.gguf_schema import ALIGNMENT, MAGIC, SUPPORTED_VERSIONS, Key

__all__ = ["GGUFHeader", "TensorEntry", "read_gguf"]

_MAX_DIMS = 4
_MAX_NESTING = 8
# far above any tokenizer, far below what would hurt to hold in memory
_MAX_VALUE_BYTES = 1 << 29
_DOWNLOAD_HINT = "download or convert the file again"


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of the table. ``shape`` in numpy order, ``offset`` in bytes into the data section.

    ``type`` is a plain number, and ``nbytes`` 0, where this project does not write that type.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType | int
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    """Metadata and tensor table of one file; ``data_offset`` and ``size`` in bytes."""

    path: Path
    version: int
    values: dict[str, Value]
    tensors: dict[str, TensorEntry]
    data_offset: int
    size: int

    def scalar(self, key: str) -> Scalar | None:
        """Value of a scalar or string key, None if the file lacks it or it is an array."""
        value = self.values.get(key)
        return None if value is None or value.type is ValueType.ARRAY else value.scalar()

    def text(self, key: str) -> str | None:
        """String value of a key, None if the file lacks it or it is of another type."""
        value = self.scalar(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        """Integer value of a key, None if the file lacks it or it is of another type."""
        value = self.scalar(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_gguf(path: Path) -> GGUFHeader:
    """Read the header of ``path``.

    Raises CheckpointError for anything that is not a complete, consistent little-endian GGUF file.
    """
    try:
        with path.open("rb") as file:
            return _parse(path, file.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def _parse(path: Path, descriptor: int) -> GGUFHeader:
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"not a GGUF file: {path} has {size} bytes", _DOWNLOAD_HINT)
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as view:
        return _Cursor(path, view).header()


class _Cursor:
    """A position in the mapped header; every read checks that the file is long enough."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self.path, self.view, self.size, self.at = path, view, len(view), 0

    def fail(self, what: str) -> CheckpointError:
        """The error to raise; ``what`` says where the file breaks."""
        return CheckpointError(f"broken GGUF file {self.path}: {what}", _DOWNLOAD_HINT)

    def skip(self, count: int, what: str) -> int:
        """Pass over ``count`` bytes and return where they begin.

        Raises CheckpointError where the file ends before, or they are more than a value can have.
        """
        start = self.at
        if count > self.size - start:
            raise self.fail(f"it ends inside {what}")
        if count > _MAX_VALUE_BYTES:
            raise self.fail(f"{what} takes {count} bytes")
        self.at = start + count
        return start

    def number(self, form: str, what: str) -> int:
        """The next integer, of the struct format ``form``."""
        start = self.skip(struct.calcsize(form), what)
        value: int = struct.unpack_from(form, self.view, start)[0]
        return value

    def string(self, what: str) -> str:
        """The next text: its length in 8 bytes, then UTF-8. CheckpointError for other bytes."""
        length = self.number("<Q", what)
        start = self.skip(length, what)
        with contextlib.suppress(UnicodeDecodeError):
            return self.view[start : self.at].decode("utf-8")
        raise self.fail(f"{what} is not UTF-8")

    def header(self) -> GGUFHeader:
        """Read from the magic on. CheckpointError for another kind or version of file."""
        if self.view[:4] != MAGIC:
            raise CheckpointError(f"not a GGUF file: {self.path}")
        self.at = 4
        version = self.number("<I", "the version")
        if version not in SUPPORTED_VERSIONS:
            raise self.fail(f"version {version} is not one of {SUPPORTED_VERSIONS}")
        n_tensors, n_values = self.number("<Q", "the counts"), self.number("<Q", "the counts")
        values = self.collect(self.values(n_values), "key")
        tensors = list(self.tensors(n_tensors))
        return self.place(version, values, tensors)

    def collect(self, pairs: Iterator[tuple[str, Value]], what: str) -> dict[str, Value]:
        """The pairs as a dict; CheckpointError for a name that comes twice."""
        result: dict[str, Value] = {}
        for key, value in pairs:
            if key in result:
                raise self.fail(f"{what} {key!r} appears twice")
            result[key] = value
        return result

    def kind(self, what: str) -> ValueType:
        """The next value type; CheckpointError for a number that is none."""
        number = self.number("<I", what)
        try:
            return ValueType(number)
        except ValueError:
            raise self.fail(f"{what} has the unknown value type {number}") from None

    def values(self, count: int) -> Iterator[tuple[str, Value]]:
        """The next ``count`` keys with their values."""
        for _ in range(count):
            key = self.string("a metadata key")
            yield key, self.value(f"the value of {key!r}")

    def value(self, what: str) -> Value:
        """The next value, as bytes; lists are measured item by item, not decoded."""
        kind = self.kind(what)
        if kind is not ValueType.ARRAY:
            start = self.at
            self.skip_item(kind, what)
            return Value(type=kind, raw=self.view[start : self.at])
        item, count = self.kind(what), self.number("<Q", what)
        start = self.at
        self.skip_items(item, count, what)
        return Value(type=kind, raw=self.view[start : self.at], item=item, count=count)

    def skip_item(self, kind: ValueType, what: str) -> None:
        """Pass over one value of a type that is no list."""
        self.skip_items(kind, 1, what)

    def skip_items(self, kind: ValueType, count: int, what: str, depth: int = 1) -> None:
        """Pass over the items of a list at ``depth``; CheckpointError for too deep a nesting."""
        if depth > _MAX_NESTING:
            raise self.fail(f"{what} is an array {depth} levels deep")
        if kind in SCALARS:
            self.skip(struct.calcsize(SCALARS[kind]) * count, what)
            return
        if kind is ValueType.STRING:
            for _ in range(count):
                self.skip(self.number("<Q", what), what)
            return
        for _ in range(count):
            inner = self.kind(what)
            self.skip_items(inner, self.number("<Q", what), what, depth + 1)

    def tensors(self, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """Name, shape (slowest dimension first), type and offset of the next ``count`` tensors."""
        for _ in range(count):
            name = self.string("a tensor name")
            what = f"the entry of tensor {name!r}"
            n_dims = self.number("<I", what)
            if n_dims > _MAX_DIMS:
                raise self.fail(f"tensor {name!r} has {n_dims} dimensions")
            dims = [self.number("<Q", what) for _ in range(n_dims)]
            yield name, tuple(reversed(dims)), self.number("<I", what), self.number("<Q", what)

    def place(
        self,
        version: int,
        values: dict[str, Value],
        rows: list[tuple[str, tuple[int, ...], int, int]],
    ) -> GGUFHeader:
        """The header; CheckpointError unless the tensors lie within the file and apart."""
        alignment = self.alignment(values)
        data = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for name, shape, kind, offset in rows:
            if name in tensors:
                raise self.fail(f"tensor {name!r} appears twice")
            tensors[name] = self.entry(name, shape, kind, offset)
            if data + offset + tensors[name].nbytes > self.size:
                raise self.fail(f"it ends inside the data of tensor {name!r}")
        self.refuse_overlaps(tensors)
        return GGUFHeader(
            path=self.path,
            version=version,
            values=values,
            tensors=tensors,
            data_offset=data,
            size=self.size,
        )

    def refuse_overlaps(self, tensors: dict[str, TensorEntry]) -> None:
        """llama.cpp wants them one after another; each byte is read for one tensor."""
        ordered = sorted(tensors.values(), key=lambda entry: (entry.offset, entry.nbytes))
        for tensor, following in pairwise(ordered):
            if tensor.offset + tensor.nbytes > following.offset:
                raise self.fail(f"tensor {tensor.name!r} runs into another's data")

    def alignment(self, values: dict[str, Value]) -> int:
        """Bytes that the data is aligned to; CheckpointError for none."""
        value = values.get(Key.ALIGNMENT)
        if value is None or value.type is not ValueType.UINT32:
            return ALIGNMENT
        alignment = value.scalar()
        if not isinstance(alignment, int) or alignment < 1:
            raise self.fail(f"{Key.ALIGNMENT} is {alignment}")
        return alignment

    def entry(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
        """A tensor with its size, 0 where the type is not known here.

        Raises CheckpointError for rows that the type's blocks do not divide.
        """
        try:
            known = GGMLType(kind)
        except ValueError:
            return TensorEntry(name=name, shape=shape, type=kind, offset=offset, nbytes=0)
        n_cols = shape[-1] if shape else 1
        if n_cols % known.block_size:
            raise self.fail(
                f"tensor {name!r} has rows of {n_cols}, not a multiple for {known.name}"
            )
        nbytes = known.row_bytes(n_cols) * prod(shape[:-1])
        return TensorEntry(name=name, shape=shape, type=known, offset=offset, nbytes=nbytes)
