"""What is computed from measured answers, and what the demo makes of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from dflash2_gguf import demo
from dflash2_gguf.errors import UsageError
from dflash2_gguf.measure import (
    PROMPTS,
    Request,
    Run,
    acceptance_length,
    first_difference,
    run_in_step,
    same_answer,
    spread,
)
from dflash2_gguf.session import Generation


def _run(tokens: int, seconds: float, length: float = 1.0, first: int = 0) -> Run:
    return Run(tuple(range(first, first + tokens)), "text", seconds, length)


@pytest.mark.parametrize(
    ("a", "b", "at"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1], [], 0),
    ],
)
def test_the_first_difference_is_a_position(a: list[int], b: list[int], at: int | None) -> None:
    assert first_difference(a, b) == at


def test_speed_is_of_the_tokens_after_the_first() -> None:
    assert _run(11, 2.0).tokens_per_second == pytest.approx(5.0)
    assert _run(1, 0.0).tokens_per_second == 0


def test_tokens_that_were_there_when_the_clock_started_do_not_count() -> None:
    run = Run(tuple(range(11)), "text", 2.0, 2.75, n_first=5)
    assert (run.n_timed, run.tokens_per_second) == (6, pytest.approx(3.0))


def test_acceptance_is_weighted_by_steps() -> None:
    # 10 + 10 tokens in 5 + 2 steps; an answer without steps says nothing
    runs = [_run(10, 1.0, 2.0), _run(10, 1.0, 5.0), _run(1, 0.0, 0.0)]
    assert acceptance_length(runs) == pytest.approx(20 / 7)
    assert acceptance_length([]) == 0


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (_run(5, 1.0), _run(5, 2.0), True),
        (_run(5, 1.0), _run(6, 1.0), True),  # an end token that only one side reports
        (_run(5, 1.0), _run(7, 1.0), False),
        (_run(5, 1.0), _run(5, 1.0, first=1), False),
    ],
)
def test_answers_are_compared_by_their_tokens(a: Run, b: Run, same: bool) -> None:
    assert same_answer(a, b) is same


@pytest.mark.parametrize(("prompt", "max_tokens"), [((), 1), ((1,), 0)])
def test_a_request_asks_for_something(prompt: tuple[int, ...], max_tokens: int) -> None:
    with pytest.raises(UsageError):
        Request(prompt=prompt, max_tokens=max_tokens)


def test_answers_in_step_take_turns_by_their_tokens_and_are_timed_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    monkeypatch.setattr(time, "perf_counter", lambda: float(log.count("slow")))

    def stream(name: str, sizes: Sequence[int], _request: Request) -> Iterator[Generation]:
        for size in sizes:
            log.append(name)
            yield Generation("x", tokens=tuple(range(size)))

    request = Request(prompt=(1,), max_tokens=6)
    runs = run_in_step(
        {"slow": partial(stream, "slow", [1, 1, 1, 1]), "wide": partial(stream, "wide", [1, 3])},
        request,
    )
    # the lead changes; a wide step lets the other catch up
    assert log == ["slow", "wide", "wide", "slow", "slow", "slow"]
    assert [runs["slow"].n_timed, runs["wide"].n_timed] == [3, 3]
    assert runs["slow"].text == "xxxx"
    # three of its four steps, and none of them on the other's account
    assert (runs["slow"].seconds, runs["wide"].seconds) == (3, 0)


def test_spread_is_median_smallest_and_largest() -> None:
    found = spread([3.0, 1.0, 2.0])
    assert (found.median, found.low, found.high) == (2.0, 1.0, 3.0)
    with pytest.raises(UsageError):
        spread([])


def test_the_demo_tells_equal_from_different_texts() -> None:
    plain, drafted = _run(11, 2.0), _run(11, 4.0, 2.0)
    both = (drafted, drafted)
    same = demo._Answers(plain=(plain, plain), block=both, automatic=(plain, plain))
    assert same.difference is None
    assert same.ratio(same.block) == pytest.approx(0.5)
    assert "the same 11 tokens" in demo._describe("?", same)
    assert "0.50 times the speed" in demo._describe("?", same)
    assert "1.00 times the speed" in demo._describe("?", same)
    other = demo._Answers(plain=(plain, plain), block=(drafted, _run(7, 4.0)), automatic=both)
    assert other.difference == 7
    assert "DIFFERS from token 7 on" in demo._describe("?", other)
    assert "1 of 2 equal" in demo._summary([same, other], 7)


@pytest.mark.native
def test_the_demo_answers_alike_on_the_real_pair(
    target_gguf: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ["--target", str(target_gguf), "--draft", str(drafter)]
    assert demo.main([*pair, "-n", "8", "-t", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("without drafter  the same 8 tokens") == len(PROMPTS)
    assert f"texts            {len(PROMPTS)} of {len(PROMPTS)} equal" in shown


def test_the_demo_tells_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--target", "nothing.gguf", "--draft", "none.gguf"]) == 1
    assert "error: nothing.gguf does not exist\n" in capsys.readouterr().err
