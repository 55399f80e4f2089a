"""Tokens and verification steps with sampling: of libdflash2's rules, the pin, the reference.

All counts are [n_prompts, 2], tokens and steps, summed over seeds. Only rounds are counted that
begin with room for a whole block, on every side (see sampled.uncut).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.builds import PIN, Build
from tests.oracle.peer_rounds import answers
from tests.oracle.sampled import BLOCK, N_PREDICT, TOP_P, Sampled, uncut

__all__ = [
    "FLOAT32",
    "VERIFIERS",
    "end_tokens",
    "of_pin",
    "of_reference",
    "of_rules",
    "run_rules",
    "until_end",
]

# enum dflash2_verifier; greedy runs at temperature 0, the others at 1
VERIFIERS = {"greedy": 1, "match": 2, "coupled": 3, "reject": 4, "block": 5}
WIDTH = BLOCK - 1
_SAMPLING = {"top_k": 0, "top_p": TOP_P, "min_p": 0.0}
_SESSION: dict[str, int] = {"n_ctx": 512, "n_seq_max": 8, "n_threads": 1}
FLOAT32: dict[str, int] = {"type_k": 0, "type_v": 0, "flash_attn": 0}


def run_rules(
    build: Build,
    pair: tuple[Path, Path],
    prompts: Sequence[list[int]],
    keys: Sequence[tuple[str, int]],
    **session: int,
) -> dict[str, np.ndarray]:
    """The serve job for every prompt with every (rule, seed) of keys, prompt by prompt."""
    requests = [
        {
            "prompt": prompt,
            "verifier": VERIFIERS[rule],
            "seed": seed,
            "temp": float(rule != "greedy"),
            "penalty_repeat": 1.0,
            "n_predict": N_PREDICT,
            "n_draft_max": WIDTH,
            **_SAMPLING,
        }
        for prompt in prompts
        for rule, seed in keys
    ]
    target, draft = map(str, pair)
    options = {**_SESSION, **session, "width": N_PREDICT}
    result = build.run_parallel("serve", requests, path=target, draft=draft, **options)
    if result["failures"].any():
        raise RuntimeError(f"drafts failed: {result['failures'].tolist()}")
    return result


def of_rules(
    result: dict[str, np.ndarray], keys: Sequence[tuple[str, int]]
) -> dict[str, np.ndarray]:
    """Counts of each rule from what run_rules gave."""
    kept = result["before"] <= N_PREDICT - BLOCK
    return {rule: _counts(result, keys, rule, kept) for rule, _ in keys}


def until_end(
    result: dict[str, np.ndarray], keys: Sequence[tuple[str, int]], rule: str, end: Sequence[int]
) -> np.ndarray:
    """Counts of a rule without the round that produced an end-of-generation token, and later."""
    first = np.array([_first(row, end) for row in result["tokens"]])
    behind = result["before"] + result["accepted"] + 1
    kept = (result["before"] <= N_PREDICT - BLOCK) & (behind <= first[result["prompt"]])
    return _counts(result, keys, rule, kept)


def _first(tokens: np.ndarray, end: Sequence[int]) -> int:
    found = np.flatnonzero(np.isin(tokens, end))
    return int(found[0]) if len(found) else len(tokens)


def _counts(
    result: dict[str, np.ndarray], keys: Sequence[tuple[str, int]], rule: str, kept: np.ndarray
) -> np.ndarray:
    request = result["prompt"]
    wanted = np.array([name == rule for name, _ in keys])
    kept = kept & wanted[request % len(keys)]
    prompt = request[kept] // len(keys)
    n_prompts = len(result["tokens"]) // len(keys)
    tokens = np.bincount(prompt, result["accepted"][kept] + 1, minlength=n_prompts)
    return np.stack([tokens, np.bincount(prompt, minlength=n_prompts)], axis=1)


def of_pin(
    pair: tuple[Path, Path],
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    temperature: float,
    build: Build = PIN,
) -> np.ndarray:
    """Counts of the pin's own sampling and accepting, until an end-of-generation token."""
    requests: list[dict[str, Any]] = [
        {
            "prompt": prompt,
            # the pin's numbers follow from the seed alone: one for all would be one draw, not 64
            "seed": 1000 * seed + number,
            "temperature": temperature,
            "n_predict": N_PREDICT,
            **_SAMPLING,
        }
        for number, prompt in enumerate(prompts)
        for seed in seeds
    ]
    found = answers(build.libraries / "llama-server", pair, WIDTH, requests)
    counts = np.array([answer.counted(N_PREDICT, BLOCK) for answer in found])
    return counts.reshape(len(prompts), len(seeds), 2).sum(axis=1)


def of_reference(stored: Sequence[Sampled], variant: str, seeds: Sequence[int]) -> np.ndarray:
    """Counts of stored answers of the reference, for the prompts from the first on."""
    answers_ = [one for one in stored if one.variant == variant and one.seed in seeds]
    counts = np.zeros((1 + max(one.prompt for one in answers_), 2), int)
    for one in answers_:
        lengths = uncut([int(digit) for digit in one.lengths], N_PREDICT)
        counts[one.prompt] += sum(lengths), len(lengths)
    return counts


def end_tokens(build: Build, target: Path) -> list[int]:
    """Ids of the end-of-generation tokens of a model."""
    return build.run_one(job="end_tokens", path=str(target))["ids"].tolist()
