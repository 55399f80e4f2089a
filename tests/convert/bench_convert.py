"""Time and memory of conversions at a published drafter's true shape, beside the unpatched pin's.

``python -m tests.convert.bench_convert [--shape NAME] [--rounds N] [--threads N] PIN_BIN TARGET``:
PIN_BIN is the folder with the pin's llama-quantize, whose tree also has convert_hf_to_gguf.py;
TARGET a GGUF file whose tokenizer is taken. Weights are random. Both sides read the same checkpoint
one after the other, in turning order; q4_k_m is llama-quantize's from the pin's own bf16 file there
and comes straight from the checkpoint here. `make bench-convert` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.convert.hf_targets import write_hf_target
from tests.convert.releases import PUBLISHED, write_random

__all__ = ["Cost", "main", "run"]

_MIB = 1 << 20


@dataclass(frozen=True)
class Cost:
    """Of one program: seconds by the clock, and the most memory it held, bytes."""

    seconds: float
    peak: int


def write_target(folder: Path, name: str, tokenizer: Path) -> Path:
    """A Hugging Face folder of the drafter's target: its sizes, the tokenizer of another model."""
    data, _ = PUBLISHED[name]
    write_hf_target(folder, tokenizer)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = data["num_target_layers"]
    config |= {key: data[key] for key in ("hidden_size", "vocab_size")}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(words: Sequence[object], log: Path) -> Cost:
    """Run a program to its end; SystemExit with its output when it fails."""
    start = time.perf_counter()
    with log.open("wb") as out:
        pid = os.posix_spawnp(
            str(words[0]),
            list(map(str, words)),
            {**os.environ, "HF_HUB_OFFLINE": "1"},
            file_actions=[(os.POSIX_SPAWN_DUP2, out.fileno(), fd) for fd in (1, 2)],
        )
        _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{words[0]} failed:\n{log.read_text(errors='replace')[-3000:]}")
    return Cost(seconds, usage.ru_maxrss * 1024)


def _commands(
    folder: Path, source: Path, target: Path, pin: Path, threads: int
) -> dict[tuple[str, str], list[object]]:
    """What to run, by preset and side, in an order in which llama-quantize finds its source."""
    script = pin.parents[1] / "convert_hf_to_gguf.py"
    commands: dict[tuple[str, str], list[object]] = {}
    for preset in ("bf16", "q8_0", "q4_k_m"):
        out = folder / f"ours-{preset}.gguf"
        ours = [sys.executable, "-m", "dflash2_gguf.convert_cli", source, "--target", target]
        commands[preset, "ours"] = [*ours, "--preset", preset, "-o", out, "--force"]
        out = folder / f"pin-{preset}.gguf"
        theirs = [sys.executable, script, source, "--target-model-dir", target]
        commands[preset, "pin"] = [*theirs, "--outtype", preset, "--outfile", out]
    quantize = [pin / "llama-quantize", folder / "pin-bf16.gguf", folder / "pin-q4_k_m.gguf"]
    commands["q4_k_m", "pin"] = [*quantize, "Q4_K_M", threads]
    return commands


def _table(name: str, nbytes: int, costs: dict[tuple[str, str], list[Cost]]) -> str:
    lines = [
        f"{name}, {nbytes / 1e9:.2f} GB of bf16 weights\n",
        "| preset | ours, s | pin, s | ratio | ours, peak MiB | pin, peak MiB |",
        "|---|---|---|---|---|---|",
    ]
    for preset in dict.fromkeys(preset for preset, _ in costs):
        times = [
            statistics.median(cost.seconds for cost in costs[preset, side])
            for side in ("ours", "pin")
        ]
        peaks = [max(cost.peak for cost in costs[preset, side]) // _MIB for side in ("ours", "pin")]
        cells = [*(f"{t:.1f}" for t in times), f"{times[0] / times[1]:.2f}", *map(str, peaks)]
        lines.append(f"| {preset} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pin", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--shape", choices=PUBLISHED, default="GLM-5.3-Flash-DFlash2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    costs: dict[tuple[str, str], list[Cost]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-convert-", dir="build") as name:
        folder = Path(name)
        write_random(options.shape, folder / "drafter")
        nbytes = 2 * PUBLISHED[options.shape][1]
        target = write_target(folder / "target", options.shape, options.target)
        commands = _commands(folder, folder / "drafter", target, options.pin, options.threads)
        for number in range(options.rounds):
            # llama-quantize needs the pin's bf16 file, which the first round writes in time
            for key in commands if number % 2 == 0 else reversed(commands):
                cost = run(commands[key], folder / "log.txt")
                costs.setdefault(key, []).append(cost)
                print(f"{' '.join(key)}: {cost.seconds:.1f} s", file=sys.stderr, flush=True)
    print(_table(options.shape, nbytes, costs), end="")


if __name__ == "__main__":
    main()
