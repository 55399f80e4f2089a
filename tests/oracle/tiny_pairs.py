"""Random pairs of a tiny target and a tiny DFlash 2 drafter, as files.

The target is a transformers module with the same weights as the GGUF written next to it; the
drafter is a checkpoint directory in the published layout (config.json, model.safetensors), float32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

__all__ = ["LAYER_NAMES", "DraftShape", "TargetShape", "write_draft", "write_target"]

N_CTX = 512


@dataclass(frozen=True)
class TargetShape:
    """A tiny target. hidden is the draft's too; K = 16 candidates need hidden >= 272 upstream."""

    arch: str = "qwen3"
    hidden: int = 320
    layers: int = 8
    heads: int = 5
    heads_kv: int = 1
    head_dim: int = 64
    feed_forward: int = 384
    vocab: int = 512
    tied: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        if self.arch not in ("qwen3", "llama"):
            raise ValueError(f"no tiny target of architecture {self.arch}")


@dataclass(frozen=True)
class DraftShape:
    """A tiny drafter; every field is one thing a checkpoint may vary in."""

    name: str
    hidden: int = 320
    layers: int = 2
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    feed_forward: int = 448
    vocab: int = 512
    num_target_layers: int = 8
    taps: tuple[int, ...] = (0, 2, 3, 5, 6)
    block_size: int = 8
    window: int | None = 12
    full_layers: tuple[int, ...] = ()
    causal: bool = False
    group_size: int = 16
    rank: int = 32
    top_k: int = 16
    mask_token_id: int = 7
    rope_theta: float = 10000.0
    output_multiplier: float | None = None
    softcap: float | None = None
    embedding_scale: float | None = None
    seed: int = 2


def write_target(path: Path, shape: TargetShape) -> Any:
    """Write the target's GGUF (float32) to path; the torch module with the same weights."""
    module = _torch_target(shape)
    weights = {name: value.numpy() for name, value in module.state_dict().items()}
    writer = gguf.GGUFWriter(path, shape.arch)
    _add_target_metadata(writer, shape)
    for name, value in _target_tensors(weights, shape):
        writer.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return module


def _torch_target(shape: TargetShape) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[shape.arch]
    config = config_class(
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads_kv,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=N_CTX,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=shape.tied,
        attn_implementation="sdpa",
    )
    torch.manual_seed(shape.seed)
    module = model_class(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, value in module.named_parameters():
            _randomise(torch, name, value)
    return module


def _randomise(torch: Any, name: str, value: Any) -> None:
    if "norm" in name:
        value.copy_(1.0 + 0.2 * torch.randn_like(value))
    elif "embed_tokens" in name or "lm_head" in name:
        value.copy_(0.3 * torch.randn_like(value))
    else:
        value.copy_(torch.randn_like(value) / value.shape[-1] ** 0.5)


def _add_target_metadata(writer: gguf.GGUFWriter, shape: TargetShape) -> None:
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    # upstream's vocabulary of its own tiny models: no text, only ids
    writer.add_tokenizer_model("test")
    writer.add_token_list([f"tok_{i}" for i in range(shape.vocab)])
    writer.add_token_scores([0.0] * shape.vocab)


LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def _target_tensors(weights: dict[str, Any], shape: TargetShape) -> Any:
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    yield "output_norm.weight", weights["model.norm.weight"]
    if not shape.tied:
        yield "output.weight", weights["lm_head.weight"]
    heads = {"self_attn.q_proj.weight": shape.heads, "self_attn.k_proj.weight": shape.heads_kv}
    for layer in range(shape.layers):
        for hf, name in LAYER_NAMES.items():
            value = weights.get(f"model.layers.{layer}.{hf}")
            if value is None:
                continue
            if shape.arch == "llama" and hf in heads:
                value = interleave_rope_rows(value, heads[hf])
            yield f"blk.{layer}.{name}", value


def interleave_rope_rows(value: np.ndarray, n_head: int) -> np.ndarray:
    """HF's half-split rope rows [n_head * hd, n] in llama's order (conversion/llama.py:permute)."""
    halves = value.reshape(n_head, 2, value.shape[0] // n_head // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)


def write_draft(directory: Path, shape: DraftShape) -> Path:
    """Write a random checkpoint in the published layout and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_draft_config(shape), indent=2))
    rng = np.random.default_rng(shape.seed)
    tensors = {name: _random(rng, name, size) for name, size in _draft_tensors(shape)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _draft_config(shape: DraftShape) -> dict[str, Any]:
    sliding = shape.window is not None
    types = ["sliding_attention" if sliding else "full_attention"] * shape.layers
    for layer in shape.full_layers:
        types[layer] = "full_attention"
    dflash: dict[str, Any] = {
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.taps),
        "conv_kernel_size": 2,
        "conv_group_size": shape.group_size,
        "selector_rank": shape.rank,
        "selector_top_k": shape.top_k,
    }
    optional = {
        "output_multiplier": shape.output_multiplier,
        "final_logit_softcapping": shape.softcap,
        "input_embedding_scale": shape.embedding_scale,
    }
    dflash.update({key: value for key, value in optional.items() if value is not None})
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.feed_forward,
        "is_causal": shape.causal,
        "layer_types": types,
        "use_sliding_window": sliding,
        "sliding_window": shape.window,
        "max_position_embeddings": N_CTX,
        "max_window_layers": 0,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads_kv,
        "num_target_layers": shape.num_target_layers,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "dtype": "float32",
        "vocab_size": shape.vocab,
        "block_size": shape.block_size,
        "dflash_config": dflash,
    }


def _draft_tensors(shape: DraftShape) -> Any:
    hidden, taps = shape.hidden, len(shape.taps)
    yield "fc.weight", (hidden, taps * hidden)
    yield "hidden_norm.weight", (hidden,)
    yield "norm.weight", (hidden,)
    yield "candidate_selector.hidden_projection.weight", (shape.rank, hidden)
    yield "candidate_selector.predecessor_codebook", (shape.vocab, shape.rank)
    yield "candidate_selector.successor_codebook", (shape.vocab, shape.rank)
    for layer in range(shape.layers):
        for name, size in _draft_layer_tensors(shape):
            yield f"layers.{layer}.{name}", size


def _draft_layer_tensors(shape: DraftShape) -> Any:
    hidden, groups = shape.hidden, shape.hidden // shape.group_size
    rows_q, rows_kv = shape.heads * shape.head_dim, shape.heads_kv * shape.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "self_attn.q_proj.weight", (rows_q, hidden)
    yield "self_attn.k_proj.weight", (rows_kv, hidden)
    yield "self_attn.v_proj.weight", (rows_kv, hidden)
    yield "self_attn.o_proj.weight", (hidden, rows_q)
    yield "self_attn.q_norm.weight", (shape.head_dim,)
    yield "self_attn.k_norm.weight", (shape.head_dim,)
    yield "mlp.gate_proj.weight", (shape.feed_forward, hidden)
    yield "mlp.up_proj.weight", (shape.feed_forward, hidden)
    yield "mlp.down_proj.weight", (hidden, shape.feed_forward)
    for side in ("attention_conv", "mlp_conv"):
        yield f"{side}.base_kernel", (2, 2, hidden)
        yield f"{side}.kernel_projection.weight", (2 * 2 * groups, hidden)


def _random(rng: np.random.Generator, name: str, size: tuple[int, ...]) -> np.ndarray:
    value = rng.standard_normal(size, dtype=np.float32)
    if "norm" in name:
        return 1.0 + 0.2 * value
    if name.endswith("base_kernel"):
        # tap 0 near one as in a trained drafter, tap 1 large enough to matter
        return 0.3 * value + np.array([1.0, 0.0], dtype=np.float32)[None, :, None]
    if name.endswith("_codebook"):
        return 0.5 * value
    return value / np.float32(size[-1] ** 0.5)
