"""The converter's terminal: data on stdout, all else on stderr, plain where nobody is looking.

The only module of the converter that imports rich, and only when the stream is a terminal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dflash2_gguf.errors import DFlash2Error

__all__ = ["Terminal", "human_bytes"]

_STYLES = {"error": "bold red", "warning": "yellow", "hint": "cyan"}
_PLAIN_SECONDS = 5.0


def human_bytes(count: float) -> str:
    """Bytes in decimal units, such as 38.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _printable(text: str) -> str:
    """Names come from foreign files: no escape sequence of theirs may reach the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Terminal:
    """Standard streams of the process; decides once which of them are for eyes."""

    def __init__(self) -> None:
        self._rich_out = sys.stdout.isatty()
        self._rich_err = sys.stderr.isatty()

    def line(self, text: str) -> None:
        """One line of data."""
        print(_printable(text))

    def json(self, value: Any) -> None:
        """A JSON document as data."""
        print(json.dumps(value, indent=2, ensure_ascii=False))

    def facts(self, title: str, rows: Mapping[str, str]) -> None:
        """Names and values: a table on a terminal, ``name: value`` lines elsewhere."""
        rows = {_printable(name): _printable(value) for name, value in rows.items()}
        if not self._rich_out:
            for name, value in rows.items():
                print(f"{name}: {value}")
            return
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(title), show_header=False, box=SIMPLE, title_justify="left")
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(Text(name), Text(value))
        Console(highlight=False, markup=False).print(table)

    def error(self, error: DFlash2Error) -> None:
        """One line for the message, one for the hint."""
        self._say("error", error.message)
        if error.hint:
            self._say("hint", error.hint)

    def warning(self, text: str) -> None:
        """Something the user should know, which stops nothing."""
        self._say("warning", text)

    def note(self, text: str) -> None:
        """A remark without label."""
        print(_printable(text), file=sys.stderr, flush=True)

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Progress over ``total`` bytes: a bar with rate and time left, or plain lines."""
        if not self._rich_err:
            yield _PlainProgress(label, total).advance
            return
        from rich import progress as bars

        columns = (
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.DownloadColumn(),
            bars.TransferSpeedColumn(),
            bars.TimeRemainingColumn(),
        )
        with bars.Progress(*columns, console=_stderr_console(), transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda count: bar.advance(task, count)

    def _say(self, kind: str, text: str) -> None:
        text = _printable(text)
        if not self._rich_err:
            print(f"{kind}: {text}", file=sys.stderr, flush=True)
            return
        from rich.text import Text

        line = Text(f"{kind}: ", style=_STYLES[kind])
        line.append(text, style="")
        _stderr_console().print(line, soft_wrap=True)


class _PlainProgress:
    """A line every few seconds, for logs."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._start = self._last = time.monotonic()

    def advance(self, count: int) -> None:
        """Count bytes; print when the last line is some seconds old."""
        self._done += count
        now = time.monotonic()
        if now - self._last < _PLAIN_SECONDS:
            return
        self._last = now
        rate = self._done / (now - self._start)
        left = (self._total - self._done) / rate
        print(
            f"{self._label}: {human_bytes(self._done)} of {human_bytes(self._total)}, "
            f"{human_bytes(rate)}/s, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def _stderr_console() -> Any:
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False)
