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

from dflash2_gguf.errors import DFlash2Error, UsageError

__all__ = ["main"]

_INTERRUPTED = 130

_Model = Annotated[
    Path | None, typer.Option("-m", "--model", metavar="FILE", help="Target, a GGUF file.")
]
_Draft = Annotated[
    Path | None,
    typer.Option("-d", "--draft", metavar="FILE", help="Its DFlash 2 drafter, a GGUF file."),
]
_CtxSize = Annotated[
    int | None,
    typer.Option(
        "-c",
        "--ctx-size",
        metavar="N",
        min=0,
        help="Context in tokens; 0 is all the model was trained with. Default: at most 8192.",
        show_default=False,
    ),
]
_Threads = Annotated[
    int | None,
    typer.Option(
        "-t", "--threads", metavar="N", min=1, help="CPU threads. Default: physical cores."
    ),
]
_DraftMax = Annotated[
    str,
    typer.Option(
        "--draft-max",
        metavar="auto|off|N",
        help="Tokens drafted at once; auto is as many as pay, none if none do.",
    ),
]
_MaxTokens = Annotated[
    int | None,
    typer.Option(
        "-n", "--max-tokens", metavar="N", min=1, help="Longest answer. Default: until it ends."
    ),
]
_Temperature = Annotated[
    float, typer.Option("--temp", metavar="T", min=0.0, help="Temperature; 0 is greedy.")
]
_TopK = Annotated[
    int, typer.Option("--top-k", metavar="K", min=0, help="Keep the K likeliest tokens; 0 is all.")
]
_TopP = Annotated[
    float,
    typer.Option("--top-p", metavar="P", min=0.0, max=1.0, help="Keep this much probability."),
]
_MinP = Annotated[
    float,
    typer.Option(
        "--min-p", metavar="P", min=0.0, max=1.0, help="Drop tokens below P of the likeliest."
    ),
]
_Seed = Annotated[
    int | None, typer.Option("--seed", metavar="S", min=0, help="Random seed. Default: drawn.")
]
_Verifier = Annotated[
    str,
    typer.Option(
        "--verifier",
        metavar="NAME",
        help="How drafts are accepted: auto, greedy, match, coupled, reject or block.",
    ),
]
_Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Show llama.cpp's log, and tracebacks of errors.")
]
_Template = Annotated[
    Path | None,
    typer.Option(
        "--chat-template", metavar="FILE", help="Chat template (Jinja) instead of the target's."
    ),
]
_Prompt = Annotated[
    str | None,
    typer.Option("-p", "--prompt", metavar="TEXT", help="Exact prompt. Default: stdin."),
]
_Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End before this text; may be repeated."),
]
_NoDraft = Annotated[
    bool, typer.Option("--no-draft", help="Decode plainly; same as --draft-max off.")
]
_Grammar = Annotated[
    Path | None,
    typer.Option("--grammar", metavar="FILE", help="GBNF grammar that the text follows."),
]
_JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE|TEXT",
        help="JSON schema that the text follows; TEXT begins with {.",
    ),
]
_Fit = Annotated[
    bool,
    typer.Option(
        "--fit", help="Choose a context, and GPU layers, that fit into the memory that is free."
    ),
]
_GpuLayers = Annotated[
    str,
    typer.Option(
        "--gpu-layers",
        metavar="auto|N",
        help="Target layers on the GPU; auto is all, or as many as --fit finds.",
    ),
]
_Exact = Annotated[
    bool,
    typer.Option(
        "--exact", help="The very tokens of decoding without a drafter, whatever rounding does."
    ),
]
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
    model: _Model = None,
    draft: _Draft = None,
    ctx_size: _CtxSize = None,
    threads: _Threads = None,
    draft_max: _DraftMax = "auto",
    gpu_layers: _GpuLayers = "auto",
    fit: _Fit = False,
    max_tokens: _MaxTokens = None,
    temp: _Temperature = 0.8,
    top_k: _TopK = 40,
    top_p: _TopP = 0.95,
    min_p: _MinP = 0.05,
    seed: _Seed = None,
    verifier: _Verifier = "auto",
    exact: _Exact = False,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message.")
    ] = None,
    chat_template: _Template = None,
    verbose: _Verbose = False,
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
    model: _Model = None,
    draft: _Draft = None,
    prompt: _Prompt = None,
    max_tokens: _MaxTokens = None,
    stop: _Stop = None,
    ctx_size: _CtxSize = None,
    threads: _Threads = None,
    draft_max: _DraftMax = "auto",
    no_draft: _NoDraft = False,
    gpu_layers: _GpuLayers = "auto",
    fit: _Fit = False,
    temp: _Temperature = 0.8,
    top_k: _TopK = 40,
    top_p: _TopP = 0.95,
    min_p: _MinP = 0.05,
    seed: _Seed = None,
    verifier: _Verifier = "auto",
    exact: _Exact = False,
    grammar: _Grammar = None,
    json_schema: _JsonSchema = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print text, token ids and statistics as JSON.")
    ] = False,
    verbose: _Verbose = False,
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
    model: _Model = None,
    draft: _Draft = None,
    ctx_size: _CtxSize = None,
    parallel: Annotated[
        int,
        typer.Option(
            "--parallel", metavar="N", min=1, max=64, help="Sequences held at once, each of -c."
        ),
    ] = 1,
    draft_max: _DraftMax = "auto",
    gpu_layers: _GpuLayers = "auto",
    fit: _Fit = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    verbose: _Verbose = False,
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
    model: _Model = None,
    draft: _Draft = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help="One prompt a line, or .jsonl with a text or tokens."
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("-n", "--max-tokens", metavar="N", min=1, help="Longest answer.")
    ] = 128,
    ctx_size: _CtxSize = None,
    threads: _Threads = None,
    draft_max: _DraftMax = "auto",
    gpu_layers: _GpuLayers = "auto",
    temp: Annotated[
        float, typer.Option("--temp", metavar="T", min=0.0, help="Temperature; 0 is greedy.")
    ] = 0.0,
    top_k: _TopK = 40,
    top_p: _TopP = 0.95,
    min_p: _MinP = 0.05,
    seed: _Seed = None,
    exact: Annotated[
        bool, typer.Option("--exact/--no-exact", help="In exact mode, or as it comes.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
    verbose: _Verbose = False,
) -> _Job:
    """Compare the tokens with and without a drafter; exit code 1 when any differ."""
    from dflash2_gguf.launch import Launch, parse_draft_max, parse_gpu_layers
    from dflash2_gguf.prove import ProofSettings, prove, read_prompts
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
