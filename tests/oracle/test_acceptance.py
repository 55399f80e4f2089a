"""Greedy acceptance length on the real pair against the authors' own generation loop.

Both sides read the same held-out prompts. The reference runs in float32 on the dequantized target;
ours runs the quantized target and the bf16 drafter, so features differ by about one percent and
single drafts may differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.acceptance import (
    DRAFTER,
    GOLDEN,
    N_PREDICT,
    N_PROMPTS,
    Acceptance,
    interval,
    load_golden,
    mean_length,
    run,
)
from tests.oracle.builds import Build, tokenized
from tests.oracle.conftest import RealRun
from tests.oracle.prompts import load_prompts

pytestmark = [pytest.mark.reference, pytest.mark.slow]


@pytest.fixture(scope="module")
def golden() -> list[Acceptance]:
    return load_golden()


def test_golden_was_made_from_these_files(target_gguf: Path) -> None:
    stored = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert stored["target_sha256"] == hashlib.sha256(target_gguf.read_bytes()).hexdigest()
    weights = (DRAFTER / "model.safetensors").read_bytes()
    assert stored["draft_sha256"] == hashlib.sha256(weights).hexdigest()
    assert [entry["name"] for entry in stored["prompts"]] == [
        prompt.name for prompt in load_prompts(N_PROMPTS)
    ]


@pytest.mark.native
def test_golden_is_what_the_reference_gives_today(
    target_gguf: Path, ours: Build, golden: list[Acceptance]
) -> None:
    prompts = load_prompts(3)
    tokens = tokenized(ours, target_gguf, prompts)
    for fresh, stored in zip(run(target_gguf, prompts, tokens, N_PREDICT), golden, strict=False):
        assert fresh == stored


@pytest.mark.native
def test_acceptance_length_is_the_reference_s(
    golden: list[Acceptance], real_run: RealRun, record_property: Callable[[str, Any], None]
) -> None:
    expected = [_whole_rounds(entry.lengths) for entry in golden]
    found = [_whole_rounds(real_run.lengths(number)) for number in range(N_PROMPTS)]
    ratio = mean_length(found) / mean_length(expected)
    low, high = interval(expected)
    record_property("acceptance length", [mean_length(found), mean_length(expected), low, high])
    print(
        f"acceptance length {mean_length(found):.3f}, reference {mean_length(expected):.3f} "
        f"(95 % interval over prompts {low:.3f} to {high:.3f}), ratio {ratio:.4f}"
    )
    assert abs(ratio - 1) <= 0.03


def _whole_rounds(lengths: Sequence[int]) -> list[int]:
    """The rounds that no length limit could cut: they end 8 tokens before N_PREDICT or earlier."""
    ends = accumulate(lengths)
    return [length for length, end in zip(lengths, ends, strict=True) if end <= N_PREDICT - 8]
