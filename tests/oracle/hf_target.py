"""The Hugging Face directory that upstream's converter wants, rebuilt from the target's GGUF.

Only what the converter reads of a target: config.json and the tokenizer. Upstream checks the
tokenizer itself, by hashing what it makes of a test text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf

__all__ = ["write_hf_target"]

_CONTROL = int(gguf.TokenType.CONTROL)


def write_hf_target(target: Path, directory: Path) -> Path:
    """Write config and tokenizer of a SmolLM target (byte-level BPE) to directory and return it."""
    reader = gguf.GGUFReader(target)
    read = {field.name: field.contents for field in reader.fields.values()}
    if read["tokenizer.ggml.pre"]() != "smollm":
        raise ValueError("only the smollm pre-tokenizer is known here")
    directory.mkdir(parents=True, exist_ok=True)
    tokens: list[str] = read["tokenizer.ggml.tokens"]()
    special = [i for i, kind in enumerate(read["tokenizer.ggml.token_type"]()) if kind == _CONTROL]
    _tokenizer(tokens, read["tokenizer.ggml.merges"](), special).save(
        str(directory / "tokenizer.json")
    )
    names = {key: tokens[read[f"tokenizer.ggml.{key}_token_id"]()] for key in ("bos", "eos")}
    _write(directory / "tokenizer_config.json", _tokenizer_config(names, read))
    _write(directory / "config.json", _model_config(read))
    return directory


def _tokenizer(tokens: list[str], merges: list[str], special: list[int]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], normalized=False, special=True) for i in special]
    )
    return tokenizer


def _tokenizer_config(names: dict[str, str], read: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names["bos"],
        "eos_token": names["eos"],
        "unk_token": "<|endoftext|>",
        "pad_token": names["eos"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": read["tokenizer.chat_template"](),
    }


def _model_config(read: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": read["llama.embedding_length"](),
        "num_hidden_layers": read["llama.block_count"](),
        "num_attention_heads": read["llama.attention.head_count"](),
        "vocab_size": read["llama.vocab_size"](),
        "bos_token_id": read["tokenizer.ggml.bos_token_id"](),
        "eos_token_id": read["tokenizer.ggml.eos_token_id"](),
        "tie_word_embeddings": True,
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
