"""``python -m dflash2_gguf.bench``: speed per workload and with many requests, against the pin.

Each finished part is a line of the results file; a run that was interrupted goes on behind it.
The page of markdown is made from that file, so it can be written again without measuring.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.bench_table import page
from dflash2_gguf.concurrency import Level, measure_level, parallel_systems
from dflash2_gguf.contenders import PIN, PLAIN, Contender, Pair, Tokenizer, ours, pin
from dflash2_gguf.engine import physical_cores
from dflash2_gguf.errors import CheckpointError, DFlash2Error, OutputError, UsageError
from dflash2_gguf.measure import Request, Run
from dflash2_gguf.never_slower import Cell, measure_cells, our_systems, pin_systems
from dflash2_gguf.session import Session
from dflash2_gguf.ui import Terminal
from dflash2_gguf.words import counted
from dflash2_gguf.workloads import Question, by_workload, read_questions

__all__ = ["Results", "main"]

_PARTS = ("speed", "concurrency")
_METHOD = 2  # counts up when figures are taken otherwise and cannot stand on a page with older ones
_TEMPERATURES = (0.0, 1.0)
_FEWEST_REQUESTS = 4  # of a concurrency pass
_SPARE_TOKENS = 16  # of a context, for what is drafted beyond an answer's end


@dataclass(frozen=True)
class Results:
    """The results file: one JSON object a line, ``settings``, ``kind`` and the measurement."""

    path: Path
    settings: dict[str, Any]

    def cells(self) -> list[Cell]:
        """Finished workloads of these settings, in the order they were measured."""
        return [Cell(**value) for value in self._read("cell")]

    def levels(self) -> list[Level]:
        """Finished concurrency levels of these settings."""
        return [Level(**value) for value in self._read("level")]

    def add(self, *measured: Cell | Level) -> None:
        """Append; OutputError when the file cannot be written."""
        lines = [
            {"settings": self.settings, "kind": type(one).__name__.lower(), "value": asdict(one)}
            for one in measured
        ]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error}") from error

    def _read(self, kind: str) -> Iterator[dict[str, Any]]:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {self.path}: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                if entry["kind"] == kind and entry["settings"] == self.settings:
                    yield entry["value"]
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{self.path}, line {number} is no result: {error}", "remove that line"
                ) from error


def main(arguments: list[str] | None = None) -> int:
    """Measure what is missing and write the page; 0 when all is there."""
    terminal = Terminal()
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        _bench(options, terminal)
    except DFlash2Error as error:
        terminal.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--target", type=Path, required=True, help="target, a GGUF file")
    add("--draft", type=Path, required=True, help="its drafter, a GGUF file")
    add("--server", type=Path, required=True, help="llama-server of the pin")
    add("--workloads", type=Path, required=True, help="questions, JSON lines (workload, text)")
    add("--results", type=Path, required=True, help="file to go on with, JSON lines")
    add("--write", type=Path, help="the page of markdown (default: standard output)")
    add("--parts", nargs="*", default=list(_PARTS), help="speed, concurrency, both, or neither")
    add("--widths", type=int, nargs="+", default=[1, 3, 7], help="our fixed widths")
    add("--pin-widths", type=int, nargs="+", default=[1, 7], help="the pin's, besides its default")
    add("--parallel", type=int, nargs="+", default=[1, 8, 32], help="requests at a time")
    add("--limit", type=int, default=4, help="prompts per workload that are counted")
    add("-n", "--max-tokens", type=int, default=64, help="tokens per answer")
    add("-c", "--ctx-size", type=int, default=6144, help="context for the workloads, in tokens")
    add("-t", "--threads", type=int, default=physical_cores(), help="CPU threads")
    return parser.parse_args(arguments)


def _bench(options: argparse.Namespace, terminal: Terminal) -> None:
    _require(options)
    pair = Pair(
        target=options.target,
        draft=options.draft,
        server=options.server,
        n_threads=options.threads,
    )
    questions = read_questions(options.workloads)
    results = Results(options.results, _settings(options, questions))
    if "speed" in options.parts:
        _speed(options, pair, by_workload(questions, options.limit + 1), results, terminal)
    if "concurrency" in options.parts:
        _concurrency(options, pair, questions, results, terminal)
    text = page(
        _command(options),
        _machine(options.threads),
        _describe(options),
        results.cells(),
        sorted(results.levels(), key=lambda level: level.n_parallel),
    )
    if options.write is None:
        terminal.write(text)
    else:
        _write(options.write, text)


def _require(options: argparse.Namespace) -> None:
    unknown = set(options.parts) - set(_PARTS)
    if unknown:
        raise UsageError(f"there is no part {unknown.pop()!r}", f"it can be {' or '.join(_PARTS)}")
    single = {name: [getattr(options, name)] for name in ("limit", "max_tokens", "ctx_size")}
    several = {name: getattr(options, name) for name in ("widths", "pin_widths", "parallel")}
    for name, values in (single | several).items():
        if min(values) < 1:
            raise UsageError(f"{name} is {min(values)}", "it can be 1 or more")


def _settings(options: argparse.Namespace, questions: Sequence[Question]) -> dict[str, Any]:
    """What must be equal for two measurements to stand on one page."""
    names = ("widths", "pin_widths", "limit", "max_tokens", "ctx_size", "threads")
    files = {name: getattr(options, name).name for name in ("target", "draft")}
    texts = json.dumps([asdict(question) for question in questions])
    digest = hashlib.sha256(texts.encode()).hexdigest()[:16]
    return (
        files
        | {"method": _METHOD, "workloads": digest}
        | {name: getattr(options, name) for name in names}
    )


def _speed(
    options: argparse.Namespace,
    pair: Pair,
    groups: dict[str, list[Question]],
    results: Results,
    terminal: Terminal,
) -> None:
    done = {cell.workload for cell in results.cells()}
    missing = {name: group for name, group in groups.items() if name not in done}
    if not missing:
        return
    with ExitStack() as stack:
        tokenizer = Tokenizer(stack.enter_context(Session(pair.target, n_ctx=512)))
        servers = stack.enter_context(pin_systems(pair, options.pin_widths, options.ctx_size))
        for name, group in missing.items():
            requests = [
                {heat: tokenizer.request(one, options.max_tokens, heat) for heat in _TEMPERATURES}
                for one in group
            ]
            with our_systems(pair, options.widths, options.ctx_size) as sessions:
                results.add(*measure_cells(name, requests, sessions | servers, terminal.note))


def _concurrency(
    options: argparse.Namespace,
    pair: Pair,
    questions: Sequence[Question],
    results: Results,
    terminal: Terminal,
) -> None:
    done = {level.n_parallel for level in results.levels()}
    missing = [number for number in options.parallel if number not in done]
    if not missing:
        return
    with Session(pair.target, n_ctx=512) as session:
        requests = _shortest(Tokenizer(session), questions, max(missing), options.max_tokens)
    n_ctx = max(len(one.prompt) for one in requests) + options.max_tokens + _SPARE_TOKENS
    terminal.note("answers given alone")
    with ours(pair, False, n_ctx=n_ctx) as plain:
        alone = {PLAIN: [_from_empty(plain, one) for one in requests]}
    with pin(pair, 0, n_ctx=n_ctx) as server:
        alone[PIN] = [_from_empty(server, one) for one in requests]
    for number in missing:
        count = max(number, _FEWEST_REQUESTS)
        with parallel_systems(pair, number, n_ctx) as systems:
            results.add(measure_level(number, requests[:count], alone, systems, terminal.note))


def _shortest(
    tokenizer: Tokenizer, questions: Sequence[Question], most: int, max_tokens: int
) -> list[Request]:
    """Greedy requests of the shortest questions: reading prompts is not what is compared."""
    count = max(most, _FEWEST_REQUESTS)
    free = sorted((q for q in questions if q.json_schema is None), key=lambda q: len(q.text))
    if len(free) < count:
        raise UsageError(
            f"{count} requests at a time need as many questions, there are {len(free)}",
            "add questions without a schema, or ask fewer at a time (--parallel)",
        )
    return [tokenizer.request(one, max_tokens, 0.0) for one in free[:count]]


def _from_empty(system: Contender, request: Request) -> Run:
    """What is reused of another prompt was evaluated in other batches, and rounds differently."""
    system.forget()
    return system.answer(request)


def _command(options: argparse.Namespace) -> str:
    """The call without folders, which are different everywhere."""
    files = ("target", "draft", "server", "workloads", "results")
    words = [f"--{name} {getattr(options, name).name}" for name in files]
    return (
        f"python -m dflash2_gguf.bench {' '.join(words)} -t {options.threads} "
        f"-n {options.max_tokens} --limit {options.limit} -c {options.ctx_size}"
    )


def _machine(n_threads: int) -> str:
    cores = counted(physical_cores(), "core")
    return (
        f"a machine with {cores} ({platform.machine()}, {platform.system()}), "
        f"{counted(n_threads, 'thread')}"
    )


def _describe(options: argparse.Namespace) -> list[str]:
    return [
        f"target: {options.target.name}",
        f"drafter: {options.draft.name}",
        (
            f"answers of up to {counted(options.max_tokens, 'token')}, "
            f"{counted(options.limit, 'prompt')} per workload"
        ),
    ]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
