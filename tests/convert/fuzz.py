"""Mutated inputs for the converter, many thousands of them in one process.

    python -m tests.convert.fuzz [--runs N] [--seed S] [--kinds K ...] [--minutes M]

Each run changes a small valid input and hands it to the commands' functions. Findings are: anything
but a DFlash2Error, an error without words, more than ``SECONDS``, more memory than
``MEMORY``, a file that is read outside the inputs or written outside the outputs, a file left after
an error, and an output that the gguf package cannot read. ``--seed S --runs 1 --kinds K`` repeats
one. The exit code is 1 when there are findings. Syncing to disk is left out.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import gguf

from dflash2_gguf.errors import DFlash2Error
from tests.convert.checkpoints import safetensors_bytes
from tests.convert.fuzz_kinds import KINDS, Kind, Step, mutated, words_of

__all__ = ["Finding", "Fuzzer", "Report", "main"]

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10
# above what the process had at its start
MEMORY = 2 << 30
# what a run may leave the peak higher than it was; the inputs have less than 1 MiB
_GROWTH = 256 << 20
_READABLE = [
    *(sys.prefix, sys.base_prefix, sys.exec_prefix, str(ROOT), "/usr", "/lib", "/proc", "/sys"),
    *("/dev", *(entry for entry in sys.path if entry)),
]
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {"os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.symlink": 2}


class Hang(BaseException):
    """A run took longer than it may."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What went wrong; ``place`` is the same for all runs that show the same fault."""

    kind: str
    seed: int
    place: str
    details: str

    @property
    def command(self) -> str:
        """What repeats it."""
        return f"python -m tests.convert.fuzz --seed {self.seed} --runs 1 --kinds {self.kind}"


@dataclass
class Report:
    """Counts of one kind."""

    runs: int = 0
    refused: int = 0
    accepted: int = 0
    slowest: float = 0.0
    findings: list[Finding] = field(default_factory=list)


class _Watch:
    """An audit hook that notes what is opened or changed outside two folders."""

    def __init__(self, folder: Path) -> None:
        self.inputs, self.outputs = f"{folder / 'in'}{os.sep}", f"{folder / 'out'}{os.sep}"
        self.readable = (self.inputs, self.outputs, *_READABLE)
        self.active = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, values: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open" and isinstance(values[0], (str, bytes)):
            path, flags = _normal(values[0]), values[2]
            writes = isinstance(flags, int) and flags & _WRITING and path != os.devnull
            folder = f"{path}{os.sep}" == self.outputs
            if not folder and not path.startswith(self.outputs if writes else self.readable):
                self.seen.append(f"{'wrote' if writes else 'read'} {path}")
        elif event in _CHANGES:
            for path in map(_normal, values[: _CHANGES[event]]):
                if not path.startswith(self.outputs):
                    self.seen.append(f"{event} {path}")


def _normal(path: str | bytes) -> str:
    """The absolute path without following links."""
    if isinstance(path, str) and path.startswith("/") and "/." not in path and "//" not in path:
        return path
    return os.path.normpath(Path.cwd() / os.fsdecode(path))


class Fuzzer:
    """Runs in one scratch folder, which holds ``in``, ``out`` and files nobody may touch."""

    def __init__(self, folder: Path, kinds: Mapping[str, Kind]) -> None:
        self.inputs, self.outputs = folder / "in", folder / "out"
        self.cases = {
            name: kind.cases(_new(folder / "valid" / name)) for name, kind in kinds.items()
        }
        self.kinds = kinds
        self.words = {name: words_of(cases) for name, cases in self.cases.items()}
        _new(folder / "outside")
        for place in ("outside", "."):
            (folder / place / "secret.safetensors").write_bytes(safetensors_bytes({}))
        for path in (self.inputs, self.outputs):
            path.mkdir()
        self.written: dict[str, bytes] = {}
        self.listing: list[tuple[str, int, int]] = []
        self.watch = _Watch(folder)
        self.reports = {name: Report() for name in kinds}

    def run(self, name: str, seed: int) -> None:
        """One run: a mutated case, and every step on it."""
        rng, report = Random(f"{name} {seed}"), self.reports[name]
        case = rng.choice(self.cases[name])
        self._place(mutated(rng, case, self.words[name]))
        steps = self.kinds[name].steps(rng, case)
        _forget_peak()
        begin, peak = time.monotonic(), _peak()
        accepted = True
        for step in steps:
            fault, accepted = self._step(step, thorough=rng.random() < 0.1)
            if fault is not None:
                report.findings.append(
                    Finding(kind=name, seed=seed, place=fault[0], details=fault[1])
                )
                break
        if _peak() > peak + _GROWTH:
            grown = f"the peak grew by {(_peak() - peak) >> 20} MiB"
            report.findings.append(Finding(kind=name, seed=seed, place="memory", details=grown))
        report.runs += 1
        report.accepted += accepted
        report.refused += not accepted
        report.slowest = max(report.slowest, time.monotonic() - begin)

    def _place(self, files: Mapping[str, bytes]) -> None:
        for name in self.written.keys() - files.keys():
            (self.inputs / name).unlink()
        for name, data in files.items():
            if self.written.get(name) is not data:
                (self.inputs / name).parent.mkdir(exist_ok=True)
                (self.inputs / name).write_bytes(data)
        self.written, self.listing = dict(files), _listing(self.inputs)

    def _step(self, step: Step, *, thorough: bool) -> tuple[tuple[str, str] | None, bool]:
        """The fault, if there is one, and whether the input was accepted."""
        output, accepted, fault = None, False, None
        self.watch.seen.clear()
        try:
            with _alarm():
                self.watch.active = True
                output = step(self.inputs, self.outputs)
                accepted = True
        except DFlash2Error as error:
            if not _is_said(error):
                fault = ("empty message or hint", f"{error.message!r} {error.hint!r}")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            fault = (_place_of(error), traceback.format_exc())
        finally:
            self.watch.active = False
        fault = fault or self._traces(output) or (_unread(output) if thorough else None)
        for path in self.outputs.iterdir():
            path.unlink()
        return fault, accepted

    def _traces(self, output: Path | None) -> tuple[str, str] | None:
        if self.watch.seen:
            return "outside", "; ".join(self.watch.seen)
        if _listing(self.inputs) != self.listing:
            return "inputs", "the inputs changed"
        expected = [] if output is None else [output]
        found = list(self.outputs.iterdir())
        if found != expected:
            return "left", f"there is {found}, not {expected}"
        size = sum(len(data) for data in self.written.values())
        if output is not None and output.stat().st_size > 64 * size:
            return "size", f"{output.stat().st_size} bytes are made of {size}"
        return None


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    found = []
    for entry in os.scandir(folder):
        if entry.is_dir():
            found += _listing(Path(entry.path))
        else:
            status = entry.stat()
            found.append((entry.path, status.st_size, status.st_mtime_ns))
    return sorted(found)


def _is_said(error: DFlash2Error) -> bool:
    """Has it words? The terminal escapes what is not printable."""
    return bool(error.message.strip()) and (error.hint is None or bool(error.hint.strip()))


def _place_of(error: BaseException) -> str:
    """Kind of the exception and the innermost line of the package."""
    frames = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(ROOT)
        and ".venv" not in frame.filename
        and frame.name != "ring"
    ]
    return f"{type(error).__name__} at {frames[-1] if frames else 'an unknown line'}"


def _unread(output: Path | None) -> tuple[str, str] | None:
    """A fault where the gguf package cannot read what was written."""
    if output is None:
        return None
    try:
        tensors = gguf.GGUFReader(output).tensors
    except Exception as error:
        return f"unreadable output: {type(error).__name__}", traceback.format_exc()
    return None if tensors else ("unreadable output: no tensors", str(output))


def _peak() -> int:
    """Most memory the process had at once since the last ``_forget_peak``, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) << 10


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def _alarm() -> Iterator[None]:
    def ring(_number: int, _frame: types.FrameType | None) -> None:
        raise Hang(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def bounded() -> Iterator[None]:
    """At most ``MEMORY`` more than the process has, one thread, no waiting for the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    sync, count = os.fsync, os.cpu_count
    os.fsync, os.cpu_count = lambda _descriptor: None, lambda: 1
    try:
        yield
    finally:
        os.fsync, os.cpu_count = sync, count
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def fuzz(
    folder: Path, kinds: Mapping[str, Kind], *, runs: int, seed: int, minutes: float = 1e9
) -> dict[str, Report]:
    """``runs`` in all, or as many as ``minutes`` allow, the kinds in turn.

    The n-th run of a kind has the seed ``seed + n``.
    """
    fuzzer, end = Fuzzer(folder, kinds), time.monotonic() + 60 * minutes
    turns = [name for name, kind in kinds.items() for _ in range(kind.share)]
    with bounded(), (folder / "current").open("w") as current:
        for i in range(runs):
            name = turns[i % len(turns)]
            number = seed + fuzzer.reports[name].runs
            os.pwrite(current.fileno(), f"{name} {number}\n".encode().ljust(40), 0)
            fuzzer.run(name, number)
            if time.monotonic() > end:
                break
            if i % 10000 == 9999:
                found = sum(len(report.findings) for report in fuzzer.reports.values())
                print(f"{i + 1} runs, {found} findings", file=sys.stderr, flush=True)
    return fuzzer.reports


def table(reports: Mapping[str, Report]) -> str:
    """One line per kind, and their sums."""
    lines = [
        f"{'kind':12} {'runs':>8} {'refused':>8} {'accepted':>8} {'slowest':>10} {'findings':>8}"
    ]
    for name, r in reports.items():
        lines.append(
            f"{name:12} {r.runs:8} {r.refused:8} {r.accepted:8} {r.slowest * 1000:7.0f} ms "
            f"{len(r.findings):8}"
        )
    every = list(reports.values())
    lines.append(
        f"{'all':12} {sum(r.runs for r in every):8} {sum(r.refused for r in every):8} "
        f"{sum(r.accepted for r in every):8} {max(r.slowest for r in every) * 1000:7.0f} ms "
        f"{sum(len(r.findings) for r in every):8}"
    )
    return "\n".join(lines)


def describe(findings: Sequence[Finding]) -> Iterator[str]:
    """Each fault once: how often, how to repeat it, and what it says."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.place, []).append(finding)
    for place, group in groups.items():
        yield f"\n{place} ({len(group)} times)\n  {group[0].command}\n{group[0].details}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the table and the findings; 1 when there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.convert.fuzz")
    parser.add_argument("--runs", type=int, default=10000, help="in all [default: 10000]")
    parser.add_argument("--seed", type=int, default=0, help="of the first run of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="K")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--nice", type=int, default=19, help="to others [default: 19]")
    given = parser.parse_args(arguments)
    faulthandler.enable()
    os.nice(given.nice)
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="dflash2-fuzz-", dir=memory))
    # a process that dies leaves the folder; its file `current` names the run
    kinds = {name: KINDS[name] for name in given.kinds}
    reports = fuzz(folder, kinds, runs=given.runs, seed=given.seed, minutes=given.minutes)
    shutil.rmtree(folder)
    findings = [finding for report in reports.values() for finding in report.findings]
    print(table(reports), *describe(findings), sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
