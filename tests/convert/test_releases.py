"""The published drafters at their true sizes, with random weights, become files of these sizes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash2_gguf.check import find_facts
from dflash2_gguf.check_fact import Verdict
from dflash2_gguf.convert_cli import main
from tests.convert.releases import PUBLISHED, write_random, write_target_of

pytestmark = [pytest.mark.native, pytest.mark.slow]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Gigabytes, which go at the end."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("release", PUBLISHED)
def test_a_release_is_converted_at_its_true_size(
    release: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = folder / release, write_target_of(release, folder / "target.gguf")
    write_random(release, source)
    path = folder / "drafter.gguf"
    words = [str(source), "--target", str(target), "--preset", "q8_0", "-o", str(path)]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{path}\n"
    shapes = {
        tensor.name: tuple(map(int, tensor.shape)) for tensor in gguf.GGUFReader(path).tensors
    }
    assert sum(map(prod, shapes.values())) == PUBLISHED[release][1]
    facts = find_facts(target, path)
    assert [fact.name for fact in facts if fact.verdict is not Verdict.OK] == ["licence"]


def test_weights_far_into_a_large_file_are_where_they_belong(folder: Path) -> None:
    release = "GLM-5.3-Flash-DFlash2"
    source, target = folder / release, write_target_of(release, folder / "target.gguf")
    write_random(release, source)
    path = folder / "drafter.gguf"
    words = [str(source), "--target", str(target), "--preset", "bf16", "-o", str(path)]
    assert main(words) == 0
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    import safetensors

    with safetensors.safe_open(source / "model.safetensors", framework="pt") as weights:
        for theirs, ours in (
            ("layers.4.mlp.down_proj.weight", "blk.4.ffn_down.weight"),
            ("layers.4.self_attn.q_proj.weight", "blk.4.attn_q.weight"),
            ("candidate_selector.successor_codebook", "selector_successor.weight"),
        ):
            name = theirs if theirs in weights.keys() else f"model.{theirs}"  # noqa: SIM118
            rows = weights.get_slice(name)
            last = rows.get_shape()[0] - 3
            expected = rows[last:].float().numpy()
            found = stored[ours].data.view(np.uint16)[last:].astype(np.uint32) << 16
            np.testing.assert_array_equal(found.view(np.float32), expected)
