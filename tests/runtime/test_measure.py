"""What demo and comparison compute from measured answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash2_gguf import bench_peer, demo
from dflash2_gguf.errors import UsageError
from dflash2_gguf.measure import PROMPTS, Run, first_difference, spread


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


def test_spread_is_median_smallest_and_largest() -> None:
    found = spread([3.0, 1.0, 2.0])
    assert (found.median, found.low, found.high) == (2.0, 1.0, 3.0)
    with pytest.raises(UsageError):
        spread([])


def _results() -> dict[str, list[list[Run]]]:
    return {
        "ours plain": [[_run(11, 2.0), _run(11, 2.0)], [_run(11, 1.0), _run(11, 1.0)]],
        "ours auto": [[_run(11, 1.0), _run(11, 1.0)], [_run(11, 1.0), _run(11, 1.0)]],
        "ours 7": [[_run(11, 1.0, 2.5), _run(11, 1.0, 2.5)], [_run(11, 2.0, 5.0)] * 2],
        "pin plain": [[_run(10, 2.0)] * 2, [_run(11, 2.0)] * 2],
        "pin 7": [[_run(11, 4.0, 2.0)] * 2, [_run(11, 4.0, 2.0, first=5)] * 2],
    }


def test_ratios_are_taken_prompt_by_prompt() -> None:
    assert bench_peer.ratios(_results(), "ours 7", "ours plain") == pytest.approx([2.0, 0.5])


def test_the_report_names_every_ratio_and_difference() -> None:
    report = bench_peer._report(_results(), [7])
    assert list(report["ratios"]) == [
        "ours plain / pin plain",
        "ours auto / ours plain",
        "ours 7 / ours plain",
        "ours 7 / pin 7",
        "pin 7 / pin plain",
    ]
    assert report["ratios"]["ours 7 / ours plain"] == {"median": 1.25, "low": 0.5, "high": 2.0}
    # 10 + 10 tokens in 4 + 2 steps
    assert report["acceptance_length"]["ours 7"] == pytest.approx(20 / 6)
    # an end token more is none, other tokens are
    differing = {(d["system"], d["prompt"], d["token"]) for d in report["differences"]}
    assert differing == {("pin 7", 1, 0)}


def test_the_description_holds_every_figure() -> None:
    text = bench_peer._describe(bench_peer._report(_results(), [7]))
    assert "ours 7 / ours plain    1.25 (0.50 to 2.00)" in text
    assert "  pin 7, prompt 1, token 0" in text


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
