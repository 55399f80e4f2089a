"""Several requests at once: tokens per second of all together, and whether answers stay the same.

The clock runs from the first request to the last answer, prompts included. Our sessions are driven
by one Python thread per request, the pin through HTTP without streaming: what either costs per
token or request is part of the figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypedDict

from dflash2_gguf.contenders import (
    AUTO,
    EXACT,
    PIN,
    PIN_DEFAULT,
    PLAIN,
    Contender,
    Pair,
    open_all,
    ours,
    pin,
)
from dflash2_gguf.errors import UsageError
from dflash2_gguf.measure import Request, Run, acceptance_length, same_answer

__all__ = ["Level", "measure_level", "parallel_systems", "rate_ratios"]

Note = Callable[[str], None]

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Level:
    """What ``n_parallel`` requests at a time came to, for each system by name.

    rates: tokens per second of all requests together, one figure a pass.
    differences: requests with an answer that is not the one given alone.
    acceptance: tokens per step.
    """

    n_parallel: int
    n_requests: int
    n_tokens: int
    rates: Mapping[str, Sequence[float]]
    differences: Mapping[str, int]
    acceptance: Mapping[str, float]

    def __post_init__(self) -> None:
        if self.n_parallel < 1 or not self.rates or not all(self.rates.values()):
            raise UsageError(f"the measurement of {self.n_parallel} at a time is incomplete")


class _Shape(TypedDict):
    n_ctx: int
    n_parallel: int


@contextmanager
def parallel_systems(pair: Pair, n_parallel: int, n_ctx: int) -> Iterator[dict[str, Contender]]:
    """All systems, each for ``n_parallel`` requests of up to ``n_ctx`` tokens."""
    shape = _Shape(n_ctx=n_ctx, n_parallel=n_parallel)
    wanted = {
        PLAIN: ours(pair, False, **shape),
        AUTO: ours(pair, True, **shape),
        EXACT: ours(pair, True, exact=True, **shape),
        PIN: pin(pair, 0, **shape),
        PIN_DEFAULT: pin(pair, None, **shape),
    }
    with open_all(wanted) as contenders:
        yield contenders


def measure_level(
    n_parallel: int,
    requests: Sequence[Request],
    alone: Mapping[str, Sequence[Run]],
    systems: Mapping[str, Contender],
    note: Note,
) -> Level:
    """One pass forwards and one backwards through the systems, after some short answers.

    The short answers are as many as requests for systems that learn, one for the others.
    ``alone`` holds the answers given one at a time, by PLAIN and by PIN.
    """
    short = [replace(one, max_tokens=min(one.max_tokens, _WARM_UP_TOKENS)) for one in requests]
    for name, system in systems.items():
        note(f"{n_parallel} at a time, {name}, to warm up")
        _pass(system, short if name in (AUTO, EXACT) else short[:1], n_parallel)
    passes: dict[str, list[tuple[float, list[Run]]]] = {name: [] for name in systems}
    for name in (*systems, *reversed(list(systems))):
        note(f"{n_parallel} at a time, {name}")
        passes[name].append(_pass(systems[name], requests, n_parallel))
    return Level(
        n_parallel=n_parallel,
        n_requests=len(requests),
        n_tokens=sum(len(run.tokens) for run in passes[PLAIN][0][1]),
        rates={name: [rate for rate, _ in done] for name, done in passes.items()},
        differences={
            name: _differing(done, alone[PIN if name.startswith("pin") else PLAIN])
            for name, done in passes.items()
        },
        acceptance={
            name: acceptance_length([run for _, runs in done for run in runs])
            for name, done in passes.items()
        },
    )


def rate_ratios(level: Level, over: str, under: str) -> list[float]:
    """For each pass, the rate of ``over`` by that of ``under``."""
    return [a / b for a, b in zip(level.rates[over], level.rates[under], strict=True)]


def _pass(
    system: Contender, requests: Sequence[Request], n_parallel: int
) -> tuple[float, list[Run]]:
    """Tokens per second of all requests, and their answers."""
    system.forget()
    start = time.perf_counter()
    with ThreadPoolExecutor(n_parallel) as pool:
        runs = list(pool.map(system.answer, requests))
    seconds = time.perf_counter() - start
    return sum(len(run.tokens) for run in runs) / seconds, runs


def _differing(passes: Sequence[tuple[float, list[Run]]], alone: Sequence[Run]) -> int:
    return sum(
        any(not same_answer(runs[number], one) for _, runs in passes)
        for number, one in enumerate(alone[: len(passes[0][1])])
    )
