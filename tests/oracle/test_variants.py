"""Converted variants of a drafter load in the unpatched pin, and draft here without a loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.oracle.builds import Build
from tests.oracle.tiny_pairs import DraftShape, TargetShape, write_draft, write_target

pytestmark = [pytest.mark.native, pytest.mark.reference]

FLOAT32: dict[str, Any] = {"flash_attn": 0, "n_ctx": 256, "n_threads": 1}
Tensors = dict[str, np.ndarray]


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


def plain(config: dict[str, Any], tensors: Tensors) -> None:
    """Nothing is changed."""


def first(config: dict[str, Any], tensors: Tensors) -> None:
    config["architectures"] = ["DFlashDraftModel"]
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        del config["dflash_config"][key]
    for name in [name for name in tensors if "conv." in name or "selector" in name]:
        del tensors[name]


def sinks(config: dict[str, Any], tensors: Tensors) -> None:
    config["dflash_config"]["attention_sink_bias"] = True
    for layer in range(config["num_hidden_layers"]):
        tensors[f"layers.{layer}.self_attn.sinks"] = _random(config["num_attention_heads"])


def shared_values(config: dict[str, Any], tensors: Tensors) -> None:
    for layer in range(config["num_hidden_layers"]):
        del tensors[f"layers.{layer}.self_attn.v_proj.weight"]


def own_tables(config: dict[str, Any], tensors: Tensors) -> None:
    sizes = config["vocab_size"], config["hidden_size"]
    tensors["embed_tokens.weight"], tensors["lm_head.weight"] = _random(*sizes), _random(*sizes)


def reduced_head(config: dict[str, Any], tensors: Tensors) -> None:
    config["dflash_config"]["draft_vocab_size"] = 96
    tensors["lm_head.weight"] = _random(96, config["hidden_size"])
    tensors["d2t"] = 2 * np.arange(96, dtype=np.int64) + 5


def gelu(config: dict[str, Any], tensors: Tensors) -> None:
    config["hidden_act"] = "gelu_pytorch_tanh"


def scaled(config: dict[str, Any], tensors: Tensors) -> None:
    config["dflash_config"] |= {"attention_value_scale": 0.612}
    config["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": config.pop("rope_theta", 1e4),
        "partial_rotary_factor": 0.5,
    }


VARIANTS = (plain, sinks, shared_values, own_tables, reduced_head, gelu, scaled)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write_target(path, TargetShape())
    return path


def write(folder: Path, change: Callable[[dict[str, Any], Tensors], None]) -> Path:
    write_draft(folder, DraftShape(name="variant"))
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("change", VARIANTS, ids=lambda change: change.__name__)
def test_a_variant_drafts_and_changes_nothing(
    change: Callable[[dict[str, Any], Tensors], None],
    target: Path,
    ours: Build,
    convert: Callable[..., Path],
    tmp_path: Path,
) -> None:
    draft = convert(write(tmp_path / "c", change), target, "f32", tmp_path / "draft.gguf")
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    job = {"job": "session", "path": str(target), "prompts": prompts, "n_predict": 24}
    options = {"type_k": 0, "type_v": 0, **FLOAT32}
    drafted = ours.run_one(**job, draft=str(draft), **options)
    alone = ours.run_one(**job, draft=None, **options)
    assert not drafted["failures"].any()
    assert drafted["drafted"].sum() > 100
    assert drafted["tokens"].tolist() == alone["tokens"].tolist()


@pytest.mark.peer
@pytest.mark.parametrize("change", [*VARIANTS, first], ids=lambda change: change.__name__)
def test_the_unpatched_pin_loads_a_variant(
    change: Callable[[dict[str, Any], Tensors], None],
    target: Path,
    pin: Build,
    convert: Callable[..., Path],
    tmp_path: Path,
) -> None:
    draft = convert(write(tmp_path / "c", change), target, "q8_0", tmp_path / "draft.gguf")
    sizes = pin.run_one(job="shape", path=str(draft))
    found = {name: int(value) for name, value in sizes.items()}
    assert found == {"n_layer": 2, "n_embd": 320, "n_vocab": 512}
