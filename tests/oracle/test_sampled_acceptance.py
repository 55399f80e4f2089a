"""Acceptance with sampling at temperature 1 and top-p 0.95: our rules, the reference, the pin.

False alarms: the comparisons of sampled runs fail when the claim is more than three standard errors
(bootstrap over prompts) away from what was measured: by chance in one of 370 runs on other random
numbers for equalities, and in one of 740 for inequalities that hold with nothing to spare. Seeds
are fixed, so one machine gives one result; ``tests.oracle.acceptance_table`` takes more of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.oracle.acceptance import DRAFTER, N_PROMPTS
from tests.oracle.builds import Build, tokenized
from tests.oracle.conftest import RealRun
from tests.oracle.dequantized import torch_target, write_float32
from tests.oracle.peer_rounds import answers
from tests.oracle.prompts import load_prompts
from tests.oracle.reference import load_draft
from tests.oracle.sampled import (
    BLOCK,
    GOLDEN,
    N_PREDICT,
    SEEDS,
    VARIANTS,
    Sampled,
    generate,
    load_golden,
)
from tests.oracle.sampled_runs import (
    FLOAT32,
    WIDTH,
    end_tokens,
    of_pin,
    of_reference,
    of_rules,
    run_rules,
    until_end,
)
from tests.oracle.spread import Spread, length, ratio

pytestmark = [pytest.mark.native, pytest.mark.slow]

KEYS = [(rule, seed) for seed in SEEDS for rule in ("reject", "block", "coupled", "match")]
EXACT = [("reject", SEEDS[0])]  # float32 takes minutes a seed


@pytest.fixture(scope="module")
def prompts(target_gguf: Path, ours: Build) -> list[list[int]]:
    return tokenized(ours, target_gguf, load_prompts(N_PROMPTS))


@pytest.fixture(scope="module")
def golden() -> list[Sampled]:
    return load_golden()


@dataclass(frozen=True)
class Rules:
    """All rules on the real pair, and the same results as counts by rule."""

    result: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]

    def against(self, rule: str, other: str) -> Spread:
        """Ratio of two acceptance lengths, printed."""
        found = ratio(self.counts[rule], self.counts[other])
        lengths = [length(self.counts[name]) for name in (rule, other)]
        print(f"{rule} {lengths[0]}, {other} {lengths[1]}, ratio {found}")
        return found


@pytest.fixture(scope="module")
def rules(
    target_gguf: Path,
    drafter_gguf: Callable[[str], Path],
    ours: Build,
    prompts: list[list[int]],
) -> Rules:
    result = run_rules(ours, (target_gguf, drafter_gguf("q8_0")), prompts, KEYS)
    return Rules(result, of_rules(result, KEYS))


@pytest.fixture(scope="module")
def exact(
    target_gguf: Path,
    drafter_gguf: Callable[[str], Path],
    ours: Build,
    prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, np.ndarray]:
    """``reject`` in float32, which sees the distributions that the reference sees."""
    target = tmp_path_factory.mktemp("float32") / "target.gguf"
    write_float32(target_gguf, target)
    return run_rules(ours, (target, drafter_gguf("f32")), prompts, EXACT, **FLOAT32)


def test_golden_was_made_from_these_files(target_gguf: Path, golden: list[Sampled]) -> None:
    stored = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert stored["target_sha256"] == hashlib.sha256(target_gguf.read_bytes()).hexdigest()
    weights = (DRAFTER / "model.safetensors").read_bytes()
    assert stored["draft_sha256"] == hashlib.sha256(weights).hexdigest()
    for seed, variant in product(SEEDS, VARIANTS):
        found = [one.prompt for one in golden if (one.seed, one.variant) == (seed, variant)]
        assert found == list(range(N_PROMPTS))


@pytest.mark.reference
@pytest.mark.parametrize("variant", VARIANTS)
def test_golden_is_what_the_reference_gives_today(
    variant: str, target_gguf: Path, prompts: list[list[int]], golden: list[Sampled]
) -> None:
    import torch

    torch.set_num_threads(1)
    target, draft = torch_target(target_gguf), load_draft(DRAFTER)
    for stored in [one for one in golden if one.variant == variant][:2]:
        prompt = prompts[stored.prompt]
        tokens, lengths = generate(target, draft, prompt, stored.seed, variant)
        assert tokens == stored.tokens
        assert "".join(map(str, lengths)) == stored.lengths


def test_reject_keeps_the_reference_s_tokens_given_its_random_numbers(
    exact: dict[str, np.ndarray], golden: list[Sampled]
) -> None:
    same = [one for one in golden if (one.variant, one.seed) == ("truncated", SEEDS[0])]
    expected = np.array([one.tokens for one in same])
    unequal = exact["tokens"] != expected
    first = np.where(unequal.any(axis=1), unequal.argmax(axis=1), N_PREDICT)
    print(f"{first.sum()} of {unequal.size} tokens before the first difference of an answer")
    # A draw far down the order of tokens meets near ties. Other rules, or the same with a number
    # of another purpose, part within the first three tokens.
    assert first.mean() > N_PREDICT / 2


def test_reject_accepts_what_the_reference_accepts(
    exact: dict[str, np.ndarray], golden: list[Sampled]
) -> None:
    mine = of_rules(exact, EXACT)["reject"]
    found = ratio(mine, of_reference(golden, "truncated", SEEDS[:1]))
    print(f"float32 {length(mine)}, ratio to the reference with the same q {found}")
    assert abs(found.value - 1) <= max(0.02, 3 * found.error)
    assert found.error <= 0.015


def test_reject_on_the_real_pair_is_within_2_percent_of_the_reference(
    rules: Rules, golden: list[Sampled]
) -> None:
    found = ratio(rules.counts["reject"], of_reference(golden, "published", SEEDS))
    print(f"reject {length(rules.counts['reject'])}, ratio to the published reference {found}")
    assert abs(found.value - 1) <= 0.02 + 3 * found.error
    assert found.error <= 0.03


def test_block_accepts_at_least_as_much_as_reject(rules: Rules) -> None:
    found = rules.against("block", "reject")
    assert found.value >= 1 - 3 * found.error
    assert found.error <= 0.04


def test_coupled_accepts_nearly_as_much_as_reject(rules: Rules) -> None:
    found = rules.against("coupled", "reject")
    assert found.value >= 0.9 - 3 * found.error
    assert found.error <= 0.04


@pytest.mark.parametrize("rule", ["reject", "block", "coupled"])
def test_rule_accepts_more_than_match(rule: str, rules: Rules) -> None:
    found = rules.against(rule, "match")
    assert found.value > 1 + 2 * found.error


@pytest.mark.peer
def test_match_accepts_what_the_pin_accepts(
    target_gguf: Path,
    drafter_gguf: Callable[[str], Path],
    ours: Build,
    pin: Build,
    prompts: list[list[int]],
    rules: Rules,
) -> None:
    mine = until_end(rules.result, KEYS, "match", end_tokens(ours, target_gguf))
    theirs = of_pin((target_gguf, drafter_gguf("q8_0")), prompts, SEEDS, 1.0, pin)
    found = ratio(mine, theirs)
    print(f"match {length(mine)}, pin {length(theirs)}, ratio {found}")
    assert abs(found.value - 1) <= 3 * found.error
    assert found.error <= 0.05


@pytest.mark.peer
def test_greedy_accepts_what_the_pin_accepts_round_by_round(
    target_gguf: Path, drafter_gguf: Callable[[str], Path], pin: Build, real_run: RealRun
) -> None:
    asked = [
        {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0.0}
        for prompt in real_run.prompts[:24]
    ]
    found = answers(
        pin.libraries / "llama-server", (target_gguf, drafter_gguf("bf16")), WIDTH, asked
    )
    n_rounds = n_equal = 0
    for number, answer in enumerate(found):
        _, last = answer.counted(N_PREDICT, BLOCK)
        accepted = np.cumsum(np.array(real_run.lengths(number)) - 1)
        same = _n_same(answer.tokens, real_run.drafted["tokens"][number].tolist())
        # its slots share batches, and where rounding turned a token the texts are different ones
        seen = [
            key for key, count in answer.accepted.items() if key <= last and 1 + key + count <= same
        ]
        n_rounds += len(seen)
        n_equal += sum(accepted[key - 1] == answer.accepted[key] for key in seen)
    print(f"{n_equal} of {n_rounds} rounds begin and end at the same token")
    assert n_rounds >= 100
    assert n_equal >= 0.9 * n_rounds


def _n_same(a: list[int], b: list[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
