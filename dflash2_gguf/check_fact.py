"""One thing that ``check`` looked at, and what it found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from dflash2_gguf.errors import DFlash2Error

__all__ = ["Fact", "Verdict", "error", "from_error", "note", "ok", "warning"]

_NO_HINT = "download or convert the file again"


class Verdict(str, Enum):
    """How good a fact is, best first.

    note: headers do not tell, or worth knowing. warning: it may run and draft badly. error: it does
    not run, or drafts badly for sure.
    """

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """``name`` is what was looked at, ``hint`` the way out of what is not ok."""

    name: str
    verdict: Verdict
    message: str
    hint: str | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.message:
            raise ValueError(f"a fact without words: {self.name!r}, {self.message!r}")
        if (self.verdict is Verdict.OK) is not (self.hint is None):
            raise ValueError(f"{self.name}: {self.verdict.value} with the hint {self.hint!r}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self) | {"verdict": self.verdict.value}


def ok(name: str, message: str) -> Fact:
    """Nothing to do."""
    return Fact(name=name, verdict=Verdict.OK, message=message)


def note(name: str, message: str, hint: str) -> Fact:
    """Headers do not tell, or something worth knowing."""
    return Fact(name=name, verdict=Verdict.NOTE, message=message, hint=hint)


def warning(name: str, message: str, hint: str) -> Fact:
    """It may run and draft badly."""
    return Fact(name=name, verdict=Verdict.WARNING, message=message, hint=hint)


def error(name: str, message: str, hint: str) -> Fact:
    """It does not run, or drafts badly for sure."""
    return Fact(name=name, verdict=Verdict.ERROR, message=message, hint=hint)


def from_error(name: str, problem: DFlash2Error) -> Fact:
    """What another part of the program refuses."""
    return error(name, problem.message, problem.hint or _NO_HINT)
