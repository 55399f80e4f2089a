"""A llama GGUF, dequantized, as a transformers module in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.oracle.tiny_pairs import LAYER_NAMES

__all__ = ["torch_target", "write_float32"]


def torch_target(path: Path) -> Any:
    """LlamaForCausalLM with the weights of the GGUF at path (architecture llama)."""
    import torch
    from transformers import LlamaForCausalLM

    reader = gguf.GGUFReader(path)
    config = _config(reader)
    weights = {}
    for tensor in reader.tensors:
        if tensor.name != "rope_freqs.weight":
            value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            name, value = _hf_tensor(tensor.name, value, config)
            weights[name] = torch.from_numpy(np.array(value, dtype=np.float32))
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    module = module.to_empty(device="cpu")
    module.load_state_dict(weights, strict=True)
    return _with_rotary(LlamaForCausalLM, config, module).eval()


def _with_rotary(model_class: Any, config: Any, module: Any) -> Any:
    # to_empty leaves the rotary frequencies, which no state dict holds, unset
    module.model.rotary_emb = type(module.model.rotary_emb)(config)
    module.tie_weights()
    return module


def _config(reader: gguf.GGUFReader) -> Any:
    from transformers import LlamaConfig

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise ValueError(f"no {key} in the GGUF")
        return field.contents()

    if value("general.architecture") != "llama":
        raise ValueError("only llama targets can be read")
    heads = value("llama.attention.head_count")
    return LlamaConfig(
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=value("llama.attention.head_count_kv"),
        vocab_size=value("llama.vocab_size"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=value("llama.rope.freq_base"),
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        attn_implementation="sdpa",
        dtype="float32",
    )


_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_HF_NAMES = {name: hf for hf, name in LAYER_NAMES.items()}


def _hf_tensor(name: str, value: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name], value
    _, layer, kind = name.split(".", 2)
    heads = {
        "attn_q.weight": config.num_attention_heads,
        "attn_k.weight": config.num_key_value_heads,
    }
    if kind in heads:
        value = _half_split_rope_rows(value, heads[kind])
    return f"model.layers.{layer}.{_HF_NAMES[kind]}", value


def _half_split_rope_rows(value: np.ndarray, n_head: int) -> np.ndarray:
    """Inverse of tiny_pairs.interleave_rope_rows."""
    pairs = value.reshape(n_head, value.shape[0] // n_head // 2, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)


def write_float32(source: Path, destination: Path) -> None:
    """Write source again with every tensor as float32 and all metadata as it is."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(destination, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "general.file_type")):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
