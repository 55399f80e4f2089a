"""Tokenizer metadata from a Hugging Face directory (``tokenizer.json``, byte-level BPE).

The keys are those of upstream's ``conversion/base.py:_set_vocab_gpt2``. Upstream recognises a
pre-tokenizer by hashing a test string; here its regular expressions are compared, which needs no
tokenizer library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash2_gguf.convert.gguf_values import Value, array, boolean, string, u32
from dflash2_gguf.convert.pre_tokenizers import pre_type
from dflash2_gguf.convert.source import read_json
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.ggml_types import TokenType, ValueType
from dflash2_gguf.gguf_schema import Key

__all__ = ["read_tokenizer"]

GGUF_HINT = "give the target's GGUF file with --target instead, its tokenizer is copied as it is"


def read_tokenizer(path: Path, *, n_vocab: int, model_type: str) -> dict[str, Value]:
    """Tokenizer keys for ``n_vocab`` tokens; CheckpointError where they cannot be known."""
    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(f"there is no tokenizer.json in {path}", GGUF_HINT)
    data = read_json(path / "tokenizer.json")
    try:
        return _keys(path, data, n_vocab, model_type)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # a foreign file with dozens of nested fields: any of them may be of another type
        raise CheckpointError(f"the tokenizer files in {path} are malformed", GGUF_HINT) from error


def _keys(path: Path, data: dict[str, Any], n_vocab: int, model_type: str) -> dict[str, Value]:
    file, model = path / "tokenizer.json", data["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise CheckpointError(f"{file} is not a byte-level BPE tokenizer", GGUF_HINT)
    pre = pre_type(data, model_type)
    if pre is None:
        raise CheckpointError(f"the pre-tokenizer of {file} is unknown", GGUF_HINT)
    tokens, types = _tokens(data, model, n_vocab)
    keys = {
        Key.TOKENIZER_MODEL: string("gpt2"),
        Key.TOKENIZER_PRE: string(pre),
        Key.TOKENS: array(ValueType.STRING, tokens),
        Key.TOKEN_TYPES: array(ValueType.INT32, types),
        Key.MERGES: array(ValueType.STRING, _merges(model)),
    }
    return {**keys, **_special(path, data, {token: i for i, token in enumerate(tokens)})}


def _tokens(
    data: dict[str, Any], model: dict[str, Any], n_vocab: int
) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{i}]" for i in range(n_vocab)]
    types = [int(TokenType.UNUSED)] * n_vocab
    for token, index in model.get("vocab", {}).items():
        _place(tokens, types, index, token, TokenType.NORMAL)
    for entry in data.get("added_tokens") or []:
        content = str(entry["content"])
        special = bool(entry.get("special")) or _looks_special(content)
        kind = TokenType.CONTROL if special else TokenType.USER_DEFINED
        text = content if special else content.replace("\u2581", " ")
        _place(tokens, types, entry["id"], text, kind)
    return tokens, types


def _place(tokens: list[str], types: list[int], index: Any, token: str, kind: TokenType) -> None:
    if type(index) is not int or not 0 <= index < len(tokens):
        raise CheckpointError(
            f"token {token!r} has id {index!r}, outside the vocabulary of {len(tokens)}", GGUF_HINT
        )
    tokens[index], types[index] = token, int(kind)


def _looks_special(token: str) -> bool:
    """Control tokens some models do not mark (``conversion/base.py:does_token_look_special``)."""
    return (
        token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (token.startswith("<|") and token.endswith("|>"))
        or (token.startswith("<\uff5c") and token.endswith("\uff5c>"))
        or (token.startswith("<unused") and token.endswith(">"))
    )


def _merges(model: dict[str, Any]) -> list[str]:
    result = []
    for merge in model.get("merges", []):
        pair = merge.split(" ", 1) if isinstance(merge, str) else merge
        result.append(" ".join(part.replace(" ", "\u0120") for part in pair))
    return result


def _special(path: Path, data: dict[str, Any], ids: dict[str, int]) -> dict[str, Value]:
    file = path / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    keys: dict[str, Value] = {}
    for kind, key in Key.SPECIAL_TOKEN_IDS.items():
        token = config.get(f"{kind}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if kind != "mask" and isinstance(text, str) and text in ids:
            keys[key] = u32(ids[text])
    _from_config(path, keys, len(ids))
    for kind, key in Key.ADD_SPECIAL.items():
        flag = config.get(f"add_{kind}_token", _template_adds(data, config, kind))
        if isinstance(flag, bool):
            keys[key] = boolean(flag)
    prefix = config.get("add_prefix_space")
    if isinstance(prefix, bool):
        keys[Key.ADD_SPACE_PREFIX] = boolean(prefix)
    template = _chat_template(path, config)
    if template:
        keys[Key.CHAT_TEMPLATE] = string(template)
    return keys


def _from_config(path: Path, keys: dict[str, Value], n_vocab: int) -> None:
    """Ids that only config.json names, as upstream's ``SpecialVocab`` does."""
    config = read_json(path / "config.json")
    for kind in ("bos", "eos", "unk", "sep", "pad"):
        for source in (config, config.get("text_config") or {}):
            value = source.get(f"{kind}_token_id")
            if type(value) is int and 0 <= value < n_vocab:
                keys.setdefault(Key.SPECIAL_TOKEN_IDS[kind], u32(value))


def _template_adds(data: dict[str, Any], config: dict[str, Any], kind: str) -> bool | None:
    """Does the post-processor put this token around a single sequence? None if it does not say."""
    processor = data.get("post_processor") or {}
    for item in processor.get("processors", [processor]):
        single = item.get("single", []) if item.get("type") == "TemplateProcessing" else []
        if len(single) > 1 and kind in ("bos", "eos"):
            edge = single[0 if kind == "bos" else -1].get("SpecialToken", {}).get("id")
            token = config.get(f"{kind}_token")
            text = token.get("content") if isinstance(token, dict) else token
            return None if edge is None else edge == text
    return None


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
