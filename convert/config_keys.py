"""Which keys a config.json may have, and which other drafter kinds are refused by name."""

from __future__ import annotations

import difflib
from typing import Any

from dflash2_gguf.errors import CheckpointError

__all__ = [
    "refuse_other_variants",
    "refuse_unsupported_values",
    "unknown_top_level",
]

_ARCHITECTURE = "DFlash2DraftModel"

_OTHER_ARCHITECTURES = {
    "DFlashDraftModel": "a DFlash 1 drafter",
    "DFlash2BeamDraftModel": "a DFlash 2 Beam drafter",
    "Qwen3DSparkModel": "a DSpark drafter",
    "DSparkDraftModel": "a DSpark drafter",
    "DSparkSpeculator": "a DSpark drafter",
    "Lfm2DSparkDraftModel": "a DSpark drafter",
    "LingDSparkModel": "a DSpark drafter",
    "DominoDraftModel": "a Domino drafter",
    "LlamaForCausalLMEagle3": "an EAGLE-3 drafter",
    "Eagle3DraftModel": "an EAGLE-3 drafter",
}

# keys that are read from dflash_config, falling back to the top level
_DRAFT_KEYS = {
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "use_swa",
    "swa_window_size",
    "causal",
    "attention_value_scale",
    "rope_is_neox_style",
    "is_neox_style",
    "rope_dim",
    "partial_rotary_factor",
}

# keys of which some values are not converted: key -> (accepted values, what others mean)
_FIXED_KEYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_sink_bias": ((False, None), "attention sinks"),
    "sample_from_anchor": ((False, None), "DSpark's sampling from the anchor"),
    "use_gemma_norm": ((False, None), "Gemma's norms"),
    "shift_label": ((False, None), "Domino's shifted labels"),
    "projector_type": ((None, "dflash", "dflash2"), "another projector"),
    "pure_draft_prefix_len": ((None, 0), "Domino's draft prefix"),
    "gru_hidden_dim": ((None, 0), "Domino's GRU"),
    "emb_dim": ((None, 0), "Domino's embeddings"),
    "markov_head_type": ((None,), "DSpark's Markov head"),
    "draft_vocab_size": ((None,), "a reduced draft vocabulary"),
    "target_hidden_size": ((None,), "a target of another hidden size"),
    "logit_scale": ((None, 1, 1.0), "vLLM's own logit scale"),
    "has_own_lm_head": ((False, None), "a head of its own that is announced, not shipped"),
    "use_aux_hidden_state": ((True, None), "drafting without target features"),
    "hidden_act": (("silu", None), "another activation"),
    "attention_bias": ((False, None), "attention biases"),
    "quantization_config": ((None,), "quantized weights"),
    "mlp_bias": ((False, None), "MLP biases"),
}

_TOP_LEVEL = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dflash_config",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "is_causal",
    "layer_types",
    "license",
    "max_position_embeddings",
    "max_window_layers",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_target_layers",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_sliding_window",
    "vocab_size",
}

_ONLY_DFLASH2 = "this version converts DFlash 2 checkpoints (DFlash2DraftModel) only"


def refuse_other_variants(data: dict[str, Any]) -> None:
    """Raise CheckpointError, naming the kind, when this is not a DFlash 2 drafter."""
    kind = data.get("speculators_model_type")
    if kind is not None or "transformer_layer_config" in data:
        raise CheckpointError(f"this is a checkpoint in speculators format ({kind})", _ONLY_DFLASH2)
    names = data.get("architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError("config.json names no architecture", _ONLY_DFLASH2)
    nested = data.get("dflash_config", {})
    if not isinstance(nested, dict):
        raise CheckpointError(f"config.json: dflash_config is {nested!r}, not an object")
    name = names[0]
    if name != _ARCHITECTURE:
        what = _OTHER_ARCHITECTURES.get(str(name), "not a DFlash 2 drafter")
        raise CheckpointError(f"{name} is {what}", _ONLY_DFLASH2)


def refuse_unsupported_values(data: dict[str, Any]) -> None:
    """Raise CheckpointError for unknown ``dflash_config`` keys and unconverted features."""
    nested = data.get("dflash_config", {})
    known = _DRAFT_KEYS | set(_FIXED_KEYS)
    unknown = sorted(set(nested) - known)
    if unknown:
        close = difflib.get_close_matches(unknown[0], sorted(known), n=1)
        hint = f"did you mean {close[0]}?" if close else "it may change what the drafter computes"
        raise CheckpointError(
            f"config.json: unknown in dflash_config: {', '.join(unknown)}",
            hint,
        )
    for key, (accepted, meaning) in _FIXED_KEYS.items():
        for value in (nested.get(key), data.get(key)):
            if not any(value is item or value == item for item in accepted) and value is not None:
                raise CheckpointError(
                    f"config.json: {key} is {_short(value)}: {meaning} cannot be converted yet"
                )


def unknown_top_level(data: dict[str, Any]) -> tuple[str, ...]:
    """One warning per top-level key that has no meaning here."""
    known = _TOP_LEVEL | _DRAFT_KEYS | set(_FIXED_KEYS)
    return tuple(f"config.json: unknown key {key} is ignored" for key in sorted(set(data) - known))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
