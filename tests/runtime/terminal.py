"""A program in a terminal of its own: what it shows, and keys pressed at the right moment."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ENVIRONMENT", "PROGRAM", "Terminal", "terminal"]

PROGRAM = [sys.executable, "-m", "dflash2_gguf"]
# takes the terminal as its own, so that Ctrl-C there reaches the program
_ADOPT = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
# no colours, no line editing sequences, and help texts of one width
ENVIRONMENT = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "80"}
_PATIENCE = 120.0


class Terminal:
    """The other end of a program's terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self._process = process
        self._master = master
        self.shown = ""

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Wait until ``text`` is shown beyond position ``after``; the position behind it."""
        deadline = time.monotonic() + _PATIENCE
        while (at := self.shown.find(text, after)) < 0:
            assert time.monotonic() < deadline, f"{text!r} never came, but {self.shown!r}"
            assert self._read(), f"ended without {text!r}: {self.shown!r}"
        return at + len(text)

    def wait_until_it_sleeps(self) -> None:
        """Wait until the program waits, for a key if the prompt is shown.

        A signal between prompt and read is one that CPython's readline loop forgets until the next
        key: it asks for signals only where one interrupts its select().
        """
        deadline = time.monotonic() + _PATIENCE
        while self._state() not in ("S", "I"):  # I: macOS, where it has slept for long
            assert time.monotonic() < deadline, f"it never waits: {self.shown!r}"
            time.sleep(0.01)

    def press(self, keys: str) -> None:
        """Type ``keys``; Ctrl-C is "\\x03", Ctrl-D "\\x04"."""
        os.write(self._master, keys.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + _PATIENCE
        while self._read():
            assert time.monotonic() < deadline, f"it does not end: {self.shown!r}"
        return self._process.wait(timeout=_PATIENCE)

    def _state(self) -> str:
        status = Path(f"/proc/{self._process.pid}/stat")
        if status.exists():  # small Linux images have no ps
            return status.read_text(encoding="utf-8").rpartition(") ")[2][0]
        command = ["ps", "-o", "state=", "-p", str(self._process.pid)]
        return subprocess.check_output(command, text=True)[:1]

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], 1.0)
        if not ready:
            return True
        try:
            data = os.read(self._master, 4096)
        except OSError:  # Linux says so when the other end is closed
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


@contextmanager
def terminal(arguments: Sequence[str]) -> Iterator[Terminal]:
    """Run dflash2-run with ``arguments`` in a new terminal; it is ended on the way out."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _ADOPT, *PROGRAM, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
