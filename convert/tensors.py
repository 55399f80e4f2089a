"""Which checkpoint tensor becomes which GGUF tensor; missing and extra ones are named."""

from __future__ import annotations

from dataclasses import dataclass

from dflash2_gguf.convert.hparams import DraftHparams
from dflash2_gguf.convert.source import Checkpoint, SourceTensor
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.gguf_schema import Name, TensorSpec, draft_tensors

__all__ = ["PlannedTensor", "plan_tensors"]

_READABLE = ("BF16", "F16", "F32")
_SHOWN = 5

# part of a tensor name -> what a checkpoint with it is
_FOREIGN = (
    ("markov_", "a DSpark drafter"),
    ("conf_proj", "a DSpark drafter"),
    ("d2t", "a drafter with a reduced vocabulary"),
    ("t2d", "a drafter with a reduced vocabulary"),
    ("sink", "a drafter with attention sinks"),
    ("aux_hidden_norms", "a Laguna drafter (auxiliary norms)"),
    ("g_proj", "a Laguna drafter (attention gates)"),
    ("encoder.", "a drafter with Muse assistant names"),
    ("post_feedforward_layernorm", "a drafter with Gemma's extra norms"),
    ("pre_feedforward_layernorm", "a drafter with Gemma's extra norms"),
    ("layer_scalar", "a drafter with Gemma's layer scales"),
    ("mask_embedding", "a drafter with its own mask embedding"),
    ("weight_scale", "a quantized checkpoint"),
    ("weight_packed", "a quantized checkpoint"),
    ("qweight", "a quantized checkpoint"),
    ("self_attn.q_proj.bias", "a drafter with attention biases"),
)


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor to write and its source. ``rope_dim`` > 0: reorder heads of that size."""

    spec: TensorSpec
    source: SourceTensor
    rope_dim: int = 0

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


def plan_tensors(hparams: DraftHparams, checkpoint: Checkpoint) -> tuple[PlannedTensor, ...]:
    """Match a checkpoint against the schema.

    Raises CheckpointError naming the missing, unknown or misshapen tensors.
    """
    own_embeddings = Name.HF_EMBEDDINGS in checkpoint.tensors
    own_head = Name.HF_HEAD in checkpoint.tensors
    _refuse_foreign(checkpoint)
    if own_embeddings and not own_head and not hparams.tie_embeddings:
        raise CheckpointError(
            f"the checkpoint has {Name.HF_EMBEDDINGS} but no {Name.HF_HEAD}, and does not tie them",
            "llama.cpp would use the embeddings as head; set tie_word_embeddings if that is meant",
        )
    specs = draft_tensors(hparams.shape(own_embeddings=own_embeddings, own_head=own_head))
    _refuse_missing(specs, checkpoint)
    _refuse_extra(specs, checkpoint)
    return tuple(_planned(spec, checkpoint.tensors[spec.hf_name], hparams) for spec in specs)


def _planned(spec: TensorSpec, source: SourceTensor, hparams: DraftHparams) -> PlannedTensor:
    if not source.nbytes:
        raise CheckpointError(f"tensor {source.stored_name} has no elements")
    if source.shape != spec.shape:
        raise CheckpointError(
            f"tensor {source.stored_name} has shape {list(source.shape)}, "
            f"config.json asks for {list(spec.shape)}"
        )
    if source.dtype not in _READABLE:
        raise CheckpointError(
            f"tensor {source.stored_name} is stored as {source.dtype}",
            f"this version reads {', '.join(_READABLE)}; take the unquantized checkpoint",
        )
    interleaved = hparams.rope.interleaved and spec.rope_rows
    return PlannedTensor(spec=spec, source=source, rope_dim=hparams.head_dim if interleaved else 0)


def _refuse_foreign(checkpoint: Checkpoint) -> None:
    if not checkpoint.tensors:
        raise CheckpointError("the checkpoint holds no tensors")
    if (checkpoint.directory / "mask_embedding.pt").exists():
        raise CheckpointError(
            "the checkpoint ships mask_embedding.pt, which cannot be converted yet",
            "its mask vector replaces a row of the target's embeddings",
        )
    for name in checkpoint.tensors:
        for part, kind in _FOREIGN:
            if part in name:
                raise CheckpointError(
                    f"tensor {name} belongs to {kind}",
                    "this version converts plain DFlash 2 drafters",
                )
    if not any(name.startswith(Name.HF_SELECTOR_PREFIX) for name in checkpoint.tensors):
        raise CheckpointError(
            "the checkpoint has no candidate selector: it is a DFlash 1 drafter",
            "this version converts DFlash 2 checkpoints only",
        )


def _refuse_missing(specs: tuple[TensorSpec, ...], checkpoint: Checkpoint) -> None:
    missing = [spec.hf_name for spec in specs if spec.hf_name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(specs)} tensors are missing: {_names(missing)}",
            "config.json and weights do not belong together, or a shard was not downloaded",
        )


def _refuse_extra(specs: tuple[TensorSpec, ...], checkpoint: Checkpoint) -> None:
    known = {spec.hf_name for spec in specs}
    extra = [name for name in checkpoint.tensors if name not in known]
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
