"""Acceptance lengths and their ratios, with what the choice of prompts leaves open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["Spread", "length", "ratio"]

_DRAWS = 4000


@dataclass(frozen=True)
class Spread:
    """An estimate, its standard error and its 95 % interval, by bootstrap over prompts."""

    value: float
    error: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def length(counts: np.ndarray) -> Spread:
    """Tokens per verification step; counts [n_prompts, 2] are tokens and steps of each prompt."""
    return _spread(counts, _length)


def ratio(above: np.ndarray, below: np.ndarray) -> Spread:
    """Ratio of two acceptance lengths on the same prompts, which are drawn in pairs."""
    if above.shape != below.shape:
        raise ValueError(f"{len(above)} prompts against {len(below)}")
    both = np.concatenate([above, below], axis=1)
    return _spread(both, lambda sums: _length(sums[..., :2]) / _length(sums[..., 2:]))


def _length(sums: np.ndarray) -> np.ndarray:
    return np.asarray(sums[..., 0] / sums[..., 1])


def _spread(counts: np.ndarray, of: Callable[[np.ndarray], np.ndarray]) -> Spread:
    picks = np.random.default_rng(0).integers(0, len(counts), size=(_DRAWS, len(counts)))
    drawn = of(counts[picks].sum(axis=1))
    low, high = np.quantile(drawn, [0.025, 0.975])
    value = of(counts.sum(axis=0))
    return Spread(float(value), float(drawn.std()), float(low), float(high))
