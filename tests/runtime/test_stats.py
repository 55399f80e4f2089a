"""Figures derived from the counters."""

from __future__ import annotations

import json

import pytest

from dflash2_gguf import Stats
from dflash2_gguf.stats import Memory


def _stats() -> Stats:
    return Stats(
        n_prompt=10,
        n_generated=21,
        n_prompt_sampled=1,
        n_steps=8,
        n_drafted=50,
        n_accepted=12,
        accepted_at=(8, 4, 0),
        drafted_at=(8, 8, 0),
        draft_seconds=1.0,
        verify_seconds=2.5,
        inject_seconds=0.25,
        sample_seconds=0.25,
        prompt_seconds=9.0,
    )


def test_acceptance_length_leaves_out_the_token_of_the_prompt() -> None:
    assert _stats().acceptance_length == pytest.approx(20 / 8)


def test_speed_leaves_out_the_prompt_and_its_token() -> None:
    assert _stats().tokens_per_second == pytest.approx(20 / 4.0)


def test_positions_never_drafted_have_no_acceptance() -> None:
    assert _stats().position_acceptance == (1.0, 0.5)


def test_nothing_done_gives_zeros() -> None:
    nothing = Stats()
    assert nothing.acceptance_length == nothing.acceptance_rate == nothing.tokens_per_second == 0


def test_as_dict_is_json_with_derived_figures() -> None:
    shown = json.loads(json.dumps(_stats().as_dict()))
    assert shown["n_generated"] == 21
    assert shown["acceptance_length"] == pytest.approx(2.5)


def test_failed_drafts_are_told_with_their_reason() -> None:
    failures = {"cache": 0, "compute": 3, "values": 0}
    assert Stats(draft_failures=failures).warnings() == (
        "3 steps had no draft (the draft pass failed)",
    )
    assert Stats(draft_failures={"compute": 1}).warnings() == (
        "1 step had no draft (the draft pass failed)",
    )


def test_a_drafter_that_is_never_right_is_told() -> None:
    (warning,) = Stats(n_drafted=700, n_accepted=2).warnings()
    assert warning.startswith("2 of 700 drafted tokens were accepted")
    assert Stats(n_drafted=70, n_accepted=0).warnings() == ()
    assert Stats(n_drafted=700, n_accepted=70).warnings() == ()


def test_memory_adds_up() -> None:
    assert Memory(target_weights=3, draft_cache=4).total == 7
