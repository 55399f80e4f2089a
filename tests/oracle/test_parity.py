"""Candidate sets, scores and greedy paths of libdflash2 against the authors' torch model, in
float32.

Every round of a generation is compared, so the context grows, past the window, by injected rows.
The target's tokens come from libdflash2; the reference evaluates them again from scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.oracle.builds import Build, tokenized
from tests.oracle.comparison import Round, compare, rounds_of
from tests.oracle.dequantized import torch_target, write_float32
from tests.oracle.prompts import load_prompts
from tests.oracle.reference import Reference, load_draft
from tests.oracle.tiny_pairs import DraftShape, TargetShape, write_draft, write_target

pytestmark = [pytest.mark.native, pytest.mark.reference]

SIX_TAPS = (0, 1, 2, 4, 5, 6)
QWEN3_SHAPES = [
    DraftShape(name="sliding window"),
    DraftShape(name="full attention", window=None),
    DraftShape(name="one full layer", full_layers=(1,)),
    DraftShape(name="causal", causal=True),
    DraftShape(name="six taps", taps=SIX_TAPS),
    DraftShape(name="block of 16", block_size=16, window=20),
    DraftShape(
        name="block of 16, full attention, six taps", block_size=16, window=None, taps=SIX_TAPS
    ),
    DraftShape(name="output multiplier", output_multiplier=0.5),
    DraftShape(name="softcap", softcap=4.0),
    DraftShape(name="embedding scale", embedding_scale=1.5),
    DraftShape(name="all three", output_multiplier=0.7, softcap=3.0, embedding_scale=2.0),
    DraftShape(name="three layers, group 32", layers=3, group_size=32, rank=16, top_k=8),
]


# how the drafter sees another architecture's features, not all its options again
LLAMA_SHAPES = [QWEN3_SHAPES[0], QWEN3_SHAPES[1], QWEN3_SHAPES[4]]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A tiny target of an architecture: its GGUF and its torch module."""

    @lru_cache
    def make(arch: str) -> tuple[Path, Any]:
        path = tmp_path_factory.mktemp(arch) / "target.gguf"
        return path, write_target(path, TargetShape(arch=arch, tied=arch == "llama"))

    return make


@pytest.mark.parametrize(
    ("arch", "shape", "n_seq_max"),
    [("qwen3", shape, 1) for shape in QWEN3_SHAPES]
    + [("llama", shape, 1) for shape in LLAMA_SHAPES]
    + [("qwen3", shape, 3) for shape in QWEN3_SHAPES[:2]],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_every_round_has_the_reference_lattice(
    arch: str,
    shape: DraftShape,
    n_seq_max: int,
    targets: Callable[[str], tuple[Path, Any]],
    ours: Build,
    convert: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path, module = targets(arch)
    source = write_draft(tmp_path / "draft", shape)
    draft = convert(source, path, "f32", tmp_path / "draft.gguf")
    reference = Reference(module, load_draft(source))
    widths = sorted({1, 3, 7, shape.block_size - 1})
    sessions = _sessions(ours, path, draft, widths, n_seq_max)
    for width, rounds in zip(widths, sessions, strict=True):
        assert max(len(played.path) for played in rounds) == width
        _compare_all(rounds, reference)


@pytest.mark.slow
def test_trained_pair_in_float32_has_the_reference_lattice_after_accepted_drafts(
    target_gguf: Path,
    drafter_dir: Path,
    drafter_gguf: Callable[[str], Path],
    ours: Build,
    tmp_path: Path,
) -> None:
    path = tmp_path / "target-f32.gguf"
    write_float32(target_gguf, path)
    reference = Reference(torch_target(target_gguf), load_draft(drafter_dir))
    prompts = tokenized(ours, target_gguf, load_prompts(3))
    job = _job(path, drafter_gguf("f32"), prompts) | {"n_predict": 40, "n_ctx": 512}
    result = ours.run_one(**job)
    assert (result["accepted"] > 0).sum() > 10
    _compare_all(rounds_of(prompts, result), reference)


def _compare_all(rounds: list[Round], reference: Reference) -> None:
    # causal attention: the features of a text's beginning are those of the whole text's
    longest = {played.prompt: [*played.context, played.anchor] for played in rounds}
    features = {prompt: reference.features(tokens) for prompt, tokens in longest.items()}
    for played in rounds:
        known = features[played.prompt][:, : len(played.context)]
        compare(played, reference.lattice_from(known, played.anchor, len(played.path)))


def _job(target: Path, draft: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """A session whose caches and attention are float32 too."""
    return {
        "job": "session",
        "path": str(target),
        "draft": str(draft),
        "prompts": prompts,
        "lattices": True,
        "n_batch": 16,
        "n_ubatch": 16,
        "n_threads": 1,
        "type_k": 0,
        "type_v": 0,
        "flash_attn": 0,
    }


def _sessions(
    ours: Build, target: Path, draft: Path, widths: list[int], n_seq_max: int
) -> list[list[Round]]:
    prompts = [np.random.default_rng(size).integers(8, 512, size=size) for size in (1, 9, 40)]
    common = _job(target, draft, [prompt.tolist() for prompt in prompts])
    common |= {"n_seq_max": n_seq_max, "n_ctx": 256 * n_seq_max}
    jobs = [{**common, "n_draft_max": width, "n_predict": 12 + width} for width in widths]
    sessions = []
    for result in ours.run(jobs):
        assert result is not None, "libdflash2 aborted"
        assert not result["failures"].any()
        sessions.append(rounds_of(common["prompts"], result))
    return sessions
