"""Write a GGUF file so that it appears under its name complete, or not at all.

A temporary file in the destination's folder gets the header and full length at once, tensor rows in
any order, then the final header; it is synced, verified and renamed. Any exception removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import final

from dflash2_gguf.convert.gguf_values import Value
from dflash2_gguf.convert.quantize import Bytes
from dflash2_gguf.convert.verify import verify_file
from dflash2_gguf.errors import OutputError
from dflash2_gguf.ggml_types import GGMLType
from dflash2_gguf.gguf_schema import ALIGNMENT, MAGIC, VERSION, Key

__all__ = [
    "CopiedTensor",
    "GGUFWriter",
    "OutputTensor",
    "check_destination",
    "check_space",
    "file_bytes",
]


@dataclass(frozen=True, kw_only=True)
class OutputTensor:
    """A tensor to be written: shape in numpy order."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.type.row_bytes(self.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.row_bytes * prod(self.shape[:-1])


@dataclass(frozen=True, kw_only=True)
class CopiedTensor:
    """A tensor whose bytes come from another file: of any type, also one not written here."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType | int
    nbytes: int


_Tensors = Sequence[OutputTensor | CopiedTensor]


def _alignment(values: Mapping[str, Value]) -> int:
    given = values.get(Key.ALIGNMENT)
    return ALIGNMENT if given is None else int(given.scalar())


def _pad(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _offsets(tensors: _Tensors, alignment: int) -> dict[str, int]:
    offsets, at = {}, 0
    for tensor in tensors:
        offsets[tensor.name] = at
        at += _pad(tensor.nbytes, alignment)
    return offsets


def _header(values: Mapping[str, Value], tensors: _Tensors) -> bytes:
    alignment = _alignment(values)
    offsets = _offsets(tensors, alignment)
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(values))]
    parts += [_string(key) + value.encode() for key, value in values.items()]
    for tensor in tensors:
        dims = tuple(reversed(tensor.shape))
        parts.append(_string(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        parts.append(struct.pack("<IQ", tensor.type, offsets[tensor.name]))
    header = b"".join(parts)
    return header + bytes(_pad(len(header), alignment) - len(header))


def file_bytes(values: Mapping[str, Value], tensors: _Tensors) -> int:
    """Size of the file that these values and tensors make."""
    alignment = _alignment(values)
    data = sum(_pad(tensor.nbytes, alignment) for tensor in tensors)
    return len(_header(values, tensors)) + data


def check_destination(path: Path, *, force: bool) -> None:
    """Raise OutputError when ``path`` exists (without ``force``), is a folder, or has no folder."""
    if path.is_dir():
        raise OutputError(f"{path} is a folder", "name a file in it")
    if path.exists() and not force:
        raise OutputError(f"{path} exists", "use --force to replace it")
    if not path.parent.is_dir():
        raise OutputError(f"there is no folder {path.parent}")


def check_space(sizes: Mapping[Path, int]) -> None:
    """Raise OutputError when a disk has less free space than its files need together."""
    needed: dict[int, int] = {}
    folders: dict[int, Path] = {}
    for path, size in sizes.items():
        device = path.parent.stat().st_dev
        needed[device] = needed.get(device, 0) + size
        folders[device] = path.parent
    for device, size in needed.items():
        free = shutil.disk_usage(folders[device]).free
        if free < size:
            raise OutputError(
                f"{folders[device]} has {free:,} bytes free, {size:,} are needed",
                "free some space or choose another folder",
            )


@contextlib.contextmanager
def _as_output_error(path: Path) -> Iterator[None]:
    """Turn what the operating system reports into one line about the destination."""
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: ("the disk is full", "free some space or choose another folder"),
            errno.EDQUOT: ("the disk quota is used up", "choose another folder"),
            errno.EFBIG: ("the file would be too large for this disk or limit", None),
            errno.EROFS: ("the disk is read-only", "choose another folder"),
            errno.EACCES: ("permission denied", "choose another folder"),
            errno.EPERM: ("permission denied", "choose another folder"),
        }
        reason, hint = reasons.get(error.errno or 0, (error.strerror or str(error), None))
        raise OutputError(f"cannot write {path}: {reason}", hint) from error


@final
class GGUFWriter:
    """One output file; a context manager that leaves nothing behind unless ``finish`` succeeded."""

    def __init__(
        self,
        path: Path,
        *,
        values: Mapping[str, Value],
        tensors: _Tensors,
        force: bool = False,
    ) -> None:
        self.path = path
        self.force = force
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._offsets = _offsets(tensors, _alignment(values))
        self._header = _header(values, tensors)
        self.size = file_bytes(values, tensors)
        self._descriptor = -1
        self._temporary: Path | None = None

    def __enter__(self) -> GGUFWriter:
        check_destination(self.path, force=self.force)
        with _as_output_error(self.path):
            self._descriptor, name = tempfile.mkstemp(
                prefix=f".{self.path.name}.", suffix=".part", dir=self.path.parent
            )
            self._temporary = Path(name)
            try:
                os.truncate(self._descriptor, self.size)
                self._write_at(0, self._header)
            except BaseException:
                self._discard()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._discard()

    def _discard(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None

    def _write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written

    def write_rows(self, name: str, first_row: int, data: Bytes) -> None:
        """Write rows of a tensor, starting at ``first_row``."""
        tensor = self._tensors[name]
        row_bytes = tensor.nbytes // prod(tensor.shape[:-1])
        self.write_bytes(name, first_row * row_bytes, data.data)

    def write_bytes(self, name: str, begin: int, data: memoryview) -> None:
        """Write bytes of a tensor, starting at its byte ``begin``."""
        with _as_output_error(self.path):
            self._write_at(len(self._header) + self._offsets[name] + begin, data)

    def finish(self, values: Mapping[str, Value]) -> None:
        """Write the final metadata (same length), sync, verify and give the file its name."""
        tensors = list(self._tensors.values())
        header = _header(values, tensors)
        if len(header) != len(self._header) or self._temporary is None:
            raise ValueError("the metadata changed its length")
        with _as_output_error(self.path):
            self._write_at(0, header)
            os.fchmod(self._descriptor, 0o666 & ~_umask())
            os.fsync(self._descriptor)
            verify_file(self._temporary, values=values, tensors=tensors, offsets=self._offsets)
            check_destination(self.path, force=self.force)
            self._temporary.replace(self.path)
            self._temporary = None
            _sync_folder(self.path.parent)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable; where that is impossible the file is still complete."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
