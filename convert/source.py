"""A checkpoint directory: its files, its tensors, and one sequential pass over their bytes.

Supported: ``model.safetensors``, shards listed by ``model.safetensors.index.json``, and (with
torch) ``pytorch_model.bin`` or a ``.pt`` file loaded with ``weights_only=True``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.convert.safetensors_file import SafetensorsHeader, read_header
from dflash2_gguf.convert.torch_file import open_torch
from dflash2_gguf.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "SourceTensor",
    "Visitor",
    "file_sha256",
    "open_checkpoint",
    "read_json",
    "read_source",
    "read_tensor",
]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TORCH = ("pytorch_model.bin", "pytorch_model.pt", "model.pt")
_PREFIX = "model."
_HASH_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """A tensor. ``name`` has no ``model.`` prefix, ``begin`` counts from the data start."""

    name: str
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose headers have been read; no tensor data is held.

    kind: "safetensors", "torch", or "gguf" for a drafter's GGUF file.
    """

    directory: Path
    files: tuple[str, ...]
    tensors: dict[str, SourceTensor]
    data_starts: dict[str, int]
    kind: str

    @property
    def nbytes(self) -> int:
        """Bytes of all tensor data."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; CheckpointError when it is missing, unreadable or something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path.name} in {path.parent}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return data


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of a checkpoint directory.

    Raises CheckpointError for a directory without weights, a missing or broken shard, an index that
    points outside the directory, or tensors the index does not list.
    """
    if not directory.is_dir():
        raise CheckpointError(
            f"not a checkpoint directory: {directory}",
            "give the folder that holds config.json and model.safetensors",
        )
    if (directory / _INDEX).is_file():
        return _sharded(directory, _weight_map(directory))
    if (directory / _SINGLE).is_file():
        return _safetensors(directory, [_SINGLE])
    for name in _TORCH:
        if (directory / name).is_file():
            return _torch(directory, name)
    found = ", ".join(sorted(p.name for p in directory.glob("*.safetensors"))) or "no .safetensors"
    raise CheckpointError(
        f"no {_SINGLE} or {_INDEX} in {directory}",
        f"found {found}; fetch the whole checkpoint",
    )


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{_INDEX} has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{_INDEX} maps {name!r} to {shard!r}, not to a .safetensors file"
            )
        if Path(shard).name != shard or "\\" in shard or ":" in shard:
            raise CheckpointError(f"{_INDEX} points outside the checkpoint: {shard!r}")
    return weight_map


def _sharded(directory: Path, weight_map: dict[str, str]) -> Checkpoint:
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not _is_file(directory / shard)]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}",
            "fetch the whole checkpoint",
        )
    checkpoint = _safetensors(directory, shards)
    stored = {tensor.stored_name: tensor.file for tensor in checkpoint.tensors.values()}
    for name, shard in weight_map.items():
        if stored.get(name) != shard:
            raise CheckpointError(f"{_INDEX} lists {name!r} in {shard}, which does not hold it")
    for name, shard in stored.items():
        if name not in weight_map:
            raise CheckpointError(f"{shard} holds {name!r}, which {_INDEX} does not list")
    return checkpoint


def _is_file(path: Path) -> bool:
    """False also for a name that no file system takes."""
    try:
        return path.is_file()
    except OSError:
        return False


def _safetensors(directory: Path, names: list[str]) -> Checkpoint:
    headers = [read_header(directory / name) for name in names]
    tensors: dict[str, SourceTensor] = {}
    for header in headers:
        _collect(tensors, _source_tensors(header))
    return Checkpoint(
        directory=directory,
        files=tuple(names),
        tensors=tensors,
        data_starts={header.path.name: header.data_start for header in headers},
        kind="safetensors",
    )


def _source_tensors(header: SafetensorsHeader) -> list[SourceTensor]:
    return [
        SourceTensor(
            name=tensor.name.removeprefix(_PREFIX),
            stored_name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            file=header.path.name,
            begin=tensor.begin,
            nbytes=tensor.nbytes,
        )
        for tensor in header.tensors
    ]


def _collect(tensors: dict[str, SourceTensor], found: list[SourceTensor]) -> None:
    for tensor in found:
        if tensor.name in tensors:
            other = tensors[tensor.name]
            raise CheckpointError(
                f"tensor {tensor.name!r} appears twice: as {other.stored_name!r} in {other.file} "
                f"and as {tensor.stored_name!r} in {tensor.file}"
            )
        tensors[tensor.name] = tensor


def _torch(directory: Path, name: str) -> Checkpoint:
    state = open_torch(directory / name)
    tensors: dict[str, SourceTensor] = {}
    for stored, (dtype, shape, data) in state.items():
        source = SourceTensor(
            name=stored.removeprefix(_PREFIX),
            stored_name=stored,
            dtype=dtype,
            shape=shape,
            file=name,
            begin=0,
            nbytes=data.nbytes,
        )
        _collect(tensors, [source])
    return Checkpoint(
        directory=directory, files=(name,), tensors=tensors, data_starts={name: 0}, kind="torch"
    )


def read_tensor(checkpoint: Checkpoint, tensor: SourceTensor) -> memoryview:
    """All bytes of one small tensor; CheckpointError when the file ends before it does."""
    if checkpoint.kind == "torch":
        state = open_torch(checkpoint.directory / tensor.file)
        return state[tensor.stored_name][2].data
    pieces = list(read_pieces(checkpoint, tensor, max(1, tensor.nbytes)))
    return pieces[0] if pieces else memoryview(b"")


def read_pieces(
    checkpoint: Checkpoint, tensor: SourceTensor, piece_bytes: int
) -> Iterator[memoryview]:
    """Bytes of one tensor in pieces; CheckpointError when the file ends before it does."""
    path = checkpoint.directory / tensor.file
    if checkpoint.kind == "torch":
        data = read_tensor(checkpoint, tensor)
        yield from (data[at : at + piece_bytes] for at in range(0, tensor.nbytes, piece_bytes))
        return
    try:
        with path.open("rb") as file:
            file.seek(checkpoint.data_starts[tensor.file] + tensor.begin)
            for at in range(0, tensor.nbytes, piece_bytes):
                piece = file.read(min(piece_bytes, tensor.nbytes - at))
                if len(piece) != min(piece_bytes, tensor.nbytes - at):
                    raise CheckpointError(f"{tensor.file} ended inside {tensor.stored_name!r}")
                yield memoryview(piece)
    except OSError as error:
        raise CheckpointError(f"cannot read {tensor.file}: {error.strerror}") from error


# receives a tensor and pieces of its bytes in order; the sizes of the pieces are its own choice
Visitor = Callable[[SourceTensor, Iterator[memoryview]], None]


def read_source(
    checkpoint: Checkpoint, *, piece_bytes: Callable[[SourceTensor], int], visit: Visitor
) -> dict[str, str]:
    """Read every file once from start to end, showing each tensor to ``visit``.

    ``piece_bytes`` gives the size of the pieces a tensor is read in. Returns {file name: sha256
    hex}. Raises CheckpointError when a file ends early or changed since its header was read.
    """
    read = _read_torch if checkpoint.kind == "torch" else _read_flat
    return {name: read(checkpoint, name, piece_bytes, visit) for name in checkpoint.files}


def _in_file(checkpoint: Checkpoint, name: str) -> list[SourceTensor]:
    tensors = [tensor for tensor in checkpoint.tensors.values() if tensor.file == name]
    return sorted(tensors, key=lambda tensor: (tensor.begin, tensor.nbytes))


def _read_flat(
    checkpoint: Checkpoint,
    name: str,
    piece_bytes: Callable[[SourceTensor], int],
    visit: Visitor,
) -> str:
    digest = hashlib.sha256()

    def pieces(tensor: SourceTensor) -> Iterator[memoryview]:
        """Views of one buffer, each valid until the next; the digest takes them meanwhile."""
        buffer = bytearray(min(piece_bytes(tensor), tensor.nbytes))
        left = tensor.nbytes
        while left:
            piece = memoryview(buffer)[: min(len(buffer), left)]
            if file.readinto(piece) != len(piece):
                raise CheckpointError(f"{name} ended inside tensor {tensor.stored_name!r}")
            hashing = hasher.submit(digest.update, piece)
            left -= len(piece)
            yield piece
            hashing.result()

    try:
        with (
            (checkpoint.directory / name).open("rb", buffering=0) as raw,
            ThreadPoolExecutor(1) as hasher,  # while the visitor works on the piece
        ):
            file = _FullReader(raw)
            digest.update(file.read(checkpoint.data_starts[name]))
            at = 0
            for tensor in _in_file(checkpoint, name):
                digest.update(file.read(tensor.begin - at))  # GGUF files pad between tensors
                visit(tensor, pieces(tensor))
                at = tensor.begin + tensor.nbytes
            if checkpoint.kind == "safetensors" and file.read(1):
                raise CheckpointError(f"{name} grew while it was read")
            while rest := file.read(_HASH_BYTES):
                digest.update(rest)
    except OSError as error:
        raise CheckpointError(f"cannot read {name}: {error.strerror}") from error
    return digest.hexdigest()


class _FullReader:
    """Reads exactly what is asked for unless the file ends; raw files may return less."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def readinto(self, target: memoryview) -> int:
        """Fill ``target``; the bytes read are fewer only at the end of the file."""
        done = 0
        while done < len(target):
            count = self._raw.readinto(target[done:])
            if not count:
                break
            done += count
        return done

    def read(self, count: int) -> bytes:
        """The next ``count`` bytes, fewer only at the end of the file."""
        buffer = bytearray(count)
        return bytes(buffer[: self.readinto(memoryview(buffer))])


def _read_torch(
    checkpoint: Checkpoint,
    name: str,
    piece_bytes: Callable[[SourceTensor], int],
    visit: Visitor,
) -> str:
    path = checkpoint.directory / name
    state = open_torch(path)
    for tensor in _in_file(checkpoint, name):
        data = state[tensor.stored_name][2].data
        step = piece_bytes(tensor)
        visit(tensor, (data[at : at + step] for at in range(0, tensor.nbytes, step)))
    return file_sha256(path)


def file_sha256(path: Path) -> str:
    """Hex digest of a whole file; OSError when it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASH_BYTES):
            digest.update(piece)
    return digest.hexdigest()
