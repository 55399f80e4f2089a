"""How close a drafter is to a reference, block by block, and what that does to acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash2_gguf.replay import Lattice

__all__ = ["Agreement", "Interval", "accepted", "agreement", "bootstrap", "rounds", "survival"]

Reals = np.ndarray[Any, np.dtype[np.float64]]

_RESAMPLES = 2000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Agreement:
    """A block of a drafter against the reference's, per position [n].

    top1: after the token that the reference's path has before, is the likeliest candidate the
        same? path: are all tokens of both greedy paths the same up to here? overlap: sum of
        min(q_ref, q) after that same token. kl: KL(q_ref || q) over the candidates that both have,
        NaN where the drafter does not have the token before as a candidate; the first two are
        False and the overlap 0 there.
    """

    top1: Reals
    path: Reals
    overlap: Reals
    kl: Reals


def agreement(reference: Lattice, other: Lattice) -> Agreement:
    """Compare a block with the reference's for the same anchor and rows."""
    n = len(reference.candidates)
    ours = reference.path_tokens()
    same = np.cumprod([a == b for a, b in zip(ours, other.path_tokens(), strict=True)])
    found = np.array([_position(reference, other, t, ours[t - 1] if t else None) for t in range(n)])
    return Agreement(
        top1=found[:, 0], path=same.astype(np.float64), overlap=found[:, 1], kl=found[:, 2]
    )


def _position(
    reference: Lattice, other: Lattice, position: int, before: int | None
) -> tuple[float, float, float]:
    """Same best candidate, overlap and divergence of one position."""
    left = right = 0
    if before is not None:
        known = reference.index(position - 1, before)
        found = other.index(position - 1, before)
        if known is None or found is None:
            return 0.0, 0.0, np.nan
        left, right = known, found
    log_a, log_b = reference.log_q(position, left), other.log_q(position, right)
    ids_a, ids_b = reference.candidates[position], other.candidates[position]
    best = ids_a[np.argmax(log_a)] == ids_b[np.argmax(log_b)]
    _, at_a, at_b = np.intersect1d(ids_a, ids_b, return_indices=True)
    if not at_a.size:
        return float(best), 0.0, np.nan
    log_a, log_b = log_a[at_a], log_b[at_b]
    overlap = np.exp(np.minimum(log_a, log_b)).sum()
    log_a, log_b = log_a - _log_sum(log_a), log_b - _log_sum(log_b)
    return float(best), float(overlap), float((np.exp(log_a) * (log_a - log_b)).sum())


def _log_sum(values: Reals) -> float:
    return float(np.log(np.exp(values - values.max()).sum()) + values.max())


def accepted(lattice: Lattice, tokens: Sequence[int], log_p: Reals | None) -> Reals:
    """Probability that each of ``tokens`` is accepted once those before it are.

    The tokens are what the target produces after the anchor. Greedy when ``log_p`` is None: they
    are accepted where the path has them. Else they were sampled from p, whose log-probabilities
    these are, and the rule is speculative rejection sampling: what comes out has the law p, and it
    was accepted with probability min(p, q) / p = min(1, q / p).
    """
    chances = np.zeros(len(tokens))
    if log_p is None:
        path = lattice.path_tokens()
        return np.array([float(a == b) for a, b in zip(path, tokens, strict=False)])
    before = 0
    for t, token in enumerate(tokens):
        index = lattice.index(t, token)
        if index is None:
            break  # q is 0, and nothing after it counts
        chances[t] = min(1.0, float(np.exp(lattice.log_q(t, before)[index] - log_p[t])))
        before = index
    return chances


def rounds(chances: Sequence[Reals], *, stops: bool) -> float:
    """Expected verification steps for an answer, exactly.

    ``chances[i]``: see ``accepted``, of the draft at the i-th token of the answer, the last one
    left out. A round at i that keeps k drafts goes on at i + k + 1. ``stops``: the answer's last
    token ends it and can be drafted; else the length does, and the target gives it by itself.
    """
    n = len(chances)
    expected = np.zeros(n + 1)
    for i in range(n - 1, -1, -1):
        expected[i] = 1.0
        kept = 1.0
        usable = chances[i][: n - i if stops else n - 1 - i]
        for k, chance in enumerate(usable):
            expected[i] += kept * (1.0 - chance) * expected[i + k + 1]
            kept *= chance
        expected[i] += kept * expected[min(i + len(usable) + 1, n)]
    return float(expected[0])


def survival(chances: Sequence[Reals], width: int) -> Reals:
    """Mean probability [width] that at least so many drafts of a block are accepted.

    Over the blocks that have so many tokens to be judged by; NaN where there are none.
    """
    table = np.full((len(chances), width), np.nan)
    for row, values in zip(table, chances, strict=True):
        kept = np.cumprod(values[:width])
        row[: len(kept)] = kept
    counted = np.isfinite(table).any(axis=0)
    result = np.full(width, np.nan)
    result[counted] = np.nanmean(table[:, counted], axis=0)
    return result


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def bootstrap(numerators: Reals, denominators: Reals) -> Interval:
    """Ratio of two sums over prompts; the interval is from drawing prompts again and again."""
    n = len(numerators)
    drawn = np.random.default_rng(0).integers(0, n, size=(_RESAMPLES, n))
    ratios = numerators[drawn].sum(axis=1) / denominators[drawn].sum(axis=1)
    tail = 100 * (1 - _CONFIDENCE) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Interval(float(numerators.sum() / denominators.sum()), float(low), float(high))
