"""From command line options to an open session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash2_gguf.engine import echo_log
from dflash2_gguf.errors import CheckpointError, UsageError
from dflash2_gguf.plan import Plan
from dflash2_gguf.session import Session
from dflash2_gguf.ui import Terminal
from dflash2_gguf.words import counted

__all__ = [
    "Launch",
    "chosen",
    "open_session",
    "parse_draft_max",
    "parse_gpu_layers",
    "plan_session",
    "read_text",
    "unmet",
]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What every command needs to open its models; None leaves the choice to ``Session``."""

    target: Path
    draft: Path | None = None
    n_ctx: int | None = None
    n_threads: int | None = None
    draft_max: int | None = None
    n_gpu_layers: int | None = None
    fit: bool = False
    exact: bool = False
    calibrate: bool = False
    chat_template: Path | None = None
    verbose: bool = False


def open_session(launch: Launch, terminal: Terminal) -> Session:
    """Open the models with a progress bar, and say what will be drafted."""
    template = None if launch.chat_template is None else read_text(launch.chat_template)
    drafts = launch.draft is not None and launch.draft_max != 0
    n_ctx, n_gpu_layers = _sizes(launch, terminal)
    with terminal.progress("loading") as on_progress:
        session = Session(
            launch.target,
            launch.draft if drafts else None,
            n_ctx=n_ctx,
            n_threads=launch.n_threads,
            draft_max=launch.draft_max,
            n_gpu_layers=n_gpu_layers,
            exact=launch.exact,
            calibrate=launch.calibrate,
            chat_template=template,
            on_progress=on_progress,
            verbose=launch.verbose,
        )
    for line in unmet(launch, session):
        terminal.warning(line)
    return session


def unmet(launch: Launch, opened: Session | Plan) -> Iterator[str]:
    """What was asked for and is not to be had, or not to be trusted."""
    wanted = launch.draft_max or 0
    if launch.draft is not None and opened.draft_max < wanted:
        yield f"this drafter drafts {counted(opened.draft_max, 'token')} at once, not {wanted}"
    if (launch.n_ctx or 0) > opened.n_ctx_trained:
        yield (
            f"the context of {launch.n_ctx} tokens is longer than the {opened.n_ctx_trained} that "
            "the target was trained for"
        )


def parse_draft_max(text: str) -> int | None:
    """Value of --draft-max: "auto" is None, "off" is 0, else a number."""
    if text in ("auto", "off"):
        return None if text == "auto" else 0
    if not text.isascii() or not text.isdecimal():
        raise UsageError(f"--draft-max is {text!r}", "it can be auto, off or a number of tokens")
    return int(text)


def parse_gpu_layers(text: str) -> int | None:
    """Value of --gpu-layers: "auto" is None, else a number."""
    if text == "auto":
        return None
    if not text.isascii() or not text.isdecimal():
        raise UsageError(f"--gpu-layers is {text!r}", "it can be auto or a number of layers")
    return int(text)


def plan_session(launch: Launch, *, n_parallel: int = 1) -> Plan:
    """What the session of ``launch`` takes, fitted if it is to be."""
    if launch.verbose:
        echo_log()
    return Session.plan(
        launch.target,
        launch.draft,
        n_ctx=launch.n_ctx,
        n_parallel=n_parallel,
        draft_max=launch.draft_max,
        n_gpu_layers=launch.n_gpu_layers,
        fit=launch.fit,
    )


def chosen(plan: Plan) -> str:
    """What --fit chose, in words."""
    n = plan.n_gpu_layers
    layers = "" if n is None else f", {counted(n, 'layer')} on the GPU"
    return f"fitted: context {plan.n_ctx}{layers}"


def _sizes(launch: Launch, terminal: Terminal) -> tuple[int | None, int | None]:
    if not launch.fit:
        return launch.n_ctx, launch.n_gpu_layers
    plan = plan_session(launch)
    terminal.note(chosen(plan))
    return plan.n_ctx, plan.n_gpu_layers


def read_text(path: Path) -> str:
    """Contents of a text file; CheckpointError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
