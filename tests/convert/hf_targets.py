"""A Hugging Face folder of a target, made from the tokenizer in its GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf

from tests.convert import checkpoints

_CONTROL = 3


def write_hf_target(folder: Path, target: Path) -> Path:
    """config.json, tokenizer.json and tokenizer_config.json of a SmolLM-like target."""
    reader = gguf.GGUFReader(target)

    def field(key: str) -> Any:
        return checkpoints.read_field(reader, key)

    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": field("llama.embedding_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "intermediate_size": field("llama.feed_forward_length"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }
    special = [
        {
            "id": i,
            "content": token,
            "special": True,
            "normalized": False,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL
    ]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": field("tokenizer.ggml.merges"),
        },
    }
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
        "pad_token": tokens[field("tokenizer.ggml.padding_token_id")],
        "add_prefix_space": False,
        "chat_template": field("tokenizer.chat_template"),
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder
