"""Whatever happened to the caches before, an answer is that of a fresh session.

Rows of a cache that were evaluated in other batches are rounded otherwise, with a drafter or
without one. So the tokens of a fresh session are promised by exact mode alone; the default promises
those of a session without drafter that went through the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dflash2_gguf import SamplingParams, Session
from dflash2_gguf.errors import CheckpointError, NativeError, OutputError, StateError, UsageError
from dflash2_gguf.generate import collect

pytestmark = pytest.mark.native

GREEDY = SamplingParams(temperature=0)
PROMPT = "The quick brown fox jumps over the lazy dog. The quick"
N = 12


@dataclass
class _World:
    """Two sequences under test and a plain session that starts afresh for every answer."""

    tested: Session
    plain: Session
    known: dict[tuple[tuple[int, ...], int | None], tuple[int, ...]] = field(default_factory=dict)

    def expected(self, prompt: tuple[int, ...], seed: int | None) -> tuple[int, ...]:
        key = (prompt, seed)
        if key not in self.known:
            self.plain.reset()
            self.known[key] = _answer(self.plain, list(prompt), seed)
        return self.known[key]


class _History:
    """Three conversations in one session, the last states saved of it, and which one goes on."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.texts: list[list[int]] = [[50, 51, 52], [60, 61], [70]]
        self.saved: dict[int, bytes] = {}
        self.at = 0

    @property
    def text(self) -> list[int]:
        return self.texts[self.at]

    def apply(self, kind: str, *given: Any) -> None:
        text = self.text
        if kind == "append":
            text.extend(given[0])
        elif kind == "edit":
            position = given[0] % len(text)
            text[position : position + len(given[1])] = given[1]
        elif kind == "rewind":
            del text[1 + given[0] % len(text) :]
        elif kind == "swap":
            self.at = given[0]
        elif kind == "save":
            self.saved[given[0]] = self.session.save()
        elif kind == "restore" and given[0] in self.saved:
            text[:] = self.session.restore(self.saved[given[0]]) or [50]
        elif kind == "cancel":
            pieces = self.session.generate(text, max_tokens=N, sampling=GREEDY)
            for _ in range(given[0]):
                next(pieces, None)
            pieces.close()
        elif kind == "reset":
            self.session.reset()
        del self.text[300:]

    def answer(self, seed: int | None) -> tuple[int, ...]:
        """The answer to the conversation that goes on, which becomes part of it."""
        tokens = _answer(self.session, self.text, seed)
        self.text.extend(tokens)
        return tokens


def _answer(session: Session, prompt: list[int], seed: int | None) -> tuple[int, ...]:
    pieces = session.generate(prompt, max_tokens=N, sampling=_sampling(seed))
    return collect(list(pieces)).tokens


def _sampling(seed: int | None) -> SamplingParams:
    if seed is None:
        return GREEDY
    return SamplingParams(temperature=0.9, seed=seed, repeat_penalty=1.1)


@pytest.fixture(scope="module")
def world(target_gguf: Path, drafter: Path) -> Iterator[_World]:
    with (
        Session(target_gguf, drafter, n_ctx=512, n_threads=1, n_parallel=2, exact=True) as tested,
        Session(target_gguf, n_ctx=512, n_threads=1) as plain,
    ):
        yield _World(tested, plain)


@pytest.fixture(scope="module")
def twins(target_gguf: Path, drafter: Path) -> Iterator[tuple[Session, Session]]:
    with (
        Session(target_gguf, drafter, n_ctx=512, n_threads=1, n_parallel=2) as drafting,
        Session(target_gguf, n_ctx=512, n_threads=1, n_parallel=2) as plain,
    ):
        yield drafting, plain


TOKENS = st.lists(st.integers(20, 400), min_size=1, max_size=40)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), TOKENS),
        st.tuples(st.just("edit"), st.integers(0, 10_000), TOKENS),
        st.tuples(st.just("rewind"), st.integers(0, 10_000)),
        st.tuples(st.just("swap"), st.integers(0, 2)),
        st.tuples(st.just("save"), st.integers(0, 2)),
        st.tuples(st.just("restore"), st.integers(0, 2)),
        st.tuples(st.just("cancel"), st.integers(1, 6)),
        st.tuples(st.just("reset")),
    ),
    min_size=1,
    max_size=8,
)


HISTORIES = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# Its last answer is decided by less than what reusing the rows of the others changes.
COUNTING = [("append", tokens) for tokens in ([20], [186, 317, 270], *[[20]] * 5)]


@HISTORIES
@given(steps=STEPS, seed=st.one_of(st.none(), st.integers(0, 3)))
@example(steps=COUNTING, seed=None)
def test_any_history_gives_the_tokens_of_a_fresh_run(
    world: _World, steps: list[Any], seed: int | None
) -> None:
    history = _History(world.tested)
    for step in steps:
        history.apply(*step)
        prompt = tuple(history.text)
        assert history.answer(seed) == world.expected(prompt, seed)


@HISTORIES
@given(steps=STEPS, seed=st.one_of(st.none(), st.integers(0, 3)))
@example(steps=COUNTING, seed=None)
def test_any_history_gives_the_tokens_of_the_same_history_without_drafter(
    twins: tuple[Session, Session], steps: list[Any], seed: int | None
) -> None:
    for session in twins:
        session.reset()
    drafting, plain = map(_History, twins)
    for step in steps:
        drafting.apply(*step)
        plain.apply(*step)
        assert drafting.text == plain.text
        assert drafting.answer(seed) == plain.answer(seed)


def test_an_interrupted_generation_goes_on_in_another_session(
    session: Session, target_gguf: Path, drafter: Path, tmp_path: Path
) -> None:
    sampling = SamplingParams(
        temperature=1.0, seed=4, repeat_penalty=1.2, grammar="root ::= [a-z ]+"
    )
    whole = collect(list(session.generate(PROMPT, max_tokens=40, sampling=sampling)))
    session.reset()
    pieces = session.generate(PROMPT, max_tokens=40, sampling=sampling)
    told = [next(pieces) for _ in range(5)]
    session.save_file(tmp_path / "state")
    pieces.close()
    for draft in (drafter, None):
        with Session(target_gguf, draft, n_ctx=512, n_threads=1) as other:
            other.restore(tmp_path / "state")
            rest = collect(list(other.resume()))
        assert collect(told).tokens + rest.tokens == whole.tokens
        assert rest.finish_reason == whole.finish_reason == "length"


def test_a_state_of_a_session_without_drafter_gets_its_window_back(
    session: Session, target_gguf: Path
) -> None:
    prompt = session.tokenize(PROMPT * 8)
    with Session(target_gguf, n_ctx=512, n_threads=1) as plain:
        expected = collect(list(plain.generate(prompt, max_tokens=40, sampling=GREEDY)))
        plain.reset()
        pieces = plain.generate(prompt, max_tokens=40, sampling=GREEDY)
        told = [next(pieces) for _ in range(4)]
        state = plain.save()
        pieces.close()
    fresh = collect(list(session.generate(prompt, max_tokens=40, sampling=GREEDY)))
    session.reset()
    session.restore(state)
    rest = collect(list(session.resume()))
    assert collect(told).tokens + rest.tokens == expected.tokens
    assert rest.stats is not None
    assert fresh.stats is not None
    assert rest.stats.acceptance_rate > 0.5 * fresh.stats.acceptance_rate


def test_a_restored_conversation_is_not_read_again(session: Session) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    answer = collect(list(session.chat(messages, max_tokens=20, sampling=GREEDY)))
    state = session.save()
    messages += [
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "Again."},
    ]
    expected = collect(list(session.chat(messages, max_tokens=12, sampling=GREEDY)))
    session.reset()
    session.restore(state)
    again = list(session.chat(messages, max_tokens=12, sampling=GREEDY))
    assert collect(again).tokens == expected.tokens
    assert again[-1].stats is not None
    assert again[-1].stats.n_prompt < 20


@pytest.fixture(scope="module")
def state(open_session: Session) -> bytes:
    open_session.reset()
    list(open_session.generate(PROMPT, max_tokens=8, sampling=GREEDY))
    return open_session.save()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_damaged_state_is_refused_and_nothing_is_lost(
    open_session: Session, state: bytes, data: st.DataObject
) -> None:
    if data.draw(st.booleans()):
        damaged = state[: data.draw(st.integers(0, len(state) - 1))]
    else:
        at = data.draw(st.integers(0, len(state) - 1))
        damaged = state[:at] + bytes([state[at] ^ data.draw(st.integers(1, 255))]) + state[at + 1 :]
    before = open_session.save()
    with pytest.raises(StateError) as caught:
        open_session.restore(damaged)
    assert caught.value.hint is not None
    assert open_session.save() == before


def test_a_state_of_another_target_is_refused(
    target_gguf: Path, state: bytes, tmp_path: Path
) -> None:
    tuned = Path(shutil.copy(target_gguf, tmp_path / "tuned.gguf"))
    norm = next(t for t in gguf.GGUFReader(tuned, "r+").tensors if t.name == "output_norm.weight")
    norm.data[:] *= 1.01
    with (
        Session(tuned, n_ctx=128, n_threads=1) as other,
        pytest.raises(StateError, match="of another target"),
    ):
        other.restore(state)


def test_a_state_of_another_number_of_sequences_is_refused(target_gguf: Path, state: bytes) -> None:
    with (
        Session(target_gguf, n_ctx=128, n_threads=1, n_parallel=2) as other,
        pytest.raises(StateError, match=r"of another number of sequences \(n_parallel\)"),
    ):
        other.restore(state)


def test_a_state_longer_than_the_context_is_refused_with_both_numbers(
    target_gguf: Path, state: bytes
) -> None:
    with (
        Session(target_gguf, n_ctx=16, n_threads=1) as small,
        pytest.raises(NativeError, match=r"has \d+ tokens, the context holds 16"),
    ):
        small.restore(state)


def test_a_file_that_cannot_be_read_or_written_is_an_error_of_its_own(
    session: Session, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        session.restore(tmp_path / "nothing")
    with pytest.raises(OutputError, match="cannot write"):
        session.save_file(tmp_path / "no" / "folder")
    session.save_file(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_resume_without_an_unfinished_generation_is_refused(session: Session) -> None:
    list(session.generate(PROMPT, max_tokens=2, sampling=GREEDY))
    with pytest.raises(UsageError, match="there is no unfinished generation"):
        next(session.resume())
