"""Conversations as the tokens they really were.

Tokenizing an answer again may split it differently, which would make the caches useless from there
on. So tokens are kept as long as the next prompt begins with the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Transcripts"]

# tokenizes a text that is the whole prompt, or the rest of one
Tokenize = Callable[[str, bool], list[int]]


@dataclass(frozen=True)
class _Transcript:
    text: str
    tokens: tuple[int, ...]


class Transcripts:
    """The last ``capacity`` conversations."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: list[_Transcript] = []

    def encode(self, text: str, tokenize: Tokenize) -> list[int]:
        """Tokens of a prompt, as they were for the longest beginning of it that is known."""
        begun = [known for known in self._known if text.startswith(known.text)]
        if not begun:
            return tokenize(text, True)
        longest = max(begun, key=lambda known: len(known.text))
        return [*longest.tokens, *tokenize(text[len(longest.text) :], False)]

    def add(self, text: str, tokens: Sequence[int]) -> None:
        """Remember that ``tokens`` stand for ``text``, instead of what they continue."""
        kept = [known for known in self._known if not text.startswith(known.text)]
        self._known = [*kept, _Transcript(text, tuple(tokens))][-self._capacity :] if text else kept

    def clear(self) -> None:
        """Forget all of them."""
        self._known = []
