"""config.json as the speculators library writes it, in the layout of the authors' releases.

Geometry stands under ``transformer_layer_config``, of which only what differs from Qwen3's defaults
is written; layer ids count one higher (the input of the next layer); causality is named after the
sliding window. Field meanings: speculators ``DFlashSpeculatorConfig``, ``DFlash2SpeculatorConfig``
and their reading by vLLM (``transformers_utils/configs/speculators/algos.py:update_dflash``).
"""

from __future__ import annotations

from typing import Any

from dflash2_gguf.errors import CheckpointError

__all__ = ["flatten"]

_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}

# transformers ``Qwen3Config``: what a config that leaves a key out means
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}

_DRAFT_KEYS = (
    "block_size",
    "mask_token_id",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "draft_vocab_size",
    "sample_from_anchor",
    "target_hidden_size",
    "projector_type",
    "shift_label",
    "markov_head_type",
)
_DFLASH2_DEFAULTS = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
_BLOCK_SIZE = 8
_OWN_KEYS = {"quantization_config", "license", "transformers_version", "dtype", "torch_dtype"}


def flatten(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` in the layout of the releases; unchanged when it already has that layout.

    Raises CheckpointError for a speculator of another kind, or one whose layers are not Qwen3's.
    """
    kind, layers = data.get("speculators_model_type"), data.get("transformer_layer_config")
    if kind is None and layers is None:
        return data
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise CheckpointError(
            f"this is a speculator of kind {kind!r}",
            f"of this format {' and '.join(_ARCHITECTURES)} are converted",
        )
    if not isinstance(layers, dict):
        raise CheckpointError(f"config.json: transformer_layer_config is {layers!r}, not an object")
    if layers.get("model_type", "qwen3") != "qwen3":
        raise CheckpointError(
            f"config.json: the drafter's layers are {layers['model_type']!r}, not 'qwen3'",
            "llama.cpp runs DFlash drafters made of Qwen3 layers",
        )
    if data.get("draft_ffn_type", "dense") != "dense":
        raise CheckpointError(
            f"config.json: draft_ffn_type is {data['draft_ffn_type']!r}",
            "llama.cpp runs drafters with dense MLPs only",
        )
    return {
        **_geometry(layers),
        **{key: data[key] for key in _OWN_KEYS & set(data)},
        "architectures": [_ARCHITECTURES[kind]],
        "is_causal": _causal(data, layers),
        "dflash_config": _draft(data, kind),
    }


def _geometry(layers: dict[str, Any]) -> dict[str, Any]:
    flat = {**_DEFAULTS, **layers}
    # the library goes by layer_types alone
    flat["use_sliding_window"] = "sliding_attention" in _layer_types(layers)
    return flat


def _layer_types(layers: dict[str, Any]) -> list[Any]:
    value = layers.get("layer_types")
    return [kind for kind in value if isinstance(kind, str)] if isinstance(value, list) else []


def _causal(data: dict[str, Any], layers: dict[str, Any]) -> bool:
    """Full layers see the whole block always; sliding ones unless the config says otherwise."""
    free = data.get("sliding_window_non_causal", True)
    if not isinstance(free, bool):
        raise CheckpointError(
            f"config.json: sliding_window_non_causal is {free!r}, not true or false"
        )
    kinds = set(_layer_types(layers))
    if not free and {"sliding_attention", "full_attention"} <= kinds:
        raise CheckpointError(
            "config.json: sliding layers are causal and full layers are not",
            "causality per layer cannot be expressed in a GGUF file",
        )
    return not free and "sliding_attention" in kinds


def _draft(data: dict[str, Any], kind: str) -> dict[str, Any]:
    defaults = {"block_size": _BLOCK_SIZE, **(_DFLASH2_DEFAULTS if kind == "dflash2" else {})}
    given = {key: data[key] for key in _DRAFT_KEYS if data.get(key) is not None}
    return {**defaults, **given, "target_layer_ids": _layer_ids(data)}


def _layer_ids(data: dict[str, Any]) -> list[int]:
    ids = data.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 1 for i in ids):
        raise CheckpointError(
            f"config.json: aux_hidden_state_layer_ids is {ids!r}, not a list of inputs of layers",
            "the first layer whose output can be read is 0, which this format calls 1",
        )
    return [i - 1 for i in ids]
