"""Files of prompts, and what a target reads of one."""

from __future__ import annotations

import json
from pathlib import Path

from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.launch import read_text
from dflash2_gguf.session import Session

__all__ = ["Prompt", "prompt_tokens", "read_prompts"]

# a text, or token ids
Prompt = str | tuple[int, ...]


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Prompts of a file: one a line, or, in a .jsonl file, the "text" or "tokens" of each line."""
    lines = [line for line in read_text(path).splitlines() if line.strip()]
    if path.suffix == ".jsonl":
        prompts = tuple(_prompt(path, number, line) for number, line in enumerate(lines, 1))
    else:
        prompts = tuple(lines)
    if not prompts:
        raise CheckpointError(f"there are no prompts in {path}")
    return prompts


def prompt_tokens(session: Session, prompt: Prompt, *, raw: bool) -> list[int]:
    """Token ids: of a text as a user's message through the chat template, or as it is if ``raw``.

    Raises CheckpointError when the target has no usable template.
    """
    if not isinstance(prompt, str):
        return list(prompt)
    if raw:
        return session.tokenize(prompt)
    try:
        return session.chat_tokens([{"role": "user", "content": prompt}])
    except CheckpointError as error:
        raise CheckpointError(error.message, "--raw takes texts as they are") from error


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        entry = json.loads(line)
        return str(entry["text"]) if "text" in entry else tuple(int(t) for t in entry["tokens"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"line {number} of {path} is no prompt: {error!r}",
            'a line is {"text": "..."} or {"tokens": [...]}',
        ) from error
