"""Rotation is what the drafter's own config.json says: never the target's, never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from dflash2_gguf.errors import CheckpointError
from tests.convert import checkpoints
from tests.convert.conversion import convert
from tests.convert.pairs import Edit, edit
from tests.convert.test_peer import differing
from tests.convert.test_variants import speculator

BASE = 1e7
PLAIN = {"rope_theta": BASE, "rope_type": "default"}
NESTED = "rope_parameters.rope_theta"
TRAINED = "keep the one that the drafter was trained with"
CHANGES = "it may change what the drafter computes"
NO_BASE = (
    "config.json has no rope_theta",
    "add the value the drafter was trained with to rope_parameters; it cannot be guessed",
)


def write(folder: Path, data: dict[str, Any]) -> Path:
    values = checkpoints.tensors(checkpoints.config())
    return checkpoints.write_checkpoint(folder, data=data, values=values)


def of_speculators(**parameters: Any) -> dict[str, Any]:
    """A config of the speculators library with these rope parameters."""
    data = speculator()
    data["transformer_layer_config"]["rope_parameters"] = parameters
    return data


@pytest.fixture
def other_base(target: Path, tmp_path: Path) -> Path:
    """The target of ``checkpoint``, with a RoPE base of its own."""
    return edit(target, tmp_path / "other.gguf", Edit(set={"llama.rope.freq_base": 5e5}))


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (checkpoints.config(rope_parameters=PLAIN), NESTED),
        (checkpoints.config(rope_parameters=PLAIN, rope_theta=None), NESTED),
        (checkpoints.config(rope_parameters=PLAIN, rope_theta=BASE), NESTED),
        (
            checkpoints.config(rope_parameters=PLAIN, rope_scaling=PLAIN),
            NESTED,
        ),
        (checkpoints.config(rope_parameters=..., rope_theta=BASE), "rope_theta"),
        (checkpoints.config(rope_parameters=None, rope_scaling=PLAIN), "rope_scaling.rope_theta"),
        (
            checkpoints.config(
                rope_parameters={"full_attention": PLAIN, "sliding_attention": PLAIN}
            ),
            NESTED,
        ),
        (
            checkpoints.config(rope_parameters={**PLAIN, "mrope_section": [1, 1, 2]}),
            NESTED,
        ),
        (of_speculators(**PLAIN), NESTED),
    ],
)
def test_the_base_is_found_where_it_stands_and_the_file_says_where(
    data: dict[str, Any], place: str, tmp_path: Path, other_base: Path
) -> None:
    convert(write(tmp_path / "c", data), other_base, tmp_path / "out.gguf")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert checkpoints.read_field(reader, "dflash.rope.freq_base") == BASE
    assert checkpoints.read_field(reader, "dflash2.source.rope_freq_base") == place


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        (checkpoints.config(rope_parameters=...), *NO_BASE),
        (checkpoints.config(rope_parameters={"rope_type": "default"}, rope_theta=None), *NO_BASE),
        (of_speculators(rope_type="default"), *NO_BASE),
        (
            checkpoints.config(rope_parameters=..., dflash__rope_theta=BASE),
            "config.json: unknown in dflash_config: rope_theta",
            CHANGES,
        ),
        (
            checkpoints.config(rope_parameters=PLAIN, rope_theta=1e6),
            (
                "config.json contradicts itself: rope_parameters.rope_theta = 1e+07 and "
                "rope_theta = 1e+06"
            ),
            TRAINED,
        ),
        (
            checkpoints.config(
                rope_parameters=PLAIN, rope_scaling={"rope_type": "linear", "factor": 4.0}
            ),
            "config.json contradicts itself: rope_parameters and rope_scaling differ",
            TRAINED,
        ),
        (
            checkpoints.config(
                rope_parameters={
                    "full_attention": PLAIN,
                    "sliding_attention": {**PLAIN, "rope_theta": 1e4},
                }
            ),
            "config.json: rope_parameters differs between layer types",
            "llama.cpp rotates all layers of a drafter alike",
        ),
        (
            checkpoints.config(
                rope_parameters={"rope_theta": BASE, "sliding_attention": {"rope_theta": 1e4}}
            ),
            "config.json: unknown in rope_parameters: rope_theta",
            CHANGES,
        ),
        (
            checkpoints.config(
                rope_parameters={
                    "rope_theta": BASE,
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "mscale": 0.7,
                    "mscale_all_dim": 0.7,
                }
            ),
            "config.json: unknown in rope_parameters: mscale, mscale_all_dim",
            CHANGES,
        ),
        (
            checkpoints.config(
                rope_parameters={**PLAIN, "partial_rotary_factor": 0.5},
                dflash__rope_is_neox_style=False,
            ),
            "config.json asks for interleaved and partial rotation, which cannot be converted",
            "llama.cpp rotates halves; only heads that rotate as a whole are reordered for that",
        ),
    ],
)
def test_a_rotation_that_is_not_clear_is_refused(
    data: dict[str, Any], message: str, hint: str, tmp_path: Path, other_base: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        convert(write(tmp_path / "c", data), other_base, tmp_path / "out.gguf")
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("arch", ["glm-dsa", "glm5-next"])
def test_a_target_that_rotates_interleaved_does_not_reorder_the_drafter(
    arch: str, checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    interleaved = checkpoints.write_target(tmp_path / "glm.gguf", arch=arch)
    convert(checkpoint, target, tmp_path / "a.gguf")
    convert(checkpoint, interleaved, tmp_path / "b.gguf")
    assert differing(tmp_path / "a.gguf", tmp_path / "b.gguf") == []
