"""What a drafter is: the same facts from a checkpoint directory and from a GGUF file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.convert.gguf_facts import gguf_facts, type_name
from dflash2_gguf.convert.gguf_reader import read_gguf
from dflash2_gguf.convert.hparams import DraftHparams, read_hparams
from dflash2_gguf.convert.metadata import licence_warning, provenance_of, read_provenance
from dflash2_gguf.convert.source import Checkpoint, open_checkpoint, read_json
from dflash2_gguf.convert.tensors import plan_tensors
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.gguf_schema import Name

__all__ = ["Inspection", "inspect", "render"]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Facts by name, in reading order; None means unknown. Problems are full lines.

    ``tensors`` gives type and shape (slowest dimension first) by name.
    """

    facts: dict[str, Any]
    tensors: dict[str, str]
    problems: tuple[str, ...] = ()


def inspect(path: Path) -> Inspection:
    """Facts of a checkpoint directory or a GGUF file; CheckpointError when it is neither."""
    if path.is_dir():
        return _inspect_directory(path)
    if not path.exists():
        raise CheckpointError(
            f"there is no file or folder {path}",
            "check the path; it can be a GGUF file or a checkpoint folder",
        )
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path} is one file of a checkpoint", f"give its folder instead: {path.parent}"
        )
    header = read_gguf(path)
    facts, problems = gguf_facts(header)
    warning = licence_warning(provenance_of(facts))
    problems += [warning] if warning else []
    tensors = {t.name: f"{type_name(t.type)} {list(t.shape)}" for t in header.tensors.values()}
    return Inspection(facts=facts, tensors=tensors, problems=tuple(problems))


def _inspect_directory(path: Path) -> Inspection:
    checkpoint = open_checkpoint(path)
    hparams = read_hparams(read_json(path / "config.json"))
    provenance = read_provenance(path, hparams)
    problems = list(hparams.warnings)
    try:
        problems += plan_tensors(hparams, checkpoint).warnings
    except CheckpointError as error:
        problems.append(error.message)
    warning = licence_warning(provenance)
    facts = {
        "kind": f"DFlash {2 if hparams.parts else 1} checkpoint ({checkpoint.kind})",
        "name": provenance.name,
        "license": provenance.licence,
        "license_name": provenance.licence_name,
        "license_link": provenance.licence_link,
        "source_repo": provenance.repo,
        "source_revision": provenance.revision,
        **_weights(checkpoint),
        **_shape(hparams),
        **_behaviour(hparams),
    }
    return Inspection(
        facts=facts,
        tensors={t.name: f"{t.dtype} {list(t.shape)}" for t in checkpoint.tensors.values()},
        problems=(*problems, *([warning] if warning else [])),
    )


def _weights(checkpoint: Checkpoint) -> dict[str, Any]:
    kinds = Counter(tensor.dtype for tensor in checkpoint.tensors.values())
    count = 0
    for tensor in checkpoint.tensors.values():
        size = 1
        for n in tensor.shape:
            size *= n
        count += size
    return {
        "parameters": count,
        "bytes": checkpoint.nbytes,
        "files": len(checkpoint.files),
        "tensors": len(checkpoint.tensors),
        "tensor_types": dict(sorted(kinds.items())),
        "own_embeddings": Name.HF_EMBEDDINGS in checkpoint.tensors,
        "own_head": Name.HF_HEAD in checkpoint.tensors,
    }


def _shape(h: DraftHparams) -> dict[str, Any]:
    return {
        "layers": h.n_layer,
        "hidden_size": h.n_embd,
        "feed_forward": h.n_ff,
        "heads": h.n_head,
        "kv_heads": h.n_head_kv,
        "head_dim": h.head_dim,
        "vocabulary": h.n_vocab,
        "context": h.context_length,
        "norm_epsilon": h.rms_eps,
    }


def _behaviour(h: DraftHparams) -> dict[str, Any]:
    scaling = h.rope.scaling
    return {
        "block_size": h.block_size,
        "mask_token_id": h.mask_token_id,
        "target_layers": list(h.target_layer_ids),
        "target_layer_count": h.n_target_layer,
        "conv_kernel": h.parts.conv_kernel if h.parts else None,
        "conv_group": h.parts.conv_group if h.parts else None,
        "selector_rank": h.parts.selector_rank if h.parts else None,
        "selector_top_k": h.parts.selector_top_k if h.parts else None,
        "causal": h.causal,
        "sliding_window": h.sliding_window,
        "sliding_layers": list(h.sliding_layers),
        "rope_base": h.rope.freq_base,
        "rope_base_from": h.rope.origin,
        "rope_dims": h.rope.dims,
        "rope_layout": "interleaved" if h.rope.interleaved else "halves",
        "rope_scaling": f"{scaling.kind} x{scaling.factor:g}" if scaling else None,
        "output_multiplier": h.output_multiplier,
        "softcap": h.softcap,
        "embedding_scale": h.embedding_scale,
        "value_scale": h.value_scale,
    }


def render(facts: dict[str, Any]) -> dict[str, str]:
    """Facts as text for people; unknown ones are left out."""
    return {
        name.replace("_", " "): _text(name, value)
        for name, value in facts.items()
        if value is not None and value != {}
    }


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "sliding_layers":
        return _layer_flags(value)
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items())
    if isinstance(value, int) and name in ("parameters", "bytes"):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _layer_flags(flags: list[bool]) -> str:
    if all(flags):
        return "all"
    return ", ".join(str(i) for i, flag in enumerate(flags) if flag) or "none"
