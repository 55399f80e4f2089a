"""Whole conversations, in a terminal and through a pipe."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from dflash2_gguf import SamplingParams, Session
from dflash2_gguf.generate import collect
from tests.runtime.terminal import ENVIRONMENT, PROGRAM, terminal

pytestmark = pytest.mark.native

GOLDEN = Path(__file__).parents[1] / "golden"
STORY = "Write a short story about a dog who finds a ball."


@pytest.fixture
def arguments(target_gguf: Path, drafter: Path) -> list[str]:
    """The chat on the real pair, greedy, with a width that does not depend on the clock."""
    pair = ["-m", str(target_gguf), "-d", str(drafter)]
    return [*pair, "-c", "1024", "-t", "1", "--temp", "0", "--draft-max", "7"]


def _answers(session: Session, questions: list[str], max_tokens: int) -> list[str]:
    """What the Python API answers to the same questions in turn."""
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        pieces = session.chat(
            messages, max_tokens=max_tokens, sampling=SamplingParams(temperature=0)
        )
        messages.append({"role": "assistant", "content": collect(list(pieces)).text})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def _masked(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", text)


def test_a_conversation_in_a_terminal(session: Session, arguments: list[str]) -> None:
    answers = _answers(session, ["Say hello.", "And goodbye?"], 24)
    with terminal([*arguments, "-n", "24"]) as screen:
        at = 0
        for line in ("Say hello.", "And goodbye?", "/stats", "/help", "/reset", "/what", "/exit"):
            at = screen.wait_for("> ", after=at)
            screen.press(f"{line}\n")
            at = screen.wait_for(f"{line}\n", after=at)
        assert screen.end() == 0
    expected = (GOLDEN / "chat.txt").read_text(encoding="utf-8")
    expected = expected.replace("{answer 1}", answers[0]).replace("{answer 2}", answers[1])
    assert _masked(screen.shown) == _masked(expected)


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(session: Session, arguments: list[str]) -> None:
    (story,) = _answers(session, [STORY], 100)
    with terminal([*arguments, "-n", "100"]) as screen:
        at = screen.wait_for("> ")
        screen.press(f"{STORY}\n")
        at = screen.wait_for(story[:20], after=at)
        screen.press("\x03")
        end = screen.wait_for("\n> ", after=at)
        told = screen.shown[at - 20 : end - len("\n> ")].replace("^C", "")
        assert 20 <= len(told) < len(story)
        assert story.startswith(told)
        screen.press("Say hello.\n")
        at = screen.wait_for("Say hello.\n", after=end)
        at = screen.wait_for("\n> ", after=at)
        screen.press("/exit\n")
        assert screen.end() == 0


def test_ctrl_c_at_the_prompt_leaves(arguments: list[str]) -> None:
    with terminal(arguments) as screen:
        screen.wait_for("> ")
        screen.wait_until_it_sleeps()
        screen.press("\x03")
        assert screen.end() == 130
        assert "Traceback" not in screen.shown


def test_ctrl_d_at_the_prompt_leaves(arguments: list[str]) -> None:
    with terminal(arguments) as screen:
        screen.wait_for("> ")
        screen.press("\x04")
        assert screen.end() == 0


def test_a_question_too_long_for_the_context_is_refused_and_the_chat_goes_on(
    arguments: list[str],
) -> None:
    with terminal([*arguments, "-c", "64", "-n", "8"]) as screen:
        at = screen.wait_for("> ")
        screen.press("word " * 100 + "\n")
        at = screen.wait_for("error: the prompt has 1", after=at)
        at = screen.wait_for("hint: use a larger context", after=at)
        at = screen.wait_for("\n> ", after=at)
        screen.press("Hi\n")
        at = screen.wait_for("\n> ", after=at + 3)
        assert "error" not in screen.shown[at - 40 : at]
        screen.press("/exit\n")
        assert screen.end() == 0


def test_through_a_pipe_answers_are_all_there_is_on_stdout(
    session: Session, arguments: list[str]
) -> None:
    answers = _answers(session, ["Say hello.", "And goodbye?"], 16)
    done = subprocess.run(
        [*PROGRAM, *arguments, "-n", "16"],
        input="Say hello.\n\nAnd goodbye?\n",
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=True,
    )
    assert done.stdout == "".join(f"{answer}\n" for answer in answers)
    assert done.stderr == ""


def test_the_system_message_reaches_the_model(session: Session, arguments: list[str]) -> None:
    system = {"role": "system", "content": "Answer in French."}
    pieces = session.chat(
        [system, {"role": "user", "content": "Hello!"}],
        max_tokens=12,
        sampling=SamplingParams(temperature=0),
    )
    done = subprocess.run(
        [*PROGRAM, *arguments, "-n", "12", "--system", "Answer in French."],
        input="Hello!\n",
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=True,
    )
    assert done.stdout == collect(list(pieces)).text + "\n"
