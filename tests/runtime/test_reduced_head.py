"""A drafter with a reduced head of the real pair: it drafts, and what is said stays the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash2_gguf import SamplingParams, Session
from dflash2_gguf.convert_cli import main
from dflash2_gguf.generate import collect

pytestmark = pytest.mark.native

GREEDY = SamplingParams(temperature=0)
QUESTION = [{"role": "user", "content": "Write a short story about a dog who finds a ball."}]
PROMPTS = "Write a short story about a cat.\nTell me about the sea.\n"


@pytest.fixture(scope="module")
def reduced(
    target_gguf: Path, drafter: Path, drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Counted over two answers, which the smallest ids of the tokenizer fill up."""
    folder = tmp_path_factory.mktemp("reduced")
    (folder / "prompts.txt").write_text(PROMPTS)
    pair = ["-m", str(target_gguf), "-d", str(drafter), "--prompts", str(folder / "prompts.txt")]
    short = ["-n", "48", "-c", "256", "-t", "1"]
    assert main(["calibrate", *pair, *short, "-o", str(folder / "counts.gguf")]) == 0
    words = ["convert", str(drafter_dir), "--target", str(target_gguf), "--preset", "q8_0"]
    words += ["--imatrix", str(folder / "counts.gguf"), "--draft-vocab", "4096"]
    assert main([*words, "-o", str(folder / "small.gguf")]) == 0
    return folder / "small.gguf"


@pytest.fixture(scope="module")
def small(target_gguf: Path, reduced: Path) -> Iterator[Session]:
    with Session(target_gguf, reduced, n_ctx=512, n_threads=1, draft_max=7) as session:
        yield session


def test_greedy_answers_are_those_without_a_drafter(session: Session, small: Session) -> None:
    plain = collect(list(session.chat(QUESTION, max_tokens=96, sampling=GREEDY, draft=False)))
    found = collect(list(small.chat(QUESTION, max_tokens=96, sampling=GREEDY)))
    assert found.tokens == plain.tokens
    assert found.stats is not None
    assert found.stats.acceptance_length > 1.2


def test_sampled_answers_are_those_without_a_drafter(session: Session, small: Session) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=11, verifier="coupled")
    plain = collect(list(session.chat(QUESTION, max_tokens=64, sampling=sampling, draft=False)))
    small.reset()
    found = collect(list(small.chat(QUESTION, max_tokens=64, sampling=sampling)))
    assert found.tokens == plain.tokens
    assert found.stats is not None
    assert found.stats.n_accepted > 0
