"""One measured answer, whatever gave it, and how two of them compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from dflash2_gguf.errors import UsageError
from dflash2_gguf.generate import collect
from dflash2_gguf.sampling import SamplingParams
from dflash2_gguf.session import Generation, Session
from dflash2_gguf.stats import Stats

__all__ = [
    "PROMPTS",
    "Request",
    "Run",
    "Spread",
    "Stream",
    "System",
    "acceptance_length",
    "first_difference",
    "run_in_step",
    "run_session",
    "same_answer",
    "spread",
    "stream_session",
]

PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a dog who finds a ball.",
    "Explain in three sentences why the sky is blue.",
    "List five healthy breakfast ideas.",
)


def _greedy() -> SamplingParams:
    return SamplingParams(temperature=0)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a system is asked: token ids, the longest answer in tokens, how to choose them."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=_greedy)

    def __post_init__(self) -> None:
        if not self.prompt or self.max_tokens < 1:
            raise UsageError(f"{len(self.prompt)} tokens of prompt, {self.max_tokens} of answer")


@dataclass(frozen=True)
class Run:
    """An answer: its tokens, and the seconds that those after the first took.

    n_first: tokens that were there when the clock started. stats: counters, where there are any.
    """

    tokens: tuple[int, ...]
    text: str
    seconds: float
    acceptance_length: float
    n_first: int = 1
    stats: Stats | None = None

    @property
    def n_timed(self) -> int:
        """Tokens that took ``seconds``; the first ones belong to the prompt and do not count."""
        return len(self.tokens) - self.n_first

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed."""
        return self.n_timed / self.seconds if self.seconds > 0 else 0.0


# whatever answers requests, one after the other or from several threads
System = Callable[[Request], Run]
# the pieces of an answer, as they come
Stream = Callable[[Request], Iterator[Generation]]


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some figures."""

    median: float
    low: float
    high: float


class _Answering:
    """An answer in the making: pieces, and the time spent in making all but the first."""

    def __init__(self, stream: Iterator[Generation]) -> None:
        self._stream = stream
        self._pieces: list[Generation] = []
        self._seconds = 0.0
        self.n_tokens = 0

    def step(self) -> bool:
        """Make one more piece; False when there is none."""
        start = time.perf_counter()
        piece = next(self._stream, None)
        if piece is None:
            return False
        self._seconds += time.perf_counter() - start if self._pieces else 0.0
        self._pieces.append(piece)
        self.n_tokens += len(piece.tokens)
        return True

    def run(self) -> Run:
        """What came of it."""
        answer = collect(self._pieces)
        return Run(
            tokens=answer.tokens,
            text=answer.text,
            seconds=self._seconds,
            acceptance_length=answer.stats.acceptance_length if answer.stats else 0.0,
            n_first=len(self._pieces[0].tokens),
            stats=answer.stats,
        )


def stream_session(
    session: Session, request: Request, *, draft: bool | int
) -> Iterator[Generation]:
    """The pieces of an answer; what the caches hold of its prompt is not read again."""
    return session.generate(
        request.prompt, max_tokens=request.max_tokens, sampling=request.sampling, draft=draft
    )


def run_session(session: Session, request: Request, *, draft: bool | int) -> Run:
    """Answer ``request`` at one go."""
    answer = _Answering(stream_session(session, request, draft=draft))
    while answer.step():
        pass
    return answer.run()


def run_in_step(streams: Mapping[str, Stream], request: Request) -> dict[str, Run]:
    """Answer ``request`` with all systems side by side, each timed in its own steps only.

    Whoever has the fewest tokens goes next, so all are at the same place of the text at about the
    same time, and what else the machine does falls on all of them alike. On a machine whose speed
    wanders by a tenth within seconds this tells a hundredth, which no order of whole answers does.
    """
    answers = {name: _Answering(stream(request)) for name, stream in streams.items()}
    going = list(answers)
    while going:
        # of equals the one that went last: the lead changes from token to token
        name = min(going, key=lambda one: answers[one].n_tokens)
        going.remove(name)
        if answers[name].step():
            going.insert(0, name)
    return {name: answer.run() for name, answer in answers.items()}


def same_answer(a: Run, b: Run) -> bool:
    """Are the tokens equal? An end token that only one side reports is no difference."""
    length = min(len(a.tokens), len(b.tokens))
    equal = a.tokens[:length] == b.tokens[:length]
    return equal and abs(len(a.tokens) - len(b.tokens)) <= 1


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Position of the first token that differs, None when there is none."""
    if tuple(a) == tuple(b):
        return None
    pairs = zip(a, b, strict=False)
    same = (index for index, (x, y) in enumerate(pairs) if x != y)
    return next(same, min(len(a), len(b)))


def acceptance_length(runs: Sequence[Run]) -> float:
    """Tokens per step over all answers, each weighted by its steps; 0 without any step."""
    timed = [run for run in runs if run.acceptance_length]
    tokens = sum(len(run.tokens) for run in timed)
    steps = sum(len(run.tokens) / run.acceptance_length for run in timed)
    return tokens / steps if steps else 0.0


def spread(values: Sequence[float]) -> Spread:
    """Summary of at least one value."""
    if not values:
        raise UsageError("there is nothing to summarize")
    return Spread(median(values), min(values), max(values))
