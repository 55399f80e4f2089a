"""The systems that are compared: ours and the unpatched pin's, with and without drafting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dflash2_gguf.errors import UsageError
from dflash2_gguf.json_schema import to_gbnf
from dflash2_gguf.measure import Request, Stream, System, run_session, stream_session
from dflash2_gguf.peer import PeerOptions, peer_server
from dflash2_gguf.sampling import SamplingParams
from dflash2_gguf.session import Session
from dflash2_gguf.workloads import Question

__all__ = [
    "AUTO",
    "CONTROL",
    "EXACT",
    "PIN",
    "PIN_DEFAULT",
    "PLAIN",
    "Contender",
    "Pair",
    "Tokenizer",
    "fixed",
    "interleaved",
    "open_all",
    "ours",
    "pin",
]

PLAIN, AUTO, EXACT, CONTROL = "plain", "auto", "exact", "control"
PIN, PIN_DEFAULT = "pin plain", "pin default"
_SEED = 20


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The files of all systems, and their threads."""

    target: Path
    draft: Path
    server: Path
    n_threads: int

    def __post_init__(self) -> None:
        if self.n_threads < 1:
            raise UsageError(f"threads is {self.n_threads}", "it can be 1 or more")


@dataclass(frozen=True)
class Contender:
    """A system that is ready: it answers requests, and forgets what its caches hold.

    ``stream`` answers piece by piece, in step with others; a server's time cannot be told so.
    """

    answer: System
    forget: Callable[[], None]
    stream: Stream | None = None


class Tokenizer:
    """Makes requests of questions, through the target's chat template."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def request(self, question: Question, max_tokens: int, temperature: float) -> Request:
        """The question with nothing but top-p 0.95 at a temperature above 0, and one seed.

        A schema becomes a grammar here, so that every system gets the same one.
        """
        message = {"role": "user", "content": question.text}
        schema = question.json_schema
        return Request(
            prompt=tuple(self._session.chat_tokens([message])),
            max_tokens=max_tokens,
            sampling=SamplingParams(
                temperature=temperature,
                top_k=0,
                top_p=0.95,
                min_p=0.0,
                seed=_SEED,
                grammar=None if schema is None else to_gbnf(schema),
            ),
        )


@contextmanager
def ours(
    pair: Pair, draft: bool | int, *, n_ctx: int, n_parallel: int = 1, exact: bool = False
) -> Iterator[Contender]:
    """A session of its own: what it learns of costs and acceptance, no other system shares.

    ``draft`` False has no drafter, True drafts as many tokens as pay, a number so many. ``n_ctx``
    is per sequence.
    """
    with Session(
        pair.target,
        pair.draft if draft else None,
        n_ctx=n_ctx,
        n_threads=pair.n_threads,
        n_parallel=n_parallel,
        exact=exact,
    ) as session:
        yield Contender(
            partial(run_session, session, draft=draft),
            session.reset,
            partial(stream_session, session, draft=draft),
        )


@contextmanager
def fixed(pair: Pair, widths: Sequence[int], *, n_ctx: int) -> Iterator[dict[str, Contender]]:
    """Fixed widths in one session: they learn nothing, and share the prompts it has read."""
    with Session(pair.target, pair.draft, n_ctx=n_ctx, n_threads=pair.n_threads) as session:
        yield {
            str(width): Contender(partial(run_session, session, draft=width), session.reset)
            for width in widths
        }


@contextmanager
def pin(
    pair: Pair, draft_max: int | None, *, n_ctx: int, n_parallel: int = 1
) -> Iterator[Contender]:
    """A llama-server; ``draft_max`` as in ``PeerOptions``, ``n_ctx`` per slot."""
    options = PeerOptions(
        program=pair.server,
        target=pair.target,
        draft=pair.draft,
        draft_max=draft_max,
        n_ctx=n_ctx * n_parallel,
        n_threads=pair.n_threads,
        n_slots=n_parallel,
    )
    with peer_server(options) as server:
        yield Contender(server.answer, server.forget)


@contextmanager
def open_all(
    contenders: Mapping[str, AbstractContextManager[Contender]],
) -> Iterator[dict[str, Contender]]:
    """All of them, opened in their order."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(one) for name, one in contenders.items()}


def interleaved(names: Sequence[str], number: int) -> list[str]:
    """The order of systems for the ``number``-th request: forwards, backwards the next time."""
    return list(names) if number % 2 == 0 else list(reversed(names))
