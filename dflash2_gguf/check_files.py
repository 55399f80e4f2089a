"""The two models of a check, as far as their headers tell; no weight is read."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from dflash2_gguf.convert.fork_names import DRAFT_ARCHITECTURES, OTHER_ARCHITECTURES
from dflash2_gguf.convert.fork_tensors import rename_tensors
from dflash2_gguf.convert.gguf_facts import gguf_facts, tensor_problems
from dflash2_gguf.convert.gguf_reader import GGUFHeader, TensorEntry, read_gguf
from dflash2_gguf.convert.gguf_values import Value
from dflash2_gguf.convert.hparams import read_hparams
from dflash2_gguf.convert.inspection import inspect
from dflash2_gguf.convert.source import open_checkpoint, read_json
from dflash2_gguf.convert.target import Target, open_target
from dflash2_gguf.convert.tensors import plan_tensors
from dflash2_gguf.errors import CheckpointError, DFlash2Error, PairError
from dflash2_gguf.ggml_types import GGMLType, TokenType, ValueType
from dflash2_gguf.gguf_header import Header, read_header
from dflash2_gguf.gguf_schema import ARCHITECTURE, Key, arch_key
from dflash2_gguf.known_models import HF_ARCHITECTURES
from dflash2_gguf.pair import check_target, split_parts

__all__ = ["DraftFile", "TargetFile", "open_draft", "open_target_file", "tensor_bytes"]

_LENGTH = struct.Struct("<Q")
_OTHER_KIND = "llama.cpp's DFlash graph has no place for them; take a DFlash 2 drafter"
_CUT = "the download probably stopped half-way: fetch the file again"


@dataclass(frozen=True, kw_only=True)
class TargetFile:
    """A target: ``parts`` are the headers of its files, none for a Hugging Face folder.

    n_padding: rows at the end of the vocabulary that have no text. first: as the runtime reads it.
    """

    path: Path
    model: Target
    n_padding: int
    parts: tuple[GGUFHeader, ...] = ()
    first: Header | None = None

    @property
    def arch(self) -> str | None:
        """llama.cpp's name of the architecture, None where a folder's is not known."""
        return self.model.arch if self.parts else HF_ARCHITECTURES.get(self.model.arch)

    @property
    def tokens(self) -> Value:
        """The token texts."""
        return self.model.tokenizer[Key.TOKENS]

    def token(self, index: int) -> str:
        """One token's text; a whole vocabulary takes long to decode."""
        raw, at = self.tokens.raw, 0
        for _ in range(index):
            at += 8 + _LENGTH.unpack_from(raw, at)[0]
        length = _LENGTH.unpack_from(raw, at)[0]
        return raw[at + 8 : at + 8 + length].decode("utf-8", errors="replace")

    def tensor_shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, slowest dimension first; None when there is none."""
        found = (part.tensors[name].shape for part in self.parts if name in part.tensors)
        return next(found, None)

    def integer(self, field: str) -> int | None:
        """A number of the architecture, None where there is none or no GGUF file."""
        return self.parts[0].integer(arch_key(field, arch=self.model.arch)) if self.parts else None


def _padding(model: Target) -> int:
    types = model.tokenizer.get(Key.TOKEN_TYPES)
    if types is None or types.item is not ValueType.INT32:
        return 0
    kinds = struct.unpack(f"<{types.count}i", types.raw)
    return next(
        (n for n, kind in enumerate(reversed(kinds)) if kind != TokenType.UNUSED), len(kinds)
    )


@dataclass(frozen=True, kw_only=True)
class DraftFile:
    """A drafter: ``facts`` as ``inspect`` names them, ``tensor_faults`` by kind of fault.

    header: None for a checkpoint folder. first: the same as the runtime reads it.
    """

    path: Path
    facts: Mapping[str, Any]
    tensor_faults: Mapping[str, DFlash2Error]
    header: GGUFHeader | None = None
    first: Header | None = None


def open_target_file(path: Path) -> TargetFile:
    """Read a target's headers.

    Raises CheckpointError or PairError for what is no target, is not complete or cannot be read.
    """
    model = open_target(path)
    if path.is_dir():
        return TargetFile(path=path, model=model, n_padding=_padding(model))
    first = read_header(path)
    parts = tuple(read_gguf(part) for part in split_parts(first))
    check_target(first)
    for part in parts:
        _require_complete(part)
    return TargetFile(path=path, model=model, n_padding=_padding(model), parts=parts, first=first)


def open_draft(path: Path) -> DraftFile:
    """Read the headers of a GGUF drafter or a checkpoint folder.

    Raises CheckpointError for what is no drafter, is not complete or cannot be read.
    """
    if path.is_dir() or path.suffix == ".safetensors" or not path.exists():
        return DraftFile(
            path=path, facts=inspect(path).facts, tensor_faults=dict(_checkpoint_faults(path))
        )
    header = read_gguf(path)
    _refuse_others(header)
    facts, _ = gguf_facts(header)
    _require_complete(header)
    return DraftFile(
        path=path,
        facts=facts,
        tensor_faults={
            kind: CheckpointError(line, _TENSOR_HINTS[kind])
            for kind, line in tensor_problems(header, facts).items()
        },
        header=header,
        first=read_header(path),
    )


def _refuse_others(header: GGUFHeader) -> None:
    """Architectures of forks, and models that are no drafters at all."""
    arch = header.text(Key.ARCHITECTURE)
    if arch in OTHER_ARCHITECTURES:
        raise CheckpointError(
            f"{header.path} has architecture {arch!r}: {OTHER_ARCHITECTURES[arch]}",
            "convert the checkpoint of a DFlash 2 drafter",
        )
    if arch in DRAFT_ARCHITECTURES and arch != ARCHITECTURE:
        raise CheckpointError(
            f"{header.path} was made for a fork of llama.cpp: its architecture is {arch!r}",
            "`dflash2-convert migrate` makes it a file that llama.cpp loads, and check that one",
        )
    if arch != ARCHITECTURE:
        raise PairError(
            f"{header.path} is not a drafter: its architecture is {arch!r}",
            "are target and drafter swapped?",
        )
    try:
        ours = rename_tensors(header, ARCHITECTURE)
    except CheckpointError as error:
        raise CheckpointError(f"{header.path}: {error.message}", _OTHER_KIND) from error
    foreign = [name for name in header.tensors if name not in ours]
    if foreign:
        raise CheckpointError(
            f"{header.path} has tensor names of a fork, such as {foreign[0]}",
            "`dflash2-convert migrate` makes it a file that llama.cpp loads, and check that one",
        )


_TENSOR_HINTS = {
    "incomplete": "convert the drafter's checkpoint again",
    "missing": "llama.cpp refuses the file; convert the whole checkpoint again",
    "unknown": _OTHER_KIND,
    "misshapen": "metadata and tensors are of two drafters; convert the checkpoint again",
    "mistyped": "llama.cpp runs norms and convolution bases in F32 only; convert again",
}


def _checkpoint_faults(path: Path) -> Iterable[tuple[str, DFlash2Error]]:
    try:
        plan_tensors(read_hparams(read_json(path / "config.json")), open_checkpoint(path))
    except CheckpointError as error:
        yield "checkpoint", error


def _require_complete(header: GGUFHeader) -> None:
    """Tensors of types that this project does not write; of the others the reader saw to it."""
    for tensor in header.tensors.values():
        end = header.data_offset + tensor.offset + tensor_bytes(tensor)
        if end > header.size:
            raise CheckpointError(
                f"{header.path} is truncated: tensor {tensor.name} ends at byte {end}, "
                f"the file has {header.size}",
                _CUT,
            )


def tensor_bytes(tensor: TensorEntry) -> int:
    """Size of a tensor; 1 where its type is newer than the gguf package."""
    if isinstance(tensor.type, GGMLType):
        return tensor.nbytes
    try:
        per_block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
    except ValueError:
        return 1
    return prod(tensor.shape) // per_block * nbytes
