"""``dflash2-run``: a conversation in the terminal, or answers to the lines of a pipe."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from dflash2_gguf.errors import DFlash2Error
from dflash2_gguf.launch import Launch, open_session
from dflash2_gguf.sampling import SamplingParams
from dflash2_gguf.session import Generation, Session
from dflash2_gguf.stats import Memory, Stats
from dflash2_gguf.ui import Terminal
from dflash2_gguf.words import counted

__all__ = ["ChatSettings", "chat"]

_PROMPT = "> "
_HELP = {
    "/stats": "what the drafter did, how fast it was, and the memory in use",
    "/reset": "forget the conversation",
    "/help": "this list",
    "/exit": "leave; so do Ctrl-D, and Ctrl-C at the prompt",
    "Ctrl-C": "stop the answer and keep the conversation",
}


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """How to answer; ``max_tokens`` bounds one answer."""

    system: str | None = None
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)


def chat(launch: Launch, settings: ChatSettings, terminal: Terminal) -> int:
    """Talk until /exit or the end of input; the exit code is 0. KeyboardInterrupt leaves too."""
    with open_session(launch, terminal) as session:
        _greet(launch, session, terminal)
        conversation = _Conversation(session, settings, terminal)
        while (line := terminal.read_line(_PROMPT)) is not None:
            command = line.strip()
            if command == "/exit":
                break
            if command.startswith("/") and command[1:].isalpha():
                conversation.command(command)
            elif command:
                conversation.answer(line)
    return 0


def _greet(launch: Launch, session: Session, terminal: Terminal) -> None:
    if not terminal.is_interactive:
        return
    tokens = counted(session.draft_max, "token")
    drafts = f"drafts up to {tokens} at once" if session.draft_max else "no drafter"
    terminal.note(f"{launch.target.name}: {drafts}, context {session.n_ctx}; /help lists commands")


class _Conversation:
    """The messages so far and what can be done with them."""

    def __init__(self, session: Session, settings: ChatSettings, terminal: Terminal) -> None:
        self._session = session
        self._settings = settings
        self._terminal = terminal
        self._messages = self._opening()

    def command(self, name: str) -> None:
        """Run /stats, /reset or /help."""
        if name == "/stats":
            self._terminal.table(_report(self._session.stats, self._session.memory))
        elif name == "/reset":
            self._session.reset()
            self._messages = self._opening()
            self._terminal.note("the conversation is forgotten")
        elif name == "/help":
            self._terminal.table(_HELP)
        else:
            self._terminal.warning(f"there is no command {name}; /help lists them")

    def answer(self, question: str) -> None:
        """Stream the answer; the pair is kept unless nothing was answered."""
        messages = [*self._messages, {"role": "user", "content": question}]
        try:
            pieces = self._session.chat(
                messages, max_tokens=self._settings.max_tokens, sampling=self._settings.sampling
            )
            text, last = self._stream(pieces)
        except DFlash2Error as error:
            self._terminal.error(error)
            return
        if text:
            self._messages = [*messages, {"role": "assistant", "content": text}]
        if last.finish_reason == "context":
            self._terminal.warning("the context is full; /reset starts over")
        for warning in (last.stats or Stats()).warnings():
            self._terminal.warning(warning)

    def _opening(self) -> list[dict[str, str]]:
        system = self._settings.system
        return [{"role": "system", "content": system}] if system else []

    def _stream(self, pieces: Generator[Generation, None, None]) -> tuple[str, Generation]:
        """Show the pieces as they come. Ctrl-C stops them, a second one leaves the chat."""
        text, last = "", Generation("", finish_reason="cancelled")
        with _interrupts_into(queue.SimpleQueue()) as events:
            worker = threading.Thread(target=_feed, args=(pieces, events), daemon=True)
            worker.start()
            try:
                while (event := events.get()) is not None:
                    if isinstance(event, Generation):
                        self._terminal.write(event.text)
                        text, last = text + event.text, event
                    elif isinstance(event, KeyboardInterrupt):
                        self._session.cancel()
                    else:
                        raise event
            finally:
                self._session.cancel()
                worker.join()
        self._terminal.write("\n")
        return text, last


# pieces as they come, errors and interrupts in between, None at the end
_Events = queue.SimpleQueue[Generation | BaseException | None]


def _feed(pieces: Generator[Generation, None, None], events: _Events) -> None:
    """Runs beside the main thread, which alone gets Ctrl-C: a step may take long."""
    try:
        for piece in pieces:
            events.put(piece)
        events.put(None)
    except BaseException as error:  # raised again in the main thread
        events.put(error)


@contextmanager
def _interrupts_into(events: _Events) -> Iterator[_Events]:
    """Make the first Ctrl-C an event; it may come while text is being written."""
    seen: list[int] = []

    def handle(signum: int, _frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(signum)
        events.put(KeyboardInterrupt())  # SimpleQueue.put is safe in a handler

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield events
    finally:
        signal.signal(signal.SIGINT, before)


def _reasons(stats: Stats) -> str:
    return ", ".join(f"{count} {why}" for why, count in stats.width_reasons.items() if count)


def _report(stats: Stats, memory: Memory) -> dict[str, str]:
    positions = " ".join(f"{share:.2f}" for share in stats.position_acceptance)
    return {
        "tokens": f"{stats.n_generated} in {counted(stats.n_steps, 'verification step')}",
        "prompt": f"{counted(stats.n_prompt, 'token')} evaluated, {stats.n_prompt_reused} reused",
        "acceptance length": f"{stats.acceptance_length:.2f} tokens per step",
        "drafted": f"{stats.n_drafted}, accepted {stats.n_accepted} ({stats.acceptance_rate:.0%})",
        "by position": positions or "nothing drafted",
        "steps by width": " ".join(map(str, stats.verified_width)) or "nothing verified",
        "width chosen": _reasons(stats) or "fixed",
        "speed": f"{stats.tokens_per_second:.1f} tokens/s",
        "time": f"draft {stats.draft_seconds:.2f} s, verify {stats.verify_seconds:.2f} s, "
        f"inject {stats.inject_seconds:.2f} s, sample {stats.sample_seconds:.2f} s, "
        f"prompt {stats.prompt_seconds:.2f} s",
        "memory": f"{memory.total / 2**20:.0f} MiB, of it target weights "
        f"{memory.target_weights / 2**20:.0f}, drafter weights {memory.draft_weights / 2**20:.0f}",
    }
