"""``check --run``: the pair answers a few prompts, and what is kept of the drafts is judged.

The rule, for whole blocks at temperature 0. *Dead* is a drafter of which hardly anything is kept:
the target then writes one token per step whatever is drafted. Features of the wrong model, weights
in the wrong order or scales that were dropped give 1.00 to 1.05 tokens per step (the bundled pair
with the rows of ``fc`` shuffled: 1.05, with all matrices shuffled: 1.00; the same is reported of
other engines). *Weak* is the bundled pair with its rotated rows in the wrong order, 1.53; as it is
it has 2.04, and published pairs have 2 to 6. So dead is where the whole interval is below 1.2, and
weak where the mean is below 1.6, in the middle between what was measured on both sides. What costs
less, a layer id off by one (1.93) or another rope base (1.95), is left to ``check_trial``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.check_fact import Fact, error, from_error, ok, warning
from dflash2_gguf.check_trial import Answer, alternatives, try_out
from dflash2_gguf.errors import CheckpointError, DFlash2Error
from dflash2_gguf.gguf_header import read_header
from dflash2_gguf.gguf_schema import Key
from dflash2_gguf.known_models import usual_layers
from dflash2_gguf.prompts import prompt_tokens
from dflash2_gguf.sampling import SamplingParams
from dflash2_gguf.session import Session
from dflash2_gguf.stats import Stats
from dflash2_gguf.ui import Terminal
from dflash2_gguf.words import counted

__all__ = ["PROMPTS", "Kept", "judge", "kept_of", "run_pair"]

PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a dog who finds a ball.",
    "Explain in three sentences why the sky is blue.",
    "List five healthy breakfast ideas.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tom has 3 boxes with 12 apples each and eats 5 apples. How many are left?",
    "Translate to French: The weather is nice today and we go to the sea.",
    "Count from 1 to 30.",
)

_MAX_TOKENS = 64
_PROMPT_ROOM = 960  # tokens; chat templates can be long
_DEAD, _WEAK = 1.2, 1.6  # tokens per step
_DEVIATIONS = 1.96  # of a 95 % confidence interval
_FEW_STEPS = 32

_FAILURES = {
    "values": "the drafter computes NaN or infinite values",
    "compute": "the draft pass fails",
    "cache": "the draft cache is full",
}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What was kept: ``length`` is tokens per step with its 95 % confidence interval."""

    n_steps: int
    n_drafted: int
    n_accepted: int
    length: float
    low: float
    high: float
    failures: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """All numbers, ready for JSON."""
        return asdict(self)


def run_pair(
    target: Path,
    draft: Path,
    *,
    prompts: Sequence[str] = PROMPTS,
    max_tokens: int = _MAX_TOKENS,
    n_threads: int | None = None,
) -> tuple[list[Fact], Kept | None]:
    """Load the pair, answer ``prompts`` and judge; no numbers where it cannot be loaded."""
    n_ctx = _PROMPT_ROOM + max_tokens
    try:
        with Session(
            target,
            draft,
            n_ctx=n_ctx,
            n_threads=n_threads,
            draft_max=_block_size(draft) - 1,  # a fixed width: it never stops for not paying
        ) as session:
            answers = list(_answers(session, prompts, max_tokens))
            kept = kept_of(session.stats)
        facts = judge(kept)
        if kept.high >= _DEAD:
            facts += _tried(target, draft, answers, kept, n_ctx, n_threads)
    except DFlash2Error as problem:
        return [from_error("run", problem)], None
    return facts, kept


def _block_size(draft: Path) -> int:
    return max(2, read_header(draft).arch(Key.Arch.BLOCK_SIZE, int) or 0)


def _answers(session: Session, prompts: Sequence[str], max_tokens: int) -> Iterator[Answer]:
    """Each from empty caches."""
    with Terminal().progress("running") as on_progress:
        for number, prompt in enumerate(prompts):
            session.reset()
            tokens = _tokens(session, prompt)
            pieces = session.generate(
                tokens, max_tokens=max_tokens, sampling=SamplingParams(temperature=0)
            )
            said = tuple(token for piece in pieces for token in piece.tokens)
            yield Answer(tuple(tokens), said)
            on_progress((number + 1) / len(prompts))


def _tokens(session: Session, prompt: str) -> list[int]:
    """As a message where the target has a chat template: drafters are trained on answers."""
    try:
        return prompt_tokens(session, prompt, raw=False)
    except CheckpointError:
        return prompt_tokens(session, prompt, raw=True)


def _tried(
    target: Path,
    draft: Path,
    answers: Sequence[Answer],
    kept: Kept,
    n_ctx: int,
    n_threads: int | None,
) -> list[Fact]:
    """Other numbers, where the header's are not beyond doubt."""
    theirs, ours = read_header(target), read_header(draft)
    n_layer = theirs.arch(Key.Arch.BLOCK_COUNT, int) or 0
    n_layer -= theirs.arch(Key.Arch.NEXTN_LAYERS, int) or 0
    ids = tuple(int(i) - 1 for i in ours.arch(Key.Arch.TARGET_LAYERS, tuple) or ())
    usual = usual_layers(n_layer, len(ids))
    is_weak = kept.length < _WEAK
    trials = alternatives(
        ours,
        n_layer=n_layer,
        target_base=theirs.arch(Key.Arch.ROPE_FREQ_BASE, float),
        shifts=[s for s in (1, -1) if is_weak or tuple(i + s for i in ids) in usual],
    )
    return try_out(target, ours, trials, answers, n_ctx=n_ctx, n_threads=n_threads)


def kept_of(stats: Stats) -> Kept:
    """The numbers of a run; the interval takes steps as independent.

    ``accepted_at`` counts the steps that kept at least so many drafts, so it is the whole
    distribution of what a step keeps.
    """
    n = max(stats.n_steps, 1)
    at_least = [count / n for count in stats.accepted_at]
    mean = sum(at_least)
    square = sum((2 * k + 1) * share for k, share in enumerate(at_least))
    margin = _DEVIATIONS * math.sqrt(max(square - mean * mean, 0.0) / n)
    return Kept(
        n_steps=stats.n_steps,
        n_drafted=stats.n_drafted,
        n_accepted=stats.n_accepted,
        length=stats.acceptance_length,
        low=stats.acceptance_length - margin,
        high=stats.acceptance_length + margin,
        failures={reason: count for reason, count in stats.draft_failures.items() if count},
    )


def judge(kept: Kept) -> list[Fact]:
    """Facts about draft passes that failed, and about what was kept of the others."""
    facts = [
        error(
            "draft passes",
            f"{count} of {kept.n_steps} steps had no draft: {_FAILURES[reason]}",
            "a weight or a number of the metadata is broken; convert the checkpoint again",
        )
        for reason, count in kept.failures.items()
    ]
    if not kept.n_drafted:
        return facts
    return [*facts, _acceptance(kept)]


def _acceptance(kept: Kept) -> Fact:
    figures = (
        f"{kept.length:.2f} tokens per step (95 % between {kept.low:.2f} and {kept.high:.2f}), "
        f"{kept.n_accepted} of {kept.n_drafted} drafts kept in {counted(kept.n_steps, 'step')}"
    )
    if kept.n_steps < _FEW_STEPS:
        return warning(
            "acceptance",
            f"too little to judge: {figures}",
            "the answers are too short; -n lets them be longer",
        )
    if kept.high < _DEAD:
        return error(
            "acceptance",
            f"dead: {figures}",
            "these are not the features it was trained on: another model's drafter, layers or "
            "weights in another order, or weights that were lost; convert its checkpoint again",
        )
    if kept.length < _WEAK:
        return warning(
            "acceptance",
            f"weak: {figures}; drafters that work keep more",
            "compare rope base and layout, layer ids and quantization with the checkpoint",
        )
    return ok("acceptance", f"as expected: {figures}")
