"""Questions for the speed table, made of the held-out prompts in tests/assets.

``python -m tests.workloads`` prints them as JSON lines: code, math and chat as they are; code to
copy and to edit; facts to extract as JSON with a schema; questions about a long document, which is
chat and math prompts one after the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["questions"]

PROMPTS = Path(__file__).resolve().parent / "assets" / "prompts" / "prompts.jsonl"
PER_WORKLOAD = 12
SETS = {"code": "HumanEval", "math": "gsm_symbolic", "chat": "mt_bench"}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "facts": {
            "type": "array",
            "minItems": 3,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "value": {"type": "integer"}},
                "required": ["name", "value"],
            },
        },
    },
    "required": ["title", "facts"],
}
# a small target answers other texts instead of copying them
EDITS = (
    "Copy this code word for word:\n\n{}\n\nCopy:",
    "Copy this code, but rename the function to solve:\n\n{}\n\nCopy:",
    "Copy this code, but leave the docstring out:\n\n{}\n\nCopy:",
)
N_MATH_ENTRIES = 22  # with all chat prompts, some 4300 tokens


def questions() -> Iterator[dict[str, Any]]:
    """Workload, text and, where there is one, schema; workloads take turns."""
    texts = {name: _texts(source) for name, source in SETS.items()}
    listed = enumerate(texts["chat"] + texts["math"][:N_MATH_ENTRIES], 1)
    entries = "\n".join(f"Entry {i}: {text}" for i, text in listed)
    for i in range(PER_WORKLOAD):
        for name, found in texts.items():
            yield {"workload": name, "text": found[i]}
        code = texts["code"][-1 - i].partition("\n\n")[2]
        yield {"workload": "copy and edit", "text": EDITS[i % len(EDITS)].format(code)}
        ask = f"Give this a title and list its facts as JSON:\n\n{texts['math'][-1 - i]}"
        yield {"workload": "JSON", "text": ask, "json_schema": SCHEMA}
        ask = f"{entries}\n\nWhat is entry {5 * i + 3} about? Answer in a short paragraph."
        yield {"workload": "long context", "text": ask}


def _texts(source: str) -> list[str]:
    prompts = map(json.loads, PROMPTS.read_text(encoding="utf-8").splitlines())
    return [prompt["text"] for prompt in prompts if prompt["name"].startswith(source)]


if __name__ == "__main__":
    sys.stdout.write("".join(json.dumps(one) + "\n" for one in questions()))
