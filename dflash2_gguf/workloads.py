"""Questions to measure with: a JSON lines file, one question a line, each of a named workload.

{"workload": "code", "text": "Write a function that ..."}
{"workload": "json", "text": "Describe ... as JSON", "json_schema": {"type": "object", ...}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.errors import CheckpointError, UsageError
from dflash2_gguf.words import counted

__all__ = ["Question", "by_workload", "read_questions"]

_FIELDS = {"workload", "text", "json_schema"}


@dataclass(frozen=True, kw_only=True)
class Question:
    """One user message; the answer follows ``json_schema`` where there is one.

    Raises UsageError for a field of the wrong kind or an empty text.
    """

    workload: str
    text: str
    json_schema: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("workload", "text"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise UsageError(f"{name} is {value!r}", "it can be any text")
        if self.json_schema is not None and not isinstance(self.json_schema, Mapping):
            raise UsageError(f"json_schema is {self.json_schema!r}", "it can be an object")


def read_questions(path: Path) -> list[Question]:
    """All questions of a file; CheckpointError names the line that cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read questions from {path}: {error}") from error
    found = [
        _question(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise CheckpointError(f"{path} holds no question")
    return found


def by_workload(questions: Sequence[Question], count: int) -> dict[str, list[Question]]:
    """The first ``count`` questions of each workload, workloads in their order in the file.

    Raises UsageError where a workload has fewer.
    """
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.workload, []).append(question)
    for name, group in groups.items():
        if len(group) < count:
            raise UsageError(
                f"workload {name!r} has {counted(len(group), 'question')}, {count} are needed",
                "add some, or measure fewer (--limit; one more is needed to warm up)",
            )
    return {name: group[:count] for name, group in groups.items()}


def _question(line: str, place: str) -> Question:
    try:
        value = json.loads(line)
        if not isinstance(value, dict):
            raise TypeError(f"a {type(value).__name__}, not an object")
        return Question(**{name: value[name] for name in _FIELDS & value.keys()})
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{place} is no question: {error}") from error
    except UsageError as error:
        raise CheckpointError(f"{place}: {error.message}", error.hint) from error
