"""What ``fidelity`` shows: a table, JSON, a page of markdown, a plot."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.agreement import Interval
from dflash2_gguf.engine import physical_cores
from dflash2_gguf.errors import UsageError
from dflash2_gguf.fidelity import Acceptance, Drafter, FidelitySettings, Measured, measure
from dflash2_gguf.replacing import replacing, require_writable
from dflash2_gguf.ui import Terminal
from dflash2_gguf.words import counted

__all__ = ["Report", "fidelity", "page", "plot", "table"]

_HEAD = (
    "drafter",
    "MB",
    "bits",
    "tokens/step, T 0",
    "of the first",
    "tokens/step, T 1",
    "of the first",
    "KL of q",
    "overlap",
    "top-1",
    "path",
    "draft ms",
    "time",
)

_LEGEND = (
    "MB: all tensors; bits: per weight; tokens/step: per verification step at temperature T "
    "(95 % interval); of the first, time: ratio to the first drafter; KL of q (0 is equal), "
    "overlap, top-1, path (1 is equal): agreement with its drafts; draft ms: per block"
)
_METHOD = """\
Written by `dflash2-convert fidelity` on {machine}.

The pair answers {n_prompts} prompts, greedily and sampled at temperature 1; every drafter then
drafts a block after each token of these answers, {n_blocks} in all, from the same recorded
features. Tokens per step (verification step) at temperature 0 are those of decoding with that
drafter; at temperature 1 they are the expectation under speculative rejection sampling, exact for
these texts. In brackets are 95 % confidence intervals over prompts drawn again and again. "Of the
first" is the ratio to the first drafter of the table over the same draws, so its interval is much
narrower. KL of q (nats, over the candidates that both have), overlap (the sum of the smaller of
both q), top-1 and path (the greedy path is the same up to a position) compare with the first
drafter after the same predecessor; here they are means over the positions of a block, below per
position. Time is the median ratio of single draft passes, taken in turns.
"""
_TYPES = """\
What the recipe's types became: rows that their blocks do not divide get a type with smaller ones.
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Where the figures go besides the terminal, checked before anything is measured."""

    plot: Path | None = None
    page: Path | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        for path in filter(None, (self.plot, self.page)):
            require_writable(path, force=True)
        if self.plot is not None:
            _require_plot(self.plot)


def fidelity(settings: FidelitySettings, report: Report, terminal: Terminal) -> int:
    """Measure and show; returns 0. Raises what ``measure`` raises."""
    found = measure(settings, terminal)
    if report.as_json:
        terminal.write(json.dumps([_plain(one) for one in found], indent=2) + "\n")
    else:
        terminal.grid(_HEAD, table(found))
        terminal.note(_LEGEND)
    if report.plot is not None:
        plot(found, report.plot)
    if report.page is not None:
        image = None if report.plot is None else report.plot.name
        text = page(found, n_prompts=len(settings.prompts), machine=_machine(settings), image=image)
        with replacing(report.page) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return 0


def _machine(settings: FidelitySettings) -> str:
    threads = settings.n_threads or physical_cores()
    name = f"{platform.machine()}, {platform.system()}"
    cores = counted(physical_cores(), "core")
    return f"a machine with {cores} ({name}), with {threads} of them in use"


def table(found: Sequence[Measured]) -> list[tuple[str, ...]]:
    """Cells, a row per drafter."""
    return [tuple(_cells(one)) for one in found]


def _cells(one: Measured) -> Iterator[str]:
    yield one.drafter.label
    yield f"{one.drafter.nbytes / 1e6:.2f}"
    yield f"{one.drafter.bits:.2f}"
    for acceptance in one.acceptance:
        yield _interval(acceptance.length, 2)
        yield _interval(acceptance.relative, 3)
    yield f"{_mean(one.kl):.4f}"
    for values in (one.overlap, one.top1, one.path):
        yield f"{_mean(values):.3f}"
    yield f"{one.draft_ms:.1f}"
    yield f"{one.time_ratio:.2f}"


def _interval(value: Interval, digits: int) -> str:
    return f"{value.value:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _plain(one: Measured) -> dict[str, object]:
    values: dict[str, object] = _json(asdict(one))
    return values


def _json(value: Any) -> Any:
    """JSON knows no paths, and no number for what was never seen."""
    if isinstance(value, dict):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def page(found: Sequence[Measured], *, n_prompts: int, machine: str, image: str | None) -> str:
    """The whole page of markdown."""
    method = _METHOD.format(n_blocks=found[0].n_blocks, n_prompts=n_prompts, machine=machine)
    blocks = ["# Quantization of drafters\n", method, _markdown(_HEAD, table(found))]
    if image is not None:
        blocks.append(f"![acceptance against size]({image})\n")
    types = [(one.drafter.label, one.drafter.types) for one in found]
    blocks += ["## Types\n", _TYPES, _markdown(("drafter", "matrices"), types)]
    for name, title in (("kl", "KL of q"), ("top1", "Top-1 agreement"), ("path", "Path agreement")):
        blocks += [f"## {title} per position\n", _positions(found, name)]
    for index, acceptance in enumerate(found[0].acceptance):
        blocks.append(f"## At least so many drafts accepted, T {acceptance.temperature:g}\n")
        blocks.append(_survivals(found, index))
    return "\n".join(blocks)


def _positions(found: Sequence[Measured], name: str) -> str:
    width = len(found[0].top1)
    rows = [(one.drafter.label, *(f"{value:.4f}" for value in getattr(one, name))) for one in found]
    return _markdown(("drafter", *map(str, range(1, width + 1))), rows)


def _survivals(found: Sequence[Measured], index: int) -> str:
    def values(one: Measured) -> Acceptance:
        return one.acceptance[index]

    width = len(values(found[0]).survival)
    rows = [
        (one.drafter.label, *(f"{value:.3f}" for value in values(one).survival)) for one in found
    ]
    return _markdown(("drafter", *map(str, range(1, width + 1))), rows)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _require_plot(path: Path) -> None:
    if path.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"the plot is {path}", "it can be a .png or .svg file")
    try:
        import matplotlib  # noqa: F401  # asked for before the work
    except ImportError as error:
        raise UsageError(
            "a plot needs matplotlib", "pip install 'dflash2-gguf[plot]', or leave out --plot"
        ) from error


def plot(found: Sequence[Measured], path: Path) -> None:
    """Tokens per step against size, a panel per temperature; PNG or SVG by the name's ending."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "dflash2"}):  # the same figures give the same file
        figure = Figure(figsize=(12, 5.5), layout="constrained")
        panels = figure.subplots(1, len(found[0].acceptance), squeeze=False)[0]
        for index, axes in enumerate(panels):
            _panel(axes, found, index)
        with replacing(path) as temporary:
            kind = path.suffix[1:].lower()
            metadata = {"Date": None} if kind == "svg" else {}
            figure.savefig(temporary, format=kind, metadata=metadata, dpi=120)


# kinds of drafters: marker, colour
_SERIES = {
    "without importance matrix": ("o", "tab:blue"),
    "with importance matrix": ("s", "tab:orange"),
    "with a reduced head": ("^", "tab:green"),
}


def _series(drafter: Drafter) -> str:
    kinds = list(_SERIES)
    return kinds[2] if drafter.n_tokens is not None else kinds[int(drafter.imatrix)]


def _panel(axes: object, found: Sequence[Measured], index: int) -> None:
    draw: Any = axes
    for kind, (marker, colour) in _SERIES.items():
        chosen = [one for one in found if _series(one.drafter) == kind]
        if not chosen:
            continue
        sizes = [one.drafter.nbytes / 1e6 for one in chosen]
        ratios = [one.acceptance[index].relative for one in chosen]
        values = [ratio.value for ratio in ratios]
        below = [ratio.value - ratio.low for ratio in ratios]
        above = [ratio.high - ratio.value for ratio in ratios]
        draw.errorbar(
            sizes, values, yerr=[below, above], fmt=marker, color=colour, label=kind, linewidth=0.7
        )
        for one, size, value in zip(chosen, sizes, values, strict=True):
            place = {"xytext": (4, 3), "textcoords": "offset points"}
            name = one.drafter.label.replace(" + imatrix", "")
            draw.annotate(name, (size, value), fontsize=6, color=colour, **place)
    draw.axhline(1.0, color="grey", linewidth=0.8)
    draw.set_xscale("log")
    for axis in (draw.xaxis.set_major_formatter, draw.xaxis.set_minor_formatter):
        axis("{x:g}")
    draw.set_xlabel("tensors, MB")
    draw.set_ylabel("tokens per step, of the reference's")
    draw.set_title(f"temperature {found[0].acceptance[index].temperature:g}")
    draw.legend(fontsize=8)
