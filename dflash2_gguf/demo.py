"""``python -m dflash2_gguf.demo``: the same questions with and without drafter, side by side.

Exit code 1 when a text differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dflash2_gguf.errors import DFlash2Error
from dflash2_gguf.launch import Launch, open_session
from dflash2_gguf.measure import (
    PROMPTS,
    Request,
    Run,
    Spread,
    first_difference,
    run_in_step,
    run_session,
    spread,
    stream_session,
)
from dflash2_gguf.session import Session
from dflash2_gguf.ui import Terminal
from dflash2_gguf.words import counted

__all__ = ["main"]


@dataclass(frozen=True)
class _Answers:
    """Runs of one question: plain, with whole blocks, with as many drafted tokens as pay."""

    plain: tuple[Run, Run]
    block: tuple[Run, Run]
    automatic: tuple[Run, Run]

    def ratio(self, runs: Sequence[Run]) -> float:
        """Median speed of ``runs`` over the median of plain decoding."""
        without = spread([run.tokens_per_second for run in self.plain]).median
        return spread([run.tokens_per_second for run in runs]).median / without if without else 0.0

    @property
    def difference(self) -> int | None:
        """First token at which any run leaves the plain one."""
        plain = self.plain[0].tokens
        runs = (*self.plain, *self.block, *self.automatic)
        found = [first_difference(plain, run.tokens) for run in runs]
        return min((at for at in found if at is not None), default=None)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 when all texts are equal."""
    terminal = Terminal()
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        return _demo(options, terminal)
    except DFlash2Error as error:
        terminal.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dflash2-demo", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--target", type=Path, required=True, help="target, a GGUF file")
    parser.add_argument("--draft", type=Path, required=True, help="its drafter, a GGUF file")
    parser.add_argument("-n", "--max-tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("-t", "--threads", type=int, help="CPU threads (default: physical cores)")
    return parser.parse_args(arguments)


def _demo(options: argparse.Namespace, terminal: Terminal) -> int:
    def launch(draft: Path | None) -> Session:
        settings = Launch(target=options.target, draft=draft, n_threads=options.threads)
        return open_session(settings, terminal)

    with launch(None) as plain, launch(options.draft) as drafted:
        answers = []
        for number, question in enumerate(PROMPTS, 1):
            terminal.note(
                f"question {number} of {len(PROMPTS)}, answered in three ways, twice each"
            )
            answers.append(_ask(question, plain, drafted, options.max_tokens))
            terminal.write(_describe(question, answers[-1]))
        terminal.write(_summary(answers, drafted.draft_max))
    return int(any(answer.difference is not None for answer in answers))


def _ask(question: str, plain: Session, drafted: Session, max_tokens: int) -> _Answers:
    prompt = plain.chat_tokens([{"role": "user", "content": question}])
    request = Request(prompt=tuple(prompt), max_tokens=max_tokens)
    streams = {
        "plain": partial(stream_session, plain, draft=False),
        "automatic": partial(stream_session, drafted, draft=True),
    }
    rounds = []
    for lead in (streams, dict(reversed(streams.items()))):
        for session in (plain, drafted):
            session.reset()
        runs = run_in_step(lead, request)
        drafted.reset()
        runs["block"] = run_session(drafted, request, draft=drafted.draft_max)
        rounds.append(runs)
    return _Answers(**{name: (rounds[0][name], rounds[1][name]) for name in rounds[0]})


def _describe(question: str, answer: _Answers) -> str:
    run = answer.block[0]
    lines = [f"question         {question}", f"answer           {_one_line(run.text)}"]
    if answer.difference is None:
        lines.append(f"without drafter  the same {counted(len(run.tokens), 'token')}")
    else:
        lines.append(f"without drafter  {_one_line(answer.plain[0].text)}")
        lines.append(f"                 DIFFERS from token {answer.difference} on")
    lines.append(
        f"whole blocks     {run.acceptance_length:.2f} tokens per step, "
        f"{answer.ratio(answer.block):.2f} times the speed"
    )
    lines.append(
        f"automatic        {answer.automatic[0].acceptance_length:.2f} tokens per step, "
        f"{answer.ratio(answer.automatic):.2f} times the speed"
    )
    return "\n".join(lines) + "\n\n"


def _summary(answers: list[_Answers], draft_max: int) -> str:
    equal = sum(answer.difference is None for answer in answers)
    length = spread([answer.block[0].acceptance_length for answer in answers])
    block = spread([answer.ratio(answer.block) for answer in answers])
    automatic = spread([answer.ratio(answer.automatic) for answer in answers])
    lines = [
        f"texts            {equal} of {len(answers)} equal",
        (
            f"whole blocks     {counted(draft_max, 'token')} drafted at once, "
            f"{length.median:.2f} tokens per step"
        ),
        f"                 {_speed(block)}",
        "automatic        as many as pay on this machine",
        f"                 {_speed(automatic)}",
    ]
    if equal < len(answers):
        lines.append(
            "A batch rounds differently than a single token, which can flip a choice between two "
            "candidates that are almost equal."
        )
    return "\n".join(lines) + "\n"


def _speed(ratio: Spread) -> str:
    return (
        f"{ratio.median:.2f} times the speed of plain decoding "
        f"(median; {ratio.low:.2f} to {ratio.high:.2f})"
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
