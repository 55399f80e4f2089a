"""Options that several commands share, each once."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "CtxSize",
    "Draft",
    "DraftMax",
    "Exact",
    "Fit",
    "GpuLayers",
    "Grammar",
    "JsonSchema",
    "LongestAnswer",
    "MaxTokens",
    "MinP",
    "Model",
    "NoDraft",
    "Prompt",
    "Prompts",
    "Raw",
    "Seed",
    "Stop",
    "Temperature",
    "Template",
    "Threads",
    "TopK",
    "TopP",
    "Verbose",
    "Verifier",
    "Version",
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dflash2-gguf {metadata.version('dflash2-gguf')}")
        raise typer.Exit


Model = Annotated[
    Path | None, typer.Option("-m", "--model", metavar="FILE", help="Target, a GGUF file.")
]
Draft = Annotated[
    Path | None,
    typer.Option("-d", "--draft", metavar="FILE", help="Its DFlash 2 drafter, a GGUF file."),
]
CtxSize = Annotated[
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
Threads = Annotated[
    int | None,
    typer.Option(
        "-t", "--threads", metavar="N", min=1, help="CPU threads. Default: physical cores."
    ),
]
DraftMax = Annotated[
    str,
    typer.Option(
        "--draft-max",
        metavar="auto|off|N",
        help="Tokens drafted at once; auto is as many as pay, none if none do.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "-n", "--max-tokens", metavar="N", min=1, help="Longest answer. Default: until it ends."
    ),
]
LongestAnswer = Annotated[
    int, typer.Option("-n", "--max-tokens", metavar="N", min=1, help="Longest answer.")
]
Temperature = Annotated[
    float, typer.Option("--temp", metavar="T", min=0.0, help="Temperature; 0 is greedy.")
]
TopK = Annotated[
    int, typer.Option("--top-k", metavar="K", min=0, help="Keep the K likeliest tokens; 0 is all.")
]
TopP = Annotated[
    float,
    typer.Option("--top-p", metavar="P", min=0.0, max=1.0, help="Keep this much probability."),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p", metavar="P", min=0.0, max=1.0, help="Drop tokens below P of the likeliest."
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="S", min=0, help="Random seed. Default: drawn.")
]
Verifier = Annotated[
    str,
    typer.Option(
        "--verifier",
        metavar="NAME",
        help="How drafts are accepted: auto, greedy, match, coupled, reject or block.",
    ),
]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Show llama.cpp's log, and tracebacks of errors.")
]
Template = Annotated[
    Path | None,
    typer.Option(
        "--chat-template", metavar="FILE", help="Chat template (Jinja) instead of the target's."
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option("-p", "--prompt", metavar="TEXT", help="Exact prompt. Default: stdin."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End before this text; may be repeated."),
]
NoDraft = Annotated[
    bool, typer.Option("--no-draft", help="Decode plainly; same as --draft-max off.")
]
Grammar = Annotated[
    Path | None,
    typer.Option("--grammar", metavar="FILE", help="GBNF grammar that the text follows."),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE|TEXT",
        help="JSON schema that the text follows; TEXT begins with {.",
    ),
]
Fit = Annotated[
    bool,
    typer.Option(
        "--fit", help="Choose a context, and GPU layers, that fit into the memory that is free."
    ),
]
GpuLayers = Annotated[
    str,
    typer.Option(
        "--gpu-layers",
        metavar="auto|N",
        help="Target layers on the GPU; auto is all that there can be.",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact", help="The very tokens of decoding without a drafter, whatever rounding does."
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts", metavar="FILE", help="One prompt a line, or .jsonl with a text or tokens."
    ),
]
Version = Annotated[
    bool,
    typer.Option(
        "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
    ),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Take texts as they are, not as messages of a chat.")
]
