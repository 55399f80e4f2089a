"""The published drafters: their configs, and checkpoints and targets of their true sizes."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tests.convert import checkpoints
from tests.convert.pairs import write_holes

__all__ = ["PUBLISHED", "write_checkpoint_of", "write_random", "write_target_of"]

_BLOCK = 1 << 24
_WEIGHTS = "model.safetensors"


def published(
    *,
    hidden: int,
    ff: int,
    layers: int,
    heads: int,
    eps: float,
    theta: float,
    context: int,
    vocab: int,
    targets: int,
    mask: int,
    ids: list[int],
    block: int = 8,
    eos: Any = None,
    **extra: float,
) -> dict[str, Any]:
    """All keys of a published config."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dflash_config": {
            "block_size": block,
            "conv_group_size": 16,
            "conv_kernel_size": 2,
            "mask_token_id": mask,
            "selector_rank": 256,
            "selector_top_k": 16,
            "target_layer_ids": ids,
            **extra,
        },
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ff,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * layers,
        "max_position_embeddings": context,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_target_layers": targets,
        "pad_token_id": 0,
        "rms_norm_eps": eps,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "sliding_window": 2048,
        "tie_word_embeddings": False,
        "transformers_version": "5.7.0",
        "use_cache": False,
        "use_sliding_window": True,
        "vocab_size": vocab,
    }


GLM = [154820, 154827, 154829]
# config, and the parameters that its authors count
PUBLISHED = {
    "GLM-5.3-Flash-DFlash2": (
        published(
            hidden=4096, ff=12288, layers=5, heads=32, eps=1e-5, theta=1e4, context=1048576,
            vocab=154880, targets=45, mask=154856, ids=[5, 14, 24, 33, 42], eos=GLM,
        ),
        1_171_080_448,
    ),
    "GLM-5.3-DFlash2": (
        published(
            hidden=6144, ff=12288, layers=6, heads=64, eps=1e-5, theta=1e6, context=1048576,
            vocab=154880, targets=78, mask=154856, ids=[5, 19, 33, 47, 61, 75], eos=GLM,
        ),
        2_459_424_256,
    ),
    "Qwen3.8-27B-DFlash2": (
        published(
            hidden=5120, ff=17408, layers=5, heads=32, eps=1e-6, theta=1e7, context=262144,
            vocab=248320, targets=64, mask=248070, ids=[5, 19, 33, 47, 61], eos=248044,
        ),
        1_924_404_480,
    ),
    "Muse-Glimmer-30B-DFlash2": (
        published(
            hidden=6656, ff=19968, layers=5, heads=32, eps=1e-5, theta=5e5, context=131072,
            vocab=202048, targets=52, mask=201818, ids=[1, 13, 25, 37, 49], block=16, eos=200001,
            output_multiplier=0.19611613513818404, final_logit_softcapping=20.0,
        ),
        2_772_159_744,
    ),
}  # fmt: skip

_TARGETS = {
    "GLM-5.3-Flash-DFlash2": "glm5-next",
    "GLM-5.3-DFlash2": "glm-dsa",
    "Qwen3.8-27B-DFlash2": "qwen35",
    "Muse-Glimmer-30B-DFlash2": "muse-glimmer",
}


def write_target_of(release: str, path: Path) -> Path:
    """A target for a release at its true size: metadata, embeddings and head."""
    data, _ = PUBLISHED[release]
    arch, hidden, rows = _TARGETS[release], data["hidden_size"], data["vocab_size"]
    values: dict[str, Any] = {
        "general.architecture": arch,
        "general.name": release.removesuffix("-DFlash2"),
        f"{arch}.block_count": data["num_target_layers"],
        f"{arch}.embedding_length": hidden,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(rows)],
    }
    if arch == "glm5-next":
        values[f"{arch}.hyper_connection.count"] = 4
    if arch == "qwen35":
        values[f"{arch}.rope.dimension_sections"] = [11, 11, 10, 0]
    return write_holes(
        path, values, {"token_embd.weight": (rows, hidden), "output.weight": (rows, hidden)}
    )


def write_checkpoint_of(release: str, folder: Path) -> Path:
    """A published checkpoint whose weights are a hole."""
    with (folder / _begin(release, folder)).open("r+b") as file:
        file.truncate(file.seek(0, 2) + 2 * PUBLISHED[release][1])
    return folder


def write_random(release: str, folder: Path) -> Path:
    """A published checkpoint with random bf16 weights, of a period of 16 MiB."""
    values = np.random.default_rng(0).normal(scale=0.02, size=_BLOCK // 2).astype(np.float32)
    block = checkpoints.to_bytes(checkpoints.round_bf16(values), "BF16")
    left = 2 * PUBLISHED[release][1]
    with (folder / _begin(release, folder)).open("ab") as file:
        while left:
            left -= file.write(block[:left])
    return folder


def _begin(release: str, folder: Path) -> str:
    """Make the folder with its config and the header of its weights; the name of their file."""
    data, _ = PUBLISHED[release]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(data))
    header, at = {}, 0
    for name, shape in checkpoints.shapes(data).items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    text = json.dumps(header).encode()
    (folder / _WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text)
    return _WEIGHTS
