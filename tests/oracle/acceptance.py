"""Greedy acceptance of the real pair by the authors' own loop, and the golden file that keeps it.

``python -m tests.oracle.acceptance TARGET.gguf`` runs ``dflash_generate`` on every prompt (target:
the GGUF dequantized to float32, drafter in float32) and writes tests/oracle/golden/acceptance.json;
about ten minutes on two cores.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.oracle.builds import PIN, tokenized
from tests.oracle.dequantized import torch_target
from tests.oracle.prompts import Prompt, load_prompts
from tests.oracle.reference import load_draft

__all__ = [
    "DRAFTER",
    "N_PREDICT",
    "N_PROMPTS",
    "Acceptance",
    "interval",
    "load_golden",
    "mean_length",
    "run",
]

DRAFTER = Path(__file__).resolve().parents[1] / "assets" / "smollm2-135m-dflash2"
GOLDEN = Path(__file__).with_name("golden") / "acceptance.json"
N_PROMPTS, N_PREDICT = 64, 64


@dataclass(frozen=True)
class Acceptance:
    """One prompt: the answer's token ids, and tokens committed per verification (accepted + 1)."""

    name: str
    tokens: list[int]
    lengths: list[int]


def run(
    target: Path, prompts: Sequence[Prompt], tokens: Sequence[list[int]], n_predict: int
) -> Iterator[Acceptance]:
    """dflash_generate, greedy, without stop tokens, on each prompt as tokenized."""
    import torch

    # eight rows at a time gain little from a second thread, which costs much on a busy machine
    torch.set_num_threads(1)
    reference, draft = torch_target(target), load_draft(DRAFTER)
    for prompt, ids in zip(prompts, tokens, strict=True):
        yield _generate(reference, draft, prompt.name, ids, n_predict)


def _generate(target: Any, draft: Any, name: str, prompt: list[int], n_predict: int) -> Acceptance:
    import torch
    from dflash import model

    # return_stats wants the time of a CUDA device
    with mock.patch.object(model, "_cuda_time", time.perf_counter):
        result = model.dflash_generate(
            draft, target, torch.tensor([prompt]), n_predict, None, return_stats=True
        )
    answer = result.output_ids[0, len(prompt) :].tolist()
    return Acceptance(name, answer, result.acceptance_lengths)


def mean_length(lengths: Sequence[Sequence[int]]) -> float:
    """Acceptance length: tokens committed per verification, over all prompts."""
    return sum(map(sum, lengths)) / sum(map(len, lengths))


def interval(lengths: Sequence[Sequence[int]], level: float = 0.95) -> tuple[float, float]:
    """Bootstrap confidence interval of mean_length, drawing prompts."""
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(lengths), size=(4000, len(lengths)))
    sums = np.array([sum(row) for row in lengths])[picks].sum(axis=1)
    counts = np.array([len(row) for row in lengths])[picks].sum(axis=1)
    low, high = np.quantile(sums / counts, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def load_golden() -> list[Acceptance]:
    """The stored results, in the order of the prompts."""
    return [Acceptance(**entry) for entry in json.loads(GOLDEN.read_text())["prompts"]]


def main(argv: Sequence[str]) -> None:
    """Write the golden file for the target given."""
    target = Path(argv[0])
    prompts = load_prompts(N_PROMPTS)
    tokens = tokenized(PIN, target, prompts)
    results = []
    for result in run(target, prompts, tokens, N_PREDICT):
        results.append(result)
        print(f"{result.name} {mean_length([result.lengths]):.2f}", file=sys.stderr, flush=True)
    head = {
        "made_with": "python -m tests.oracle.acceptance TARGET.gguf",
        "reference": "dflash 0.1.0 dflash_generate, float32, greedy, no stop tokens, CPU",
        "target_sha256": hashlib.sha256(target.read_bytes()).hexdigest(),
        "draft_sha256": hashlib.sha256((DRAFTER / "model.safetensors").read_bytes()).hexdigest(),
        "mean_length": round(mean_length([result.lengths for result in results]), 4),
    }
    entries = ",\n".join(json.dumps(asdict(result)) for result in results)
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(head)[:-1] + f', "prompts": [\n{entries}\n]}}\n')


if __name__ == "__main__":
    main(sys.argv[1:])
