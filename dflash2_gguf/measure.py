"""One measured answer, whatever gave it, and how two of them compare."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dflash2_gguf.errors import UsageError
from dflash2_gguf.generate import collect
from dflash2_gguf.sampling import SamplingParams
from dflash2_gguf.session import Session

__all__ = ["PROMPTS", "Run", "Spread", "first_difference", "run_session", "spread"]

PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a dog who finds a ball.",
    "Explain in three sentences why the sky is blue.",
    "List five healthy breakfast ideas.",
)


@dataclass(frozen=True)
class Run:
    """An answer: its tokens, and the seconds from the first of them to the last."""

    tokens: tuple[int, ...]
    text: str
    seconds: float
    acceptance_length: float

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed; the first token belongs to the prompt and does not count."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some figures."""

    median: float
    low: float
    high: float


def run_session(
    session: Session, prompt: Sequence[int], max_tokens: int, *, draft: bool | int
) -> Run:
    """Greedy answer to ``prompt`` from empty caches."""
    session.reset()
    pieces, times = [], []
    greedy = SamplingParams(temperature=0)
    for piece in session.generate(prompt, max_tokens=max_tokens, sampling=greedy, draft=draft):
        pieces.append(piece)
        times.append(time.perf_counter())
    answer = collect(pieces)
    length = answer.stats.acceptance_length if answer.stats else 0.0
    return Run(answer.tokens, answer.text, times[-1] - times[0], length)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Position of the first token that differs, None when there is none."""
    if tuple(a) == tuple(b):
        return None
    pairs = zip(a, b, strict=False)
    same = (index for index, (x, y) in enumerate(pairs) if x != y)
    return next(same, min(len(a), len(b)))


def spread(values: Sequence[float]) -> Spread:
    """Summary of at least one value."""
    if not values:
        raise UsageError("there is nothing to summarize")
    return Spread(median(values), min(values), max(values))
