"""``prove`` finds what differs, and nothing where nothing does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash2_gguf import prove as module
from dflash2_gguf.cli import main
from dflash2_gguf.launch import Launch
from dflash2_gguf.prove import ProofSettings, prove
from dflash2_gguf.sampling import SamplingParams
from dflash2_gguf.session import Generation
from dflash2_gguf.stats import Stats
from dflash2_gguf.ui import Terminal

GREEDY = SamplingParams(temperature=0)


class _Scripted:
    """A session that answers what it is told to."""

    def __init__(self, answers: dict[str, tuple[int, ...]], stats: Stats) -> None:
        self._answers = answers
        self.stats = stats

    def reset(self) -> None:
        """Nothing to forget."""

    def chat_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        return [ord(messages[0]["content"])]

    def generate(self, prompt: list[int], **_options: Any) -> Iterator[Generation]:
        tokens = self._answers.get(chr(prompt[0]), ()) if len(prompt) == 1 else ()
        yield Generation("", tokens=tokens)

    def logits(self, tokens: Sequence[int]) -> list[float]:
        return [token / 4 for token in tokens]


def _run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plain: dict[str, tuple[int, ...]],
    drafted: dict[str, tuple[int, ...]],
    verified_width: tuple[int, ...] = (0, 0, 0, 4),
) -> tuple[int, str, str]:
    stats = Stats(
        n_generated=8,
        n_steps=sum(verified_width),
        verified_width=verified_width,
        n_doubts=1,
        n_replayed=5,
        noise=0.25,
    )

    @contextmanager
    def open_session(launch: Launch, _terminal: Terminal) -> Iterator[_Scripted]:
        yield _Scripted(drafted if launch.draft else plain, stats)

    monkeypatch.setattr(module, "open_session", open_session)
    launch = Launch(target=Path("t"), draft=Path("d"), exact=True)
    settings = ProofSettings(prompts=tuple(plain), max_tokens=8, sampling=GREEDY)
    code = prove(launch, settings, Terminal())
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_equal_answers_are_a_proof(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"a": (1, 2, 3), "b": (4,)}
    code, shown, warned = _run(monkeypatch, capsys, answers, answers)
    assert (code, warned) == (0, "")
    assert shown == (
        "2 answers, 2.00 tokens per step\n"
        "4 tokens compared, answers that differ: 0\n"
        "exact mode: decisions taken again 1, tokens evaluated for that 5, "
        "largest rounding seen in a logit 0.25\n"
    )


def test_a_proof_of_one_token_counts_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, shown, _ = _run(monkeypatch, capsys, {"a": (1,)}, {"a": (1,)})
    assert shown.splitlines()[:2] == [
        "1 answer, 2.00 tokens per step",
        "1 token compared, answers that differ: 0",
    ]


def test_a_proof_without_drafts_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"a": (1, 2, 3)}
    _, _, warned = _run(monkeypatch, capsys, answers, answers, verified_width=(38, 0, 2))
    assert warned == (
        "warning: 2 of 40 steps verified a draft, so little was compared; "
        "--draft-max 7 drafts at every step\n"
    )


def test_a_proof_of_answers_that_end_at_once_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, warned = _run(monkeypatch, capsys, {"a": (2,)}, {"a": (2,)}, verified_width=())
    assert warned.startswith("warning: 0 of 0 steps verified a draft, so little was compared")


@pytest.mark.parametrize(
    ("drafted", "where"),
    [
        ((1, 2, 9), "token 3 without the drafter, token 9 with it, -1.5 apart in logits"),
        ((1, 2), "token 3 without the drafter, the end with it"),
        ((1, 2, 3, 4), "the end without the drafter, token 4 with it"),
    ],
)
def test_the_first_difference_is_named_with_its_margin(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    drafted: tuple[int, ...],
    where: str,
) -> None:
    plain = {"a": (7,), "b": (1, 2, 3), "c": (8,)}
    code, shown, _ = _run(monkeypatch, capsys, plain, {"a": (7,), "b": drafted, "c": (9,)})
    assert code == 1
    assert "answers that differ: 2\n" in shown
    position = 4 if len(drafted) == 4 else 3
    assert f"first in answer 2 at token {position}: {where}\n" in shown


@pytest.mark.native
@pytest.mark.parametrize("sampling", [[], ["--temp", "0.8", "--seed", "5"]])
def test_the_real_pair_is_proven(
    target_gguf: Path,
    drafter: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sampling: list[str],
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "Once upon a time"}\n\n{"tokens": [20, 30, 40, 50]}\n')
    pair = ["-m", str(target_gguf), "-d", str(drafter), "--prompts", str(prompts)]
    code = main(["prove", *pair, "-n", "32", "-c", "256", "-t", "1", "--json", *sampling])
    proof = json.loads(capsys.readouterr().out)
    assert code == 0
    assert proof["n_tokens"] == 64
    assert proof["n_different"] == 0
    assert proof["acceptance_length"] >= 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there are no prompts"),
        (["--prompts", "p.txt"], "there is no drafter"),
        (["--prompts", "p.txt", "-d", "d", "--temp", "1"], "only be compared with a seed"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    (tmp_path / "p.txt").write_text("one\n")
    monkeypatch.chdir(tmp_path)
    assert main(["prove", "-m", "t.gguf", *words]) == 2
    assert message in capsys.readouterr().err
