"""Generations that share one engine: which sequence each gets, and who steps.

There is no thread of its own. Whoever waits for a token takes the next step for all, and what it
brings the others lies ready for them; when nobody waits, nothing runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile

from dflash2_gguf.engine import AbortedError, Engine, Step
from dflash2_gguf.errors import UsageError

__all__ = ["Scheduler", "Ticket"]


@dataclass
class Ticket:
    """A generation in progress: its sequence, and steps that nobody has taken yet."""

    seq: int
    owner: int
    steps: deque[Step] = field(default_factory=deque)
    cancelled: bool = False


@dataclass
class _Idle:
    """A sequence between generations: what its caches hold and when it was used last."""

    tokens: Sequence[int] = ()
    used: int = 0


class Scheduler:
    """Sequences of an engine, given to generations and taken back. Thread-safe.

    A generation gets the idle sequence whose caches share the longest beginning with its prompt,
    unless that would throw away more than it saves; else the one that was not used for longest.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Condition()
        self._busy = False  # somebody is inside the engine
        self._urgent = 0  # calls that must not wait behind step after step
        self._closed = False
        self._clock = 0
        self._idle = {seq: _Idle() for seq in range(engine.n_parallel)}
        self._open: dict[int, Ticket] = {}
        self._waiting: deque[object] = deque()
        self.latest = 0  # the sequence that was worked on last

    def open(self, prompt: Sequence[int], begin: Callable[[int], object]) -> Ticket:
        """A ticket for ``prompt`` on a sequence that ``begin(seq)`` has started.

        Waits, first come first served, until a sequence is free. Raises UsageError when all are
        held by generations of this very thread, and what ``begin`` raises.
        """
        seq = self._take(lambda: self._choose(prompt))
        return self._start(seq, begin)

    def adopt(self, seq: int) -> Ticket:
        """A ticket for a sequence that goes on where a restored state left it."""
        return self._start(self._take(lambda: seq if seq in self._idle else None), lambda _: None)

    def next(self, ticket: Ticket) -> Step | None:
        """The ticket's next step; None once it is cancelled. Steps for all, if need be."""
        while True:
            with self._lock:
                if ticket.cancelled:
                    return None
                if ticket.steps:
                    return ticket.steps.popleft()
            with self.engine() as engine:
                if engine is not None and not (ticket.steps or ticket.cancelled):
                    self._step(engine)

    def close(self, ticket: Ticket) -> None:
        """End a ticket's generation; its caches stay."""
        with self.engine(urgent=True) as engine:
            if engine is not None:
                engine.end(ticket.seq)
                self._idle[ticket.seq] = _Idle(engine.tokens(ticket.seq), self._tick())
            self._open.pop(ticket.seq, None)

    def cancel(self) -> None:
        """Cancel every open ticket, from any thread."""
        with self._lock:
            for ticket in self._open.values():
                ticket.cancelled = True
            if self._open and not self._closed:
                self._engine.abort()

    def forget(self) -> None:
        """Empty all sequences; waits until none is in use."""
        with self._all_idle() as engine:
            for seq in self._idle:
                engine.clear(seq)
                self._idle[seq] = _Idle()

    def restore(self, data: bytes) -> int:
        """Load a saved state into the sequence that was not used for longest; that sequence."""
        seq = self._take(lambda: self._choose(()))
        try:
            with self._engine_or_error() as engine:
                engine.restore(seq, data)
                self.latest = seq
        finally:
            with self.engine(urgent=True) as engine_now:
                tokens = engine_now.tokens(seq) if engine_now else ()
                self._idle[seq] = _Idle(tokens, self._tick())
        return seq

    def shut(self) -> None:
        """Cancel everything and close the engine; again is harmless."""
        self.cancel()
        with self.engine(urgent=True) as engine:
            if engine is not None:
                self._closed = True
                engine.close()

    @contextmanager
    def engine(self, *, urgent: bool = False) -> Iterator[Engine | None]:
        """The engine, for one caller at a time; None once it is closed. Urgent ones come first."""
        with self._lock:
            self._urgent += urgent
            self._lock.wait_for(lambda: not self._busy and (urgent or not self._urgent))
            self._urgent -= urgent
            self._busy = True
        try:
            yield None if self._closed else self._engine
        finally:
            with self._lock:
                self._busy = False
                self._lock.notify_all()

    def _step(self, engine: Engine) -> None:
        try:
            results = engine.step()
        except AbortedError:
            return  # whom it was meant for is cancelled; the others step again
        for seq, step in results:
            self.latest = seq
            if seq in self._open:
                self._open[seq].steps.append(step)

    def _start(self, seq: int, begin: Callable[[int], object]) -> Ticket:
        ticket = Ticket(seq, threading.get_ident())
        try:
            with self._engine_or_error():
                begin(seq)
                self.latest = seq
                self._open[seq] = ticket
        except BaseException:
            self.close(ticket)
            raise
        return ticket

    @contextmanager
    def _engine_or_error(self) -> Iterator[Engine]:
        with self.engine(urgent=True) as engine:
            if engine is None:
                raise UsageError("the session is closed")
            yield engine

    @contextmanager
    def _all_idle(self) -> Iterator[Engine]:
        me = threading.get_ident()
        with self._lock:
            if any(ticket.owner == me for ticket in self._open.values()):
                raise _own_generation_is_open()
            self._lock.wait_for(lambda: self._closed or len(self._idle) == self._engine.n_parallel)
        with self._engine_or_error() as engine:
            yield engine

    def _take(self, choose: Callable[[], int | None]) -> int:
        """Wait for this thread's turn and for a sequence, and take it."""
        me, turn = threading.get_ident(), object()
        with self._lock:
            self._waiting.append(turn)
            try:
                while True:
                    if self._closed:
                        raise UsageError("the session is closed")
                    seq = choose() if self._waiting[0] is turn else None
                    if seq is not None:
                        del self._idle[seq]
                        return seq
                    if self._open and all(ticket.owner == me for ticket in self._open.values()):
                        raise _own_generation_is_open()
                    self._lock.wait()
            finally:
                self._waiting.remove(turn)
                self._lock.notify_all()

    def _choose(self, prompt: Sequence[int]) -> int | None:
        if not self._idle:
            return None
        shared = {seq: _n_common(prompt, idle.tokens) for seq, idle in self._idle.items()}
        best = max(shared, key=shared.__getitem__)
        if 2 * shared[best] >= len(self._idle[best].tokens) > 0:
            return best
        return min(
            self._idle, key=lambda seq: (len(self._idle[seq].tokens) > 0, self._idle[seq].used)
        )

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _own_generation_is_open() -> UsageError:
    return UsageError(
        "a generation of this thread is still open", "exhaust its iterator or close() it"
    )
