"""Coupled verification: one seed gives one text, with and without drafter, at every width.

``python -m tests.oracle.coupled TARGET.gguf DRAFT.gguf [N_PROMPTS]`` answers every prompt with
every setting at every width, in half an hour of one core for ten prompts, and prints what differs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.builds import OURS, Build, tokenized
from tests.oracle.keyed import gumbel
from tests.oracle.prompts import load_prompts

__all__ = [
    "N_PREDICT",
    "SESSION",
    "SETTINGS",
    "WIDTHS",
    "Case",
    "Difference",
    "answers",
    "compare",
    "next_scores",
    "prompt_tokens",
    "rotated",
]

N_PREDICT = 24
AUTO = -1
WIDTHS = (1, 2, 3, 4, 5, 6, 7, AUTO)
SESSION: dict[str, int] = {"n_ctx": 128, "n_seq_max": 16, "n_threads": 1}
_COUPLED = 3  # enum dflash2_verifier
_HEAD, _TAIL, _N_CHAT = 24, 40, 120  # tokens of plain texts and of chat prompts, and chat prompts

_PENALTIES = {
    "penalty_last_n": 64,
    "penalty_repeat": 1.2,
    "penalty_freq": 0.1,
    "penalty_present": 0.3,
}
_GRAMMAR = {"grammar": 'root ::= ("- " [a-zA-Z ,.]+ "\\n")+', "ignore_eos": False}
_RULES: dict[str, dict[str, Any]] = {"free": {}, "penalties": _PENALTIES, "grammar": _GRAMMAR}
SETTINGS: dict[str, dict[str, Any]] = {
    f"T {temp} {name}": {"temp": temp, **rules}
    for temp, (name, rules) in product((0.7, 1.0), _RULES.items())
}


@dataclass(frozen=True)
class Case:
    """A prompt (its number), a setting (its name), and how many tokens a round drafts."""

    prompt: int
    setting: str
    width: int

    @property
    def seed(self) -> int:
        """One seed per prompt, whatever is done with it."""
        return 1000 + self.prompt

    def request(self, prompts: Sequence[list[int]]) -> dict[str, Any]:
        """As rounds.serve takes it; nothing cuts the distribution off."""
        whole = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty_repeat": 1.0}
        return {
            "prompt": prompts[self.prompt],
            "verifier": _COUPLED,
            "seed": self.seed,
            "n_predict": N_PREDICT,
            "n_draft_max": self.width,
            **whole,
            **SETTINGS[self.setting],
        }


@dataclass(frozen=True)
class Difference:
    """The first token that is not plain decoding's."""

    case: Case
    position: int
    margin: float  # between the two tokens, in units of logits


def rotated(n_prompts: int) -> list[Case]:
    """One case per prompt; 48 prompts in a row have every setting at every width."""
    every = list(product(SETTINGS, WIDTHS))
    return [Case(number, *every[number % len(every)]) for number in range(n_prompts)]


def prompt_tokens(target: Path, count: int) -> list[list[int]]:
    """Ends of chat prompts, then beginnings of the same texts without a chat template."""
    held_out = load_prompts(_N_CHAT)
    chats = [ids[-_TAIL:] for ids in tokenized(OURS, target, held_out)]
    texts = [prompt.text for prompt in held_out]
    ids = OURS.run_one(job="tokenize", path=str(target), texts=texts)
    plain = [ids[f"tokens-{number}"][:_HEAD].tolist() for number in range(len(texts))]
    prompts = chats + plain
    if count > len(prompts):
        raise ValueError(f"there are only {len(prompts)} prompts")
    return prompts[:count]


def answers(
    build: Build,
    target: Path,
    draft: Path | None,
    prompts: Sequence[list[int]],
    cases: Sequence[Case],
) -> dict[str, np.ndarray]:
    """What the serve job gives for each case; tokens are [n_cases, at most N_PREDICT]."""
    return build.run_parallel(
        "serve",
        [case.request(prompts) for case in cases],
        path=str(target),
        draft=str(draft) if draft else None,
        width=N_PREDICT,
        **SESSION,
    )


def next_scores(
    logits: np.ndarray, text: Sequence[int], setting: Mapping[str, Any], seed: int
) -> np.ndarray:
    """log p plus noise of every token after a text, but for a constant and the grammar.

    llama-sampler.cpp: llama_sampler_penalties_apply; verify.cpp: argmax_with_noise.
    """
    scores = logits.astype(np.float64)
    if "penalty_last_n" in setting:
        for token, count in Counter(text[-setting["penalty_last_n"] :]).items():
            repeat = setting["penalty_repeat"]
            scores[token] *= repeat if scores[token] <= 0 else 1 / repeat
            scores[token] -= count * setting["penalty_freq"] + setting["penalty_present"]
    return scores / setting["temp"] + gumbel(seed, len(text), np.arange(len(scores)))


def compare(
    build: Build,
    target: Path,
    prompts: Sequence[list[int]],
    cases: Sequence[Case],
    tokens: tuple[np.ndarray, np.ndarray],
) -> list[Difference]:
    """Where answers with a drafter leave those without, tokens = (plain, drafted)."""
    plain, drafted = tokens
    unequal = plain != drafted
    rows = np.flatnonzero(unequal.any(axis=1))
    found = [(int(row), int(unequal[row].argmax())) for row in rows]
    if not found:
        return []
    texts = [prompts[cases[row].prompt] + plain[row, :at].tolist() for row, at in found]
    options = {"n_ctx": SESSION["n_ctx"], "n_threads": 1}
    logits = build.run_one(job="last_logits", path=str(target), texts=texts, **options)["logits"]
    differences = []
    for (row, at), text, values in zip(found, texts, logits, strict=True):
        case = cases[row]
        scores = next_scores(values, text, SETTINGS[case.setting], case.seed)
        pair = int(plain[row, at]), int(drafted[row, at])
        # an answer that ended where the other went on is no matter of rounding
        gap = abs(scores[pair[0]] - scores[pair[1]]) if min(pair) >= 0 else np.inf
        differences.append(Difference(case, at, float(gap * SETTINGS[case.setting]["temp"])))
    return differences


def main(argv: Sequence[str]) -> int:
    """Every prompt, setting and width; 1 when an answer differs."""
    target, draft = Path(argv[0]), Path(argv[1])
    count = int(argv[2]) if len(argv) > 2 else 200
    prompts, n_different = prompt_tokens(target, count), 0
    for start in range(0, count, 10):
        numbers = range(start, min(start + 10, count))
        cases = [Case(*c) for c in product(numbers, SETTINGS, WIDTHS)]
        alone = [Case(number, setting, 0) for number, setting in product(numbers, SETTINGS)]
        plain = answers(OURS, target, None, prompts, alone)["tokens"]
        drafted = answers(OURS, target, draft, prompts, cases)["tokens"]
        tokens = np.repeat(plain, len(WIDTHS), axis=0), drafted
        found = compare(OURS, target, prompts, cases, tokens)
        n_different += len(found)
        print(f"prompts {start} to {numbers[-1]}: {len(cases)} answers, different: {found}")
        sys.stdout.flush()
    return int(n_different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
