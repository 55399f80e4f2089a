"""From command line options to an open session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash2_gguf.errors import CheckpointError, UsageError
from dflash2_gguf.session import Session
from dflash2_gguf.ui import Terminal

__all__ = ["Launch", "open_session", "parse_draft_max"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What every command needs to open its models; None leaves the choice to ``Session``."""

    target: Path
    draft: Path | None = None
    n_ctx: int | None = None
    n_threads: int | None = None
    draft_max: int | None = None
    chat_template: Path | None = None
    verbose: bool = False


def open_session(launch: Launch, terminal: Terminal) -> Session:
    """Open the models with a progress bar, and say what will be drafted."""
    template = None if launch.chat_template is None else _read_text(launch.chat_template)
    drafts = launch.draft is not None and launch.draft_max != 0
    with terminal.progress("loading") as on_progress:
        session = Session(
            launch.target,
            launch.draft if drafts else None,
            n_ctx=launch.n_ctx,
            n_threads=launch.n_threads,
            draft_max=launch.draft_max,
            chat_template=template,
            on_progress=on_progress,
            verbose=launch.verbose,
        )
    wanted = launch.draft_max or 0
    if drafts and session.draft_max < wanted:
        terminal.warning(f"this drafter drafts {session.draft_max} tokens at once, not {wanted}")
    return session


def parse_draft_max(text: str) -> int | None:
    """Value of --draft-max: "auto" is None, "off" is 0, else a number."""
    if text in ("auto", "off"):
        return None if text == "auto" else 0
    if not text.isascii() or not text.isdecimal():
        raise UsageError(f"--draft-max is {text!r}", "it can be auto, off or a number of tokens")
    return int(text)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
