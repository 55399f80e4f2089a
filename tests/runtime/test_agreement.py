"""Agreement of blocks and expected acceptance, against small cases counted by hand or simulated."""

from __future__ import annotations

import numpy as np
import pytest

from dflash2_gguf.agreement import accepted, agreement, bootstrap, rounds, survival
from dflash2_gguf.replay import Lattice


def lattice(candidates: list[list[int]], scores: np.ndarray) -> Lattice:
    return Lattice(np.array(candidates, dtype=np.int32), scores.astype(np.float32))


def random_lattice(seed: int, n: int = 3, k: int = 4) -> Lattice:
    rng = np.random.default_rng(seed)
    scores = 2 * rng.normal(size=(n, k, k))
    scores[0] = scores[0, :1]
    return lattice([rng.permutation(8)[:k].tolist() for _ in range(n)], scores)


def shuffled(block: Lattice, seed: int) -> Lattice:
    """The same block with its candidates in another order."""
    rng = np.random.default_rng(seed)
    k = block.candidates.shape[1]
    orders = [rng.permutation(k) for _ in block.candidates]
    scores = np.stack(
        [
            block.scores[t][np.ix_(orders[t - 1] if t else np.arange(k), orders[t])]
            for t in range(len(orders))
        ]
    )
    return lattice(
        [ids[order].tolist() for ids, order in zip(block.candidates, orders, strict=True)], scores
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_block_agrees_with_itself_in_any_order_of_candidates(seed: int) -> None:
    block = random_lattice(seed)
    found = agreement(block, shuffled(block, seed + 100))
    assert found.top1.tolist() == found.path.tolist() == [1.0] * 3
    np.testing.assert_allclose(found.overlap, 1.0, atol=1e-6)
    np.testing.assert_allclose(found.kl, 0.0, atol=1e-6)


def test_overlap_and_divergence_are_those_of_the_formulas() -> None:
    left = lattice([[5, 6]], np.log([[[0.75, 0.25], [0.75, 0.25]]]))
    right = lattice([[6, 5]], np.log([[[0.5, 0.5], [0.5, 0.5]]]))
    found = agreement(left, right)
    assert found.overlap[0] == pytest.approx(0.75)
    assert found.kl[0] == pytest.approx(0.75 * np.log(1.5) + 0.25 * np.log(0.5))


def test_only_shared_candidates_enter_the_divergence_and_all_the_overlap() -> None:
    left = lattice([[1, 2]], np.log([[[0.6, 0.4], [0.6, 0.4]]]))
    right = lattice([[1, 3]], np.log([[[0.5, 0.5], [0.5, 0.5]]]))
    found = agreement(left, right)
    assert found.overlap[0] == pytest.approx(0.5)
    assert found.kl[0] == pytest.approx(0.0)


def test_a_token_before_that_is_no_candidate_agrees_in_nothing() -> None:
    scores = np.zeros((2, 2, 2))
    scores[0, :, 0] = 1.0
    found = agreement(lattice([[1, 2], [3, 4]], scores), lattice([[7, 8], [3, 4]], scores))
    assert found.path.tolist() == [0.0, 0.0]
    assert (found.top1[1], found.overlap[1], np.isnan(found.kl[1])) == (0.0, 0.0, True)


def test_greedy_drafts_are_accepted_where_the_path_has_the_targets_token() -> None:
    scores = np.zeros((3, 2, 2))
    scores[:, :, 0] = 1.0
    block = lattice([[10, 11], [20, 21], [30, 31]], scores)
    assert accepted(block, [10, 21, 30], None).tolist() == [1.0, 0.0, 1.0]
    assert accepted(block, [10], None).tolist() == [1.0]


def test_sampled_drafts_are_accepted_with_the_ratio_of_q_to_p() -> None:
    scores = np.log(np.array([[[0.5, 0.5]] * 2, [[0.9, 0.1], [0.2, 0.8]]]))
    block = lattice([[1, 2], [3, 4]], scores)
    log_p = np.log(np.array([0.25, 0.4]))
    assert accepted(block, [2, 3], log_p).tolist() == pytest.approx([1.0, 0.5])
    assert accepted(block, [1, 9], log_p).tolist() == pytest.approx([1.0, 0.0])
    assert accepted(block, [9, 3], log_p).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("stops", [False, True])
def test_expected_rounds_are_those_of_a_simulation(stops: bool) -> None:
    rng = np.random.default_rng(5)
    chances = [rng.uniform(size=3) for _ in range(9)]
    n_runs, total = 40000, 0
    for _ in range(n_runs):
        at = 0
        while at < len(chances):
            total += 1
            left = len(chances) - at
            coins = rng.uniform(size=3) < chances[at]
            at += int(np.cumprod(coins[: left if stops else left - 1]).sum()) + 1
    assert rounds(chances, stops=stops) == pytest.approx(total / n_runs, rel=0.01)


@pytest.mark.parametrize(
    ("chance", "stops", "expected"),
    [(0.0, False, 8), (0.0, True, 8), (1.0, False, 2), (1, True, 2)],
)
def test_no_draft_accepted_is_one_token_a_round_and_all_is_a_block(
    chance: float, stops: bool, expected: float
) -> None:
    assert rounds([np.full(3, chance)] * 8, stops=stops) == expected


def test_a_last_token_that_ends_the_answer_can_be_drafted() -> None:
    chances = [np.ones(3)] * 3
    assert (rounds(chances, stops=True), rounds(chances, stops=False)) == (1.0, 1.0)
    chances = [np.array([1.0, 0.0, 1.0]), np.ones(3), np.ones(1)]
    assert (rounds(chances, stops=True), rounds(chances, stops=False)) == (2.0, 2.0)
    assert (rounds([np.ones(1)] * 2, stops=True), rounds([np.zeros(1)] * 2, stops=True)) == (1, 2)


def test_the_law_of_rejection_sampling_is_that_of_the_formula() -> None:
    """min(1, q/p) of what comes out, against drawing from q and keeping with min(1, p/q)."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    kept = np.minimum(p, q)
    out = kept + (1 - kept.sum()) * np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    np.testing.assert_allclose(out, p)
    block = lattice([[0, 1, 2]], np.broadcast_to(np.log(q), (1, 3, 3)))
    found = [accepted(block, [x], np.log(p[[x]]))[0] for x in range(3)]
    np.testing.assert_allclose(found, kept / out, rtol=1e-6)


def test_survival_counts_blocks_that_have_a_token_to_judge_by() -> None:
    found = survival([np.array([1.0, 0.5]), np.array([0.0])], 3)
    assert found[:2].tolist() == [0.5, 0.5]
    assert np.isnan(found[2])


def test_bootstrap_of_equal_prompts_is_certain_and_of_others_is_not() -> None:
    same = bootstrap(np.full(20, 6.0), np.full(20, 3.0))
    assert (same.value, same.low, same.high) == (2.0, 2.0, 2.0)
    rng = np.random.default_rng(0)
    tokens, steps = rng.integers(10, 60, 50).astype(float), rng.integers(5, 30, 50).astype(float)
    found = bootstrap(tokens, steps)
    assert found.low < found.value < found.high
    assert found.value == tokens.sum() / steps.sum()
