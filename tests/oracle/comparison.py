"""A drafted block of libdflash2 against the reference's, up to ties closer than the tolerance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.oracle.reference import Lattice, walk

__all__ = ["TOLERANCE", "Round", "compare", "rounds_of"]

# of the largest score of a position; everything is float32, and about 5e-6 is what it measures
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Round:
    """A block as libdflash2 proposed it, and what stood before it."""

    prompt: int
    context: list[int]
    anchor: int
    path: np.ndarray
    candidates: np.ndarray
    scores: np.ndarray


def rounds_of(prompts: list[list[int]], result: dict[str, np.ndarray]) -> list[Round]:
    """The rounds of a session job that drafted something."""
    rounds = []
    for number in np.flatnonzero(result["drafted"]):
        prompt = int(result["prompt"][number])
        known = prompts[prompt] + result["tokens"][prompt, : result["before"][number]].tolist()
        lattice = [result[f"{name}-{number}"] for name in ("path", "candidates", "scores")]
        rounds.append(Round(prompt, known[:-1], known[-1], *lattice))
    return rounds


def compare(played: Round, expected: Lattice, tolerance: float = TOLERANCE) -> None:
    """Assert equality of a round with the reference, up to ties closer than the tolerance."""
    position = len(played.context)
    scale = np.abs(expected.scores).max(axis=(1, 2))
    for t in range(len(played.path)):
        _compare_candidates(played, expected, t, tolerance * scale[t], position)
        _compare_scores(played, expected, t, tolerance * scale[t], position)
    _compare_path(played, expected, tolerance * scale)


def _compare_candidates(
    played: Round, expected: Lattice, t: int, slack: float, position: int
) -> None:
    mine, theirs = set(played.candidates[t].tolist()), set(expected.candidates[t].tolist())
    assert len(mine) == len(theirs), f"position {position} + {t}: repeated candidates"
    edge = expected.logits[t][expected.candidates[t]].min()
    for token in mine ^ theirs:
        distance = abs(float(expected.logits[t][token] - edge))
        assert distance <= slack, f"position {position} + {t}: candidate {token} off by {distance}"


def _compare_scores(played: Round, expected: Lattice, t: int, slack: float, position: int) -> None:
    mine, theirs = _common(played.candidates[t], expected.candidates[t])
    before = (
        _common(played.candidates[t - 1], expected.candidates[t - 1])
        if t
        else (np.array([0]), np.array([0]))
    )
    own = played.scores[t][np.ix_(before[0], mine)]
    reference = expected.scores[t][np.ix_(before[1], theirs)]
    worst = float(np.abs(own - reference).max())
    assert worst <= slack, f"position {position} + {t}: score off by {worst}, allowed {slack}"


def _common(mine: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _, left, right = np.intersect1d(mine, theirs, return_indices=True)
    return left, right


def _compare_path(played: Round, expected: Lattice, slack: np.ndarray) -> None:
    own = [int(played.candidates[t, b]) for t, b in enumerate(walk(played.scores))]
    assert played.path.tolist() == own, "the path is not the best one of the block's own scores"
    chosen = walk(expected.scores)
    for t in range(len(chosen)):
        if played.path[t] == expected.path[t]:
            continue
        if expected.path[t] in played.candidates[t] and played.path[t] in expected.candidates[t]:
            row = np.sort(expected.scores[t][chosen[t - 1] if t else 0])
            margin = float(row[-1] - row[-2])
            difference = f"+{t}: {played.path[t]}, not {expected.path[t]}: {margin}"
            assert margin <= 2 * slack[t], difference
        # else one of the two is at the edge of the candidates, where others may stand in its place
        return  # after a tie the two walks are on different paths
    assert [int(expected.candidates[t, b]) for t, b in enumerate(chosen)] == played.path.tolist()
