"""The metadata of a GGUF file, read without loading a library or a weight.

llama.cpp aborts the process on some malformed files; reading the header first turns these into
errors that name the file. Format: GGUF versions 2 and 3, little-endian (ggml ``docs/gguf.md``).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.ggml_types import ValueType
from dflash2_gguf.gguf_schema import ALIGNMENT, MAGIC, SUPPORTED_VERSIONS, Key, arch_key

__all__ = ["Header", "StringArray", "TensorInfo", "Value", "read_header"]

_DOWNLOAD_HINT = "the file is probably not complete; download or convert it again"
_SCALARS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
_LENGTH = struct.Struct("<Q")
T = TypeVar("T")


@dataclass(frozen=True)
class StringArray:
    """An array of strings as its bytes in the file, so that whole vocabularies compare at once."""

    count: int
    raw: bytes

    def __len__(self) -> int:
        return self.count

    def items(self) -> list[bytes]:
        """The strings, in order."""
        found, at = [], 0
        for _ in range(self.count):
            (length,) = struct.unpack_from("<Q", self.raw, at)
            found.append(self.raw[at + 8 : at + 8 + length])
            at += 8 + length
        return found


Value = int | float | bool | str | tuple[int | float | bool, ...] | StringArray


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the header describes it; ``shape`` in file order (fastest dimension first)."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def n_rows(self) -> int:
        """Product of all dimensions but the first."""
        rows = 1
        for size in self.shape[1:]:
            rows *= size
        return rows


@dataclass(frozen=True)
class Header:
    """Metadata and tensor list of one file. Offsets count from ``data_offset``, in bytes."""

    path: Path
    fields: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    data_offset: int
    file_size: int

    @property
    def architecture(self) -> str:
        """``general.architecture``, "" when it is missing."""
        return self.get(Key.ARCHITECTURE, str) or ""

    def get(self, key: str, kind: type[T]) -> T | None:
        """Value of ``key``, None when it is missing; CheckpointError when it is no ``kind``."""
        value = self.fields.get(key)
        if value is not None and not isinstance(value, kind):
            found = type(value).__name__
            raise CheckpointError(
                f"{self.path}: {key} is {found}, expected {kind.__name__}", _DOWNLOAD_HINT
            )
        return value

    def arch(self, field: str, kind: type[T]) -> T | None:
        """Value of a field of this file's own architecture, such as ``block_count``."""
        return self.get(arch_key(field, arch=self.architecture), kind)

    def missing_bytes(self, row_bytes: Callable[[int, int], int]) -> int:
        """Bytes that the tensors need beyond the file's end.

        ``row_bytes(type_id, n)`` is the size of a row of n weights (``ggml_row_size``).
        """
        ends = (
            t.offset + row_bytes(t.type_id, t.shape[0]) * t.n_rows for t in self.tensors.values()
        )
        return max(0, self.data_offset + max(ends, default=0) - self.file_size)


def read_header(path: Path) -> Header:
    """Read the header of ``path``.

    Raises CheckpointError when the file cannot be opened, is no GGUF, ends early or is malformed.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise CheckpointError(f"{path} is not a GGUF file: it has {size} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Reader(data, path), path, size)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


class _Reader:
    """A position in the mapped file; every read is checked against its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.at = 0

    def malformed(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is malformed: {what}", _DOWNLOAD_HINT)

    def unpack(self, code: str, count: int = 1) -> tuple[int | float | bool, ...]:
        size = struct.calcsize(f"<{code}") * count
        self._require(size)
        values = struct.unpack_from(f"<{count}{code}", self._data, self.at)
        self.at += size
        return values

    def unsigned(self, code: str) -> int:
        return int(self.unpack(code)[0])

    def string(self) -> str:
        length = self.unsigned("Q")
        self._require(length)
        text = self._data[self.at : self.at + length].decode("utf-8", errors="replace")
        self.at += length
        return text

    def strings(self, count: int) -> StringArray:
        start = at = self.at
        read, data, end = _LENGTH.unpack_from, self._data, len(self._data)
        for _ in range(count):  # a vocabulary has hundreds of thousands
            at = at + 8 + read(data, at)[0] if at + 8 <= end else end + 1
            if at > end:
                self._require(at - self.at)
        self.at = at
        return StringArray(count, data[start:at])

    def _require(self, size: int) -> None:
        if size > len(self._data) - self.at:
            raise CheckpointError(
                f"{self._path} is truncated: its header goes on after byte {len(self._data)}",
                _DOWNLOAD_HINT,
            )


def _parse(reader: _Reader, path: Path, size: int) -> Header:
    n_tensors, n_fields = _preamble(reader, path)
    fields: dict[str, Value] = {}
    for _ in range(n_fields):
        key = reader.string()
        fields[key] = _value(reader, key)
    tensors = [_tensor(reader) for _ in range(n_tensors)]
    alignment = fields.get(Key.ALIGNMENT, ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise reader.malformed(f"{Key.ALIGNMENT} is {alignment!r}")
    return Header(
        path=path,
        fields=fields,
        tensors={tensor.name: tensor for tensor in tensors},
        data_offset=-(-reader.at // alignment) * alignment,
        file_size=size,
    )


def _preamble(reader: _Reader, path: Path) -> tuple[int, int]:
    magic = bytes(int(byte) for byte in reader.unpack("B", 4))
    if magic != MAGIC:
        raise CheckpointError(
            f"{path} is not a GGUF file: it starts with {magic!r}",
            "a safetensors checkpoint becomes one with `dflash2-convert`",
        )
    version = reader.unsigned("I")
    if version & 0xFFFF == 0:
        raise CheckpointError(f"{path} is a big-endian GGUF file, which is not supported")
    if version not in SUPPORTED_VERSIONS:
        raise CheckpointError(f"{path} is GGUF version {version}, supported: 2 and 3")
    return reader.unsigned("Q"), reader.unsigned("Q")


def _value(reader: _Reader, key: str) -> Value:
    kind = reader.unsigned("I")
    if kind == ValueType.STRING:
        return reader.string()
    if kind == ValueType.ARRAY:
        return _array(reader, key)
    return reader.unpack(_scalar_code(reader, kind, key))[0]


def _array(reader: _Reader, key: str) -> Value:
    kind, count = reader.unsigned("I"), reader.unsigned("Q")
    if kind == ValueType.STRING:
        return reader.strings(count)
    return reader.unpack(_scalar_code(reader, kind, key), count)


def _scalar_code(reader: _Reader, kind: int, key: str) -> str:
    code = _SCALARS.get(ValueType(kind)) if kind in list(ValueType) else None
    if code is None:
        raise reader.malformed(f"{key} has value type {kind}")
    return code


def _tensor(reader: _Reader) -> TensorInfo:
    name = reader.string()
    n_dims = reader.unsigned("I")
    if not 1 <= n_dims <= 4:
        raise reader.malformed(f"tensor {name} has {n_dims} dimensions")
    shape = tuple(int(size) for size in reader.unpack("Q", n_dims))
    return TensorInfo(
        name=name, shape=shape, type_id=reader.unsigned("I"), offset=reader.unsigned("Q")
    )
