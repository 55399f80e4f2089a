"""``dflash2-run``: a conversation in the terminal, or answers to the lines of a pipe."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field

from dflash2_gguf.errors import DFlash2Error
from dflash2_gguf.launch import Launch, open_session
from dflash2_gguf.sampling import SamplingParams
from dflash2_gguf.session import Generation, Session
from dflash2_gguf.stats import Memory, Stats
from dflash2_gguf.ui import Terminal

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
    drafts = (
        f"up to {session.draft_max} tokens drafted at once" if session.draft_max else "no drafter"
    )
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
        """Show the pieces as they come. Ctrl-C stops them at once, a second one leaves the chat."""
        text, last = "", Generation("", finish_reason="cancelled")
        worker = _Worker(pieces)
        try:
            while (piece := self._next(worker)) is not None:
                self._terminal.write(piece.text)
                text, last = text + piece.text, piece
        finally:
            self._session.cancel()
            worker.join()
        self._terminal.write("\n")
        return text, last

    def _next(self, worker: _Worker) -> Generation | None:
        with suppress(KeyboardInterrupt):
            return worker.next()
        self._session.cancel()
        return worker.next()


class _Worker:
    """Runs a generation beside the main thread, which alone gets Ctrl-C: steps may take long."""

    def __init__(self, pieces: Generator[Generation, None, None]) -> None:
        self._pieces = pieces
        self._queue: queue.Queue[Generation | BaseException | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="dflash2-generate", daemon=True)
        self._thread.start()

    def next(self) -> Generation | None:
        """The next piece, None after the last; raises what the generation raised."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def join(self) -> None:
        """Wait for the end, which follows soon after Session.cancel."""
        self._thread.join()

    def _run(self) -> None:
        try:
            for piece in self._pieces:
                self._queue.put(piece)
            self._queue.put(None)
        except BaseException as error:  # raised again in the main thread
            self._queue.put(error)


def _report(stats: Stats, memory: Memory) -> dict[str, str]:
    positions = " ".join(f"{share:.2f}" for share in stats.position_acceptance)
    return {
        "tokens": f"{stats.n_generated} in {stats.n_steps} verification steps",
        "prompt": f"{stats.n_prompt} tokens evaluated, {stats.n_prompt_reused} reused",
        "acceptance length": f"{stats.acceptance_length:.2f} tokens per step",
        "drafted": f"{stats.n_drafted}, accepted {stats.n_accepted} ({stats.acceptance_rate:.0%})",
        "by position": positions or "nothing drafted",
        "speed": f"{stats.tokens_per_second:.1f} tokens/s",
        "time": f"draft {stats.draft_seconds:.2f} s, verify {stats.verify_seconds:.2f} s, "
        f"inject {stats.inject_seconds:.2f} s, sample {stats.sample_seconds:.2f} s, "
        f"prompt {stats.prompt_seconds:.2f} s",
        "memory": f"{memory.total / 2**20:.0f} MiB, of it target weights "
        f"{memory.target_weights / 2**20:.0f}, drafter weights {memory.draft_weights / 2**20:.0f}",
    }
