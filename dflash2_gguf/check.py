"""``dflash2-convert check``: does a drafter fit a target, told from headers or by a short run?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dflash2_gguf.check_both import last_fact, pair_facts, target_fact
from dflash2_gguf.check_draft import draft_facts
from dflash2_gguf.check_fact import Fact, Verdict, from_error, note
from dflash2_gguf.check_files import open_draft, open_target_file
from dflash2_gguf.convert.ui import Terminal
from dflash2_gguf.errors import DFlash2Error, UsageError
from dflash2_gguf.words import counted

__all__ = ["CheckRequest", "check", "find_facts"]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """The arguments of ``check``; ``max_tokens`` is the longest answer of its run."""

    target: Path
    draft: Path
    as_json: bool = False
    run: bool = False
    max_tokens: int = 64
    n_threads: int | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        for path in (self.target, self.draft):
            if self.run and path.is_dir():
                raise UsageError(f"--run needs GGUF files, {path} is a folder", "convert it first")
        if self.run and self.max_tokens < 3:
            raise UsageError(
                f"answers of {counted(self.max_tokens, 'token')} judge no draft",
                "-n can be 3 or more",
            )


def check(request: CheckRequest, terminal: Terminal) -> int:
    """Print every fact; 1 when one of them is an error, else 0."""
    facts = list(find_facts(request.target, request.draft))
    kept: dict[str, Any] | None = None
    if request.run:
        found, kept = _run(request, facts)
        facts += found
    worst = _worst(facts)
    if request.as_json:
        terminal.json(
            {
                "target": str(request.target),
                "draft": str(request.draft),
                "verdict": worst.value,
                "facts": [fact.as_dict() for fact in facts],
                "run": kept,
            }
        )
    else:
        _print(facts, terminal)
    return 1 if worst is Verdict.ERROR else 0


def _run(request: CheckRequest, facts: Sequence[Fact]) -> tuple[list[Fact], dict[str, Any] | None]:
    """The runtime and its libraries are loaded for this alone."""
    if _worst(facts) is Verdict.ERROR:
        why = "not run: the headers say already that the pair does not work"
        return [note("run", why, "see the errors above")], None
    from dflash2_gguf.check_run import run_pair
    from dflash2_gguf.engine import echo_log

    if request.verbose:
        echo_log()
    found, kept = run_pair(
        request.target,
        request.draft,
        max_tokens=request.max_tokens,
        n_threads=request.n_threads,
    )
    return found, None if kept is None else kept.as_dict()


def find_facts(target_path: Path, draft_path: Path) -> tuple[Fact, ...]:
    """Everything that the headers of a target and a drafter tell, in reading order."""
    target = _open("target", open_target_file, target_path)
    draft = _open("drafter", open_draft, draft_path)
    facts: list[Fact] = []
    if isinstance(target, Fact):
        facts.append(target)
    else:
        facts.append(target_fact(target))
    if isinstance(draft, Fact):
        facts.append(draft)
    else:
        facts += draft_facts(draft)
    if not isinstance(target, Fact) and not isinstance(draft, Fact):
        facts += pair_facts(target, draft)
        if _worst(facts) is not Verdict.ERROR:
            facts.append(last_fact(target, draft))
    return tuple(facts)


def _open(name: str, opener: Callable[[Path], _T], path: Path) -> _T | Fact:
    try:
        return opener(path)
    except DFlash2Error as problem:
        return from_error(name, problem)


def _worst(facts: Sequence[Fact]) -> Verdict:
    ranks = list(Verdict)
    return max((fact.verdict for fact in facts), key=ranks.index)


def _print(facts: Sequence[Fact], terminal: Terminal) -> None:
    width = max(len(fact.name) for fact in facts)
    for fact in facts:
        terminal.line(f"{fact.verdict.value:7}  {fact.name:{width}}  {fact.message}")
        if fact.hint:
            terminal.line(f"{'':7}  {'':{width}}  hint: {fact.hint}")
    counts = Counter(fact.verdict for fact in facts)
    terminal.note(", ".join(_counted(v, counts[v]) for v in reversed(list(Verdict)) if counts[v]))


def _counted(verdict: Verdict, n: int) -> str:
    return f"{n} ok" if verdict is Verdict.OK else counted(n, verdict.value)
