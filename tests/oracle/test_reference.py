"""The oracle itself: what the other tests lean on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.oracle.comparison import TOLERANCE, Round, compare
from tests.oracle.reference import Lattice, Reference, load_draft, walk
from tests.oracle.tiny_pairs import DraftShape, TargetShape, write_draft, write_target

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder: Path = tmp_path_factory.mktemp("pair")
    target = write_target(folder / "target.gguf", TargetShape())
    return Reference(target, load_draft(write_draft(folder / "draft", DraftShape(name="plain"))))


def test_own_walk_over_all_pairs_is_the_authors_path(reference: Reference) -> None:
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 512, size=40)]
    for n_draft in (7, 3, 1):
        lattice = reference.lattice(tokens, 11, n_draft)
        own = [int(lattice.candidates[t, b]) for t, b in enumerate(walk(lattice.scores))]
        assert own == lattice.path.tolist()


def test_scores_of_the_first_position_know_only_the_anchor(reference: Reference) -> None:
    tokens = list(range(20, 50))
    first = reference.lattice(tokens, 11, 7)
    other = reference.lattice(tokens, 12, 7)
    assert np.ptp(first.scores[0], axis=0).max() == 0
    assert np.abs(first.scores[0] - other.scores[0]).max() > 1e-2


def test_only_the_window_of_the_context_matters(reference: Reference) -> None:
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, 512, size=40)]
    features = reference.features(tokens)
    whole = reference.lattice_from(features, 5, 7)
    features[:, : 40 - 11] = 0
    assert np.abs(reference.lattice_from(features, 5, 7).scores - whole.scores).max() == 0
    features[:, 40 - 11] = 0
    assert np.abs(reference.lattice_from(features, 5, 7).scores - whole.scores).max() > 1e-4


def _played(lattice: Lattice) -> Round:
    return Round(
        prompt=0,
        context=[1, 2, 3],
        anchor=4,
        path=lattice.path.copy(),
        candidates=lattice.candidates.copy(),
        scores=lattice.scores.copy(),
    )


def test_comparison_sees_a_wrong_score_candidate_or_path(reference: Reference) -> None:
    lattice = reference.lattice(list(range(20, 50)), 11, 7)
    compare(_played(lattice), lattice)
    score, candidate, path = (_played(lattice) for _ in range(3))
    score.scores[3, 2, 1] += 2 * TOLERANCE * np.abs(lattice.scores[3]).max()
    candidate.candidates[2, 0] = int(np.argmin(lattice.logits[2]))
    path.path[6] = lattice.candidates[6, np.argmin(lattice.scores[6, walk(lattice.scores)[5]])]
    for wrong in (score, candidate, path):
        with pytest.raises(AssertionError):
            compare(wrong, lattice)


def test_comparison_allows_another_candidate_only_where_the_two_are_equally_likely(
    reference: Reference,
) -> None:
    """The reference's path may go over the least likely candidate, of which a tie makes another."""
    lattice = reference.lattice(list(range(20, 50)), 11, 7)
    t, chosen = 6, walk(lattice.scores)
    edge, outside = lattice.logits[t][lattice.candidates[t]].min(), np.argmin(lattice.logits[t])
    slack = TOLERANCE * np.abs(lattice.scores[t]).max()
    for distance, is_tie in ((0.5 * slack, True), (3 * slack, False)):
        logits = lattice.logits.copy()
        logits[t, lattice.candidates[t, chosen[t]]] = edge
        logits[t, outside] = edge - distance
        played = _played(lattice)
        played.candidates[t, chosen[t]] = outside
        played.scores[t, :, chosen[t]] = played.scores[t].min() - 1
        played.path[t] = played.candidates[t, walk(played.scores)[t]]
        assert played.path[t] != lattice.path[t]
        expected = replace(lattice, logits=logits)
        if is_tie:
            compare(played, expected)
        else:
            with pytest.raises(AssertionError, match="candidate"):
                compare(played, expected)


def test_comparison_sees_a_path_that_is_not_the_one_of_the_scores(reference: Reference) -> None:
    lattice = reference.lattice(list(range(20, 50)), 11, 7)
    played = _played(lattice)
    row = lattice.scores[6, walk(lattice.scores)[5]]
    played.path[6] = lattice.candidates[6, np.argsort(row)[-2]]
    with pytest.raises(AssertionError, match="own scores"):
        compare(played, lattice, tolerance=1.0)
