"""Several generations in one batch give what each gives alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash2_gguf import Generation, SamplingParams, Session
from dflash2_gguf.errors import UsageError
from dflash2_gguf.generate import collect

pytestmark = pytest.mark.native

QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a dog who finds a ball.",
    "List five healthy breakfast ideas.",
    "Explain in three sentences why the sky is blue.",
    "Say hello.",
)
N_PARALLEL = 3


@pytest.fixture(scope="module")
def open_parallel(target_gguf: Path, drafter: Path) -> Iterator[Session]:
    with Session(
        target_gguf, drafter, n_ctx=512, n_threads=1, draft_max=7, n_parallel=N_PARALLEL
    ) as session:
        yield session


@pytest.fixture
def parallel(open_parallel: Session) -> Session:
    open_parallel.reset()
    return open_parallel


def _ask(session: Session, question: str, sampling: SamplingParams, n: int = 24) -> Generation:
    messages = [{"role": "user", "content": question}]
    return collect(list(session.chat(messages, max_tokens=n, sampling=sampling)))


def _tokens(answers: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0), SamplingParams(temperature=1.0, seed=5)]
)
def test_answers_together_are_the_answers_alone(
    session: Session, parallel: Session, sampling: SamplingParams
) -> None:
    alone = [_ask(session, question, sampling) for question in QUESTIONS]
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        together = list(pool.map(lambda q: _ask(parallel, q, sampling), QUESTIONS))
    assert _tokens(together) == _tokens(alone)


def test_counters_of_a_generation_are_its_own(parallel: Session) -> None:
    greedy = SamplingParams(temperature=0)
    with ThreadPoolExecutor(2) as pool:
        long, short = pool.map(lambda n: _ask(parallel, QUESTIONS[1], greedy, n), (40, 8))
    for answer, length in ((long, 40), (short, 8)):
        assert answer.stats is not None
        assert answer.stats.n_generated == length
        assert answer.stats.n_accepted == sum(answer.from_draft)
        assert sum(answer.stats.verified_width) == answer.stats.n_steps
    total = parallel.stats
    assert total.n_generated >= 48


def test_a_conversation_comes_back_to_its_own_caches(parallel: Session) -> None:
    greedy = SamplingParams(temperature=0)
    first = _ask(parallel, QUESTIONS[1], greedy)
    _ask(parallel, QUESTIONS[2], greedy)
    messages = [
        {"role": "user", "content": QUESTIONS[1]},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And then?"},
    ]
    last = list(parallel.chat(messages, max_tokens=4, sampling=greedy))[-1]
    assert last.stats is not None
    assert last.stats.n_prompt < 16
    assert last.stats.n_prompt_reused > 50


def test_a_long_prompt_does_not_hold_up_who_generates(parallel: Session) -> None:
    greedy = SamplingParams(temperature=0)
    prompt = parallel.tokenize("word " * 400)
    writer = parallel.chat(
        [{"role": "user", "content": QUESTIONS[1]}], max_tokens=40, sampling=greedy
    )
    next(writer)
    reader = parallel.generate(prompt, max_tokens=1, sampling=greedy)
    waiting = threading.Thread(target=lambda: next(reader))
    before = parallel.stats.n_steps
    waiting.start()
    waiting.join()
    # 400 tokens at 128 a step: the writer went on in each of those steps
    assert parallel.stats.n_steps - before >= 3
    reader.close()
    writer.close()


def test_more_generations_than_sequences_wait_for_their_turn(parallel: Session) -> None:
    greedy = SamplingParams(temperature=0)
    with ThreadPoolExecutor(2 * N_PARALLEL) as pool:
        answers = list(pool.map(lambda _: _ask(parallel, QUESTIONS[0], greedy, 4), range(9)))
    assert len({answer.tokens for answer in answers}) == 1


def test_a_thread_that_holds_every_sequence_is_told(parallel: Session) -> None:
    prompt = parallel.tokenize("Hello")
    held = [parallel.generate(prompt, max_tokens=8) for _ in range(N_PARALLEL)]
    for pieces in held:
        next(pieces)
    with pytest.raises(UsageError, match="a generation of this thread is still open"):
        next(parallel.generate(prompt, max_tokens=8))
    for pieces in held:
        pieces.close()


def test_cancel_ends_all_generations(parallel: Session) -> None:
    started = threading.Barrier(N_PARALLEL + 1)

    def run(question: str) -> str | None:
        pieces = parallel.chat(
            [{"role": "user", "content": question}],
            max_tokens=400,
            sampling=SamplingParams(temperature=0, logit_bias={2: -1000.0}),
        )
        next(pieces)
        started.wait()
        return collect(list(pieces)).finish_reason

    with ThreadPoolExecutor(N_PARALLEL) as pool:
        running = [pool.submit(run, question) for question in QUESTIONS[:N_PARALLEL]]
        started.wait()
        parallel.cancel()
        assert {job.result() for job in running} == {"cancelled"}


def test_a_failing_request_leaves_the_others_alone(parallel: Session) -> None:
    greedy = SamplingParams(temperature=0)
    expected = _ask(parallel, QUESTIONS[0], greedy)
    pieces = parallel.chat(
        [{"role": "user", "content": QUESTIONS[0]}], max_tokens=24, sampling=greedy
    )
    first = next(pieces)
    with pytest.raises(UsageError, match="the grammar does not parse"):
        list(parallel.generate("x", sampling=SamplingParams(grammar="root ::= (")))
    assert collect([first, *pieces]).tokens == expected.tokens


@pytest.mark.parametrize("count", [0, 65])
def test_a_number_of_sequences_out_of_range_is_refused(target_gguf: Path, count: int) -> None:
    with pytest.raises(UsageError, match=f"n_parallel is {count}"):
        Session(target_gguf, n_parallel=count)
