"""Decoding speed per workload: the automatic width against none, fixed ones and the pin's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dflash2_gguf.contenders import (
    AUTO,
    CONTROL,
    PIN,
    PIN_DEFAULT,
    PLAIN,
    Contender,
    Pair,
    fixed,
    interleaved,
    open_all,
    ours,
    pin,
)
from dflash2_gguf.errors import UsageError
from dflash2_gguf.measure import Request, Run, acceptance_length, run_in_step, same_answer

__all__ = ["IN_STEP", "Cell", "best_of", "measure_cells", "our_systems", "pin_systems", "ratios"]

Note = Callable[[str], None]

# Of these the smallest difference matters, so they answer side by side. The control is the first
# system once more and does nothing else: what lies between these two is noise.
IN_STEP = {PLAIN: "plain in step", AUTO: "automatic in step", CONTROL: "control in step"}

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one workload at one temperature came to, for each system by name.

    Those of IN_STEP have a second name each, for their answers in step.
    tokens, seconds: per prompt, over all its runs, first tokens left out.
    acceptance: tokens per step. differences: prompts with an answer that leaves plain decoding's;
    the pin's sampled ones are compared with the pin's own.
    widths: steps of the automatic width by the tokens they verified; reasons: why, in rounds.
    """

    workload: str
    temperature: float
    tokens: Mapping[str, Sequence[int]]
    seconds: Mapping[str, Sequence[float]]
    acceptance: Mapping[str, float]
    differences: Mapping[str, int]
    widths: Sequence[int]
    reasons: Mapping[str, int]

    def __post_init__(self) -> None:
        sizes = {
            len(values) for column in (self.tokens, self.seconds) for values in column.values()
        }
        if sizes == {0} or len(sizes) != 1 or self.tokens.keys() != self.seconds.keys():
            raise UsageError(f"the measurement of {self.workload!r} is incomplete")

    @property
    def n_prompts(self) -> int:
        """Prompts that were measured."""
        return len(self.tokens[PLAIN])

    def speeds(self, system: str) -> list[float]:
        """Tokens per second of each prompt; 0 for an answer without a timed token."""
        pairs = zip(self.tokens[system], self.seconds[system], strict=True)
        return [tokens / seconds if seconds else 0.0 for tokens, seconds in pairs]

    def overall(self, system: str) -> float:
        """All tokens by all seconds: nothing that happens between two prompts is hidden."""
        seconds = sum(self.seconds[system])
        return sum(self.tokens[system]) / seconds if seconds else 0.0


@contextmanager
def our_systems(pair: Pair, widths: Sequence[int], n_ctx: int) -> Iterator[dict[str, Contender]]:
    """Ours without drafter, twice, with the automatic width and with each fixed one."""
    wanted = {PLAIN: ours(pair, False, n_ctx=n_ctx), AUTO: ours(pair, True, n_ctx=n_ctx)}
    wanted |= {CONTROL: ours(pair, False, n_ctx=n_ctx)}
    with open_all(wanted) as contenders, fixed(pair, widths, n_ctx=n_ctx) as others:
        yield contenders | others


@contextmanager
def pin_systems(pair: Pair, widths: Sequence[int], n_ctx: int) -> Iterator[dict[str, Contender]]:
    """Servers of the pin: plain, at its default width, at others."""
    wanted = {PIN: pin(pair, 0, n_ctx=n_ctx), PIN_DEFAULT: pin(pair, None, n_ctx=n_ctx)}
    wanted |= {f"pin {width}": pin(pair, width, n_ctx=n_ctx) for width in widths}
    with open_all(wanted) as contenders:
        yield contenders


def measure_cells(
    workload: str,
    requests: Sequence[Mapping[float, Request]],
    systems: Mapping[str, Contender],
    note: Note,
) -> list[Cell]:
    """Ask every system every request, each question at all its temperatures in a row.

    So a prompt is read once. The first question only warms up and is not counted: the automatic
    width answers it whole, as it learns from it, the others only begin.
    """
    for first in requests[0].values():
        brief = replace(first, max_tokens=min(first.max_tokens, _WARM_UP_TOKENS))
        for name, system in systems.items():
            system.answer(first if name == AUTO else brief)
    runs: dict[float, list[dict[str, list[Run]]]] = {heat: [] for heat in requests[0]}
    alone = [name for name in systems if name != CONTROL]
    for number, question in enumerate(requests[1:]):
        for heat, request in question.items():
            note(f"{workload}, prompt {number + 1} of {len(requests) - 1}, T {heat:g}")
            answers = _in_step(systems, request)
            for name in interleaved(alone, number):
                answers[name] = [systems[name].answer(request)]
            runs[heat].append(answers)
    return [_cell(workload, heat, done) for heat, done in runs.items()]


def _in_step(systems: Mapping[str, Contender], request: Request) -> dict[str, list[Run]]:
    """Answers side by side, as often as there are systems; each of them takes the lead once."""
    streams = [
        (IN_STEP[name], system.stream)
        for name, system in systems.items()
        if name in IN_STEP and system.stream is not None
    ]
    turns = [dict(streams[turn:] + streams[:turn]) for turn in range(len(streams))]
    runs = [run_in_step(turn, request) for turn in turns]
    return {name: [run[name] for run in runs] for name, _ in streams}


def ratios(cell: Cell, over: str, under: str) -> list[float]:
    """For each prompt, the speed of ``over`` by that of ``under``, where both have one."""
    pairs = zip(cell.speeds(over), cell.speeds(under), strict=True)
    return [a / b for a, b in pairs if a and b]


def best_of(cell: Cell, systems: Sequence[str]) -> str:
    """The fastest over all tokens; chosen afterwards, so a comparison with it favours it."""
    return max(systems, key=cell.overall)


def _cell(workload: str, temperature: float, prompts: Sequence[Mapping[str, list[Run]]]) -> Cell:
    runs = {name: [answers[name] for answers in prompts] for name in prompts[0]}
    automatic = (*runs[AUTO], *runs.get(IN_STEP[AUTO], ()))
    stats = [run.stats for prompt in automatic for run in prompt if run.stats]
    return Cell(
        workload=workload,
        temperature=temperature,
        tokens={name: [sum(r.n_timed for r in p) for p in ps] for name, ps in runs.items()},
        seconds={name: [sum(r.seconds for r in p) for p in ps] for name, ps in runs.items()},
        acceptance={
            name: acceptance_length([r for p in ps for r in p]) for name, ps in runs.items()
        },
        differences=_differences(runs, sampled=temperature > 0),
        widths=_sums([one.verified_width for one in stats]),
        reasons={
            reason: sum(one.width_reasons[reason] for one in stats)
            for reason in (stats[0].width_reasons if stats else ())
        },
    )


def _differences(runs: Mapping[str, list[list[Run]]], *, sampled: bool) -> dict[str, int]:
    """Two programs draw differently: a sampled answer of the pin has the pin's as its like."""
    found = {}
    for name, prompts in runs.items():
        like = runs[PIN if sampled and name.startswith("pin") else PLAIN]
        found[name] = sum(
            any(not same_answer(run, plain[0]) for run in prompt)
            for prompt, plain in zip(prompts, like, strict=True)
        )
    return found


def _sums(rows: Sequence[Sequence[int]]) -> list[int]:
    """Sums by position; short rows are filled up with 0."""
    length = max(map(len, rows), default=0)
    return [sum(row[i] for row in rows if i < len(row)) for i in range(length)]
