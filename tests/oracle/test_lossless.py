"""Greedy text with a drafter against plain greedy text of the unpatched pin, token for token.

The same row evaluated alone and in a batch of eight differs by rounding, so where two tokens are
that close, either may come first. How close that is gets measured here, per model; a difference
with a larger margin is an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracle.bigram import write_bigram_draft
from tests.oracle.builds import ROOT, Build
from tests.oracle.conftest import REAL_PAIR, RealRun
from tests.oracle.tiny_pairs import DraftShape

pytestmark = [pytest.mark.native, pytest.mark.peer]

FLOAT32: dict[str, int] = {"flash_attn": 0, "n_ctx": 256, "n_threads": 1}

TINY = (
    "llama-dense",
    "llama-moe",
    "llama4-moe",
    "qwen3-dense",
    "qwen3moe-moe",
    "qwen35-dense",
    "qwen35moe-moe",
    "gemma-dense",
    "gemma2-dense",
    "gemma3-dense",
    "deepseek-moe",
    "deepseek2-moe",
    "deepseek32-moe",
    "deepseek4-moe",
    "glm-dsa-moe",
    "glm5-next-moe",
    "glm4moe-moe",
    "gpt-oss-moe",
    "lfm2-dense",
    "nemotron_h-dense",
    "kimi-k3-moe",
    "bailingmoe3-moe",
    "muse-glimmer-dense",
    "mimo2-moe",
    "minimax-m2-moe",
)


@dataclass(frozen=True)
class Difference:
    """The first token of an answer that is not the pin's, and how close the pin's best were."""

    prompt: int
    position: int
    margin: float  # in logits


def differences(plain: dict[str, np.ndarray], tokens: np.ndarray) -> list[Difference]:
    """First difference of each answer; behind it the texts are different ones."""
    unequal = plain["tokens"] != tokens
    first = unequal.argmax(axis=1)
    return [
        Difference(int(i), int(first[i]), float(plain["margins"][i, first[i]]))
        for i in np.flatnonzero(unequal.any(axis=1))
    ]


def noise(build: Build, path: Path, texts: Sequence[list[int]], **options: int) -> float:
    """Largest |logit difference| of the last rows of texts, singly against 2 to 8 at a time."""
    result = build.run_one(job="noise", path=str(path), texts=texts, width=8, **options)
    return float(result["differences"].max())


@dataclass(frozen=True)
class TinyRun:
    """Answers of one tiny target on the pin and, with a drafter, on ours."""

    prove: list[str]  # the command that compares the same prompts
    plain: dict[str, np.ndarray]
    drafted: dict[str, np.ndarray]
    together: dict[str, np.ndarray]  # the same, all prompts at once
    restored: dict[str, np.ndarray]  # saved and restored after five steps
    exact: dict[str, np.ndarray]  # and in exact mode, doubting a thousand times more than it must
    noise: float


@pytest.fixture(scope="module", params=TINY)
def tiny_run(
    request: pytest.FixtureRequest,
    tiny_models: Path,
    pin: Build,
    ours: Build,
    convert: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> TinyRun:
    path, folder = tiny_models / f"{request.param}.gguf", tmp_path_factory.mktemp(request.param)
    sizes = {name: int(value) for name, value in pin.run_one(job="shape", path=str(path)).items()}
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, sizes["n_vocab"], size=n).tolist() for n in (1, 9, 40)]
    plain = pin.run_one(
        job="greedy", path=str(path), prompts=prompts, n_predict=64, kv_type=0, **FLOAT32
    )
    texts = [p + answer[:24].tolist() for p, answer in zip(prompts, plain["tokens"], strict=True)]
    source = write_bigram_draft(
        folder / "draft", _shape(request.param, sizes), path, plain["tokens"].tolist()
    )
    job = {
        "job": "session",
        "path": str(path),
        "draft": str(convert(source, path, "f32", folder / "draft.gguf")),
        "prompts": prompts,
        "n_predict": 64,
        "type_k": 0,
        "type_v": 0,
        **FLOAT32,
    }
    texts_file = folder / "prompts.jsonl"
    texts_file.write_text("".join(json.dumps({"tokens": prompt}) + "\n" for prompt in prompts))
    prove = ["prove", "-m", str(path), "-d", job["draft"], "--prompts", str(texts_file)]
    drafted = ours.run_one(**job)
    together = ours.run_one(**{**job, "n_seq_max": 3, "n_ctx": 3 * FLOAT32["n_ctx"]})
    level = noise(pin, path, texts, kv_type=0, **FLOAT32)
    doubts = {"exact": True, "noise_min": 1000 * level}
    exact = ours.run_one(**{**job, "n_seq_max": 3, "n_ctx": 3 * FLOAT32["n_ctx"], **doubts})
    restored = ours.run_one(**{**job, "job": "restored", "after": 5})
    return TinyRun(prove, plain, drafted, together, restored, exact, level)


def _shape(name: str, sizes: dict[str, int]) -> DraftShape:
    # upstream packs K ids and K x K scores into one row of the hidden size
    top_k = min(16, int((sizes["n_embd"] + 0.25) ** 0.5 - 0.5))
    return DraftShape(
        name=name,
        hidden=sizes["n_embd"],
        vocab=sizes["n_vocab"],
        num_target_layers=sizes["n_layer"],
        taps=(0,),
        layers=1,
        heads=2,
        heads_kv=1,
        head_dim=32,
        feed_forward=64,
        rank=top_k,
        top_k=top_k,
    )


def test_tiny_target_gives_the_pin_s_plain_tokens(tiny_run: TinyRun) -> None:
    found = differences(tiny_run.plain, tiny_run.drafted["tokens"])
    assert [d for d in found if d.margin > 2 * tiny_run.noise] == [], tiny_run.noise


def test_sequences_together_give_the_pin_s_plain_tokens(tiny_run: TinyRun) -> None:
    found = differences(tiny_run.plain, tiny_run.together["tokens"])
    assert not tiny_run.together["failures"].any()
    assert [d for d in found if d.margin > 2 * tiny_run.noise] == [], tiny_run.noise


def test_a_restored_sequence_gives_the_pin_s_plain_tokens(tiny_run: TinyRun) -> None:
    found = differences(tiny_run.plain, tiny_run.restored["tokens"])
    assert [d for d in found if d.margin > 2 * tiny_run.noise] == [], tiny_run.noise


def test_exact_mode_gives_the_pin_s_plain_tokens_however_close_they_are(
    tiny_run: TinyRun,
) -> None:
    assert not tiny_run.exact["failures"].any()
    assert tiny_run.exact["tokens"].tolist() == tiny_run.plain["tokens"].tolist()


@pytest.mark.parametrize("sampling", [[], ["--temp", "1", "--seed", "7"]])
def test_prove_finds_no_difference(tiny_run: TinyRun, sampling: list[str]) -> None:
    words = [*tiny_run.prove, "-n", "48", "-c", "256", "-t", "1", "--draft-max", "7", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "dflash2_gguf", *words, *sampling],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["n_different"] == 0


def test_tiny_target_accepts_some_drafts_and_rejects_others(tiny_run: TinyRun) -> None:
    drafted, accepted = tiny_run.drafted["drafted"], tiny_run.drafted["accepted"]
    assert not tiny_run.drafted["failures"].any()
    assert 0 < accepted.sum() < drafted.sum()


@pytest.mark.slow
def test_real_pair_gives_the_pin_s_plain_tokens(
    target_gguf: Path,
    pin: Build,
    real_run: RealRun,
    record_property: Callable[[str, Any], None],
) -> None:
    prompts = real_run.prompts
    plain = pin.run_parallel("greedy", prompts, path=str(target_gguf), **REAL_PAIR)
    texts = [p + a[:48].tolist() for p, a in zip(prompts[:12], plain["tokens"], strict=False)]
    level = noise(pin, target_gguf, texts, n_ctx=REAL_PAIR["n_ctx"], n_threads=1)
    found = differences(plain, real_run.drafted["tokens"])
    record_property("logit noise", level)
    record_property("differences", [str(difference) for difference in found])
    print(f"logit noise {level:.4f}, {len(found)} of {len(prompts)} answers differ: {found}")
    assert [d for d in found if d.margin > 2 * level] == []
