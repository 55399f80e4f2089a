"""How older and fork files name what upstream's format names: architectures, keys and tensors.

Read off public loaders and converters: llama.cpp around its DFlash merges (#22105, #25110, #27342),
buun-llama-cpp and BeeLlama (``dflash-draft``; ``dflash`` with dotted tensor names), Lucebox
(``qwen35-dflash-draft``) and its relatives. ``target_layer_ids`` counts layer outputs from 0 there,
as config.json does; ``target_layers`` counts layer inputs everywhere.
"""

from __future__ import annotations

from typing import Final

from dflash2_gguf.ggml_types import ValueType
from dflash2_gguf.gguf_schema import ARCHITECTURE, Key, Name, tensor_name

__all__ = [
    "ALIASES",
    "ARRAYS",
    "DRAFT_ARCHITECTURES",
    "FOREIGN_FIELDS",
    "FOREIGN_TENSORS",
    "LAYER_IDS",
    "LAYER_TENSORS",
    "MASK_FIELDS",
    "OTHER_ARCHITECTURES",
    "REDUNDANT",
    "SCALARS",
    "TENSORS",
]

_F = Key.Arch

DRAFT_ARCHITECTURES: Final = (ARCHITECTURE, "dflash-draft", "qwen35-dflash-draft")

OTHER_ARCHITECTURES: Final = {
    "gemma4-dflash-draft": "a fork's drafter with Gemma's graph, which llama.cpp does not have",
    "deepseek4-dflash-draft": "a fork's DSpark drafter",
    "dflash2": "a fork's drafter of a format of its own",
    "dspark": "a fork's DSpark drafter",
    "eagle3": "an EAGLE-3 drafter",
}

# fields after the architecture's name, as upstream reads and writes them: their types
SCALARS: Final = {
    **dict.fromkeys(
        (
            _F.BLOCK_COUNT,
            _F.CONTEXT_LENGTH,
            _F.EMBEDDING_LENGTH,
            _F.FEED_FORWARD_LENGTH,
            _F.HEAD_COUNT,
            _F.HEAD_COUNT_KV,
            _F.KEY_LENGTH,
            _F.VALUE_LENGTH,
            _F.SLIDING_WINDOW,
            _F.ROPE_DIMENSION_COUNT,
            _F.ROPE_SCALING_ORIG_CTX,
            _F.BLOCK_SIZE,
            _F.CONV_KERNEL_SIZE,
            _F.CONV_GROUP_SIZE,
            _F.SELECTOR_RANK,
            _F.SELECTOR_TOP_K,
        ),
        ValueType.UINT32,
    ),
    **dict.fromkeys(
        (
            _F.RMS_EPS,
            _F.VALUE_SCALE,
            _F.ROPE_FREQ_BASE,
            _F.ROPE_SCALING_FACTOR,
            _F.YARN_EXT_FACTOR,
            _F.YARN_ATTN_FACTOR,
            _F.YARN_BETA_FAST,
            _F.YARN_BETA_SLOW,
            _F.LOGIT_SCALE,
            _F.FINAL_LOGIT_SOFTCAPPING,
            _F.EMBEDDING_SCALE,
            "attention.scale",
            "rope.scaling.attn_factor",
        ),
        ValueType.FLOAT32,
    ),
    _F.CAUSAL: ValueType.BOOL,
    "rope.scaling.finetuned": ValueType.BOOL,
    _F.HIDDEN_ACTIVATION: ValueType.STRING,
    "vocab_size": ValueType.UINT32,
    _F.ROPE_SCALING_TYPE: ValueType.STRING,
}

ARRAYS: Final = {
    _F.TARGET_LAYERS: ValueType.INT32,
    _F.SLIDING_WINDOW_PATTERN: ValueType.BOOL,
    _F.ROPE_DIMENSION_SECTIONS: ValueType.INT32,
}

# other spellings -> the field
ALIASES: Final = {
    "dflash.block_size": _F.BLOCK_SIZE,
    "dflash2.conv_taps": _F.CONV_KERNEL_SIZE,
    "dflash2.conv_kernel_size": _F.CONV_KERNEL_SIZE,
    "dflash2.conv_group_size": _F.CONV_GROUP_SIZE,
    "dflash2.selector_rank": _F.SELECTOR_RANK,
    "dflash2.selector_top_k": _F.SELECTOR_TOP_K,
    "dflash.dflash2.conv_kernel_size": _F.CONV_KERNEL_SIZE,
    "dflash.dflash2.conv_group_size": _F.CONV_GROUP_SIZE,
    "dflash.dflash2.selector_rank": _F.SELECTOR_RANK,
    "dflash.dflash2.selector_top_k": _F.SELECTOR_TOP_K,
    "hidden_size": _F.EMBEDDING_LENGTH,
    "intermediate_size": _F.FEED_FORWARD_LENGTH,
    "num_attention_heads": _F.HEAD_COUNT,
    "num_hidden_layers": _F.BLOCK_COUNT,
    "num_key_value_heads": _F.HEAD_COUNT_KV,
    "rms_norm_eps": _F.RMS_EPS,
    "rope_theta": _F.ROPE_FREQ_BASE,
}

# spellings of the target's layers -> what a number of theirs means: what enters or leaves a layer
LAYER_IDS: Final = {
    _F.TARGET_LAYERS: "inputs",
    "dflash.target_layers": "inputs",
    "dflash.target_layer_ids": "outputs",
    "target_layer_ids": "outputs",
}

MASK_FIELDS: Final = ("dflash.mask_token_id", "mask_token_id")

# fields that repeat what the file says elsewhere -> what; checked, then left out
REDUNDANT: Final = {
    "dflash.n_target_layers": "taps",
    "dflash.n_target_features": "features",
    "dflash.feat_dim_per_capture": "hidden size",
    "dflash.num_target_layers": "target layers",
    "dflash.target.block_count": "target layers",
    "num_target_layers": "target layers",
    "vocab_size": "vocabulary",
    "target_checkpoint_sha256": "",
}

# beginnings of fields -> what a file with them is
FOREIGN_FIELDS: Final = {
    "decoder_arch": "a Laguna drafter",
    "dflash.domino.": "a Domino drafter",
    "dflash.dspark.": "a DSpark drafter",
    "dspark.": "a DSpark drafter",
    "hyper_connection.": "a DSpark drafter of DeepSeek V4",
    "markov_rank": "a DSpark drafter",
    "sample_from_anchor": "a DSpark drafter",
}

# parts of tensor names -> what a file with them is
FOREIGN_TENSORS: Final = {
    Name.MARKOV_PREFIX: "a DSpark drafter",
    "dspark.": "a DSpark drafter",
    "conf_proj": "a DSpark drafter",
    "confidence": "a DSpark drafter",
    "log_snr": "a DSpark drafter",
    "domino.": "a Domino drafter",
    "aux_hidden_norm": "a Laguna drafter (auxiliary norms)",
    "aux_norm": "a Laguna drafter (auxiliary norms)",
    "attn_gate": "a Laguna drafter (attention gates)",
    "hc_": "a DSpark drafter of DeepSeek V4",
    "ssm_": "a drafter with recurrent layers",
}


def _ours(hf_name: str) -> str:
    name = tensor_name(hf_name)
    assert name is not None
    return name


def _tail(hf_tail: str) -> str:
    return _ours(f"layers.0.{hf_tail}").split(".", 2)[2]


_FC, _HIDDEN_NORM = _ours("fc.weight"), _ours("hidden_norm.weight")
_PROJECTION = _ours(f"{Name.HF_SELECTOR_PREFIX}hidden_projection.weight")
_BEFORE = _ours(f"{Name.HF_SELECTOR_PREFIX}predecessor_codebook")
_AFTER = _ours(f"{Name.HF_SELECTOR_PREFIX}successor_codebook")

# other tensor names -> ours
TENSORS: Final = {
    "dflash_fc.weight": _FC,
    "dflash.fc.weight": _FC,
    "dflash_hidden_norm.weight": _HIDDEN_NORM,
    "dflash.hidden_norm.weight": _HIDDEN_NORM,
    "dflash.selector.hproj.weight": _PROJECTION,
    "selector_hproj.weight": _PROJECTION,
    "selector.hidden_proj.weight": _PROJECTION,
    "dflash.selector.pred_cb": _BEFORE,
    "selector_pred": _BEFORE,
    "selector.pred_codebook": _BEFORE,
    "dflash.selector.succ_cb": _AFTER,
    "selector_succ": _AFTER,
    "selector.succ_codebook": _AFTER,
}

# what follows ``blk.N.`` in forks -> what follows it here
LAYER_TENSORS: Final = {
    "post_attention_norm.weight": _tail("post_attention_layernorm.weight"),
    "attn_conv.base": _tail("attention_conv.base_kernel"),
    "attn_conv.proj.weight": _tail("attention_conv.kernel_projection.weight"),
    "ffn_conv.base": _tail("mlp_conv.base_kernel"),
    "ffn_conv.proj.weight": _tail("mlp_conv.kernel_projection.weight"),
}
