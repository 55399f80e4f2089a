"""Acceptance with sampling by the authors' own loop, fed with libdflash2's random numbers.

``python -m tests.oracle.sampled TARGET.gguf`` runs ``dflash_generate`` at temperature 1 and
top-p 0.95 on every prompt and writes tests/oracle/golden/sampled.json, keeping what is in it
already; about a quarter of a second per round on one core.

The reference draws with torch.multinomial and torch.rand_like. Here both are replaced by the
numbers that libdflash2 draws for the same (seed, position, purpose), used by inversion in the order
of falling probability. Every draw has the law it had before, so acceptance has, too; but as long as
both sides see the same distributions they keep the same tokens, and acceptance compares with far
fewer rounds.

The reference truncates the target's distribution by top-p and the drafter's not at all. libdflash2
truncates both. So there are two variants: "published", and "truncated", where ``top_p`` of the
reference's ``_sampling_probs`` has 0.95 as its default, which is what the drafter's call uses.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.oracle.acceptance import DRAFTER, N_PROMPTS
from tests.oracle.builds import OURS, tokenized
from tests.oracle.dequantized import torch_target
from tests.oracle.keyed import Purpose, uniform
from tests.oracle.prompts import load_prompts
from tests.oracle.reference import load_draft

__all__ = [
    "BLOCK",
    "GOLDEN",
    "N_PREDICT",
    "TOP_P",
    "VARIANTS",
    "Sampled",
    "generate",
    "load_golden",
    "uncut",
]

GOLDEN = Path(__file__).with_name("golden") / "sampled.json"
VARIANTS = ("published", "truncated")
TOP_P, N_PREDICT, BLOCK = 0.95, 32, 8
SEEDS = (1, 2)
_MOST_CANDIDATES = 1000  # more entries than that are a vocabulary


@dataclass(frozen=True)
class Sampled:
    """One answer: its tokens, and the tokens committed per verification, one digit each."""

    prompt: int
    seed: int
    variant: str
    tokens: list[int]
    lengths: str


def uncut(lengths: Sequence[int], n_predict: int) -> list[int]:
    """The rounds of an answer that no length limit can have cut.

    They begin with room for a whole block. When to stop counting depends on nothing that comes
    later, so the mean of these lengths is not biased by it.
    """
    kept, before = [], 1  # the first token comes from the prompt
    for length in lengths:
        if before > n_predict - BLOCK:
            break
        kept.append(length)
        before += length
    return kept


def _invert(weights: Any, order: Any, u: float) -> Any:
    """The entry of weights [n] in which their running sum, taken in an order, passes u."""
    import torch

    sums = weights[order].double().cumsum(0)
    return order[int(torch.searchsorted(sums, u * float(sums[-1]), right=True))]


class _Noise:
    """Stands in for the random parts of dflash.model while one answer is generated."""

    def __init__(self, model: Any, seed: int, n_prompt: int) -> None:
        self._original = model._rejection_sample
        self._seed = seed
        self._next = n_prompt  # position of the next token of the text
        self._ahead = 0  # drafted tokens of this round
        self._judged: Any = None  # distribution whose order a draw of the target follows

    def sample(self, probs: Any) -> Any:
        """For _sample_probs: drafted tokens, the first token, and those after a rejection."""
        if self._judged is None and probs.shape[-1] < _MOST_CANDIDATES:
            key = self._next + self._ahead, Purpose.DRAFT
            self._ahead += 1
        else:
            key = self._next, Purpose.TARGET
        weights = probs.reshape(-1)
        order = (weights if self._judged is None else self._judged).argsort(descending=True)
        if self._judged is None and key[1] is Purpose.TARGET:
            self._next += 1
        return _invert(weights, order, uniform(self._seed, *key)).view(probs.shape[:-1])

    def reject(self, tokens: Any, p: Any, q: Any, indices: Any = None) -> Any:
        """For _rejection_sample, which draws coins by rand_like and a token by _sample_probs."""
        import torch

        positions = range(self._next, self._next + tokens.shape[1])
        coins = torch.tensor([[uniform(self._seed, at, Purpose.ACCEPT) for at in positions]])
        start, self._next = self._next, self._next + self._kept(coins, tokens, p, q, indices)
        self._judged = p[0, self._next - start]
        with mock.patch.object(torch, "rand_like", lambda _: coins.to(p.dtype)):
            kept, token = self._original(tokens, p, q, indices)
        if start + kept != self._next:
            raise RuntimeError("the reference kept another number of tokens than its coins say")
        self._next, self._ahead, self._judged = self._next + 1, 0, None
        return kept, token

    @staticmethod
    def _kept(coins: Any, tokens: Any, p: Any, q: Any, indices: Any) -> int:
        of_target = p[:, :-1].gather(-1, tokens[..., None])[..., 0]
        of_draft = (q * (indices == tokens[..., None])).sum(-1)
        return int((coins.to(p.dtype) * of_draft < of_target).int().cumprod(-1).sum())


def generate(
    target: Any, draft: Any, prompt: Sequence[int], seed: int, variant: str
) -> tuple[list[int], list[int]]:
    """Tokens and lengths of rounds of dflash_generate on one prompt, without stop tokens."""
    import torch
    from dflash import model

    noise = _Noise(model, seed, len(prompt))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(model, "_sample_probs", noise.sample))
        stack.enter_context(mock.patch.object(model, "_rejection_sample", noise.reject))
        # return_stats wants the time of a CUDA device
        stack.enter_context(mock.patch.object(model, "_cuda_time", time.perf_counter))
        if variant == "truncated":
            truncating = partial(_with_default_top_p, model._sampling_probs)
            stack.enter_context(mock.patch.object(model, "_sampling_probs", truncating))
        result = model.dflash_generate(
            draft,
            target,
            torch.tensor([list(prompt)]),
            N_PREDICT,
            None,
            temperature=1.0,
            top_p=TOP_P,
            return_stats=True,
        )
    return result.output_ids[0, len(prompt) :].tolist(), result.acceptance_lengths


def _with_default_top_p(
    original: Any, logits: Any, temperature: float, top_p: float = TOP_P, top_k: int = 0
) -> Any:
    return original(logits, temperature, top_p, top_k)


def load_golden() -> list[Sampled]:
    """The stored answers."""
    stored = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return [Sampled(**entry) for entry in stored["answers"]]


def _missing(target: Path, known: Sequence[Sampled]) -> Iterator[Sampled]:
    import torch

    torch.set_num_threads(1)
    reference, draft = torch_target(target), load_draft(DRAFTER)
    prompts = tokenized(OURS, target, load_prompts(N_PROMPTS))
    there = {(one.prompt, one.seed, one.variant) for one in known}
    for seed in SEEDS:
        for number, prompt in enumerate(prompts):
            for variant in VARIANTS:
                if (number, seed, variant) not in there:
                    tokens, lengths = generate(reference, draft, prompt, seed, variant)
                    yield Sampled(number, seed, variant, tokens, "".join(map(str, lengths)))


def _write(target: Path, answers: Sequence[Sampled]) -> None:
    head = {
        "made_with": "python -m tests.oracle.sampled TARGET.gguf",
        "reference": "dflash 0.1.0 dflash_generate, float32, temperature 1, top-p 0.95, CPU",
        "target_sha256": hashlib.sha256(target.read_bytes()).hexdigest(),
        "draft_sha256": hashlib.sha256((DRAFTER / "model.safetensors").read_bytes()).hexdigest(),
    }
    entries = ",\n".join(json.dumps(asdict(answer)) for answer in answers)
    fresh = GOLDEN.with_suffix(".part")
    fresh.write_text(json.dumps(head)[:-1] + f', "answers": [\n{entries}\n]}}\n')
    fresh.replace(GOLDEN)


def main(argv: Sequence[str]) -> None:
    """Complete the golden file for the target given."""
    target = Path(argv[0])
    answers = load_golden() if GOLDEN.exists() else []
    for answer in _missing(target, list(answers)):
        answers.append(answer)
        _write(target, answers)
        print(f"{len(answers)} {answer.lengths}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
