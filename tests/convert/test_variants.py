"""Forms of a drafter besides the plain DFlash 2 one: what they become, and what upstream says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash2_gguf.convert.inspection import inspect
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.gguf_schema import tensor_name
from tests.convert import checkpoints
from tests.convert.conversion import convert
from tests.convert.hf_targets import write_hf_target
from tests.convert.stored_forms import write_quantized
from tests.convert.test_peer import differing, metadata, upstream_convert

Floats = checkpoints.Floats
Values = dict[str, Floats]
# changes of config.json, and of the tensors
Variant = tuple[dict[str, Any], Callable[[Values], Mapping[str, Any]]]
KNOWN_VOCAB = 49152
DISTANCES = "its entries are the distance from row to token id"
_SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def rows(*shape: int, seed: int = 7) -> Floats:
    return checkpoints.round_bf16(np.random.default_rng(seed).normal(size=shape))


def unchanged(values: Values) -> Values:
    return values


def first(values: Values) -> Values:
    return {n: v for n, v in values.items() if "conv." not in n and "selector" not in n}


def with_sinks(name: str) -> Callable[[Values], Values]:
    return lambda values: values | {f"layers.{i}.self_attn.{name}": rows(4) for i in range(2)}


def without_values(values: Values) -> Values:
    return {name: value for name, value in values.items() if "v_proj" not in name}


def n_vocab(values: Values) -> int:
    return len(values.get("candidate_selector.successor_codebook", rows(checkpoints.N_VOCAB)))


def with_tables(values: Values) -> Values:
    return tied(values) | {"lm_head.weight": rows(n_vocab(values), 32, seed=8)}


def tied(values: Values) -> Values:
    return values | {"embed_tokens.weight": rows(n_vocab(values), 32)}


VARIANTS: dict[str, Variant] = {
    "DFlash 1": (
        {
            "architectures": ["DFlashDraftModel"],
            **{f"dflash__{key}": ... for key in _SECOND},
        },
        first,
    ),
    "own embeddings and head": ({}, with_tables),
    "tied embeddings": ({"tie_word_embeddings": True}, tied),
    "sinks, partial rotation, value scale, one window for all": (
        {
            "dflash__attention_sink_bias": True,
            "dflash__attention_value_scale": 0.612,
            "dflash__use_swa": True,
            "dflash__swa_window_size": 12,
            "rope_parameters": {
                "rope_theta": 1e4,
                "rope_type": "default",
                "partial_rotary_factor": 0.5,
            },
        },
        with_sinks("attention_sink_bias"),
    ),
    "keys that are also values": ({}, without_values),
}


def write(folder: Path, variant: Variant, **sizes: int) -> tuple[Path, Values]:
    changes, change = variant
    data = checkpoints.config(**changes, **sizes)
    values = dict(change(checkpoints.tensors(checkpoints.config(**sizes))))
    return checkpoints.write_checkpoint(folder, data=data, values=values), values


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_of_a_variant_arrives(name: str, tmp_path: Path, target: Path) -> None:
    source, values = write(tmp_path / "c", VARIANTS[name])
    assert convert(source, target, tmp_path / "out.gguf") == ()
    found = checkpoints.dequantized(gguf.GGUFReader(tmp_path / "out.gguf"))
    ours = {
        (tensor_name(n.replace("attention_sink_bias", "sinks")) or n): v for n, v in values.items()
    }
    assert found.keys() == ours.keys()
    for tensor, expected in ours.items():
        np.testing.assert_array_equal(found[tensor], expected)
    assert inspect(tmp_path / "out.gguf").problems == ()
    assert inspect(source).problems == ()


@pytest.fixture(scope="module")
def hf_target(tmp_path_factory: pytest.TempPathFactory, target_gguf: Path) -> Path:
    return write_hf_target(tmp_path_factory.mktemp("hf") / "target", target_gguf)


@pytest.mark.peer
@pytest.mark.reference
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_equals_upstreams(
    name: str, tmp_path: Path, peer_dir: Path, hf_target: Path
) -> None:
    # upstream's converter wants the vocabulary of a target it knows
    source, _ = write(tmp_path / "c", VARIANTS[name], vocab_size=KNOWN_VOCAB)
    target = checkpoints.write_target(tmp_path / "target.gguf", n_vocab=KNOWN_VOCAB)
    theirs = upstream_convert(peer_dir, source, hf_target, "f32", tmp_path / "theirs.gguf")
    convert(source, target, tmp_path / "ours.gguf")
    assert differing(tmp_path / "ours.gguf", theirs) == []
    expected = {k: v for k, v in metadata(theirs).items() if k.startswith("dflash.")}
    found = metadata(tmp_path / "ours.gguf")
    assert {k: v for k, v in found.items() if k.startswith("dflash.")} == expected


@pytest.mark.peer
@pytest.mark.reference
@pytest.mark.parametrize(
    "form",
    [
        "fp8 by rows",
        "fp8 by blocks",
        "int8 by rows",
        "int4",
        "int4 with zero points",
        "gptq",
        "gptq of 8 bits, version 2",
    ],
)
def test_a_quantized_checkpoint_equals_upstreams(
    form: str, tmp_path: Path, peer_dir: Path, hf_target: Path
) -> None:
    write_quantized(tmp_path / "c", form, vocab_size=KNOWN_VOCAB)
    target = checkpoints.write_target(tmp_path / "target.gguf", n_vocab=KNOWN_VOCAB)
    theirs = upstream_convert(peer_dir, tmp_path / "c", hf_target, "f32", tmp_path / "theirs.gguf")
    convert(tmp_path / "c", target, tmp_path / "ours.gguf")
    assert differing(tmp_path / "ours.gguf", theirs) == []


@pytest.mark.parametrize(
    "spelling", ["sinks", "sinks.weight", "attention_sink_bias", "learnable_sink_param"]
)
def test_sinks_are_found_under_any_name(spelling: str, tmp_path: Path, target: Path) -> None:
    source, _ = write(tmp_path / "c", ({}, with_sinks(spelling)))
    convert(source, target, tmp_path / "out.gguf", "q8_0")
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert tensors["blk.1.attn_sinks.weight"].tensor_type == gguf.GGMLQuantizationType.F32


def reduced(folder: Path, ids: list[int], *, dtype: torch.dtype = torch.int64) -> Path:
    """A DFlash 2 checkpoint with a head of some tokens; d2t says how far each is from its row."""
    data = checkpoints.config(draft_vocab_size=len(ids))
    values = checkpoints.tensors(checkpoints.config()) | {"lm_head.weight": rows(len(ids), 32)}
    stored = {name: torch.tensor(value) for name, value in values.items()}
    stored["d2t"] = torch.tensor([token - row for row, token in enumerate(ids)], dtype=dtype)
    stored["t2d"] = torch.tensor([token in ids for token in range(24)])
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_reduced_head_keeps_its_map_as_token_ids(
    tmp_path: Path, target: Path, dtype: torch.dtype
) -> None:
    ids = [0, 2, 3, 5, 11, 23]
    source = reduced(tmp_path / "c", ids, dtype=dtype)
    warnings = convert(source, target, tmp_path / "out.gguf", "q4_k_m")
    assert "left over from training and left out: t2d" in warnings
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert tensors["d2t"].tensor_type == gguf.GGMLQuantizationType.I64
    assert tensors["d2t"].data.tolist() == ids
    assert tensors["output.weight"].shape.tolist() == [32, 6]
    assert inspect(tmp_path / "out.gguf").problems == ()


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        (
            {"lm_head.weight": None, "d2t": None},
            "config.json: draft_vocab_size is 6, and there is no lm_head.weight of that size",
            "the target's head has other rows; fetch the whole checkpoint",
        ),
        (
            {"d2t": None},
            "1 of 38 tensors are missing: d2t",
            "config.json and weights do not belong together, or a shard was not downloaded",
        ),
        (
            {"lm_head.weight": torch.ones(24, 32)},
            "tensor lm_head.weight has shape [24, 32], config.json asks for [6, 32]",
            "config.json and weights do not belong together",
        ),
    ],
)
def test_a_reduced_head_that_was_lost_or_replaced_is_told(
    changes: dict[str, torch.Tensor | None],
    message: str,
    hint: str,
    tmp_path: Path,
    target: Path,
) -> None:
    source = reduced(tmp_path / "c", [0, 2, 3, 5, 11, 23])
    path = source / "model.safetensors"
    stored = {**load_file(path), **changes}
    save_file({name: value for name, value in stored.items() if value is not None}, path)
    with pytest.raises(CheckpointError) as caught:
        convert(source, target, tmp_path / "out.gguf")
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("ids", "message", "hint"),
    [
        ([0, 1, 2, 3, 24], "tensor d2t names token 24, the vocabulary has 24", DISTANCES),
        ([0, 1, 2, 3, -1], "tensor d2t names token -1, the vocabulary has 24", DISTANCES),
        ([0, 1, 2, 3, 3], "tensor d2t names a token twice", DISTANCES),
        ([0, 1, 2], "config.json: selector_top_k 4 of a draft vocabulary of 3", None),
    ],
)
def test_a_map_that_is_none_is_refused(
    ids: list[int], message: str, hint: str | None, tmp_path: Path, target: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        convert(reduced(tmp_path / "c", ids), target, tmp_path / "out.gguf")
    assert (caught.value.message, caught.value.hint) == (message, hint)


def speculator(kind: str = "dflash2", **changes: Any) -> dict[str, Any]:
    """config.json of the small drafter as the speculators library writes it."""
    flat = checkpoints.config()
    draft = flat.pop("dflash_config")
    for key in ("architectures", "is_causal", "use_sliding_window", "num_target_layers"):
        del flat[key]
    data = {
        "architectures": ["DFlash2DraftModel" if kind == "dflash2" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "tiny"}},
        "transformer_layer_config": flat,
        "aux_hidden_state_layer_ids": [i + 1 for i in draft.pop("target_layer_ids")],
        "sliding_window_non_causal": True,
        "draft_vocab_size": flat["vocab_size"],
        "dtype": "bfloat16",
        **draft,
        **changes,
    }
    return {key: value for key, value in data.items() if value is not ...}


def dflash_metadata(path: Path) -> dict[str, Any]:
    return {k: v for k, v in metadata(path).items() if k.startswith("dflash.")}


def test_a_speculators_checkpoint_gives_the_same_file(tmp_path: Path, target: Path) -> None:
    plain = checkpoints.write_checkpoint(tmp_path / "plain")
    other = checkpoints.write_checkpoint(
        tmp_path / "other", data=speculator(), values=checkpoints.tensors(checkpoints.config())
    )
    for source in (plain, other):
        convert(source, target, tmp_path / f"{source.name}.gguf")
    assert differing(tmp_path / "plain.gguf", tmp_path / "other.gguf") == []
    assert dflash_metadata(tmp_path / "plain.gguf") == dflash_metadata(tmp_path / "other.gguf")


def test_a_speculators_reduced_head_is_kept(tmp_path: Path, target: Path) -> None:
    ids = [0, 2, 3, 5, 11, 23]
    for name in ("plain", "other"):
        reduced(tmp_path / name, ids)
    config = tmp_path / "other" / "config.json"
    config.write_text(json.dumps(speculator(draft_vocab_size=len(ids))))
    for name in ("plain", "other"):
        convert(tmp_path / name, target, tmp_path / f"{name}.gguf")
    assert differing(tmp_path / "plain.gguf", tmp_path / "other.gguf") == []
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "other.gguf").tensors}
    assert tensors["d2t"].data.tolist() == ids
    assert tensors["output.weight"].shape.tolist() == [32, len(ids)]


@pytest.mark.parametrize(
    ("kind", "non_causal", "causal"),
    [
        ("dflash2", ..., False),
        ("dflash2", False, True),
        ("dflash", ..., False),
        ("dflash", False, True),
    ],
)
def test_causality_of_a_speculator_is_vllms(
    kind: str, non_causal: Any, causal: bool, tmp_path: Path, target: Path
) -> None:
    values = checkpoints.tensors(checkpoints.config())
    data = speculator(kind, sliding_window_non_causal=non_causal)
    source = checkpoints.write_checkpoint(
        tmp_path / "c", data=data, values=values if kind == "dflash2" else first(values)
    )
    convert(source, target, tmp_path / "out.gguf")
    assert dflash_metadata(tmp_path / "out.gguf")["dflash.attention.causal"][1] is causal


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        (
            {"transformer_layer_config": {"model_type": "llama"}},
            "config.json: the drafter's layers are 'llama', not 'qwen3'",
            "llama.cpp runs DFlash drafters made of Qwen3 layers",
        ),
        (
            {"draft_ffn_type": "moe"},
            "config.json: draft_ffn_type is 'moe'",
            "llama.cpp runs drafters with dense MLPs only",
        ),
        (
            {"aux_hidden_state_layer_ids": [0, 3]},
            "config.json: aux_hidden_state_layer_ids is [0, 3], not a list of inputs of layers",
            "the first layer whose output can be read is 0, which this format calls 1",
        ),
        (
            {"sliding_window_non_causal": "no"},
            "config.json: sliding_window_non_causal is 'no', not true or false",
            None,
        ),
        (
            {
                "sliding_window_non_causal": False,
                "transformer_layer_config": {
                    "layer_types": ["sliding_attention", "full_attention"]
                },
            },
            "config.json: sliding layers are causal and full layers are not",
            "causality per layer cannot be expressed in a GGUF file",
        ),
        (
            {"sample_from_anchor": True},
            (
                "config.json: sample_from_anchor is True: a GGUF file has no place for "
                "DSpark's sampling from the anchor"
            ),
            None,
        ),
    ],
)
def test_a_speculator_that_cannot_be_converted_is_told(
    changes: dict[str, Any], message: str, hint: str | None, tmp_path: Path, target: Path
) -> None:
    values = checkpoints.tensors(checkpoints.config())
    source = checkpoints.write_checkpoint(tmp_path / "c", data=speculator(**changes), values=values)
    with pytest.raises(CheckpointError) as caught:
        convert(source, target, tmp_path / "out.gguf")
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_codebooks_that_are_modules_and_training_leftovers_are_known(
    tmp_path: Path, target: Path
) -> None:
    values = checkpoints.tensors(checkpoints.config())
    for table in ("predecessor_codebook", "successor_codebook"):
        values[f"candidate_selector.{table}.weight"] = values.pop(f"candidate_selector.{table}")
    values["verifier_norm.weight"] = rows(32)
    source = checkpoints.write_checkpoint(tmp_path / "c", values=values, prefix="model.")
    warnings = convert(source, target, tmp_path / "out.gguf")
    assert warnings == ("left over from training and left out: verifier_norm.weight",)
    assert len(gguf.GGUFReader(tmp_path / "out.gguf").tensors) == 36


def test_a_speculators_layer_types_may_be_anything(tmp_path: Path, target: Path) -> None:
    data = speculator()
    data["transformer_layer_config"]["layer_types"] = ["sliding_attention", []]
    values = checkpoints.tensors(checkpoints.config())
    source = checkpoints.write_checkpoint(tmp_path / "c", data=data, values=values)
    with pytest.raises(CheckpointError) as caught:
        convert(source, target, tmp_path / "out.gguf")
    assert caught.value.message.startswith("config.json: layer_types ")
