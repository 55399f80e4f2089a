"""Which keys a config.json may have, and which other drafter kinds are refused by name."""

from __future__ import annotations

import difflib
from typing import Any

from dflash2_gguf.errors import CheckpointError

__all__ = ["is_dflash2", "refuse_unsupported_values", "unknown_top_level"]

# architecture -> is it a DFlash 2 drafter? speculators wrote another name for DFlash 1
_ARCHITECTURES = {
    "DFlash2DraftModel": True,
    "DFlashDraftModel": False,
    "DFlashSpeculator": False,
}

_OTHER_ARCHITECTURES = {
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
    "attention_sink_bias",
    "draft_vocab_size",
    "hidden_act",
}

# keys that must agree with something else in the checkpoint
_CHECKED_KEYS = {"has_own_lm_head", "target_hidden_size"}

# keys of which some values are not converted: key -> (accepted values, what others mean)
_FIXED_KEYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "sample_from_anchor": ((False, None), "DSpark's sampling from the anchor"),
    "use_gemma_norm": ((False, None), "Gemma's norms"),
    "shift_label": ((False, None), "Domino's shifted labels"),
    "projector_type": ((None, "dflash", "dflash2"), "another projector"),
    "pure_draft_prefix_len": ((None, 0), "Domino's draft prefix"),
    "gru_hidden_dim": ((None, 0), "Domino's GRU"),
    "emb_dim": ((None, 0), "Domino's embeddings"),
    "markov_head_type": ((None,), "DSpark's Markov head"),
    "logit_scale": ((None, 1, 1.0), "vLLM's own logit scale"),
    "use_aux_hidden_state": ((True, None), "drafting without target features"),
    "attention_bias": ((False, None), "attention biases"),
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
    "quantization_config",
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

_ONLY_DFLASH = "DFlash 2 (DFlash2DraftModel) and DFlash 1 (DFlashDraftModel) are converted"


def is_dflash2(data: dict[str, Any]) -> bool:
    """DFlash 2 or DFlash 1? CheckpointError, naming the kind, for any other drafter or model."""
    names = data.get("architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError("config.json names no architecture", _ONLY_DFLASH)
    nested = data.get("dflash_config", {})
    if not isinstance(nested, dict):
        raise CheckpointError(f"config.json: dflash_config is {nested!r}, not an object")
    name = str(names[0])
    if name not in _ARCHITECTURES:
        what = _OTHER_ARCHITECTURES.get(name, "not a DFlash drafter")
        raise CheckpointError(f"{name} is {what}", _ONLY_DFLASH)
    return _ARCHITECTURES[name]


def refuse_unsupported_values(data: dict[str, Any]) -> None:
    """Raise CheckpointError for unknown ``dflash_config`` keys and unconverted features."""
    nested = data.get("dflash_config", {})
    known = _DRAFT_KEYS | _CHECKED_KEYS | set(_FIXED_KEYS)
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
                    f"config.json: {key} is {_short(value)}: a GGUF file has no place for {meaning}"
                )
    width = nested.get("target_hidden_size", data.get("target_hidden_size"))
    if width is not None and width != data.get("hidden_size"):
        raise CheckpointError(
            f"config.json: target_hidden_size is {_short(width)}, hidden_size is "
            f"{_short(data.get('hidden_size'))}",
            "llama.cpp reads features of the drafter's own width only",
        )


def unknown_top_level(data: dict[str, Any]) -> tuple[str, ...]:
    """One warning per top-level key that has no meaning here."""
    known = _TOP_LEVEL | _DRAFT_KEYS | _CHECKED_KEYS | set(_FIXED_KEYS)
    return tuple(f"config.json: unknown key {key} is ignored" for key in sorted(set(data) - known))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
