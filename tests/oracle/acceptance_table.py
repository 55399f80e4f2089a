"""Writes docs/acceptance.md: ``python -m tests.oracle.acceptance_table [N_SEEDS]``.

About ten minutes per seed on two cores, and the file is written again after each. Needs the native
libraries and the unpatched pin.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests import provisions
from tests.oracle.acceptance import N_PROMPTS
from tests.oracle.builds import OURS, ROOT, tokenized
from tests.oracle.dequantized import write_float32
from tests.oracle.prompts import load_prompts
from tests.oracle.sampled import N_PREDICT, SEEDS, load_golden
from tests.oracle.sampled_runs import (
    FLOAT32,
    end_tokens,
    of_pin,
    of_reference,
    of_rules,
    run_rules,
    until_end,
)
from tests.oracle.spread import length, ratio

__all__ = ["main"]

DOCUMENT = ROOT / "docs" / "acceptance.md"
RULES = ("reject", "block", "coupled", "match")

_HEAD = """# Acceptance by verification rule

Tokens per verification step on the bundled pair: SmolLM2-135M-Instruct in Q4_1 and its drafter in
q8_0, blocks of 8 (7 drafted tokens), temperature 1, top-p 0.95 and no other sampler, {prompts}
held-out prompts x {seeds} seeds x {predict} tokens. Only rounds with room for a
whole block count. Intervals are 95 %, by bootstrap over prompts; ratios are of the same prompts.
One command writes this file:

    python -m tests.oracle.acceptance_table {seeds}

| | tokens per step | against | ratio |
|---|---|---|---|
"""

_TAIL = """
- `reference` is `dflash_generate` of the authors' dflash 0.1.0 in float32 on the dequantized
  target, stored in tests/oracle/golden/sampled.json ({stored} seeds). It truncates the target's
  distribution by top-p and the drafter's not at all; "same q" truncates the drafter's as this
  project does, by a default of one of its functions.
- "float32" runs the dequantized target and the float32 drafter here, with the same random numbers
  as the reference.
- `pin` is llama-server of the unpatched llama.cpp, `--spec-type draft-dflash`, width 7; its answers
  end at an end-of-generation token, and so do those of `match` and `greedy` compared with it.
"""


@dataclass
class Counts:
    """Tokens and steps per prompt, added up seed by seed, by what they belong to."""

    of: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, counts: np.ndarray) -> None:
        """Add the counts of one more run."""
        self.of[name] = self.of[name] + counts if name in self.of else counts


def rows(counts: Counts) -> Iterator[str]:
    """Lines of the table, as far as there is something to say."""
    pairs = [
        ("reject", "reference"),
        ("reject, float32", "reference, same q"),
        ("block", "reject"),
        ("coupled", "reject"),
        ("match", "reject"),
        ("reject", "match"),
        ("block", "match"),
        ("coupled", "match"),
        ("match, until the end", "pin"),
        ("greedy, temperature 0", "pin, temperature 0"),
    ]
    for name, other in pairs:
        if name in counts.of and other in counts.of:
            above, below = counts.of[name], counts.of[other]
            quotient = ratio(above[: len(below)], below[: len(above)])
            yield f"| {name} | {length(above)} | {other}: {length(below)} | {quotient} |"


def write(counts: Counts, n_seeds: int, n_stored: int) -> None:
    """Write the document."""
    head = _HEAD.format(prompts=N_PROMPTS, seeds=n_seeds, predict=N_PREDICT)
    text = head + "\n".join(rows(counts)) + "\n" + _TAIL.format(stored=n_stored)
    DOCUMENT.write_text(text, encoding="utf-8")


def add_reference(counts: Counts, prompts: Sequence[list[int]], target: Path) -> int:
    """The stored answers, and float32 ones of ours with their seeds; how many seeds there are."""
    stored = load_golden()
    seeds = [seed for seed in SEEDS if sum(one.seed == seed for one in stored) == 2 * len(prompts)]
    counts.add("reference", of_reference(stored, "published", seeds))
    counts.add("reference, same q", of_reference(stored, "truncated", seeds))
    keys = [("reject", seed) for seed in seeds]
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder) / "float32.gguf"
        write_float32(target, exact)
        result = run_rules(OURS, (exact, provisions.drafter_gguf("f32")), prompts, keys, **FLOAT32)
    counts.add("reject, float32", of_rules(result, keys)["reject"])
    return len(seeds)


def add_seed(
    counts: Counts, pair: tuple[Path, Path], prompts: Sequence[list[int]], seed: int
) -> None:
    """All rules and the pin with one more seed; what needs no seed with the first."""
    keys = [(rule, seed) for rule in (*RULES, *(["greedy"] if seed == 1 else []))]
    end = end_tokens(OURS, pair[0])
    result = run_rules(OURS, pair, prompts, keys)
    for rule in RULES:
        counts.add(rule, of_rules(result, keys)[rule])
    counts.add("match, until the end", until_end(result, keys, "match", end))
    counts.add("pin", of_pin(pair, prompts, [seed], 1.0))
    if seed == 1:
        counts.add("greedy, temperature 0", until_end(result, keys, "greedy", end))
        counts.add("pin, temperature 0", of_pin(pair, prompts, [seed], 0.0))


def main(argv: Sequence[str]) -> None:
    """Measure and write, seed by seed."""
    pair = provisions.target_gguf(), provisions.drafter_gguf("q8_0")
    prompts = tokenized(OURS, pair[0], load_prompts(N_PROMPTS))
    counts = Counts()
    n_stored = add_reference(counts, prompts, pair[0])
    for seed in range(1, 1 + (int(argv[0]) if argv else 4)):
        add_seed(counts, pair, prompts, seed)
        write(counts, seed, n_stored)
        print("\n".join(rows(counts)), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
