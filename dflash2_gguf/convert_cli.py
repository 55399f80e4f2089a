"""``dflash2-convert``: options in, exit code out.

Exit codes: 0 success, 1 error, 2 wrong usage, 130 interrupted, 143 terminated. stdout carries the
paths of the files written, or JSON; everything else goes to stderr.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from dflash2_gguf import options
from dflash2_gguf.errors import DFlash2Error, UsageError

__all__ = ["main"]

_Job = Callable[[], int]
_COMMANDS = ("convert", "inspect", "check", "migrate", "pack", "presets", "calibrate", "fidelity")
_PROGRAM = "dflash2-convert"


class _Terminated(BaseException):
    """The process was asked to end; carries the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with ``arguments`` (default: the process's) and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _end_cleanly_on_signals()
        code = _parse(words)()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except _Terminated as ending:
        return ending.code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except DFlash2Error as error:
        return _report(error, verbose=_is_verbose(words))
    except Exception as error:  # the last resort: users get one line, not a traceback
        unexpected = DFlash2Error(
            f"unexpected {type(error).__name__}: {error}", "-v shows where it happened"
        )
        unexpected.__cause__ = error
        return _report(unexpected, verbose=_is_verbose(words))
    return code


def _end_cleanly_on_signals() -> None:
    """Let SIGTERM and SIGHUP unwind the stack, so that temporary files are removed."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise _Terminated(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), end)


def _is_verbose(words: Sequence[str]) -> bool:
    return "-v" in words or "--verbose" in words


def _report(error: DFlash2Error, *, verbose: bool) -> int:
    from dflash2_gguf.convert.ui import Terminal

    if verbose:
        traceback.print_exception(error)
    Terminal().error(error)
    return error.exit_code


def _parse(words: list[str]) -> _Job:
    """The work that ``words`` ask for; help is printed already and leaves nothing."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(_program)
    app.command("convert")(_convert)
    app.command("inspect")(_inspect)
    app.command("check")(_check)
    app.command("migrate")(_migrate)
    app.command("pack")(_pack)
    app.command("presets")(_presets)
    app.command("calibrate")(_calibrate)
    app.command("fidelity", cls=_ListOfFiles)(_fidelity)
    try:
        job = app(_with_command(words), prog_name=_PROGRAM, standalone_mode=False)
    except _parser_error() as error:
        raise UsageError(_first_lower(error), _way_out(error)) from error
    return job if callable(job) else lambda: int(job or 0)


class _ListOfFiles(TyperCommand):
    """Its repeated argument is shown as files, not as the Python type that holds them."""

    def get_help(self, ctx: Any) -> str:
        """The text of --help."""
        return super().get_help(ctx).replace("<list[Path]>", "<path>...")


def _with_command(words: list[str]) -> list[str]:
    """The word ``convert`` may be left out.

    Raises UsageError for a word that resembles a command and is no file.
    """
    if not words:
        return ["--help"]
    first = words[0]
    if first in (*_COMMANDS, "--help", "--version"):
        return words
    similar = get_close_matches(first, _COMMANDS, n=1)
    if similar and not first.startswith("-") and not Path(first).exists():
        raise UsageError(f"there is no command {first}", f"{similar[0]} is meant?")
    return ["convert", *words]


def _parser_error() -> type[Any]:
    """click's base exception, which typer brings under different names in different versions."""
    return next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _way_out(error: Any) -> str:
    command = getattr(getattr(error, "cmd", None), "name", None)
    if command in ("convert", "migrate", "pack") and "unexpected extra" in error.message:
        return "name the target with --target, what is written with -o"
    return "--help lists the options"


def _first_lower(error: Any) -> str:
    text: str = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:]


def _program(version: options.Version = False) -> None:  # shown before all else
    """Convert DFlash 2 drafters to GGUF. The word `convert` may be left out."""


_Source = Annotated[
    Path, typer.Argument(metavar="SRC", help="Checkpoint folder of the drafter, or its GGUF file.")
]
_Target = Annotated[
    Path | None,
    typer.Option(
        "--target",
        metavar="T",
        help="The target of a checkpoint: a GGUF file, or its Hugging Face folder.",
    ),
]
_Imatrix = Annotated[
    Path | None,
    typer.Option("--imatrix", metavar="FILE", help="Importance matrix for the quantizers."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Show every tensor, and tracebacks of errors.")
]


def _convert(
    source: _Source,
    preset: Annotated[
        list[str],
        typer.Option(
            "--preset", metavar="P", help="Recipe, see `presets`; several are written at once."
        ),
    ],
    target: _Target = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="OUT", help="A .gguf file, or a folder.")
    ] = Path(),
    imatrix: _Imatrix = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab",
            metavar="N",
            min=1,
            help="Keep N rows of the head: the tokens most often counted in --imatrix.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything but the weights, write nothing.")
    ] = False,
    as_json: _Json = False,
    verbose: _Verbose = False,
) -> _Job:
    """Convert a checkpoint, or a GGUF file, to one or more GGUF files."""
    from dflash2_gguf.convert.commands import ConvertRequest, convert
    from dflash2_gguf.convert.ui import Terminal

    request = ConvertRequest(
        source=source,
        target=target,
        presets=tuple(preset),
        output=output,
        imatrix=imatrix,
        draft_vocab=draft_vocab,
        force=force,
        dry_run=dry_run,
        as_json=as_json,
        verbose=verbose,
    )
    return partial(convert, request, Terminal())


def _inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Checkpoint folder or GGUF file.")],
    as_json: _Json = False,
    verbose: _Verbose = False,
) -> _Job:
    """Print what a drafter is."""
    from dflash2_gguf.convert.commands import show
    from dflash2_gguf.convert.ui import Terminal

    return partial(show, file, Terminal(), as_json=as_json, verbose=verbose)


def _check(
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="Its GGUF file, or its Hugging Face folder.")
    ],
    draft: Annotated[
        Path, typer.Argument(metavar="DRAFT", help="GGUF file of a drafter, or its checkpoint.")
    ],
    run: Annotated[
        bool, typer.Option("--run", help="Draft for some built-in prompts and judge what is kept.")
    ] = False,
    max_tokens: options.LongestAnswer = 64,
    threads: options.Threads = None,
    as_json: _Json = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show tracebacks, and llama.cpp's log of --run.")
    ] = False,
) -> _Job:
    """Tell whether a drafter fits a target."""
    from dflash2_gguf.check import CheckRequest, check
    from dflash2_gguf.convert.ui import Terminal

    request = CheckRequest(
        target=target,
        draft=draft,
        as_json=as_json,
        run=run,
        max_tokens=max_tokens,
        n_threads=threads,
        verbose=verbose,
    )
    return partial(check, request, Terminal())


def _migrate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="GGUF file of a drafter.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT", help="[default: FILE-migrated.gguf]"),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option("--target", metavar="T", help="Its target: tokenizer, M-RoPE, layers."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="C", help="The config.json of its checkpoint."),
    ] = None,
    layer_ids: Annotated[
        str | None,
        typer.Option(
            "--layer-ids", metavar="I", help="What the file counts: `inputs` or `outputs`."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the changes, write nothing.")
    ] = False,
    as_json: _Json = False,
    verbose: _Verbose = False,
) -> _Job:
    """Rewrite an older or fork drafter so that llama.cpp loads it."""
    from dflash2_gguf.convert.migrate import MigrateRequest, migrate
    from dflash2_gguf.convert.ui import Terminal

    request = MigrateRequest(
        file=file,
        output=output,
        target=target,
        config=config,
        layer_ids=layer_ids,
        force=force,
        dry_run=dry_run,
        as_json=as_json,
        verbose=verbose,
    )
    return partial(migrate, request, Terminal())


def _pack(
    source: _Source,
    preset: Annotated[
        list[str],
        typer.Option("--preset", metavar="P", help="Recipe, see `presets`; one file each."),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="The folder, a new one.")
    ],
    target: _Target = None,
    imatrix: _Imatrix = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--measured", metavar="FILE", help="Output of `fidelity --json`, for the card's table."
        ),
    ] = None,
    may_share: Annotated[
        bool,
        typer.Option(
            "--may-share", help="You have the right to share what the licence says must not be."
        ),
    ] = False,
) -> _Job:
    """Make the folder to upload: files, checksums, model card."""
    from dflash2_gguf.convert.pack import PackRequest, pack
    from dflash2_gguf.convert.ui import Terminal

    request = PackRequest(
        source=source,
        target=target,
        presets=tuple(preset),
        output=output,
        imatrix=imatrix,
        measured=measured,
        may_share=may_share,
    )
    return partial(pack, request, Terminal())


def _presets(as_json: _Json = False) -> _Job:
    """List the recipes."""
    from dflash2_gguf.convert.commands import list_presets
    from dflash2_gguf.convert.ui import Terminal

    return partial(list_presets, Terminal(), as_json=as_json)


def _calibrate(
    model: options.Model = None,
    draft: options.Draft = None,
    prompts: options.Prompts = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="OUT", help="The importance matrix, a GGUF.")
    ] = Path("imatrix.gguf"),
    max_tokens: options.LongestAnswer = 128,
    ctx_size: options.CtxSize = None,
    threads: options.Threads = None,
    gpu_layers: options.GpuLayers = "auto",
    temp: options.Temperature = 0.8,
    seed: Annotated[int, typer.Option("--seed", metavar="S", min=0, help="Random seed.")] = 0,
    raw: options.Raw = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: _Json = False,
    verbose: options.Verbose = False,
) -> _Job:
    """Make an importance matrix for a drafter, by drafting."""
    from dflash2_gguf.calibrate import CalibrationSettings, calibrate
    from dflash2_gguf.launch import Launch, parse_gpu_layers
    from dflash2_gguf.prompts import read_prompts
    from dflash2_gguf.sampling import SamplingParams
    from dflash2_gguf.ui import Terminal

    launch = Launch(
        target=_given(model, "target", "name its GGUF file with -m"),
        draft=_given(draft, "drafter", "name its GGUF file with -d"),
        n_ctx=ctx_size,
        n_threads=threads,
        n_gpu_layers=parse_gpu_layers(gpu_layers),
        calibrate=True,
        verbose=verbose,
    )
    prompt_file = _given(prompts, "file of prompts", "name it with --prompts")
    settings = CalibrationSettings(
        prompts=read_prompts(prompt_file),
        dataset=str(prompt_file),
        output=output,
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=temp, seed=seed),
        raw=raw,
        force=force,
        as_json=as_json,
    )
    return partial(calibrate, launch, settings, Terminal())


def _fidelity(
    drafts: Annotated[
        list[Path], typer.Argument(metavar="DRAFT", help="Drafters, the reference first.")
    ],
    model: options.Model = None,
    prompts: options.Prompts = None,
    max_tokens: options.LongestAnswer = 48,
    ctx_size: options.CtxSize = None,
    threads: options.Threads = None,
    raw: options.Raw = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw acceptance against size, PNG or SVG."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Write a page of markdown.")
    ] = None,
    as_json: _Json = False,
    verbose: options.Verbose = False,
) -> _Job:
    """Measure what quantization costs a drafter."""
    from dflash2_gguf.fidelity import FidelitySettings
    from dflash2_gguf.fidelity_report import Report, fidelity
    from dflash2_gguf.prompts import read_prompts
    from dflash2_gguf.ui import Terminal

    settings = FidelitySettings(
        target=_given(model, "target", "name its GGUF file with -m"),
        drafts=tuple(drafts),
        prompts=read_prompts(_given(prompts, "file of prompts", "name it with --prompts")),
        max_tokens=max_tokens,
        n_ctx=ctx_size,
        n_threads=threads,
        raw=raw,
        verbose=verbose,
    )
    return partial(fidelity, settings, Report(plot=plot, page=page, as_json=as_json), Terminal())


def _given(path: Path | None, what: str, hint: str) -> Path:
    if path is None:
        raise UsageError(f"there is no {what}", hint)
    return path


if __name__ == "__main__":
    sys.exit(main())
