"""The terminal: answers on stdout, everything else on stderr, plain text where nobody is looking.

The only module that imports rich, and only when stderr is a terminal.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from dflash2_gguf.errors import DFlash2Error

__all__ = ["Terminal"]

_LOG_EVERY = 60.0  # seconds
_STYLES = {"error": "bold red", "warning": "yellow", "hint": "cyan", "note": "dim"}


class Terminal:
    """Standard streams of the process; decides once whether they are for eyes."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._styled = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def write(self, text: str) -> None:
        """Answer text, visible at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def read_line(self, prompt: str) -> str | None:
        """The next line without its end; None at the end of input."""
        if self.is_interactive and sys.stdout.isatty():
            return _read_edited(prompt)
        if self.is_interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None

    def error(self, error: DFlash2Error) -> None:
        """One line for the message, one for the hint."""
        self._say("error", error.message)
        if error.hint:
            self._say("hint", error.hint)

    def warning(self, text: str) -> None:
        """Something the user should know, which stops nothing."""
        self._say("warning", text)

    def note(self, text: str) -> None:
        """A remark for a reader of the terminal."""
        self._say("note", text, label=False)

    def table(self, rows: Mapping[str, str]) -> None:
        """Names and values, one a line."""
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            self._say("note", f"{name:<{width}}  {value}", label=False)

    def grid(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table as data: drawn on a terminal, columns of text elsewhere."""
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            _draw(head, rows)
            return
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        for row in (head, *rows):
            cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            self.write("  ".join(cells).rstrip() + "\n")

    @contextmanager
    def progress(self, label: str) -> Iterator[Callable[[float], None]]:
        """A bar for a task that reports 0..1; in a log a line a minute."""
        if not self._styled:
            yield self._logging(label)
            return
        from rich.progress import Progress

        with Progress(console=_console(), transient=True) as bar:
            task = bar.add_task(label, total=1.0)
            yield lambda fraction: bar.update(task, completed=fraction)

    def _logging(self, label: str) -> Callable[[float], None]:
        last = time.monotonic()

        def on_progress(fraction: float) -> None:
            nonlocal last
            if time.monotonic() - last >= _LOG_EVERY:
                last = time.monotonic()
                self.note(f"{label}: {fraction:.0%}")

        return on_progress

    def _say(self, kind: str, text: str, *, label: bool = True) -> None:
        start = f"{kind}: " if label else ""
        if not self._styled:
            print(start + text, file=sys.stderr, flush=True)
            return
        from rich.text import Text

        line = Text(start, style=_STYLES[kind])
        line.append(text, style="" if label else _STYLES[kind])
        _console().print(line, soft_wrap=True)


def _draw(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE)
    for index, name in enumerate(head):
        table.add_column(Text(name), justify="right" if index else "left", no_wrap=index == 0)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False, markup=False).print(table)


def _console() -> Any:
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False)


def _read_edited(prompt: str) -> str | None:
    with suppress(ImportError):  # Windows has none, its console edits lines itself
        import readline  # noqa: F401  # gives input() a line editor
    try:
        return input(prompt)
    except EOFError:
        print(file=sys.stderr)
        return None
