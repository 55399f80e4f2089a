"""Which of llama.cpp's pre-tokenizers a tokenizer.json asks for.

Several of llama.cpp's names share one regular expression and differ in flags only
(``src/llama-vocab.cpp``), so a match needs the expression, ``ignore_merges`` and the model family.
Anything else is unknown, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["pre_type"]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _LINES
_CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"

_QWEN2 = _CONTRACTIONS + _START + r"\p{L}+|\p{N}|" + _TAIL
_QWEN35 = _CONTRACTIONS + _START + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _LINES
_LLAMA3 = _CONTRACTIONS + _START + r"\p{L}+|\p{N}{1,3}|" + _TAIL
_GPT4O = (
    f"{_START}{_UPPER}*{_LOWER}+{_CASED}|{_START}{_UPPER}+{_LOWER}*{_CASED}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _LINES
)


@dataclass(frozen=True, kw_only=True)
class _Known:
    """A pre-tokenizer: steps as (kind, detail), the flag, and the model families that use it."""

    name: str
    steps: tuple[tuple[str, str], ...]
    ignore_merges: bool
    families: tuple[str, ...]


_KNOWN = (
    _Known(name="qwen2", steps=(("Split", _QWEN2),), ignore_merges=False, families=("qwen",)),
    _Known(name="qwen35", steps=(("Split", _QWEN35),), ignore_merges=False, families=("qwen",)),
    _Known(name="llama-bpe", steps=(("Split", _LLAMA3),), ignore_merges=True, families=("llama",)),
    _Known(name="glm4", steps=(("Split", _LLAMA3),), ignore_merges=True, families=("glm",)),
    _Known(name="gpt-4o", steps=(("Split", _GPT4O),), ignore_merges=False, families=("gpt_oss",)),
    _Known(
        name="smollm",
        steps=(("Digits", "individual"), ("ByteLevel", "regex")),
        ignore_merges=False,
        families=("llama", "smollm"),
    ),
    _Known(name="gpt-2", steps=(("ByteLevel", "regex"),), ignore_merges=False, families=("gpt2",)),
)


def pre_type(tokenizer: dict[str, Any], model_type: str) -> str | None:
    """llama.cpp's name for the pre-tokenizer of a tokenizer.json, None if it is not a known one."""
    steps = _steps(tokenizer.get("pre_tokenizer") or {})
    ignore_merges = bool((tokenizer.get("model") or {}).get("ignore_merges", False))
    for known in _KNOWN:
        if (known.steps, known.ignore_merges) == (steps, ignore_merges) and model_type.startswith(
            known.families
        ):
            return known.name
    return None


def _steps(pre: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    items = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    described = (_describe(item) for item in items)
    return tuple(step for step in described if step != ("ByteLevel", "bytes"))


def _describe(item: dict[str, Any]) -> tuple[str, str]:
    """One step; a ByteLevel that only maps bytes is the same for all and dropped by the caller."""
    kind = str(item.get("type"))
    if kind == "Split":
        plain = item.get("behavior") == "Isolated" and not item.get("invert")
        pattern = item.get("pattern") or {}
        return kind, str(pattern.get("Regex")) if plain else "other"
    if kind == "Digits":
        return kind, "individual" if item.get("individual_digits") else "runs"
    if kind == "ByteLevel":
        if item.get("add_prefix_space"):
            return kind, "prefix"
        return kind, "regex" if item.get("use_regex", True) else "bytes"
    return kind, "other"
