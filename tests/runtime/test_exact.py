"""Exact mode: what rounding could turn is decided again, the way plain decoding decides it.

On this project's CPU builds a row among up to a few dozen has the very logits it has alone, so
doubts hardly occur by themselves; ``noise_min`` makes the engine doubt far more than it must.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash2_gguf import SamplingParams, Session, engine
from dflash2_gguf.engine import EngineOptions
from dflash2_gguf.errors import UsageError
from dflash2_gguf.generate import collect
from dflash2_gguf.native import SessionParams

pytestmark = pytest.mark.native

QUESTION = [{"role": "user", "content": "Write a short story about a dog who finds a ball."}]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "penalties": SamplingParams(temperature=0, repeat_penalty=1.3, frequency_penalty=0.2),
    "coupled": SamplingParams(temperature=1.0, top_k=0, min_p=0.0, top_p=0.95, seed=5),
    "truncated": SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=9),
    "grammar": SamplingParams(temperature=1.0, seed=3, grammar="root ::= [a-zA-Z .,]+"),
}


@pytest.fixture(scope="module")
def doubtful(target_gguf: Path, drafter: Path) -> Iterator[Session]:
    """The real pair, certain of nothing that is decided by less than 0.4."""
    original = engine.session_params

    def suspicious(options: EngineOptions) -> SessionParams:
        params = original(options)
        params.noise_min = 0.2
        return params

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "session_params", suspicious)
        session = Session(target_gguf, drafter, n_ctx=512, n_threads=1, draft_max=7, exact=True)
    with session:
        yield session


@pytest.mark.parametrize("name", SAMPLINGS)
def test_doubted_decisions_are_those_of_plain_decoding(
    session: Session, doubtful: Session, name: str
) -> None:
    plain = collect(
        list(session.chat(QUESTION, max_tokens=64, sampling=SAMPLINGS[name], draft=False))
    )
    doubtful.reset()
    exact = collect(list(doubtful.chat(QUESTION, max_tokens=64, sampling=SAMPLINGS[name])))
    assert exact.tokens == plain.tokens
    assert exact.stats is not None
    assert exact.stats.n_doubts > 0
    assert exact.stats.n_replayed >= exact.stats.n_doubts
    assert exact.stats.n_accepted > 0


def test_a_generation_can_be_saved_while_it_is_in_doubt(
    session: Session, doubtful: Session
) -> None:
    sampling = SAMPLINGS["coupled"]
    plain = collect(list(session.chat(QUESTION, max_tokens=32, sampling=sampling, draft=False)))
    for stop_after in (1, 3, 6):
        doubtful.reset()
        pieces = doubtful.chat(QUESTION, max_tokens=32, sampling=sampling)
        told = [next(pieces) for _ in range(stop_after)]
        state = doubtful.save()
        pieces.close()
        for other in (doubtful, session):
            other.reset()
            other.restore(state)
            rest = collect(list(other.resume()))
            assert collect(told).tokens + rest.tokens == plain.tokens


def test_an_exact_session_serves_many_sequences(
    session: Session, target_gguf: Path, drafter: Path
) -> None:
    greedy = SAMPLINGS["greedy"]
    texts = ["The sea", "A recipe for bread:", "Once upon a time", "def main():"]
    prompts = [session.tokenize(text) for text in texts]
    alone = []
    for prompt in prompts:
        session.reset()
        alone.append(collect(list(session.generate(prompt, max_tokens=24, sampling=greedy))).tokens)
    with (
        Session(
            target_gguf, drafter, n_ctx=256, n_threads=1, draft_max=7, n_parallel=4, exact=True
        ) as exact,
        ThreadPoolExecutor(4) as pool,
    ):
        together = pool.map(
            lambda p: collect(list(exact.generate(p, max_tokens=24, sampling=greedy))).tokens,
            prompts,
        )
        assert list(together) == alone


def test_a_verifier_that_only_keeps_the_law_is_refused(doubtful: Session) -> None:
    for verifier in ("reject", "block"):
        sampling = SamplingParams(temperature=1.0, verifier=verifier)
        with pytest.raises(UsageError, match="exact mode gives the tokens of plain decoding"):
            next(doubtful.chat(QUESTION, sampling=sampling))
