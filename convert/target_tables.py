"""Embeddings and head of a target, for a drafter that gets tables of its own."""

from __future__ import annotations

from pathlib import Path

from dflash2_gguf.convert.gguf_reader import read_gguf
from dflash2_gguf.convert.gguf_source import stored_checkpoint, stored_weight
from dflash2_gguf.convert.source import open_checkpoint, read_json
from dflash2_gguf.convert.stored_weights import Scheme, Tables, find_weights
from dflash2_gguf.convert.target import all_parts
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.gguf_schema import Name

__all__ = ["lend_tables"]


class _AbsentError(Exception):
    """The name of a table that a target lacks."""


def lend_tables(target: Path, purpose: str) -> Tables:
    """The tables of a target, from its GGUF file or its Hugging Face folder with weights.

    Raises CheckpointError with ``purpose``, what they are needed for, when they are not there.
    """
    try:
        return _from_folder(target) if target.is_dir() else _from_gguf(target)
    except _AbsentError as absent:
        raise CheckpointError(
            f"{target} has no {absent}, and {purpose}",
            "give the target with its weights: a GGUF file, or its whole Hugging Face folder",
        ) from absent


def _from_gguf(path: Path) -> Tables:
    checkpoints, weights = {}, {}
    parts = [read_gguf(part) for part in all_parts(path)]
    holder = {name: part for part in parts for name in part.tensors}
    names = {Name.HF_EMBEDDINGS: Name.TOKEN_EMBD, Name.HF_HEAD: Name.OUTPUT}
    if Name.OUTPUT not in holder:  # tied
        names[Name.HF_HEAD] = Name.TOKEN_EMBD
    for ours, name in names.items():
        if name not in holder:
            raise _AbsentError(name)
        checkpoints[ours] = stored_checkpoint(holder[name], {name})
        weights[ours] = stored_weight(checkpoints[ours].tensors[name])
    return Tables(checkpoints=checkpoints, weights=weights)


def _from_folder(folder: Path) -> Tables:
    config = read_json(folder / "config.json")
    text = config.get("text_config", config)
    scheme = Scheme.read(config.get("quantization_config"))
    checkpoint = open_checkpoint(folder)
    stored, _ = find_weights(checkpoint, scheme)
    tied = isinstance(text, dict) and text.get("tie_word_embeddings") is True
    ends = {Name.HF_EMBEDDINGS: Name.HF_EMBEDDINGS, Name.HF_HEAD: Name.HF_HEAD}
    if tied:
        ends[Name.HF_HEAD] = Name.HF_EMBEDDINGS
    weights = {}
    for ours, end in ends.items():
        found = [name for name in stored if name == end or name.endswith(f".{end}")]
        if len(found) != 1:
            raise _AbsentError(end)
        weights[ours] = stored[found[0]]
    return Tables(checkpoints=dict.fromkeys(ends, checkpoint), weights=weights)
