"""Whatever happened to the caches before, an answer is that of a fresh session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
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
    """Two sequences under test, a plain session that tells what is right, and what was asked."""

    tested: Session
    plain: Session
    known: dict[tuple[tuple[int, ...], int | None], tuple[int, ...]] = field(default_factory=dict)

    def expected(self, prompt: tuple[int, ...], seed: int | None) -> tuple[int, ...]:
        key = (prompt, seed)
        if key not in self.known:
            self.plain.reset()
            pieces = self.plain.generate(prompt, max_tokens=N, sampling=_sampling(seed))
            self.known[key] = collect(list(pieces)).tokens
        return self.known[key]


def _sampling(seed: int | None) -> SamplingParams:
    if seed is None:
        return GREEDY
    return SamplingParams(temperature=0.9, seed=seed, repeat_penalty=1.1)


@pytest.fixture(scope="module")
def world(target_gguf: Path, drafter: Path) -> Iterator[_World]:
    with (
        Session(target_gguf, drafter, n_ctx=512, n_threads=1, n_parallel=2) as tested,
        Session(target_gguf, n_ctx=512, n_threads=1) as plain,
    ):
        yield _World(tested, plain)


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


def _apply(
    world: _World, texts: list[list[int]], saved: dict[int, bytes], at: int, step: Any
) -> int:
    kind, *rest = step
    text = texts[at]
    if kind == "append":
        text.extend(rest[0])
    elif kind == "edit":
        position = rest[0] % len(text)
        text[position : position + len(rest[1])] = rest[1]
    elif kind == "rewind":
        del text[1 + rest[0] % len(text) :]
    elif kind == "swap":
        return int(rest[0])
    elif kind == "save":
        saved[rest[0]] = world.tested.save()
    elif kind == "restore" and rest[0] in saved:
        texts[at] = world.tested.restore(saved[rest[0]])[:300] or [50]
    elif kind == "cancel":
        pieces = world.tested.generate(text, max_tokens=N, sampling=GREEDY)
        for _ in range(rest[0]):
            next(pieces, None)
        pieces.close()
    elif kind == "reset":
        world.tested.reset()
    return at


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS, seed=st.one_of(st.none(), st.integers(0, 3)))
def test_any_history_gives_the_tokens_of_a_fresh_run(
    world: _World, steps: list[Any], seed: int | None
) -> None:
    texts: list[list[int]] = [[50, 51, 52], [60, 61], [70]]
    saved: dict[int, bytes] = {}
    at = 0
    for step in steps:
        at = _apply(world, texts, saved, at, step)
        del texts[at][300:]
        pieces = world.tested.generate(texts[at], max_tokens=N, sampling=_sampling(seed))
        tokens = collect(list(pieces)).tokens
        assert tokens == world.expected(tuple(texts[at]), seed)
        texts[at].extend(tokens)


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
