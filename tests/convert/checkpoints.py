"""Synthetic checkpoints and targets, written without the code under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]

N_VOCAB = 24


def config(**changes: Any) -> dict[str, Any]:
    """config.json of a small drafter; ``dflash__key`` changes an entry of ``dflash_config``."""
    data: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "is_causal": False,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "num_target_layers": 6,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": N_VOCAB,
        "dflash_config": {
            "block_size": 4,
            "mask_token_id": 3,
            "target_layer_ids": [1, 3],
            "conv_kernel_size": 2,
            "conv_group_size": 8,
            "selector_rank": 32,
            "selector_top_k": 4,
        },
    }
    for key, value in changes.items():
        nested = key.startswith("dflash__")
        place, name = (data["dflash_config"], key[8:]) if nested else (data, key)
        if value is ...:
            place.pop(name, None)
        else:
            place[name] = value
    return data


def shapes(data: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor shapes of a published checkpoint, spelled out from the specification."""
    draft = data["dflash_config"]
    h, ff, v = data["hidden_size"], data["intermediate_size"], data["vocab_size"]
    hd = data["head_dim"]
    q, kv = data["num_attention_heads"] * hd, data["num_key_value_heads"] * hd
    taps, rank = draft["conv_kernel_size"], draft["selector_rank"]
    result: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(draft["target_layer_ids"]) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
        "candidate_selector.hidden_projection.weight": (rank, h),
        "candidate_selector.predecessor_codebook": (v, rank),
        "candidate_selector.successor_codebook": (v, rank),
    }
    layer = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "self_attn.q_norm.weight": (hd,),
        "self_attn.k_norm.weight": (hd,),
        "mlp.gate_proj.weight": (ff, h),
        "mlp.up_proj.weight": (ff, h),
        "mlp.down_proj.weight": (h, ff),
    }
    for conv in ("attention_conv", "mlp_conv"):
        layer[f"{conv}.base_kernel"] = (2, taps, h)
        layer[f"{conv}.kernel_projection.weight"] = (2 * taps * (h // draft["conv_group_size"]), h)
    for i in range(data["num_hidden_layers"]):
        result.update({f"layers.{i}.{name}": shape for name, shape in layer.items()})
    return result


def tensors(data: Mapping[str, Any], *, seed: int = 0) -> dict[str, Floats]:
    """Random values that bf16 holds exactly."""
    rng = np.random.default_rng(seed)
    return {name: round_bf16(rng.normal(size=size)) for name, size in shapes(data).items()}


def round_bf16(values: Any) -> Floats:
    """Cut to bf16 precision."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return np.asarray(bits).view(np.float32)


def to_bytes(values: Floats, dtype: str) -> bytes:
    """Little-endian bytes of ``F32``, ``F16`` or (cutting) ``BF16``."""
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def safetensors_bytes(values: Mapping[str, Floats], *, dtype: str = "BF16") -> bytes:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in values.items():
        raw = to_bytes(array, dtype)
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_checkpoint(
    folder: Path,
    *,
    data: Mapping[str, Any] | None = None,
    values: Mapping[str, Floats] | None = None,
    dtype: str = "BF16",
    shards: int = 1,
    prefix: str = "",
) -> Path:
    """A checkpoint folder, in one file or several with an index."""
    data = config() if data is None else data
    values = tensors(data) if values is None else values
    named = {prefix + name: array for name, array in values.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(named, dtype=dtype))
        return folder
    weight_map = {}
    for i in range(shards):
        part = {name: named[name] for name in list(named)[i::shards]}
        shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        (folder / shard).write_bytes(safetensors_bytes(part, dtype=dtype))
        weight_map.update(dict.fromkeys(part, shard))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_target(
    path: Path,
    *,
    n_vocab: int = N_VOCAB,
    n_embd: int = 32,
    n_layer: int = 6,
    arch: str = "llama",
    nextn: int = 0,
    sections: list[int] | None = None,
    mask: int | None = None,
) -> Path:
    """Metadata of a target as GGUF, by the ``gguf`` package."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny target")
    writer.add_block_count(n_layer + nextn)
    writer.add_embedding_length(n_embd)
    if nextn:
        writer.add_nextn_predict_layers(nextn)
    if sections:
        writer.add_rope_dimension_sections(sections)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{i}" for i in range(n_vocab)])
    writer.add_token_types([1] * n_vocab)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(2)
    if mask is not None:
        writer.add_mask_token_id(mask)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_field(reader: gguf.GGUFReader, key: str) -> Any:
    """A metadata value through the ``gguf`` package."""
    field = reader.fields[key]
    return field.contents()


def dequantized(reader: gguf.GGUFReader) -> dict[str, Floats]:
    """All weights of a file as float32 through the ``gguf`` package, in numpy order."""
    return {
        t.name: gguf.dequantize(t.data, t.tensor_type).reshape(tuple(reversed(t.shape.tolist())))
        for t in reader.tensors
        if t.tensor_type is not gguf.GGMLQuantizationType.I64  # a map of tokens
    }
