"""config.json of a DFlash checkpoint, validated into one frozen dataclass.

Nothing is guessed: a key inside ``dflash_config`` that this version does not know is an error, and
so is a missing RoPE base. Defaults are those of the authors' reference (``dflash/model.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dflash2_gguf.convert.config_keys import (
    is_dflash2,
    refuse_unsupported_values,
    unknown_top_level,
)
from dflash2_gguf.convert.config_values import Config
from dflash2_gguf.convert.rope import Rope, read_rope
from dflash2_gguf.convert.speculators import flatten
from dflash2_gguf.convert.stored_weights import Scheme
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.gguf_schema import DraftShape

__all__ = ["DFlash2Parts", "DraftHparams", "default_target_layer_ids", "read_hparams"]

_DEFAULT_BLOCK_SIZE = 16
_MAX_LAYERS = 512  # llama-hparams.h:LLAMA_MAX_LAYERS
_OF_THE_RELEASE = "take the config of the release"
_COUNTING = "target_layer_ids counts outputs of layers, and the first is 0"

# hidden_act -> what llama.cpp calls it, None where that is its default
_ACTIVATIONS = {"silu": None, "gelu": "gelu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}


@dataclass(frozen=True, kw_only=True)
class DFlash2Parts:
    """What DFlash 2 added: convolutions around attention and MLP, and the candidate selector."""

    conv_kernel: int
    conv_group: int
    selector_rank: int
    selector_top_k: int

    def __post_init__(self) -> None:
        for name, value in (
            ("conv_kernel_size", self.conv_kernel),
            ("conv_group_size", self.conv_group),
            ("selector_rank", self.selector_rank),
            ("selector_top_k", self.selector_top_k),
        ):
            if value < 1:
                raise CheckpointError(f"config.json: {name} is {value}")


@dataclass(frozen=True, kw_only=True)
class DraftHparams:
    """What config.json says about a drafter. Layer ids are 0-based outputs.

    parts: None for a DFlash 1 drafter. n_vocab_draft: rows of a reduced head. sinks: None where
    the config does not say. activation: of the MLP where it is not silu.
    """

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    head_dim_given: bool
    n_vocab: int
    context_length: int
    rms_eps: float
    rope: Rope
    causal: bool
    sliding_window: int | None
    sliding_layers: tuple[bool, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    n_target_layer: int | None
    parts: DFlash2Parts | None
    output_multiplier: float | None
    softcap: float | None
    embedding_scale: float | None
    value_scale: float | None
    tie_embeddings: bool
    n_vocab_draft: int | None
    sinks: bool | None
    activation: str | None
    quantization: str | None
    scheme: Scheme
    own_head: bool
    licence: str | None
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_heads(self)
        _check_layers(self)
        _check_selector(self)
        _check_scales(self)
        if not 0 <= self.mask_token_id < self.n_vocab:
            raise CheckpointError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.n_vocab}",
                _OF_THE_RELEASE,
            )

    def shape(
        self,
        *,
        own_embeddings: bool = False,
        own_head: bool = False,
        sinks: bool = False,
        shared_kv: bool = False,
    ) -> DraftShape:
        """The tensor shapes these hyperparameters ask for, in a checkpoint that has these parts."""
        return DraftShape(
            n_layer=self.n_layer,
            n_embd=self.n_embd,
            n_ff=self.n_ff,
            n_head=self.n_head,
            n_head_kv=self.n_head_kv,
            head_dim=self.head_dim,
            n_vocab=self.n_vocab,
            n_tap=len(self.target_layer_ids),
            conv_kernel=self.parts.conv_kernel if self.parts else 0,
            conv_group=self.parts.conv_group if self.parts else 0,
            selector_rank=self.parts.selector_rank if self.parts else 0,
            n_vocab_draft=self.n_vocab_draft,
            own_embeddings=own_embeddings,
            own_head=own_head,
            sinks=sinks,
            shared_kv=shared_kv,
        )


def default_target_layer_ids(n_target: int, n_draft: int) -> tuple[int, ...]:
    """Layers read when the config names none (``dflash/model.py:build_target_layer_ids``)."""
    if n_draft == 1:
        return (n_target // 2,)
    span = n_target - 4
    return tuple(round(1 + i * span / (n_draft - 1)) for i in range(n_draft))


def read_hparams(data: dict[str, Any]) -> DraftHparams:
    """Validate the content of config.json.

    Raises CheckpointError for other drafter kinds (by name), unknown ``dflash_config`` keys,
    missing or impossible values. Unknown top-level keys end up in ``warnings``.
    """
    data = flatten(data)
    second = is_dflash2(data)
    refuse_unsupported_values(data)
    config = Config(data)
    n_layer = _layer_count(config)
    n_embd = config.positive("hidden_size")
    n_head = config.positive("num_attention_heads")
    types = _layer_types(config, n_layer)
    window, sliding, warnings = _sliding(config, types)
    head_dim = config.optional_int("head_dim")
    n_target = config.optional_int("num_target_layers")
    return DraftHparams(
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=config.positive("intermediate_size"),
        n_head=n_head,
        n_head_kv=config.optional_int("num_key_value_heads") or n_head,
        head_dim=n_embd // n_head if head_dim is None else head_dim,
        head_dim_given=head_dim is not None,
        n_vocab=config.positive("vocab_size"),
        context_length=config.positive("max_position_embeddings"),
        rms_eps=config.number("rms_norm_eps"),
        rope=read_rope(config, n_embd // n_head if head_dim is None else head_dim),
        causal=_causal(config, types),
        sliding_window=window,
        sliding_layers=sliding,
        block_size=config.draft_int("block_size", _DEFAULT_BLOCK_SIZE),
        mask_token_id=_mask_token_id(config),
        target_layer_ids=_target_layer_ids(config, n_target, n_layer),
        n_target_layer=n_target,
        parts=_parts(config) if second else None,
        output_multiplier=config.draft_float("output_multiplier"),
        softcap=_softcap(config),
        embedding_scale=config.draft_float("input_embedding_scale"),
        value_scale=config.draft_float("attention_value_scale"),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        n_vocab_draft=_draft_vocabulary(config),
        sinks=_sinks(config),
        activation=_activation(config),
        quantization=_quantization(config),
        scheme=Scheme.read(config.top("quantization_config")),
        own_head=config.draft_flag("has_own_lm_head", False),
        licence=config.optional_str("license"),
        warnings=(*unknown_top_level(data), *warnings),
    )


def _parts(config: Config) -> DFlash2Parts:
    return DFlash2Parts(
        conv_kernel=config.draft_int("conv_kernel_size"),
        conv_group=config.draft_int("conv_group_size"),
        selector_rank=config.draft_int("selector_rank"),
        selector_top_k=config.draft_int("selector_top_k"),
    )


def _draft_vocabulary(config: Config) -> int | None:
    """Rows of a reduced head; the whole vocabulary is not a reduced one."""
    value = config.draft("draft_vocab_size")
    if value is None:
        return None
    rows, n_vocab = config.draft_int("draft_vocab_size"), config.positive("vocab_size")
    if not 1 <= rows <= n_vocab:
        raise CheckpointError(
            f"config.json: draft_vocab_size {rows} of a vocabulary of {n_vocab}", _OF_THE_RELEASE
        )
    return rows if rows < n_vocab else None


def _sinks(config: Config) -> bool | None:
    given = config.draft("attention_sink_bias")
    return None if given is None else config.draft_flag("attention_sink_bias", False)


def _activation(config: Config) -> str | None:
    name = config.draft("hidden_act")
    if name is None:
        return None
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise CheckpointError(
            f"config.json: hidden_act is {name!r}, llama.cpp runs {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _quantization(config: Config) -> str | None:
    """How the weights are stored, in the checkpoint's own word; their tensors say the rest."""
    given = config.top("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else None
    if not isinstance(method, str):
        raise CheckpointError("config.json: quantization_config names no quant_method")
    return method


def _layer_count(config: Config) -> int:
    count = config.positive("num_hidden_layers")
    if count > _MAX_LAYERS:
        raise CheckpointError(
            f"config.json: num_hidden_layers is {count}, llama.cpp reads at most {_MAX_LAYERS}"
        )
    return count


def _mask_token_id(config: Config) -> int:
    value = config.draft("mask_token_id")
    if type(value) is not int:
        raise CheckpointError(
            f"config.json: mask_token_id is {value!r}",
            f"a drafter without its mask token cannot draft; {_OF_THE_RELEASE}",
        )
    return value


def _softcap(config: Config) -> float | None:
    value = config.draft_float("final_logit_softcapping")
    return value if value is not None and value > 0 else None


def _target_layer_ids(config: Config, n_target: int | None, n_layer: int) -> tuple[int, ...]:
    value = config.draft("target_layer_ids")
    if value is None:
        if n_target is None:
            raise CheckpointError(
                "config.json has neither target_layer_ids nor num_target_layers",
                "the layers a drafter reads cannot be guessed",
            )
        return default_target_layer_ids(n_target, n_layer)
    if not isinstance(value, list) or not value or not all(type(i) is int for i in value):
        raise CheckpointError(f"config.json: target_layer_ids is {value!r}, not a list of integers")
    return tuple(value)


def _sliding(
    config: Config, types: tuple[str, ...]
) -> tuple[int | None, tuple[bool, ...], tuple[str, ...]]:
    """Window, per-layer flags and warnings by the reference's rule; None is full attention."""
    full = (False,) * len(types)
    if config.draft_flag("use_swa", False):
        return config.draft_int("swa_window_size"), (True,) * len(types), ()
    sliding = tuple(kind == "sliding_attention" for kind in types)
    if not any(sliding):
        return None, full, ()
    if not config.flag("use_sliding_window", False):
        warning = "config.json: layer_types has sliding layers, but use_sliding_window is off"
        return None, full, (f"{warning}: full attention, as in the reference",)
    window = config.optional_int("sliding_window")
    if window is None:
        raise CheckpointError(
            "config.json: layer_types has sliding layers, but there is no sliding_window"
        )
    return window, sliding, ()


def _layer_types(config: Config, n_layer: int) -> tuple[str, ...]:
    value = config.top("layer_types")
    if value is None:
        if config.flag("use_sliding_window", False) and config.top("sliding_window") is not None:
            first = config.positive("max_window_layers", allow_zero=True)
            return ("full_attention",) * min(first, n_layer) + ("sliding_attention",) * max(
                0, n_layer - first
            )
        return ("full_attention",) * n_layer
    known = ("full_attention", "sliding_attention")
    if not isinstance(value, list) or any(kind not in known for kind in value):
        raise CheckpointError(
            f"config.json: layer_types is {value!r}, known are {', '.join(known)}"
        )
    if len(value) != n_layer:
        raise CheckpointError(f"config.json: {len(value)} layer_types for {n_layer} layers")
    return tuple(value)


def _causal(config: Config, types: tuple[str, ...]) -> bool:
    """is_causal, else dflash_config.causal, else the legacy rule: sliding layers are causal."""
    for value in (config.top("is_causal"), config.nested("causal")):
        if value is not None:
            if not isinstance(value, bool):
                raise CheckpointError(f"config.json: is_causal is {value!r}, not true or false")
            return value
    if len(set(types)) > 1:
        raise CheckpointError(
            "config.json has no is_causal and mixes full and sliding layers",
            "causality per layer cannot be expressed in a GGUF file",
        )
    return types[0] == "sliding_attention"


def _check_heads(h: DraftHparams) -> None:
    for name, value in (
        ("num_hidden_layers", h.n_layer),
        ("head_dim", h.head_dim),
        ("num_key_value_heads", h.n_head_kv),
    ):
        if value < 1:
            raise CheckpointError(f"config.json: {name} is {value}")
    if h.n_head % h.n_head_kv:
        raise CheckpointError(
            f"config.json: {h.n_head} attention heads cannot share {h.n_head_kv} key-value heads"
        )
    if h.head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {h.head_dim} is odd, RoPE needs pairs")
    if h.block_size < 2:
        raise CheckpointError(f"config.json: block_size {h.block_size} leaves nothing to draft")
    if h.sliding_window is not None and h.sliding_window < 1:
        raise CheckpointError(f"config.json: sliding_window is {h.sliding_window}")


def _check_layers(h: DraftHparams) -> None:
    ids = h.target_layer_ids
    if any(i < 0 for i in ids) or len(set(ids)) != len(ids):
        raise CheckpointError(
            f"config.json: target_layer_ids {list(ids)} repeat or are negative", _COUNTING
        )
    if h.n_target_layer is not None and max(ids) >= h.n_target_layer:
        raise CheckpointError(
            f"config.json: target layer {max(ids)} does not exist in a target of "
            f"{h.n_target_layer} layers (0 to {h.n_target_layer - 1})",
            _COUNTING,
        )


def _check_selector(h: DraftHparams) -> None:
    if h.parts is None:
        return
    group, top_k = h.parts.conv_group, h.parts.selector_top_k
    if h.n_embd % group:
        raise CheckpointError(
            f"config.json: conv_group_size {group} does not divide hidden_size {h.n_embd}"
        )
    lattice = top_k * (top_k + 1)
    if h.n_embd < lattice:
        raise CheckpointError(
            f"config.json: selector_top_k {top_k} is too large for hidden {h.n_embd}",
            f"llama.cpp carries the candidates in a row of that size, {lattice} are needed",
        )
    if (h.n_vocab_draft or top_k) < top_k:
        raise CheckpointError(
            f"config.json: selector_top_k {top_k} of a draft vocabulary of {h.n_vocab_draft}"
        )


def _check_scales(h: DraftHparams) -> None:
    for name, value in (
        ("rms_norm_eps", h.rms_eps),
        ("output_multiplier", h.output_multiplier),
        ("input_embedding_scale", h.embedding_scale),
        ("attention_value_scale", h.value_scale),
    ):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise CheckpointError(f"config.json: {name} is {value}, it must be positive")
