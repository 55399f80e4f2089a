"""Streamed text: whole characters only, and never a part of a stop string."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash2_gguf.errors import UsageError
from dflash2_gguf.streaming import TextStream


def _cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def _run(stream: TextStream, parts: list[bytes]) -> list[str]:
    return [*(stream.feed(part) for part in parts), stream.finish()]


@given(st.text(), st.lists(st.integers(min_value=0)))
def test_any_cut_of_utf8_gives_the_same_text(text: str, cuts: list[int]) -> None:
    assert "".join(_run(TextStream(), _cut(text.encode(), cuts))) == text


@given(st.binary(), st.lists(st.integers(min_value=0)))
def test_any_cut_of_any_bytes_gives_what_decoding_at_once_gives(
    data: bytes, cuts: list[int]
) -> None:
    shown = "".join(_run(TextStream(), _cut(data, cuts)))
    assert shown == data.decode("utf-8", errors="replace")


def test_a_character_is_shown_when_it_is_complete() -> None:
    assert _run(TextStream(), [b"\xf0\x9f", b"\x98", b"\x80!"]) == ["", "", "😀!", ""]


def test_a_character_that_never_gets_complete_is_replaced() -> None:
    assert _run(TextStream(), [b"a\xf0\x9f"]) == ["a", "\ufffd"]


@given(
    st.text(alphabet="ab", max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(min_value=0), max_size=4),
)
def test_text_ends_before_the_stop_string_that_gets_complete_first(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stream = TextStream(stops)
    shown = "".join(_run(stream, _cut(text.encode(), cuts)))
    assert stream.stopped == any(stop in text for stop in stops)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if not stream.stopped:
        assert shown == text


def test_a_stop_string_may_span_pieces_and_is_held_back_meanwhile() -> None:
    stream = TextStream(["<end>"])
    assert _run(stream, [b"one <", b"en", b"d> two", b"three"]) == ["one ", "", "", "", ""]
    assert stream.stopped


def test_what_only_began_like_a_stop_string_is_shown() -> None:
    assert _run(TextStream(["<end>"]), [b"a <e", b"lse"]) == ["a ", "<else", ""]
    assert _run(TextStream(["<end>"]), [b"a <en"]) == ["a ", "<en"]


@pytest.mark.parametrize("stop", ["end", [""], [b"end"], [3]])
def test_stop_strings_that_make_no_sense_are_refused(stop: object) -> None:
    with pytest.raises(UsageError):
        TextStream(stop)  # type: ignore[arg-type]
