"""Which checkpoint tensor becomes which GGUF tensor; missing and extra ones are named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dflash2_gguf.convert.hparams import DraftHparams
from dflash2_gguf.convert.quantize import DTYPE_SIZE, Floats
from dflash2_gguf.convert.source import Checkpoint, SourceTensor
from dflash2_gguf.convert.stored_weights import StoredWeight, Tables, find_weights
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.gguf_schema import Name, Role, TensorSpec, draft_tensors

__all__ = ["Ids", "PlannedTensor", "TensorPlan", "plan_tensors"]

Ids = np.ndarray[Any, np.dtype[np.int64]]

_SHOWN = 5
_APART = "config.json and weights do not belong together"
_TABLE = Name.HF_EMBEDDINGS
_INTEGERS = ("I64", "I32")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)$")

_BITSANDBYTES = "a checkpoint quantized by bitsandbytes"

# part of a tensor name -> what a checkpoint with it is
_FOREIGN = (
    ("markov_", "a DSpark drafter"),
    ("conf_proj", "a DSpark drafter"),
    ("aux_hidden_norms", "a Laguna drafter (auxiliary norms)"),
    ("g_proj", "a Laguna drafter (attention gates)"),
    ("post_feedforward_layernorm", "a drafter with Gemma's extra norms"),
    ("pre_feedforward_layernorm", "a drafter with Gemma's extra norms"),
    ("layer_scalar", "a drafter with Gemma's layer scales"),
    ("mlp.experts", "a drafter with experts"),
    (".absmax", _BITSANDBYTES),
    (".quant_map", _BITSANDBYTES),
    ("self_attn.q_proj.bias", "a drafter with attention biases"),
)

# other spellings of a name's end -> ours: parameters that are sometimes modules, sinks by framework
_SPELLINGS = {
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
    "self_attn.sinks.weight": Name.HF_SINKS,
    "self_attn.attention_sink_bias": Name.HF_SINKS,
    "self_attn.attention_sink_bias.weight": Name.HF_SINKS,
    "self_attn.learnable_sink_param": Name.HF_SINKS,
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}

# left by training: copies of what the target has, or what follows from other tensors and config
_LEFTOVERS = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor to write and its source. ``rope_dim`` > 0: reorder heads of that size.

    lender: where the tensor is, if it is read apart from the drafter's checkpoint. row, values: one
    row to replace, none where row is -1. kept: token ids of a reduced head's rows, ascending; the
    map of them has no source but these.
    """

    spec: TensorSpec
    weight: StoredWeight
    rope_dim: int = 0
    lender: Checkpoint | None = None
    row: int = -1
    values: Floats | None = None
    kept: Ids | None = None

    @property
    def source(self) -> SourceTensor:
        """The tensor of the checkpoint that holds the values."""
        return self.weight.main

    @property
    def n_cols(self) -> int:
        """Weights per row, the unit of quantization."""
        return self.spec.shape[-1]

    @property
    def n_rows(self) -> int:
        """Rows; a vector is one row."""
        count = 1
        for size in self.spec.shape[:-1]:
            count *= size
        return count

    @property
    def n_source_rows(self) -> int:
        """Rows that the source has."""
        return self.n_rows if self.kept is None else self.weight.shape[0]


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Tensors to write, and what a user should know of those that are not.

    quantization: the method or dtype that weights are stored in, None where all are plain floats.
    """

    tensors: tuple[PlannedTensor, ...]
    quantization: str | None = None
    warnings: tuple[str, ...] = ()


def plan_tensors(
    hparams: DraftHparams,
    checkpoint: Checkpoint,
    *,
    mask: Floats | None = None,
    tables: Tables | None = None,
) -> TensorPlan:
    """Match a checkpoint against the schema.

    mask: replaces the mask token's row of the embeddings. tables: the target's, written where the
    checkpoint has none of its own. Raises CheckpointError naming the missing, unknown or misshapen
    tensors.
    """
    if not checkpoint.tensors:
        raise CheckpointError("the checkpoint holds no tensors")
    stored, ignored = find_weights(checkpoint, hparams.scheme)
    left = [name for name in stored if name.endswith(_LEFTOVERS)]
    weights = {_canonical(name): w for name, w in stored.items() if name not in left}
    if len(weights) + len(left) < len(stored):
        raise CheckpointError("the checkpoint holds a tensor twice, under two spellings")
    lent = {
        name: w for name, w in (tables.weights if tables else {}).items() if name not in weights
    }
    weights |= lent
    _refuse_foreign(weights)
    _refuse_contradictions(hparams, weights)
    specs = draft_tensors(
        hparams.shape(
            own_embeddings=Name.HF_EMBEDDINGS in weights,
            own_head=Name.HF_HEAD in weights,
            sinks=_in_layers(weights, Name.HF_SINKS),
            shared_kv=not _in_layers(weights, Name.HF_VALUES),
        )
    )
    _refuse_missing(specs, weights)
    _refuse_extra(specs, weights)
    tensors = tuple(
        replace(
            _planned(spec, weights[spec.hf_name], hparams),
            lender=tables.checkpoints[spec.hf_name] if tables and spec.hf_name in lent else None,
            row=hparams.mask_token_id if mask is not None and spec.hf_name == _TABLE else -1,
            values=mask,
        )
        for spec in specs
    )
    quantized = [tensor.source.dtype for tensor in tensors if not tensor.weight.is_plain]
    method = (hparams.quantization or quantized[0]) if quantized else None
    lines = _warnings(left, ignored)
    if method is not None:
        lines.append(
            f"{len(quantized)} of {len(tensors)} weights are stored quantized ({method}): "
            "what that lost stays lost"
        )
    elif hparams.quantization is not None:
        lines.append(
            f"config.json speaks of {hparams.quantization}, and no weight is stored quantized"
        )
    return TensorPlan(tensors=tensors, quantization=method, warnings=tuple(lines))


def _warnings(left: list[str], ignored: Mapping[str, SourceTensor]) -> list[str]:
    lines = []
    if ignored:
        scales, are = ("scale", "is") if len(ignored) == 1 else ("scales", "are")
        lines.append(f"{len(ignored)} {scales} of activations or caches {are} left out")
    if left:
        lines.append(f"left over from training and left out: {_names(left)}")
    return lines


def _canonical(name: str) -> str:
    """Our spelling of a checkpoint's tensor name."""
    match = _LAYER.match(name)
    prefix, rest = (f"layers.{match[1]}.", match[2]) if match else ("", name)
    return prefix + _SPELLINGS.get(rest, rest)


def _in_layers(weights: Mapping[str, StoredWeight], tail: str) -> bool:
    """Does any layer have this tensor? One that only some have is missing in the others."""
    return any(name.startswith("layers.") and name.endswith(f".{tail}") for name in weights)


def _planned(spec: TensorSpec, weight: StoredWeight, hparams: DraftHparams) -> PlannedTensor:
    source = weight.main
    if not source.nbytes:
        raise CheckpointError(f"tensor {source.stored_name} has no elements")
    if not weight.fits(spec.shape):
        raise CheckpointError(
            f"tensor {source.stored_name} has shape {list(weight.shape)}, "
            f"config.json asks for {list(spec.shape)}",
            _APART,
        )
    readable = _INTEGERS if spec.role is Role.VOCAB_MAP else tuple(DTYPE_SIZE)
    if weight.is_plain and source.dtype not in readable:
        raise CheckpointError(
            f"tensor {source.stored_name} is stored as {source.dtype}",
            f"without scales this version reads {', '.join(readable)}; "
            "take the unquantized checkpoint",
        )
    interleaved = hparams.rope.interleaved and spec.rope_rows
    return PlannedTensor(spec=spec, weight=weight, rope_dim=hparams.head_dim if interleaved else 0)


def _refuse_foreign(weights: Mapping[str, StoredWeight]) -> None:
    for name in weights:
        for part, kind in _FOREIGN:
            if part in name:
                raise CheckpointError(
                    f"tensor {name} belongs to {kind}",
                    "take the unquantized checkpoint"
                    if kind == _BITSANDBYTES
                    else "drafters of plain Qwen3 layers are converted",
                )


def _refuse_contradictions(hparams: DraftHparams, weights: Mapping[str, StoredWeight]) -> None:
    """What config.json says of parts that a checkpoint may have or not."""
    own_head = Name.HF_HEAD in weights
    has_selector = any(name.startswith(Name.HF_SELECTOR_PREFIX) for name in weights)
    if hparams.parts is not None and not has_selector:
        raise CheckpointError(
            "config.json describes a DFlash 2 drafter, the checkpoint has no candidate selector",
            "it is a DFlash 1 checkpoint with the wrong config, or a part was not downloaded",
        )
    if hparams.parts is None and has_selector:
        raise CheckpointError(
            "config.json describes a DFlash 1 drafter, the checkpoint has a candidate selector",
            _APART,
        )
    if Name.HF_VOCAB_MAP in weights and hparams.n_vocab_draft is None:
        raise CheckpointError(
            f"the checkpoint has {Name.HF_VOCAB_MAP}, config.json no draft_vocab_size below the "
            "vocabulary's",
            _APART,
        )
    if Name.HF_EMBEDDINGS in weights and not own_head and not hparams.tie_embeddings:
        raise CheckpointError(
            f"the checkpoint has {Name.HF_EMBEDDINGS} but no {Name.HF_HEAD}, and does not tie them",
            "llama.cpp would use the embeddings as head; set tie_word_embeddings if that is meant",
        )
    if hparams.n_vocab_draft is not None and not own_head:
        raise CheckpointError(
            f"config.json: draft_vocab_size is {hparams.n_vocab_draft}, and there is no "
            f"{Name.HF_HEAD} of that size",
            "the target's head has other rows; fetch the whole checkpoint",
        )
    if hparams.own_head and not own_head:
        raise CheckpointError(
            f"config.json: has_own_lm_head, and there is no {Name.HF_HEAD}",
            "another head drafts other tokens; fetch the whole checkpoint",
        )
    sinks = _in_layers(weights, Name.HF_SINKS)
    if hparams.sinks is not None and hparams.sinks != sinks:
        there = "has" if sinks else "has no"
        raise CheckpointError(
            f"config.json: attention_sink_bias is {hparams.sinks}, the checkpoint {there} sinks",
            _APART,
        )


def _refuse_missing(specs: tuple[TensorSpec, ...], weights: Mapping[str, StoredWeight]) -> None:
    missing = [spec.hf_name for spec in specs if spec.hf_name not in weights]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(specs)} tensors are missing: {_names(missing)}",
            f"{_APART}, or a shard was not downloaded",
        )


def _refuse_extra(specs: tuple[TensorSpec, ...], weights: Mapping[str, StoredWeight]) -> None:
    known = {spec.hf_name for spec in specs}
    extra = [weight.main.name for name, weight in weights.items() if name not in known]
    if extra:
        raise CheckpointError(
            f"{_count(len(extra))} unknown: {_names(extra)}",
            "dropping them would change what the drafter computes",
        )


def _count(number: int) -> str:
    return "1 tensor is" if number == 1 else f"{number} tensors are"


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
