"""Where a conversion starts: a checkpoint with its target, or a drafter's GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path

from dflash2_gguf.convert.gguf_facts import gguf_facts
from dflash2_gguf.convert.gguf_source import (
    open_gguf_source,
    plan_gguf_tensors,
    requantized_metadata,
    requantizing_warning,
)
from dflash2_gguf.convert.gguf_values import Value
from dflash2_gguf.convert.hparams import read_hparams
from dflash2_gguf.convert.mask_embedding import MASK_FILE, read_mask
from dflash2_gguf.convert.metadata import (
    Provenance,
    build_metadata,
    licence_warning,
    provenance_of,
    read_provenance,
)
from dflash2_gguf.convert.source import Checkpoint, file_sha256, open_checkpoint, read_json
from dflash2_gguf.convert.target import check_pair, open_target
from dflash2_gguf.convert.target_tables import lend_tables
from dflash2_gguf.convert.tensors import PlannedTensor, plan_tensors
from dflash2_gguf.errors import UsageError
from dflash2_gguf.gguf_schema import Name, Role
from dflash2_gguf.presets import Preset

__all__ = ["Origin", "Source", "count_parameters", "open_source"]

_CONFIG = "config.json"
_FOR_MASK = "the drafter's mask_embedding.pt replaces a row of it"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a drafter is, wherever its tensors come from. ``describe`` gives a file's metadata.

    other_files: sha256 of what was read besides the tensors, by name.
    """

    name: str
    target: str
    provenance: Provenance
    n_layer: int
    n_vocab: int
    gqa: int
    describe: Callable[[Preset, dict[str, str] | None], dict[str, Value]]
    other_files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a source comes to: how it is stored, what it is, its tensors, and warnings."""

    checkpoint: Checkpoint
    origin: Origin
    tensors: tuple[PlannedTensor, ...]
    warnings: tuple[str, ...]


def count_parameters(tensors: Sequence[PlannedTensor]) -> int:
    """Weights of all tensors; a map of tokens has none."""
    return sum(prod(t.spec.shape) for t in tensors if t.spec.role is not Role.VOCAB_MAP)


def open_source(path: Path, target_path: Path | None) -> Source:
    """Check a source and match its tensors.

    ``path``: a checkpoint's folder, with its target, or a drafter's GGUF file, where none is looked
    at. Raises CheckpointError, PairError, or UsageError when a target is missing.
    """
    return _from_gguf(path) if path.suffix == ".gguf" else _from_checkpoint(path, target_path)


def _from_checkpoint(path: Path, target_path: Path | None) -> Source:
    checkpoint = open_checkpoint(path)
    hparams = read_hparams(read_json(path / _CONFIG))
    if target_path is None:
        raise UsageError(
            "a checkpoint is converted for its target", "name the target's file with --target"
        )
    mask = read_mask(path, hparams)
    lends = mask is not None and not {Name.HF_EMBEDDINGS, Name.HF_HEAD} <= set(checkpoint.tensors)
    tables = lend_tables(target_path, _FOR_MASK) if lends else None
    matched = plan_tensors(hparams, checkpoint, mask=mask, tables=tables)
    target = open_target(target_path)
    check_pair(hparams, target)
    provenance = replace(read_provenance(path, hparams), quantization=matched.quantization)
    licence = licence_warning(provenance)
    small = [_CONFIG] if mask is None else [_CONFIG, MASK_FILE]
    others = {name: file_sha256(path / name) for name in small}

    def describe(preset: Preset, hashes: dict[str, str] | None) -> dict[str, Value]:
        """Metadata of a file; ``hashes``: sha256 of the source's files, once they are read."""
        return build_metadata(
            hparams,
            target,
            preset,
            provenance,
            n_params=count_parameters(matched.tensors),
            files=(*checkpoint.files, *others),
            hashes=hashes,
        )

    origin = Origin(
        name=provenance.name,
        target=target.name,
        provenance=provenance,
        n_layer=hparams.n_layer,
        n_vocab=hparams.n_vocab,
        gqa=hparams.n_head // hparams.n_head_kv,
        describe=describe,
        other_files=others,
    )
    warnings = (*hparams.warnings, *matched.warnings, *([licence] if licence else []))
    return Source(checkpoint=checkpoint, origin=origin, tensors=matched.tensors, warnings=warnings)


def _from_gguf(path: Path) -> Source:
    header, checkpoint = open_gguf_source(path)
    facts, _ = gguf_facts(header)
    tensors = plan_gguf_tensors(header, checkpoint)
    origin = Origin(
        name=str(facts["name"] or path.stem),
        target=str(facts["target"] or "unknown"),
        provenance=provenance_of(facts),
        n_layer=facts["layers"],
        n_vocab=facts["vocabulary"],
        gqa=max(1, facts["heads"] // facts["kv_heads"]),
        describe=partial(requantized_metadata, header),
    )
    lossy = requantizing_warning(tensors)
    licence = licence_warning(provenance_of(facts))
    return Source(
        checkpoint=checkpoint,
        origin=origin,
        tensors=tensors,
        warnings=tuple(line for line in (lossy, licence) if line),
    )
