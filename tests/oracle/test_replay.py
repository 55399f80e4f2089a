"""Replayed features and blocks against the authors' torch model, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash2_gguf.engine import EngineOptions
from dflash2_gguf.errors import PairError, UsageError
from dflash2_gguf.replay import Replay
from tests.oracle.comparison import Round, compare
from tests.oracle.reference import Reference, load_draft
from tests.oracle.tiny_pairs import DraftShape, TargetShape, write_draft, write_target

pytestmark = [pytest.mark.native, pytest.mark.reference]

OPTIONS = EngineOptions(n_ctx=256, n_threads=1)
# the caches of a replay are float16
TOLERANCE = 5e-3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    return path, write_target(path, TargetShape())


def test_features_probabilities_and_blocks_are_the_references(
    target: tuple[Path, Any], convert: Any, tmp_path: Path
) -> None:
    import torch

    path, module = target
    shapes = [DraftShape(name="a", window=None), DraftShape(name="b", seed=3, window=12)]
    sources = [write_draft(tmp_path / shape.name, shape) for shape in shapes]
    drafts = [convert(s, path, "f32", tmp_path / f"{s.name}.gguf") for s in sources]
    tokens = np.random.default_rng(1).integers(8, 512, size=40).tolist()
    n_prompt = 11
    references = [Reference(module, load_draft(source)) for source in sources]
    features = references[0].features(tokens[:-1])
    with torch.inference_mode():
        logits = module(torch.tensor([tokens])).logits[0]
    log_p = torch.log_softmax(logits.double(), -1)
    known = [float(log_p[i - 1, tokens[i]]) for i in range(n_prompt, len(tokens))]

    with Replay(path, drafts, OPTIONS) as replay:
        rows, found = replay.read(tokens, n_prompt)
        scale = features.abs().max().item()
        np.testing.assert_allclose(rows, features[0].numpy(), atol=TOLERANCE * scale)
        np.testing.assert_allclose(found, known, atol=0.05)
        for anchor in (n_prompt, n_prompt + 1, len(tokens) - 2):
            for drafter, reference in enumerate(references):
                replay.inject(drafter, 0, features[0, :anchor].numpy())
                block = replay.draft(drafter, tokens[anchor], 7)
                path_tokens = np.array(block.path_tokens())
                played = Round(
                    0, tokens[:anchor], tokens[anchor], path_tokens, block.candidates, block.scores
                )
                expected = reference.lattice_from(features[:, :anchor], tokens[anchor], 7)
                compare(played, expected, tolerance=TOLERANCE)


def test_rows_one_by_one_make_the_block_of_rows_at_once(
    target: tuple[Path, Any], convert: Any, tmp_path: Path
) -> None:
    source = write_draft(tmp_path / "draft", DraftShape(name="a", window=12))
    draft = convert(source, target[0], "f32", tmp_path / "draft.gguf")
    tokens = np.random.default_rng(2).integers(8, 512, size=30).tolist()
    with Replay(target[0], [draft], OPTIONS) as replay:
        rows, _ = replay.read(tokens, 9)
        replay.inject(0, 0, rows)
        at_once = replay.draft(0, tokens[-1], 5)
        replay.inject(0, 0, rows[:9])
        for position in range(9, len(rows)):
            replay.draft(0, 3, 7)  # leaves nothing behind
            replay.inject(0, position, rows[position : position + 1])
        one_by_one = replay.draft(0, tokens[-1], 5)
    assert at_once.candidates.tolist() == one_by_one.candidates.tolist()
    np.testing.assert_allclose(at_once.scores, one_by_one.scores, rtol=1e-3, atol=1e-3)


def test_drafters_of_other_layers_cannot_share_rows(
    target: tuple[Path, Any], convert: Any, tmp_path: Path
) -> None:
    shapes = [DraftShape(name="a"), DraftShape(name="b", taps=(0, 1, 2, 4, 5, 6))]
    drafts = [
        convert(write_draft(tmp_path / s.name, s), target[0], "f32", tmp_path / f"{s.name}.gguf")
        for s in shapes
    ]
    with pytest.raises(PairError, match="drafter 2 reads other layers than the first"):
        Replay(target[0], drafts, OPTIONS)


def test_arguments_out_of_range_are_named(
    target: tuple[Path, Any], convert: Any, tmp_path: Path
) -> None:
    source = write_draft(tmp_path / "draft", DraftShape(name="a"))
    draft = convert(source, target[0], "f32", tmp_path / "draft.gguf")
    with Replay(target[0], [draft], OPTIONS) as replay:
        row = np.zeros((1, replay.n_features), dtype=np.float32)
        for call, message in (
            (lambda: replay.read([8] * 300, 9), "a text of 300 tokens, 9 of them prompt"),
            (lambda: replay.read([8, 9], 2), "a text of 2 tokens, 2 of them prompt"),
            (lambda: replay.read([8, 9, 512], 1), "token 2 is 512, the vocabulary has 512"),
            (lambda: replay.inject(1, 0, row), "drafter 1 is wanted, there are 1"),
            (lambda: replay.inject(0, -1, row), "1 rows at position -1"),
            (lambda: replay.draft(0, 512, 3), "3 tokens after token 512"),
            (lambda: replay.draft(0, 3, 8), "8 tokens after token 3, at most 7"),
        ):
            with pytest.raises(UsageError, match=message):
                call()
