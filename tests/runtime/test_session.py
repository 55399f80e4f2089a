"""The session on the real pair: a drafter changes how fast an answer comes, never the answer."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dflash2_gguf import Generation, SamplingParams, Session, models
from dflash2_gguf.errors import CheckpointError, NativeError, PairError, UsageError
from dflash2_gguf.generate import collect
from dflash2_gguf.machine import Free

pytestmark = pytest.mark.native

GREEDY = SamplingParams(temperature=0)
QUESTION = {"role": "user", "content": "List five healthy breakfast ideas."}


def _answer(pieces: Iterable[Generation]) -> Generation:
    return collect(list(pieces))


@pytest.mark.parametrize("draft", [1, 3, True])
def test_greedy_tokens_do_not_depend_on_the_drafter(session: Session, draft: bool | int) -> None:
    prompt = session.chat_tokens([QUESTION])
    plain = _answer(session.generate(prompt, max_tokens=48, sampling=GREEDY, draft=False))
    session.reset()
    drafted = _answer(session.generate(prompt, max_tokens=48, sampling=GREEDY, draft=draft))
    assert drafted.tokens == plain.tokens
    assert drafted.text == plain.text
    assert drafted.stats is not None
    assert plain.stats is not None
    assert drafted.stats.n_steps < plain.stats.n_steps
    assert plain.stats.n_drafted == 0
    assert not any(plain.from_draft)


def test_sampled_tokens_do_not_depend_on_the_drafter(session: Session) -> None:
    sampling = SamplingParams(temperature=0.7, seed=7)
    plain = _answer(session.chat([QUESTION], max_tokens=32, sampling=sampling, draft=False))
    session.reset()
    drafted = _answer(session.chat([QUESTION], max_tokens=32, sampling=sampling))
    assert drafted.tokens == plain.tokens


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("extra", [{}, {"repeat_penalty": 1.2}, {"grammar": "root ::= [a-z ]+"}])
def test_coupled_tokens_are_the_same_for_every_width(
    session: Session, temperature: float, extra: dict[str, Any]
) -> None:
    sampling = SamplingParams(
        temperature=temperature, top_k=0, min_p=0.0, seed=11, verifier="coupled", **extra
    )
    prompt = session.chat_tokens([QUESTION])
    found = set()
    for draft in (False, 1, 3, 7):
        session.reset()
        answer = _answer(session.generate(prompt, max_tokens=24, sampling=sampling, draft=draft))
        found.add(answer.tokens)
    assert len(found) == 1


@pytest.mark.parametrize("verifier", ["match", "coupled", "reject", "block"])
def test_every_verifier_accepts_drafts_and_keeps_to_the_grammar(
    session: Session, verifier: str
) -> None:
    sampling = SamplingParams(
        temperature=1.0, seed=3, verifier=verifier, grammar='root ::= "yes" | "no"'
    )
    answer = _answer(session.chat([QUESTION], max_tokens=16, sampling=sampling))
    assert answer.text in ("yes", "no")
    assert answer.finish_reason == "stop"
    free = SamplingParams(temperature=1.0, top_k=0, min_p=0.0, seed=3, verifier=verifier)
    answer = _answer(session.chat([QUESTION], max_tokens=64, sampling=free))
    assert answer.stats is not None
    assert answer.stats.n_accepted > 0


def test_a_grammar_that_does_not_parse_is_refused(session: Session) -> None:
    with pytest.raises(UsageError, match="the grammar does not parse"):
        _answer(session.chat([QUESTION], sampling=SamplingParams(grammar="root ::= (")))


def test_automatic_width_counts_its_decisions_and_gives_the_same_tokens(
    target_gguf: Path, drafter: Path, session: Session
) -> None:
    expected = _answer(session.chat([QUESTION], max_tokens=48, sampling=GREEDY))
    with Session(target_gguf, drafter, n_ctx=1024, n_threads=1) as automatic:
        answer = _answer(automatic.chat([QUESTION], max_tokens=48, sampling=GREEDY))
    assert answer.tokens == expected.tokens
    assert answer.stats is not None
    assert sum(answer.stats.width_reasons.values()) == answer.stats.n_steps
    assert answer.stats.width_reasons["explores"] > 0
    assert sum(answer.stats.verified_width) == answer.stats.n_steps


def test_statistics_add_up_with_what_was_streamed(session: Session) -> None:
    pieces = list(session.chat([QUESTION], max_tokens=48, sampling=GREEDY))
    answer, stats = collect(pieces), pieces[-1].stats
    assert stats is not None
    assert all(piece.stats is None for piece in pieces[:-1])
    assert stats.n_generated == len(answer.tokens) == len(answer.from_draft) == 48
    assert stats.n_accepted == sum(answer.from_draft) == sum(stats.accepted_at)
    assert stats.n_drafted == sum(stats.drafted_at)
    assert stats.n_prompt + stats.n_prompt_reused == len(session.chat_tokens([QUESTION]))
    assert stats.acceptance_length > 1
    assert stats.draft_failures == {"cache": 0, "compute": 0, "values": 0}


def test_max_tokens_cuts_inside_a_block(session: Session) -> None:
    whole = list(session.chat([QUESTION], max_tokens=40, sampling=GREEDY))
    lengths = [len(piece.tokens) for piece in whole]
    first_block = next(i for i, n in enumerate(lengths) if n > 1)
    limit = sum(lengths[:first_block]) + 1
    session.reset()
    cut = _answer(session.chat([QUESTION], max_tokens=limit, sampling=GREEDY))
    assert cut.tokens == collect(whole).tokens[:limit]
    assert cut.finish_reason == "length"


def test_a_stop_string_cuts_inside_a_block(session: Session) -> None:
    whole = list(session.chat([QUESTION], max_tokens=40, sampling=GREEDY))
    block = next(piece for piece in whole if len(piece.tokens) > 2)
    before = "".join(piece.text for piece in whole[: whole.index(block)])
    stop = session.detokenize(block.tokens[1:2])
    expected = (before + block.text).partition(stop)[0]
    session.reset()
    cut = _answer(session.chat([QUESTION], max_tokens=40, sampling=GREEDY, stop=[stop]))
    assert cut.text == expected
    assert cut.finish_reason == "stop"
    assert stop not in cut.text


def test_an_answer_ends_at_its_end_token(session: Session) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    answer = _answer(session.chat(messages, max_tokens=300, sampling=GREEDY))
    assert answer.finish_reason == "stop"
    assert session.detokenize(answer.tokens[-1:], special=True) == "<|im_end|>"
    assert "<|im_end|>" not in answer.text


def test_the_next_turn_evaluates_only_what_is_new(session: Session) -> None:
    first = _answer(session.chat([QUESTION], max_tokens=40, sampling=GREEDY))
    messages = [
        QUESTION,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And lunch?"},
    ]
    second = _answer(session.chat(messages, max_tokens=8, sampling=GREEDY))
    assert second.stats is not None
    said = len(session.chat_tokens([QUESTION])) + len(first.tokens)
    assert second.stats.n_prompt_reused >= said - 1
    assert second.stats.n_prompt < 24


def test_a_reused_cache_gives_the_same_answer_as_an_empty_one(session: Session) -> None:
    first = _answer(session.chat([QUESTION], max_tokens=40, sampling=GREEDY))
    messages = [
        QUESTION,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And lunch?"},
    ]
    prompt = session.chat_tokens(messages)
    reused = _answer(session.generate(prompt, max_tokens=24, sampling=GREEDY))
    assert reused.stats is not None
    assert reused.stats.n_prompt_reused > 0
    session.reset()
    fresh = _answer(session.generate(prompt, max_tokens=24, sampling=GREEDY))
    assert fresh.stats is not None
    assert fresh.stats.n_prompt_reused == 0
    assert reused.tokens == fresh.tokens


def test_the_context_may_fill_up_inside_a_block(target_gguf: Path, drafter: Path) -> None:
    with Session(target_gguf, drafter, n_ctx=256, n_threads=1, draft_max=7) as small:
        prompt = small.tokenize(", ".join(map(str, range(1, 55))))
        answer = _answer(small.generate(prompt, sampling=GREEDY))
        plain = _answer(small.generate(prompt, sampling=GREEDY, draft=False))
    assert answer.finish_reason == plain.finish_reason == "context"
    assert answer.tokens == plain.tokens
    assert answer.stats is not None
    assert answer.stats.n_accepted > 0
    assert len(prompt) + len(answer.tokens) in (256, 257)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(session: Session) -> None:
    with pytest.raises(UsageError, match="has 1024 tokens, the context 1024") as caught:
        session.generate([1] * 1024)
    assert caught.value.hint is not None
    assert "--ctx-size" in caught.value.hint


@pytest.mark.parametrize("prompt", ["", [], [-1], [49152]])
def test_a_prompt_that_cannot_be_is_refused(session: Session, prompt: str | list[int]) -> None:
    with pytest.raises(UsageError):
        session.generate(prompt)


def test_cancel_from_another_thread_ends_the_answer_and_keeps_the_session(
    session: Session,
) -> None:
    pieces = session.chat([QUESTION], sampling=GREEDY)
    first = next(pieces)
    thread = threading.Thread(target=session.cancel)
    thread.start()
    thread.join()
    rest = list(pieces)
    assert rest[-1].finish_reason == "cancelled"
    assert len(rest) <= 2
    again = _answer(session.chat([QUESTION], max_tokens=8, sampling=GREEDY))
    assert again.finish_reason == "length"
    assert again.tokens[0] == first.tokens[0]


def test_cancel_without_an_answer_in_progress_changes_nothing(session: Session) -> None:
    session.cancel()
    answer = _answer(session.chat([QUESTION], max_tokens=4, sampling=GREEDY))
    assert answer.finish_reason == "length"


def test_an_abandoned_answer_leaves_the_session_usable(session: Session) -> None:
    for _ in session.chat([QUESTION], sampling=GREEDY):
        break
    answer = _answer(session.chat([QUESTION], max_tokens=4, sampling=GREEDY))
    assert len(answer.tokens) == 4


def test_a_second_answer_in_the_same_thread_is_refused_not_deadlocked(session: Session) -> None:
    pieces = session.chat([QUESTION], sampling=GREEDY)
    next(pieces)
    with pytest.raises(UsageError, match="still open"):
        next(session.chat([QUESTION]))
    pieces.close()
    assert _answer(session.chat([QUESTION], max_tokens=2, sampling=GREEDY)).tokens


def test_answers_of_two_threads_wait_for_each_other(session: Session) -> None:
    prompt = session.chat_tokens([QUESTION])
    alone = _answer(session.generate(prompt, max_tokens=12, sampling=GREEDY)).tokens
    found: list[tuple[int, ...]] = []

    def ask() -> None:
        found.append(_answer(session.generate(prompt, max_tokens=12, sampling=GREEDY)).tokens)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 3


def test_closing_ends_an_open_answer(target_gguf: Path) -> None:
    session = Session(target_gguf, n_ctx=256, n_threads=1)
    pieces = session.chat([QUESTION], sampling=GREEDY)
    next(pieces)
    session.close()
    assert [piece.finish_reason for piece in pieces] == ["cancelled"]
    session.close()
    with pytest.raises(UsageError, match="closed"):
        session.tokenize("x")


def test_tokens_and_text_convert_both_ways(session: Session) -> None:
    text = "Grüße, 世界! <|im_end|> 😀"
    assert session.detokenize(session.tokenize(text), special=True) == text
    assert session.tokenize("<|im_end|>") != session.tokenize("<|im_end|>", parse_special=False)
    with pytest.raises(UsageError, match="not in the vocabulary"):
        session.detokenize([49152])
    with pytest.raises(UsageError, match="Unicode"):
        session.tokenize("\udc80")


def test_memory_names_every_part(session: Session) -> None:
    memory = session.memory
    assert memory.target_weights > 90 * 2**20
    assert memory.target_cache == 1024 * 30 * 2 * 3 * 64 * 2
    assert 0 < memory.draft_weights < memory.target_weights
    assert memory.draft_cache > 0
    assert memory.total > memory.target_weights + memory.draft_weights


def test_weights_report_their_progress(target_gguf: Path) -> None:
    seen: list[float] = []
    Session(target_gguf, n_ctx=256, n_threads=1, on_progress=seen.append).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_loading_can_be_interrupted(target_gguf: Path) -> None:
    def interrupt(_fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Session(target_gguf, n_ctx=256, n_threads=1, on_progress=interrupt)


def test_a_truncated_target_is_found_before_it_is_loaded(
    tmp_path: Path, target_gguf: Path, drafter: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(target_gguf.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="truncated: 1000 bytes are missing"):
        Session(cut, drafter)


def test_a_target_as_drafter_is_refused(target_gguf: Path) -> None:
    with pytest.raises(PairError, match="is not a drafter"):
        Session(target_gguf, target_gguf)


def test_a_context_that_cannot_fit_into_memory_is_refused_before_it_is_taken(
    target_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "free_memory", lambda: Free(host=2**30))
    with pytest.raises(NativeError, match=r"need 1\.\d GiB, 1\.0 GiB are free") as caught:
        Session(target_gguf, n_ctx=2**16)
    assert caught.value.hint is not None
    assert "--ctx-size" in caught.value.hint


@pytest.mark.parametrize(
    "option", ["n_ctx", "n_batch", "n_ubatch", "n_threads", "draft_max", "n_gpu_layers"]
)
def test_an_option_out_of_range_is_refused_by_name(target_gguf: Path, option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} is -1"):
        Session(target_gguf, **{option: -1})  # type: ignore[arg-type]
