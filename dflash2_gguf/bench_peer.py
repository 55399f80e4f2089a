"""``python -m dflash2_gguf.bench_peer``: our decoding against the unpatched pin's, in one run.

Every prompt is answered greedily by every system in turn, forwards and backwards, so that what
the machine does meanwhile falls on all alike. Figures are ratios of decoding speed per prompt;
the median, smallest and largest are printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from dflash2_gguf.engine import physical_cores
from dflash2_gguf.errors import CheckpointError, DFlash2Error
from dflash2_gguf.measure import PROMPTS, Run, first_difference, run_session, spread
from dflash2_gguf.peer import PeerOptions, peer_server
from dflash2_gguf.session import Session
from dflash2_gguf.ui import Terminal

__all__ = ["main", "ratios"]

# answers one prompt (token ids, longest answer)
System = Callable[[Sequence[int], int], Run]
# for each system, its runs per prompt
Results = Mapping[str, Sequence[Sequence[Run]]]

_CONTEXT = 4096


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; the exit code is 0 when every system answered."""
    terminal = Terminal()
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        report = _compare(options, terminal)
    except DFlash2Error as error:
        terminal.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    terminal.write(json.dumps(report) + "\n" if options.json else _describe(report))
    return 0


def ratios(results: Results, over: str, under: str) -> list[float]:
    """For each prompt, median speed of system ``over`` by that of ``under``."""
    pairs = zip(results[over], results[under], strict=True)
    return [_speed(a) / _speed(b) for a, b in pairs if _speed(b)]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-peer", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="target, a GGUF file")
    parser.add_argument("--draft", type=Path, required=True, help="its drafter, a GGUF file")
    parser.add_argument("--server", type=Path, required=True, help="llama-server of the pin")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 3, 7], help="drafted tokens")
    parser.add_argument("--prompts", type=Path, help="JSON lines with a text each")
    parser.add_argument("--limit", type=int, default=8, help="prompts to use")
    parser.add_argument("-n", "--max-tokens", type=int, default=96, help="tokens per answer")
    parser.add_argument("-t", "--threads", type=int, default=physical_cores(), help="CPU threads")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser.parse_args(arguments)


def _compare(options: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    questions = _questions(options.prompts)[: options.limit]
    with _systems(options) as (systems, session):
        results: dict[str, list[list[Run]]] = {name: [] for name in systems}
        for number, question in enumerate(questions):
            terminal.note(f"prompt {number + 1} of {len(questions)}")
            prompt = session.chat_tokens([{"role": "user", "content": question}])
            runs = _interleave(systems, prompt, options.max_tokens)
            for name in systems:
                results[name].append(runs[name])
    return _report(results, options.widths)


@contextmanager
def _systems(options: argparse.Namespace) -> Iterator[tuple[dict[str, System], Session]]:
    """All systems by name, ready, and a session that knows the target's chat template."""
    opening = {"n_ctx": _CONTEXT, "n_threads": options.threads}
    with ExitStack() as stack:
        plain = stack.enter_context(Session(options.target, **opening))
        drafted = stack.enter_context(Session(options.target, options.draft, **opening))
        systems: dict[str, System] = {"ours plain": partial(run_session, plain, draft=False)}
        systems["ours auto"] = partial(run_session, drafted, draft=True)
        for width in options.widths:
            systems[f"ours {width}"] = partial(run_session, drafted, draft=width)
        for width in (0, *options.widths):
            peer = PeerOptions(
                program=options.server,
                target=options.target,
                draft=options.draft,
                draft_max=width,
                n_ctx=_CONTEXT,
                n_threads=options.threads,
            )
            server = stack.enter_context(peer_server(peer))
            systems[f"pin {width or 'plain'}"] = server.run
        yield systems, plain


def _interleave(
    systems: Mapping[str, System], prompt: Sequence[int], max_tokens: int
) -> dict[str, list[Run]]:
    order = list(systems)
    runs: dict[str, list[Run]] = {name: [] for name in order}
    for name in (*order, *reversed(order)):
        runs[name].append(systems[name](prompt, max_tokens))
    return runs


def _questions(path: Path | None) -> list[str]:
    if path is None:
        return list(PROMPTS)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [str(json.loads(line)["text"]) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read prompts from {path}: {error}") from error


def _report(results: Results, widths: Sequence[int]) -> dict[str, Any]:
    pairs = [("ours plain", "pin plain"), ("ours auto", "ours plain")]
    for width in widths:
        pairs += [
            (f"ours {width}", "ours plain"),
            (f"ours {width}", f"pin {width}"),
            (f"pin {width}", "pin plain"),
        ]
    return {
        "prompts": len(results["ours plain"]),
        "ratios": {f"{a} / {b}": asdict(spread(ratios(results, a, b))) for a, b in pairs},
        "acceptance_length": {name: _acceptance(runs) for name, runs in results.items()},
        "differences": _differences(results),
        "runs": {name: [[asdict(r) for r in p] for p in runs] for name, runs in results.items()},
    }


def _speed(runs: Sequence[Run]) -> float:
    return median(run.tokens_per_second for run in runs)


def _acceptance(runs: Sequence[Sequence[Run]]) -> float:
    """Tokens per step over all prompts, each prompt weighted by its steps."""
    firsts = [prompt[0] for prompt in runs if len(prompt[0].tokens) > 1]
    tokens = sum(len(run.tokens) - 1 for run in firsts)
    steps = sum((len(run.tokens) - 1) / (run.acceptance_length or 1.0) for run in firsts)
    return tokens / steps if steps else 0.0


def _differences(results: Results) -> list[dict[str, Any]]:
    """Where an answer leaves the pin's plain one. An end token only one side reports is none."""
    found = []
    for name, runs in results.items():
        for number, prompt in enumerate(runs):
            plain = results["pin plain"][number][0].tokens
            for run in prompt:
                length = min(len(plain), len(run.tokens))
                at = first_difference(plain[:length], run.tokens[:length])
                if at is not None or abs(len(plain) - len(run.tokens)) > 1:
                    found.append({"system": name, "prompt": number, "token": at})
    return found


def _describe(report: Mapping[str, Any]) -> str:
    lines = [f"{report['prompts']} prompts, decoding speed, median (smallest to largest)"]
    for name, value in report["ratios"].items():
        lines.append(
            f"{name:<22} {value['median']:.2f} ({value['low']:.2f} to {value['high']:.2f})"
        )
    lines.append("tokens per step")
    lines += [f"{name:<22} {value:.2f}" for name, value in report["acceptance_length"].items()]
    lines.append(f"answers that differ from the pin's plain ones: {len(report['differences'])}")
    lines += [
        f"  {d['system']}, prompt {d['prompt']}, token {d['token']}" for d in report["differences"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
