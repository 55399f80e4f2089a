"""``dflash2-run``: options in, exit code out.

Exit codes: 0 success, 1 error, 2 wrong usage, 130 interrupted. A closed pipe ends quietly with 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash2_gguf import options
from dflash2_gguf.errors import DFlash2Error, UsageError

__all__ = ["main"]

_INTERRUPTED = 130

_Job = Callable[[], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with ``arguments`` (default: the process's) and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _parse(words)()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return 0
    except DFlash2Error as error:
        return _report(error, verbose=_is_verbose(words))
    except Exception as error:  # the last resort: one line, not a traceback
        unexpected = DFlash2Error(
            f"unexpected {type(error).__name__}: {error}", "-v shows where it happened"
        )
        return _report(unexpected, verbose=_is_verbose(words))
    return code


def _parse(words: list[str]) -> _Job:
    """The work that ``words`` ask for; help and the like are done already and leave nothing."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(_chat)
    app.command("generate")(_generate)
    app.command("plan")(_plan)
    app.command("prove")(_prove)
    try:
        job = app(words, prog_name="dflash2-run", standalone_mode=False)
    except _parser_error() as error:
        raise UsageError(_first_lower(error), "--help lists the options") from error
    return job if callable(job) else lambda: int(job or 0)


def _chat(
    context: typer.Context,
    model: options.Model = None,
    draft: options.Draft = None,
    ctx_size: options.CtxSize = None,
    threads: options.Threads = None,
    draft_max: options.DraftMax = "auto",
    gpu_layers: options.GpuLayers = "auto",
    fit: options.Fit = False,
    max_tokens: options.MaxTokens = None,
    temp: options.Temperature = 0.8,
    top_k: options.TopK = 40,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.05,
    seed: options.Seed = None,
    verifier: options.Verifier = "auto",
    exact: options.Exact = False,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message.")
    ] = None,
    chat_template: options.Template = None,
    verbose: options.Verbose = False,
    version: options.Version = False,  # noqa: ARG001  # shown before anything else is looked at
) -> _Job | None:
    """Chat with a GGUF model, drafted by its DFlash 2 drafter: the same text in fewer steps."""
    if context.invoked_subcommand is not None:
        _refuse_misplaced_options(context)
        return None
    from dflash2_gguf.chat import ChatSettings, chat
    from dflash2_gguf.launch import Launch, parse_draft_max, parse_gpu_layers
    from dflash2_gguf.sampling import SamplingParams
    from dflash2_gguf.ui import Terminal

    launch = Launch(
        target=_required(model),
        draft=draft,
        n_ctx=ctx_size,
        n_threads=threads,
        draft_max=parse_draft_max(draft_max),
        n_gpu_layers=parse_gpu_layers(gpu_layers),
        fit=fit,
        exact=exact,
        chat_template=chat_template,
        verbose=verbose,
    )
    sampling = SamplingParams(
        temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, verifier=verifier
    )
    settings = ChatSettings(system=system, max_tokens=max_tokens, sampling=sampling)
    return partial(chat, launch, settings, Terminal())


def _generate(
    model: options.Model = None,
    draft: options.Draft = None,
    prompt: options.Prompt = None,
    max_tokens: options.MaxTokens = None,
    stop: options.Stop = None,
    ctx_size: options.CtxSize = None,
    threads: options.Threads = None,
    draft_max: options.DraftMax = "auto",
    no_draft: options.NoDraft = False,
    gpu_layers: options.GpuLayers = "auto",
    fit: options.Fit = False,
    temp: options.Temperature = 0.8,
    top_k: options.TopK = 40,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.05,
    seed: options.Seed = None,
    verifier: options.Verifier = "auto",
    exact: options.Exact = False,
    grammar: options.Grammar = None,
    json_schema: options.JsonSchema = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print text, token ids and statistics as JSON.")
    ] = False,
    verbose: options.Verbose = False,
) -> _Job:
    """Continue one prompt and print the text."""
    from dflash2_gguf.generate import Request, generate, read_schema
    from dflash2_gguf.launch import Launch, parse_draft_max, parse_gpu_layers, read_text
    from dflash2_gguf.sampling import SamplingParams
    from dflash2_gguf.ui import Terminal

    launch = Launch(
        target=_required(model),
        draft=draft,
        n_ctx=ctx_size,
        n_threads=threads,
        draft_max=0 if no_draft else parse_draft_max(draft_max),
        n_gpu_layers=parse_gpu_layers(gpu_layers),
        fit=fit,
        exact=exact,
        verbose=verbose,
    )
    request = Request(
        prompt=prompt,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        sampling=SamplingParams(
            temperature=temp,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            verifier=verifier,
            grammar=None if grammar is None else read_text(grammar),
            json_schema=None if json_schema is None else read_schema(json_schema),
        ),
        as_json=as_json,
    )
    return partial(generate, launch, request, Terminal())


def _plan(
    model: options.Model = None,
    draft: options.Draft = None,
    ctx_size: options.CtxSize = None,
    parallel: Annotated[
        int,
        typer.Option(
            "--parallel", metavar="N", min=1, max=64, help="Sequences held at once, each of -c."
        ),
    ] = 1,
    draft_max: options.DraftMax = "auto",
    gpu_layers: options.GpuLayers = "auto",
    fit: options.Fit = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    verbose: options.Verbose = False,
) -> _Job:
    """Say what memory a session takes, before anything is loaded."""
    from dflash2_gguf.launch import Launch, parse_draft_max, parse_gpu_layers
    from dflash2_gguf.show_plan import show_plan
    from dflash2_gguf.ui import Terminal

    launch = Launch(
        target=_required(model),
        draft=draft,
        n_ctx=ctx_size,
        draft_max=parse_draft_max(draft_max),
        n_gpu_layers=parse_gpu_layers(gpu_layers),
        fit=fit,
        verbose=verbose,
    )
    return partial(show_plan, launch, Terminal(), n_parallel=parallel, as_json=as_json)


def _prove(
    model: options.Model = None,
    draft: options.Draft = None,
    prompts: options.Prompts = None,
    max_tokens: Annotated[
        int, typer.Option("-n", "--max-tokens", metavar="N", min=1, help="Longest answer.")
    ] = 128,
    ctx_size: options.CtxSize = None,
    threads: options.Threads = None,
    draft_max: options.DraftMax = "auto",
    gpu_layers: options.GpuLayers = "auto",
    temp: Annotated[
        float, typer.Option("--temp", metavar="T", min=0.0, help="Temperature; 0 is greedy.")
    ] = 0.0,
    top_k: options.TopK = 40,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.05,
    seed: options.Seed = None,
    exact: Annotated[
        bool, typer.Option("--exact/--no-exact", help="In exact mode, or as it comes.")
    ] = True,
    raw: options.Raw = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
    verbose: options.Verbose = False,
) -> _Job:
    """Compare the tokens with and without a drafter; exit code 1 when any differ."""
    from dflash2_gguf.launch import Launch, parse_draft_max, parse_gpu_layers
    from dflash2_gguf.prompts import read_prompts
    from dflash2_gguf.prove import ProofSettings, prove
    from dflash2_gguf.sampling import SamplingParams
    from dflash2_gguf.ui import Terminal

    if prompts is None:
        raise UsageError("there are no prompts", "name their file with --prompts")
    launch = Launch(
        target=_required(model),
        draft=draft,
        n_ctx=ctx_size,
        n_threads=threads,
        draft_max=parse_draft_max(draft_max),
        n_gpu_layers=parse_gpu_layers(gpu_layers),
        exact=exact,
        verbose=verbose,
    )
    settings = ProofSettings(
        prompts=read_prompts(prompts),
        max_tokens=max_tokens,
        sampling=SamplingParams(
            temperature=temp,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            verifier="coupled" if temp > 0 else "auto",
        ),
        raw=raw,
        as_json=as_json,
    )
    return partial(prove, launch, settings, Terminal())


def _parser_error() -> type[Any]:
    """click's base exception, which typer brings under different names in different versions."""
    return next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _first_lower(error: Any) -> str:
    text: str = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:]


def _required(model: Path | None) -> Path:
    if model is None:
        raise UsageError("there is no target", "name its GGUF file with -m")
    return model


def _refuse_misplaced_options(context: typer.Context) -> None:
    """Options before a subcommand belong to the chat and would be ignored without a word."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"an option ({name.replace('_', '-')}) stands before {context.invoked_subcommand}",
                f"write options after it: dflash2-run {context.invoked_subcommand} ...",
            )


def _report(error: DFlash2Error, *, verbose: bool) -> int:
    from dflash2_gguf.ui import Terminal

    if verbose:
        import traceback

        traceback.print_exc()
    Terminal().error(error)
    return error.exit_code


def _is_verbose(words: list[str]) -> bool:
    return bool({"-v", "--verbose"} & set(words))


def _silence_stdout() -> None:
    """The interpreter flushes stdout once more at exit, which would print an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
