"""`check --run`: alive, weak and dead drafters are told apart; so are numbers that fit better."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash2_gguf.check_fact import Fact, Verdict, ok
from dflash2_gguf.check_run import PROMPTS, Kept, judge, kept_of, run_pair
from dflash2_gguf.check_trial import Trial, _mean_and_error, alternatives, judge_trial
from dflash2_gguf.convert_cli import main
from dflash2_gguf.gguf_header import read_header
from dflash2_gguf.stats import Stats
from tests.convert.pairs import Edit, edit, write_right_drafter, write_right_target
from tests.runtime.gguf_files import drafter_fields, write_gguf

# the bundled pair and copies of its drafter on all built-in prompts, q8_0, blocks of 8:
# steps, drafted, kept, steps that kept at least 1, 2, ... drafts
RIGHT = (216, 1413, 226, (98, 52, 34, 23, 10, 5, 4))
LAYERS_ONE_HIGHER = (227, 1495, 216, (98, 51, 32, 21, 9, 4, 1))
ROPE_BASE_A_TENTH = (226, 1481, 217, (96, 55, 31, 23, 7, 3, 2))
ROTATED_ROWS_INTERLEAVED = (289, 1917, 152, (81, 38, 18, 11, 4, 0, 0))
ROWS_OF_FC_SHUFFLED = (422, 2796, 19, (18, 1, 0, 0, 0, 0, 0))
ALL_MATRICES_SHUFFLED = (441, 2919, 0, (0, 0, 0, 0, 0, 0, 0))


def stats(run: tuple[int, int, int, tuple[int, ...]]) -> Stats:
    steps, drafted, kept, at_least = run
    return Stats(
        n_generated=steps + kept,
        n_steps=steps,
        n_drafted=drafted,
        n_accepted=kept,
        accepted_at=at_least,
        drafted_at=(steps,) * len(at_least),
    )


@pytest.mark.parametrize(
    ("run", "verdict", "start"),
    [
        (RIGHT, Verdict.OK, "as expected: 2.05 tokens per step (95 % between 1.83 and 2.26), "),
        (LAYERS_ONE_HIGHER, Verdict.OK, "as expected: 1.95 tokens per step"),
        (ROPE_BASE_A_TENTH, Verdict.OK, "as expected: 1.96 tokens per step"),
        (ROTATED_ROWS_INTERLEAVED, Verdict.WARNING, "weak: 1.53 tokens per step"),
        (ROWS_OF_FC_SHUFFLED, Verdict.ERROR, "dead: 1.05 tokens per step"),
        (ALL_MATRICES_SHUFFLED, Verdict.ERROR, "dead: 1.00 tokens per step"),
    ],
)
def test_recorded_runs_are_judged(
    run: tuple[int, int, int, tuple[int, ...]], verdict: Verdict, start: str
) -> None:
    (fact,) = judge(kept_of(stats(run)))
    assert (fact.name, fact.verdict) == ("acceptance", verdict)
    assert fact.message.startswith(start)


def test_the_interval_is_that_of_the_steps() -> None:
    kept = kept_of(stats((4, 12, 4, (2, 1, 1))))
    per_step = np.array([0, 0, 1, 3])
    margin = 1.96 * per_step.std() / 2
    assert kept.high - kept.length == pytest.approx(margin)
    assert kept.length - kept.low == pytest.approx(margin)


def test_a_few_steps_judge_nothing() -> None:
    (fact,) = judge(kept_of(stats((20, 140, 12, (8, 4)))))
    assert (fact.verdict, fact.message) == (
        Verdict.WARNING,
        (
            "too little to judge: 1.60 tokens per step (95 % between 1.25 and 1.95), "
            "12 of 140 drafts kept in 20 steps"
        ),
    )


def test_a_few_steps_that_keep_nothing_are_not_called_dead() -> None:
    (fact,) = judge(kept_of(stats((1, 7, 0, (0,)))))
    assert (fact.verdict, fact.message) == (
        Verdict.WARNING,
        (
            "too little to judge: 1.00 tokens per step (95 % between 1.00 and 1.00), "
            "0 of 7 drafts kept in 1 step"
        ),
    )


def test_draft_passes_that_fail_are_an_error() -> None:
    kept = Kept(
        n_steps=40,
        n_drafted=0,
        n_accepted=0,
        length=1.0,
        low=1.0,
        high=1.0,
        failures={"values": 40},
    )
    (fact,) = judge(kept)
    assert (fact.name, fact.verdict, fact.message) == (
        "draft passes",
        Verdict.ERROR,
        "40 of 40 steps had no draft: the drafter computes NaN or infinite values",
    )


def trial() -> Trial:
    return Trial(
        field="rope.freq_base",
        name="rope base",
        as_is="10000",
        other="the target's 100000",
        raw=b"",
        hint="compare",
    )


FIGURES = "1.25 drafts of a block are kept with 10000, {} with the target's 100000, over 320 blocks"


@pytest.mark.parametrize(
    ("more", "verdict", "message"),
    [
        (8, Verdict.ERROR, f"the target's 100000 fits better: {FIGURES.format('1.50')}"),
        (-8, Verdict.OK, f"10000 fits better: {FIGURES.format('1.00')}"),
        (
            1,
            Verdict.NOTE,
            f"10000 and the target's 100000 cannot be told apart: {FIGURES.format('1.28')}",
        ),
    ],
)
def test_a_trial_decides_beyond_three_standard_errors(
    more: int, verdict: Verdict, message: str
) -> None:
    own = [[0, 1, 2, 2] * 10 for _ in range(8)]
    step = 1 if more > 0 else -1
    other = [
        [kept + step * (i < 10 and n < abs(more)) for i, kept in enumerate(answer)]
        for n, answer in enumerate(own)
    ]
    fact = judge_trial(trial(), own, other)
    assert (fact.verdict, fact.message) == (verdict, message)


def test_neighbouring_blocks_count_as_one_observation() -> None:
    gains = np.random.default_rng(0).integers(-2, 3, size=(6, 16))
    batches = gains.reshape(-1, 8).mean(axis=1)
    mean, doubt = _mean_and_error(gains.tolist())
    assert mean == pytest.approx(batches.mean())
    assert doubt == pytest.approx(batches.std(ddof=1) / np.sqrt(len(batches)))


def test_numbers_to_try_follow_from_the_headers(tmp_path: Path) -> None:
    base = {"dflash.rope.freq_base": 10000.0}
    draft = read_header(write_gguf(tmp_path / "d.gguf", drafter_fields() | base, {"x": (4,)}))
    found = alternatives(draft, n_layer=6, target_base=1e6, shifts=(1, -1))
    assert [(t.name, t.as_is, t.other) for t in found] == [
        ("rope base", "10000", "the target's 1e+06"),
        ("layer ids", "0/3", "1/4"),
    ]
    assert found[1].raw == struct.pack("<2i", 2, 5)
    assert alternatives(draft, n_layer=6, target_base=1e4, shifts=()) == []
    assert alternatives(draft, n_layer=6, target_base=None, shifts=()) == []


@pytest.fixture
def right_pair(tmp_path: Path) -> list[str]:
    """A target and a drafter whose headers fit."""
    target = write_right_target(tmp_path / "target.gguf")
    return [str(target), str(write_right_drafter(tmp_path / "drafter.gguf"))]


def test_the_run_has_the_answers_and_threads_asked_for(
    right_pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def run_pair(*_pair: Path, **options: int) -> tuple[list[Fact], None]:
        asked.update(options)
        return [ok("acceptance", "as expected")], None

    monkeypatch.setattr("dflash2_gguf.check_run.run_pair", run_pair)
    assert main(["check", *right_pair, "--run", "-n", "16", "-t", "3"]) == 0
    assert asked == {"max_tokens": 16, "n_threads": 3}
    assert main(["check", *right_pair, "--run"]) == 0
    assert asked == {"max_tokens": 64, "n_threads": None}


@pytest.mark.parametrize(("n", "tokens"), [("1", "1 token"), ("2", "2 tokens")])
def test_answers_that_judge_nothing_are_refused(
    right_pair: list[str], capsys: pytest.CaptureFixture[str], n: str, tokens: str
) -> None:
    assert main(["check", *right_pair, "--run", "-n", n]) == 2
    assert capsys.readouterr().err == (
        f"error: answers of {tokens} judge no draft\nhint: -n can be 3 or more\n"
    )


SOME = (PROMPTS[1], PROMPTS[7])


@pytest.mark.native
def test_the_shortest_answers_are_too_little_to_judge(target_gguf: Path, drafter: Path) -> None:
    facts, kept = run_pair(target_gguf, drafter, prompts=SOME, max_tokens=3, n_threads=1)
    assert [f.message.partition(":")[0] for f in facts][:1] == ["too little to judge"]
    assert kept is not None
    assert kept.n_drafted > 0


@pytest.mark.native
def test_the_real_pair_is_alive(target_gguf: Path, drafter: Path) -> None:
    facts, kept = run_pair(target_gguf, drafter, prompts=SOME, max_tokens=48, n_threads=1)
    assert [(f.name, f.verdict) for f in facts] == [("acceptance", Verdict.OK)]
    assert kept is not None
    assert kept.length > 1.6
    assert kept.failures == {}


def shuffled(source: Path, path: Path) -> Path:
    """A copy whose target features come in another order."""
    edit(source, path, Edit())
    reader = gguf.GGUFReader(path, "r+")
    (features,) = [t for t in reader.tensors if t.name == "fc.weight"]
    rows = np.array(features.data)
    features.data[:] = rows[np.random.default_rng(0).permutation(len(rows))]
    reader.data.flush()
    return path


@pytest.mark.native
def test_a_drafter_with_shuffled_features_is_dead(
    target_gguf: Path, drafter: Path, tmp_path: Path
) -> None:
    wrong = shuffled(drafter, tmp_path / "wrong.gguf")
    facts, _ = run_pair(target_gguf, wrong, prompts=SOME, max_tokens=48, n_threads=1)
    assert [(f.name, f.verdict) for f in facts] == [("acceptance", Verdict.ERROR)]
    assert facts[0].message.startswith("dead: 1.")


@pytest.mark.native
def test_a_drafter_that_computes_nan_is_told(
    target_gguf: Path, drafter: Path, tmp_path: Path
) -> None:
    wrong = edit(
        drafter, tmp_path / "wrong.gguf", Edit(set={"dflash.rope.freq_base": float("nan")})
    )
    facts, _ = run_pair(target_gguf, wrong, prompts=SOME[1:], max_tokens=16, n_threads=1)
    assert facts[0].name == "draft passes"
    assert facts[0].message.endswith("had no draft: the drafter computes NaN or infinite values")


@pytest.mark.slow
@pytest.mark.native
def test_layers_off_by_one_are_found_by_trying_the_others(
    target_gguf: Path, drafter: Path, tmp_path: Path
) -> None:
    one_low = Edit(set={"dflash.target_layers": [1, 8, 14, 20, 27]})
    wrong = edit(drafter, tmp_path / "wrong.gguf", one_low)
    facts, _ = run_pair(target_gguf, wrong, n_threads=1)
    assert [(f.name, f.verdict) for f in facts] == [
        ("acceptance", Verdict.OK),
        ("layer ids", Verdict.ERROR),
    ]
    assert facts[1].message.startswith("1/8/14/20/27 fits better: 1.")
    assert facts[1].hint == "`dflash2-convert migrate --layer-ids outputs` adds one to each"


@pytest.mark.native
def test_a_pair_that_cannot_be_loaded_is_one_fact(
    target_gguf: Path, drafter: Path, tmp_path: Path
) -> None:
    wrong = edit(drafter, tmp_path / "wrong.gguf", Edit(set={"dflash.attention.head_count": 8}))
    facts, kept = run_pair(target_gguf, wrong)
    assert [(f.name, f.verdict) for f in facts] == [("run", Verdict.ERROR)]
    assert kept is None
