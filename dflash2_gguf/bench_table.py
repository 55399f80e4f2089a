"""What was measured, as a page of markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dflash2_gguf.concurrency import Level, rate_ratios
from dflash2_gguf.contenders import AUTO, CONTROL, EXACT, PIN, PIN_DEFAULT, PLAIN
from dflash2_gguf.measure import spread
from dflash2_gguf.never_slower import IN_STEP, Cell, best_of, ratios

__all__ = ["page"]

_OUR_NAMES = {PLAIN: "ours, no drafter", AUTO: "ours, automatic", EXACT: "ours, automatic, exact"}
_PIN_NAMES = {PIN: "pin, no drafter", PIN_DEFAULT: "pin, its default width"}

_METHOD = """\
Figures are ratios of tokens per second within one run on one machine: the median over prompts, and
in brackets the smallest and largest. Every system answers every prompt, in an order that turns
round from prompt to prompt. For the first ratios, where a hundredth matters, decoding without a
drafter and with the automatic width answer in step: whoever has fewer tokens goes next, each is
timed in its own steps, three times per prompt. The control, a second session without a drafter,
answers with them; its ratio to the first would be 1 on a machine without noise. Only the time after
the first token counts. The pin is the unpatched llama.cpp, its llama-server with the same files and
threads. The automatic width is a session of its own that lives over all prompts of a workload at
both temperatures; its answers to a first prompt are not counted: it learns what steps cost while it
runs.
Temperature 1 is sampled with top-p 0.95 and nothing else, with one seed; there our answers and the
pin's are different texts. A document that prompts share is read once per system. The best width is
chosen from these very figures, which favours it.
"""
_CONCURRENCY = """\
Tokens per second of all requests together, from the first request to the last answer, prompts
included, from empty caches; after short uncounted answers, one pass forwards and one backwards
through the systems. Ours runs in one process with a Python thread per request, the pin behind HTTP
without streaming: what Python and HTTP cost is in the figures. Greedy. Answers that differ are
compared with those given one at a time, without drafter, by the same program; evaluated together,
rows round differently, which exact mode rules out.
"""
_SYSTEMS = """\
Tokens per second (median), tokens per step, and prompts with an answer that differs, where there
are any: from decoding without a drafter, and for sampled answers of the pin from the pin's own.
Rows evaluated together, and a prompt of which the cache held a part, round differently than rows
evaluated one by one, which can turn a decision between two tokens that are almost equal.
"""


def page(
    command: str,
    machine: str,
    settings: Sequence[str],
    cells: Sequence[Cell],
    levels: Sequence[Level],
) -> str:
    """The whole page. What was not measured is left out."""
    blocks = ["# Speed\n", f"    {command}\n", f"wrote this page on {machine}.\n"]
    blocks += ["".join(f"- {line}\n" for line in settings)]
    if cells:
        blocks += ["## Never slower\n", _METHOD, _claims(cells), _speed_table(cells)]
        blocks += [_systems_text(cells), "### What the automatic width decided\n"]
        blocks += [_decision_table(cells)]
    if levels:
        blocks += ["## Many requests at once\n", _CONCURRENCY, _level_table(levels)]
    return "\n".join(blocks)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _ratio(values: Sequence[float]) -> str:
    if not values:
        return "none"
    found = spread(values)
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def _fixed(cell: Cell) -> list[str]:
    return [name for name in cell.tokens if name.isdigit()]


def _pins(cell: Cell) -> list[str]:
    """The pin with its drafter."""
    return [name for name in cell.tokens if name.startswith("pin") and name != PIN]


def _place(cell: Cell) -> str:
    return f"{cell.workload}, T {cell.temperature:g}"


def _claims(cells: Sequence[Cell]) -> str:
    lines = [
        _worst("no drafter", [(c, IN_STEP[AUTO], IN_STEP[PLAIN]) for c in cells]),
        _worst(
            "the best fixed width", [(c, AUTO, best_of(c, _fixed(c))) for c in cells if _fixed(c)]
        ),
        _worst("the pin at its default width", [(c, AUTO, PIN_DEFAULT) for c in cells]),
        _worst("the pin at its best width", [(c, AUTO, best_of(c, _pins(c))) for c in cells]),
    ]
    return "The automatic width at its worst, over all tokens of a workload:\n\n" + "".join(lines)


def _worst(what: str, pairs: Sequence[tuple[Cell, str, str]]) -> str:
    found = [
        (cell.overall(ours) / cell.overall(other), cell)
        for cell, ours, other in pairs
        if cell.overall(other)
    ]
    if not found:
        return ""
    ratio, cell = min(found, key=lambda pair: pair[0])
    return f"- {ratio:.2f} times {what} ({_place(cell)})\n"


def _speed_table(cells: Sequence[Cell]) -> str:
    head = ["workload, T", "prompts, tokens", "automatic / no drafter", "the same, all tokens"]
    head += ["control / no drafter, all tokens", "automatic / best fixed width"]
    head += ["automatic / pin, default", "automatic / pin, best"]
    head += ["no drafter, ours / pin"]
    return _table(head, map(_speed_row, cells))


def _speed_row(cell: Cell) -> list[str]:
    row = [_place(cell), f"{cell.n_prompts}, {sum(cell.tokens[IN_STEP[AUTO]])}"]
    automatic, plain, control = IN_STEP[AUTO], IN_STEP[PLAIN], IN_STEP[CONTROL]
    row += [_ratio(ratios(cell, automatic, plain))]
    row += [f"{cell.overall(name) / cell.overall(plain):.3f}" for name in (automatic, control)]
    for names in (_fixed(cell), [PIN_DEFAULT], _pins(cell)):
        if not names:
            row.append("not measured")
            continue
        best = best_of(cell, names)
        width = f", {best.removeprefix('pin ')}" if len(names) > 1 else ""
        row.append(_ratio(ratios(cell, AUTO, best)) + width)
    return [*row, _ratio(ratios(cell, PLAIN, PIN))]


def _systems_text(cells: Sequence[Cell]) -> str:
    names = [name for name in cells[0].tokens if name not in IN_STEP.values()]
    head = ["workload, T", *(_OUR_NAMES.get(n, _PIN_NAMES.get(n, _width_name(n))) for n in names)]
    rows = [
        [_place(cell), *(_figures(cell, name) for name in names if name in cell.tokens)]
        for cell in cells
    ]
    return f"{_SYSTEMS}\n{_table(head, rows)}"


def _figures(cell: Cell, name: str) -> str:
    text = f"{spread(cell.speeds(name)).median:.1f}, {cell.acceptance[name]:.2f}"
    return text + (f", {cell.differences[name]} differ" if cell.differences[name] else "")


def _width_name(name: str) -> str:
    return f"pin, width {name.split()[1]}" if name.startswith("pin") else f"ours, width {name}"


def _decision_table(cells: Sequence[Cell]) -> str:
    reasons = list(cells[0].reasons)
    head = ["workload, T", "steps", "width 0", "1", "2 to 3", "4 and more", *reasons]
    return _table(head, (_decision_row(cell, reasons) for cell in cells))


def _decision_row(cell: Cell, reasons: Sequence[str]) -> list[str]:
    steps = sum(cell.widths)
    groups = (cell.widths[:1], cell.widths[1:2], cell.widths[2:4], cell.widths[4:])
    shares = [f"{100 * sum(group) / steps:.0f} %" if steps else "none" for group in groups]
    return [_place(cell), str(steps), *shares, *(str(cell.reasons[name]) for name in reasons)]


def _level_table(levels: Sequence[Level]) -> str:
    head = ["at a time", "requests, tokens", "system", "tokens/s", "tokens per step"]
    head += ["/ ours, no drafter", "/ pin, no drafter", "/ pin, default", "differ"]
    return _table(head, (_level_row(level, name) for level in levels for name in level.rates))


def _level_row(level: Level, name: str) -> list[str]:
    row = [str(level.n_parallel), f"{level.n_requests}, {level.n_tokens}"]
    row += [_OUR_NAMES.get(name, _PIN_NAMES.get(name, name))]
    row += [f"{spread(level.rates[name]).median:.1f}", f"{level.acceptance[name]:.2f}"]
    row += [_ratio(rate_ratios(level, name, other)) for other in (PLAIN, PIN, PIN_DEFAULT)]
    return [*row, str(level.differences[name])]
