"""``dflash2-run generate``: one continuation, as text or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.errors import UsageError
from dflash2_gguf.json_schema import to_gbnf, unenforced
from dflash2_gguf.launch import Launch, open_session, read_text
from dflash2_gguf.sampling import SamplingParams
from dflash2_gguf.session import Generation, Session
from dflash2_gguf.stats import Stats
from dflash2_gguf.ui import Terminal

__all__ = ["Request", "collect", "generate", "read_schema"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One continuation; ``prompt`` None is read from stdin."""

    prompt: str | None
    max_tokens: int | None
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    as_json: bool = False


def generate(launch: Launch, request: Request, terminal: Terminal) -> int:
    """Run the request; the exit code is 0."""
    _check_schema(request.sampling, terminal)
    prompt = request.prompt if request.prompt is not None else _read_prompt(terminal)
    with open_session(launch, terminal) as session:
        pieces = []
        for piece in session.generate(
            prompt, max_tokens=request.max_tokens, sampling=request.sampling, stop=request.stop
        ):
            pieces.append(piece)
            if not request.as_json:
                terminal.write(piece.text)
        answer = collect(pieces)
        terminal.write(_to_json(answer, session) if request.as_json else "\n")
        for text in (answer.stats or Stats()).warnings():
            terminal.warning(text)
    return 0


def collect(pieces: list[Generation]) -> Generation:
    """The whole answer as one piece."""
    return Generation(
        text="".join(piece.text for piece in pieces),
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        from_draft=tuple(flag for piece in pieces for flag in piece.from_draft),
        finish_reason=pieces[-1].finish_reason,
        stats=pieces[-1].stats,
    )


def read_schema(source: str) -> Any:
    """The JSON of a schema: ``source`` itself where it begins with a brace, else that file's."""
    is_text = source.lstrip().startswith("{")
    try:
        return json.loads(source if is_text else read_text(Path(source)))
    except (ValueError, RecursionError) as error:
        name = "--json-schema" if is_text else source
        raise UsageError(f"{name} is not JSON: {error}", "see https://json-schema.org") from error


def _check_schema(sampling: SamplingParams, terminal: Terminal) -> None:
    """Before minutes are spent on loading."""
    if sampling.json_schema is None:
        return
    to_gbnf(sampling.json_schema)
    if ignored := unenforced(sampling.json_schema):
        terminal.warning(f"the JSON schema's {', '.join(ignored)} will not be enforced")


def _read_prompt(terminal: Terminal) -> str:
    if terminal.is_interactive:
        raise UsageError("there is no prompt", "give one with -p, or through a pipe")
    return sys.stdin.read()


def _to_json(answer: Generation, session: Session) -> str:
    stats = answer.stats or Stats()
    return (
        json.dumps(
            {
                "text": answer.text,
                "tokens": answer.tokens,
                "from_draft": answer.from_draft,
                "finish_reason": answer.finish_reason,
                "draft_max": session.draft_max,
                "stats": stats.as_dict(),
            },
            ensure_ascii=False,
        )
        + "\n"
    )
