"""Everything that can be wrong with the input: one whole error each, and no file left."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash2_gguf.convert.pipeline import check_outputs, make_plan, run
from dflash2_gguf.errors import CheckpointError, DFlash2Error, PairError
from dflash2_gguf.presets import load_preset
from tests.convert import checkpoints

Damage = Callable[[Path], None]

DAMAGED = "the file is damaged or its download stopped: fetch it again"
HALF = "the download probably stopped half-way: fetch the checkpoint again"
ONLY = "DFlash 2 (DFlash2DraftModel) and DFlash 1 (DFlashDraftModel) are converted"
RELEASE = "take the config of the release"
COUNTING = "target_layer_ids counts outputs of layers, and the first is 0"
TRAINED = "keep the one that the drafter was trained with"
TOGETHER = "config.json and weights do not belong together"
SHARD = f"{TOGETHER}, or a shard was not downloaded"
DROPPED = "dropping them would change what the drafter computes"


def attempt(source: Path, target: Path, preset: str = "bf16") -> DFlash2Error:
    """Convert and return the error; nothing may be left in the output folder."""
    folder = source.parent / "output"
    folder.mkdir(exist_ok=True)
    with pytest.raises(DFlash2Error) as caught:
        plan = make_plan(source, target, [(load_preset(preset), folder / "out.gguf")])
        check_outputs(plan, force=False)
        run(plan, force=False, progress=lambda _count: None)
    assert list(folder.iterdir()) == []
    return caught.value


def weights(source: Path) -> Path:
    return source / "model.safetensors"


def edit_header(source: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the JSON header of the weights and keep the data."""
    raw = weights(source).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    weights(source).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def edit_values(source: Path, name: str, change: Callable[[Any], None]) -> None:
    values = checkpoints.tensors(checkpoints.config())
    change(values[name])
    weights(source).write_bytes(checkpoints.safetensors_bytes(values))


def set_entry(name: str, **fields: Any) -> Damage:
    return lambda source: edit_header(source, lambda header: header[name].update(fields))


def truncate(source: Path) -> None:
    raw = weights(source).read_bytes()
    weights(source).write_bytes(raw[:-1000])


def cut_header(source: Path) -> None:
    weights(source).write_bytes(weights(source).read_bytes()[:100])


def claim_petabytes(source: Path) -> None:
    raw = weights(source).read_bytes()
    weights(source).write_bytes(struct.pack("<Q", 1 << 50) + raw[8:])


def append(source: Path) -> None:
    weights(source).write_bytes(weights(source).read_bytes() + b"xyz")


def not_json(source: Path) -> None:
    weights(source).write_bytes(struct.pack("<Q", 4) + b"{]}!")


def deep_json(source: Path) -> None:
    text = b'{"a":' + b"[" * 200_000
    weights(source).write_bytes(struct.pack("<Q", len(text)) + text)


def json_list(source: Path) -> None:
    weights(source).write_bytes(struct.pack("<Q", 2) + b"[]")


def twice(source: Path) -> None:
    raw = weights(source).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    text = raw[8 : 8 + length - 1] + b', "__metadata__": {}}'
    weights(source).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def empty_file(source: Path) -> None:
    weights(source).write_bytes(b"")


def overlap(source: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        start, end = header["hidden_norm.weight"]["data_offsets"]
        header["hidden_norm.weight"]["data_offsets"] = [start - 8, end - 8]

    edit_header(source, edit)


def hole(source: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        header.pop("hidden_norm.weight")

    edit_header(source, edit)


BROKEN_FILES: list[tuple[Damage, str, str | None]] = [
    (truncate, "it is truncated, 1000 of 51648 data bytes are missing", DAMAGED),
    (cut_header, "its header claims 3803 bytes, the file has 100", DAMAGED),
    (claim_petabytes, "its header claims 1125899906842624 bytes", DAMAGED),
    (append, "3 unused bytes after the last tensor", DAMAGED),
    (not_json, "its header is not JSON (JSONDecodeError)", DAMAGED),
    (deep_json, "its header is not JSON (RecursionError)", DAMAGED),
    (json_list, "its header is not a JSON object", DAMAGED),
    (twice, "its header lists '__metadata__' twice", DAMAGED),
    (empty_file, "it has 0 bytes", DAMAGED),
    (overlap, "tensor 'hidden_norm.weight' overlaps the one before it", DAMAGED),
    (hole, "64 unused bytes before tensor 'norm.weight'", DAMAGED),
    (
        set_entry("norm.weight", dtype="F7"),
        "tensor 'norm.weight' has the unknown dtype 'F7'",
        DAMAGED,
    ),
    (
        set_entry("norm.weight", shape=[2**62, 2**62]),
        f"tensor 'norm.weight' (BF16 [{2**62}, {2**62}]) needs {2**125} bytes, not 64",
        DAMAGED,
    ),
    (
        set_entry("norm.weight", shape=[-1]),
        "the entry of tensor 'norm.weight' is malformed",
        DAMAGED,
    ),
    (
        set_entry("norm.weight", data_offsets=[0, 1e9]),
        "the entry of tensor 'norm.weight' is malformed",
        DAMAGED,
    ),
]


@pytest.mark.parametrize(("damage", "message", "hint"), BROKEN_FILES)
def test_broken_weights_are_refused(
    checkpoint: Path, target: Path, damage: Damage, message: str, hint: str | None
) -> None:
    damage(checkpoint)
    error = attempt(checkpoint, target)
    assert (error.message, error.hint) == (
        f"broken safetensors file model.safetensors: {message}",
        hint,
    )


def test_missing_shard_is_named(tmp_path: Path, target: Path) -> None:
    source = checkpoints.write_checkpoint(tmp_path / "c", shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    error = attempt(source, target)
    assert error.message == "1 of 3 shards are missing: model-00002-of-00003.safetensors"
    assert error.hint == "fetch the whole checkpoint"


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "C:x.safetensors"]
)
def test_index_cannot_leave_the_checkpoint(tmp_path: Path, target: Path, shard: str) -> None:
    source = checkpoints.write_checkpoint(tmp_path / "c", shards=2)
    checkpoints.write_checkpoint(tmp_path / "x")
    (tmp_path / "x" / "model.safetensors").rename(tmp_path / "x.safetensors")
    index = source / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["norm.weight"] = shard
    index.write_text(json.dumps(data))
    error = attempt(source, target)
    assert error.message == (
        f"model.safetensors.index.json points outside the checkpoint: {shard!r}"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weight_map: weight_map.pop("norm.weight"),
            (
                "model-00001-of-00002.safetensors holds 'norm.weight', "
                "which model.safetensors.index.json does not list"
            ),
        ),
        (
            lambda weight_map: weight_map.update(extra="model-00001-of-00002.safetensors"),
            (
                "model.safetensors.index.json lists 'extra' in model-00001-of-00002.safetensors, "
                "which does not hold it"
            ),
        ),
        (
            lambda weight_map: weight_map.update(extra=7),
            "model.safetensors.index.json maps 'extra' to 7, not to a .safetensors file",
        ),
        (lambda weight_map: weight_map.clear(), "model.safetensors.index.json has no weight_map"),
    ],
)
def test_index_that_does_not_fit_is_refused(
    tmp_path: Path, target: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    source = checkpoints.write_checkpoint(tmp_path / "c", shards=2)
    index = source / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    change(data["weight_map"])
    index.write_text(json.dumps(data))
    assert attempt(source, target).message == message


def test_tensor_in_two_shards_is_refused(tmp_path: Path, target: Path) -> None:
    source = checkpoints.write_checkpoint(tmp_path / "c", shards=2)
    second = source / "model-00002-of-00002.safetensors"
    names = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    values = checkpoints.tensors(checkpoints.config())
    part = {name: values[name] for name, shard in names.items() if shard == second.name}
    part["model.norm.weight"] = values["norm.weight"]
    second.write_bytes(checkpoints.safetensors_bytes(part))
    assert attempt(source, target).message == (
        "tensor 'norm.weight' appears twice: as 'norm.weight' in model-00001-of-00002.safetensors "
        "and as 'model.norm.weight' in model-00002-of-00002.safetensors"
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.0, "tensor norm.weight is all zeros"),
        (np.nan, "tensor norm.weight has NaN or infinite values"),
        (np.inf, "tensor norm.weight has NaN or infinite values"),
    ],
)
def test_dead_tensor_is_refused(checkpoint: Path, target: Path, value: float, message: str) -> None:
    edit_values(checkpoint, "norm.weight", lambda array: array.fill(value))
    error = attempt(checkpoint, target)
    assert (error.message, error.hint) == (message, HALF)


def test_single_nan_in_the_last_row_is_found(checkpoint: Path, target: Path) -> None:
    def change(array: Any) -> None:
        array[-1, -1] = np.nan

    edit_values(checkpoint, "candidate_selector.successor_codebook", change)
    assert attempt(checkpoint, target, "q8_0").message == (
        "tensor candidate_selector.successor_codebook has NaN or infinite values"
    )


def test_value_too_large_for_f16_is_refused(checkpoint: Path, target: Path) -> None:
    edit_values(checkpoint, "fc.weight", lambda array: array.fill(131072.0))
    error = attempt(checkpoint, target, "f16")
    assert error.message == "tensor fc.weight has the value 131072, too large for F16"
    assert error.hint == "choose preset bf16 or f32"


def test_checkpoint_without_tensors_is_refused(checkpoint: Path, target: Path) -> None:
    weights(checkpoint).write_bytes(checkpoints.safetensors_bytes({}))
    assert attempt(checkpoint, target).message == "the checkpoint holds no tensors"


def test_tensor_without_elements_is_refused(checkpoint: Path, target: Path) -> None:
    values = checkpoints.tensors(checkpoints.config())
    values["norm.weight"] = np.zeros((0,), dtype=np.float32)
    weights(checkpoint).write_bytes(checkpoints.safetensors_bytes(values))
    assert attempt(checkpoint, target).message == "tensor norm.weight has no elements"


@pytest.mark.parametrize(
    ("remove", "add", "message", "hint"),
    [
        (
            ["norm.weight", "layers.0.mlp_conv.base_kernel"],
            [],
            "2 of 36 tensors are missing: norm.weight, layers.0.mlp_conv.base_kernel",
            SHARD,
        ),
        ([], ["layers.0.extra.weight"], "1 tensor is unknown: layers.0.extra.weight", DROPPED),
        (
            [],
            ["layers.2.mlp.up_proj.weight"],
            "1 tensor is unknown: layers.2.mlp.up_proj.weight",
            DROPPED,
        ),
        (
            [],
            ["d2t"],
            "the checkpoint has d2t, config.json no draft_vocab_size below the vocabulary's",
            TOGETHER,
        ),
        (
            [],
            ["layers.0.self_attn.sinks"],
            "1 of 38 tensors are missing: layers.1.self_attn.sinks",
            SHARD,
        ),
        (
            [],
            ["fc.weight_scale"],
            "tensor fc.weight is stored as BF16 and has fc.weight_scale beside it",
            "whether that scale is in the weights already cannot be told",
        ),
        (
            [
                f"candidate_selector.{name}"
                for name in (
                    "hidden_projection.weight",
                    "predecessor_codebook",
                    "successor_codebook",
                )
            ],
            [],
            "config.json describes a DFlash 2 drafter, the checkpoint has no candidate selector",
            "it is a DFlash 1 checkpoint with the wrong config, or a part was not downloaded",
        ),
        (
            [],
            ["embed_tokens.weight"],
            "the checkpoint has embed_tokens.weight but no lm_head.weight, and does not tie them",
            "llama.cpp would use the embeddings as head; set tie_word_embeddings if that is meant",
        ),
    ],
)
def test_other_tensors_are_named(
    checkpoint: Path,
    target: Path,
    remove: list[str],
    add: list[str],
    message: str,
    hint: str,
) -> None:
    values = checkpoints.tensors(checkpoints.config())
    for name in remove:
        del values[name]
    for name in add:
        values[name] = np.ones((4, 4), dtype=np.float32)
    weights(checkpoint).write_bytes(checkpoints.safetensors_bytes(values))
    error = attempt(checkpoint, target)
    assert (error.message, error.hint) == (message, hint)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("markov_w1.weight", "a DSpark drafter"),
        ("conf_proj.weight", "a DSpark drafter"),
        ("aux_hidden_norms.0.weight", "a Laguna drafter (auxiliary norms)"),
        ("layers.0.self_attn.g_proj.weight", "a Laguna drafter (attention gates)"),
        ("layers.0.pre_feedforward_layernorm.weight", "a drafter with Gemma's extra norms"),
        ("layers.0.post_feedforward_layernorm.weight", "a drafter with Gemma's extra norms"),
        ("layers.0.layer_scalar", "a drafter with Gemma's layer scales"),
        ("layers.0.mlp.experts.0.up_proj.weight", "a drafter with experts"),
        ("layers.0.self_attn.q_proj.bias", "a drafter with attention biases"),
    ],
)
def test_tensors_of_another_kind_of_drafter_are_told_with_that_kind(
    checkpoint: Path, target: Path, name: str, kind: str
) -> None:
    values = checkpoints.tensors(checkpoints.config())
    values[name] = np.ones((4, 4), dtype=np.float32)
    weights(checkpoint).write_bytes(checkpoints.safetensors_bytes(values))
    error = attempt(checkpoint, target)
    assert (error.message, error.hint) == (
        f"tensor {name} belongs to {kind}",
        "drafters of plain Qwen3 layers are converted",
    )


def test_wrong_shape_names_both(checkpoint: Path, target: Path) -> None:
    values = checkpoints.tensors(checkpoints.config())
    values["fc.weight"] = values["fc.weight"][:, :32].copy()
    weights(checkpoint).write_bytes(checkpoints.safetensors_bytes(values))
    error = attempt(checkpoint, target)
    assert (error.message, error.hint) == (
        "tensor fc.weight has shape [32, 32], config.json asks for [32, 64]",
        TOGETHER,
    )


def test_features_of_several_streams_side_by_side_are_refused(
    checkpoint: Path, target: Path
) -> None:
    values = checkpoints.tensors(checkpoints.config())
    values["fc.weight"] = np.tile(values["fc.weight"], 4)
    weights(checkpoint).write_bytes(checkpoints.safetensors_bytes(values))
    error = attempt(checkpoint, target)
    assert (error.message, error.hint) == (
        "tensor fc.weight has shape [32, 256], config.json asks for [32, 64]",
        TOGETHER,
    )


def test_integer_weights_are_refused(checkpoint: Path, target: Path) -> None:
    set_entry("norm.weight", dtype="I16")(checkpoint)
    error = attempt(checkpoint, target)
    assert error.message == "tensor norm.weight is stored as I16"
    assert error.hint == (
        "without scales this version reads F32, F16, BF16; take the unquantized checkpoint"
    )


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        (
            {"dflash__mask_token": 3},
            "config.json: unknown in dflash_config: mask_token",
            "did you mean mask_token_id?",
        ),
        (
            {"dflash__quux": 3, "dflash__zork": 1},
            "config.json: unknown in dflash_config: quux, zork",
            "it may change what the drafter computes",
        ),
        (
            {"architectures": ["DFlashDraftModel"]},
            "config.json describes a DFlash 1 drafter, the checkpoint has a candidate selector",
            TOGETHER,
        ),
        ({"architectures": ["DSparkDraftModel"]}, "DSparkDraftModel is a DSpark drafter", ONLY),
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            "Qwen3ForCausalLM is not a DFlash drafter",
            ONLY,
        ),
        ({"architectures": ...}, "config.json names no architecture", ONLY),
        (
            {"speculators_model_type": "dflash2"},
            "config.json: transformer_layer_config is None, not an object",
            None,
        ),
        (
            {"speculators_model_type": "eagle3"},
            "this is a speculator of kind 'eagle3'",
            "of this format dflash and dflash2 are converted",
        ),
        (
            {"quantization_config": {"format": "pack-quantized"}},
            "config.json: quantization_config names no quant_method",
            None,
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 3}},
            "config.json: quantization_config packs weights of 3 bits",
            "checkpoints with 4 or 8 bits throughout are read; take the unquantized one",
        ),
        (
            {"dflash__attention_sink_bias": True},
            "config.json: attention_sink_bias is True, the checkpoint has no sinks",
            TOGETHER,
        ),
        (
            {"dflash__has_own_lm_head": True},
            "config.json: has_own_lm_head, and there is no lm_head.weight",
            "another head drafts other tokens; fetch the whole checkpoint",
        ),
        (
            {"dflash__draft_vocab_size": 12},
            ("config.json: draft_vocab_size is 12, and there is no lm_head.weight of that size"),
            "the target's head has other rows; fetch the whole checkpoint",
        ),
        (
            {"dflash__draft_vocab_size": 25},
            "config.json: draft_vocab_size 25 of a vocabulary of 24",
            RELEASE,
        ),
        (
            {"target_hidden_size": 64},
            "config.json: target_hidden_size is 64, hidden_size is 32",
            "llama.cpp reads features of the drafter's own width only",
        ),
        (
            {"hidden_act": "swigluoai"},
            (
                "config.json: hidden_act is 'swigluoai', llama.cpp runs silu, gelu, "
                "gelu_pytorch_tanh"
            ),
            None,
        ),
        (
            {"dflash__use_gemma_norm": True},
            "config.json: use_gemma_norm is True: a GGUF file has no place for Gemma's norms",
            None,
        ),
        (
            {"rope_parameters": {"rope_type": "default"}},
            "config.json has no rope_theta",
            "add the value the drafter was trained with to rope_parameters; it cannot be guessed",
        ),
        (
            {"rope_theta": 500000.0},
            (
                "config.json contradicts itself: rope_parameters.rope_theta = 10000 "
                "and rope_theta = 500000"
            ),
            TRAINED,
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "config.json: rope_type 'llama3' is not supported",
            "this version converts default, linear, yarn",
        ),
        (
            {"dflash__target_layer_ids": [1, 6]},
            "config.json: target layer 6 does not exist in a target of 6 layers (0 to 5)",
            COUNTING,
        ),
        (
            {"dflash__target_layer_ids": [-1, 3]},
            "config.json: target_layer_ids [-1, 3] repeat or are negative",
            COUNTING,
        ),
        (
            {"dflash__target_layer_ids": ..., "num_target_layers": ...},
            "config.json has neither target_layer_ids nor num_target_layers",
            "the layers a drafter reads cannot be guessed",
        ),
        (
            {"dflash__mask_token_id": 24},
            "mask_token_id 24 is outside the vocabulary of 24",
            RELEASE,
        ),
        (
            {"dflash__mask_token_id": ...},
            "config.json: mask_token_id is None",
            f"a drafter without its mask token cannot draft; {RELEASE}",
        ),
        (
            {"is_causal": ..., "layer_types": ["full_attention", "sliding_attention"]},
            "config.json has no is_causal and mixes full and sliding layers",
            "causality per layer cannot be expressed in a GGUF file",
        ),
        (
            {"dflash__selector_top_k": 6},
            "config.json: selector_top_k 6 is too large for hidden 32",
            "llama.cpp carries the candidates in a row of that size, 42 are needed",
        ),
        (
            {"dflash__conv_group_size": 7},
            "config.json: conv_group_size 7 does not divide hidden_size 32",
            None,
        ),
        (
            {"dflash__selector_rank": ...},
            "config.json has no selector_rank in dflash_config",
            None,
        ),
        ({"hidden_size": "32"}, "config.json: hidden_size is '32', not an integer", None),
        ({"hidden_size": ...}, "config.json has no hidden_size", None),
        ({"rms_norm_eps": True}, "config.json: rms_norm_eps is True, not a number", None),
        ({"rms_norm_eps": -1.0}, "config.json: rms_norm_eps is -1.0, it must be positive", None),
        ({"rms_norm_eps": 1e300}, "config.json: rms_norm_eps is 1e+300, not a number", None),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}},
            "config.json: factor of rope_type 'linear' is 0",
            None,
        ),
        ({"dflash__block_size": 1}, "config.json: block_size 1 leaves nothing to draft", None),
        (
            {"layer_types": ["sliding_attention"]},
            "config.json: 1 layer_types for 2 layers",
            None,
        ),
        (
            {"sliding_window": None},
            "config.json: layer_types has sliding layers, but there is no sliding_window",
            None,
        ),
        ({"layer_types": ...}, "config.json has no max_window_layers", None),
        (
            {"num_key_value_heads": 3},
            "config.json: 4 attention heads cannot share 3 key-value heads",
            None,
        ),
        ({"dflash_config": 3}, "config.json: dflash_config is 3, not an object", None),
    ],
)
def test_config_that_cannot_be_converted_is_refused(
    tmp_path: Path, target: Path, changes: dict[str, Any], message: str, hint: str | None
) -> None:
    source = checkpoints.write_checkpoint(
        tmp_path / "c",
        data=checkpoints.config(**changes),
        values=checkpoints.tensors(checkpoints.config()),
    )
    error = attempt(source, target)
    assert isinstance(error, CheckpointError)
    assert (error.message, error.hint) == (message, hint)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"n_vocab": 25},
            "vocabulary differs: the drafter was made for 24, tiny target has 25",
        ),
        (
            {"n_embd": 64},
            "hidden size differs: the drafter was made for 32, tiny target has 64",
        ),
        (
            {"n_layer": 7},
            "number of target layers differs: the drafter was made for 6, tiny target has 7",
        ),
        (
            {"n_layer": 5, "nextn": 1},
            "number of target layers differs: the drafter was made for 6, tiny target has 5",
        ),
    ],
)
def test_wrong_target_is_refused(
    checkpoint: Path, tmp_path: Path, options: dict[str, int], message: str
) -> None:
    other = checkpoints.write_target(tmp_path / "other.gguf", **options)
    error = attempt(checkpoint, other)
    assert isinstance(error, PairError)
    assert error.message == message
    assert error.hint == "give the target the drafter was trained for"


def test_layer_outside_the_target_is_refused(tmp_path: Path) -> None:
    source = checkpoints.write_checkpoint(
        tmp_path / "c", data=checkpoints.config(num_target_layers=...)
    )
    other = checkpoints.write_target(tmp_path / "other.gguf", n_layer=3)
    assert attempt(source, other).message == (
        "the drafter reads layer 3 of its target, but tiny target has layers 0 to 2"
    )


def test_source_without_weights_is_refused(checkpoint: Path, target: Path) -> None:
    weights(checkpoint).rename(checkpoint / "other.safetensors")
    error = attempt(checkpoint, target)
    assert error.message == (
        f"no model.safetensors or model.safetensors.index.json in {checkpoint}"
    )
    assert error.hint == "found other.safetensors; fetch the whole checkpoint"


def test_source_that_is_no_folder_is_refused(checkpoint: Path, target: Path) -> None:
    error = attempt(checkpoint / "config.json", target)
    assert error.message == f"not a checkpoint directory: {checkpoint / 'config.json'}"


def test_unreadable_config_is_refused(checkpoint: Path, target: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    assert attempt(checkpoint, target).message == (
        f"{checkpoint / 'config.json'} is not valid JSON: "
        "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    )
    (checkpoint / "config.json").unlink()
    assert attempt(checkpoint, target).message == f"there is no config.json in {checkpoint}"


def test_torch_file_with_code_in_it_is_refused(checkpoint: Path, target: Path) -> None:
    import pickle

    pytest.importorskip("torch")
    weights(checkpoint).unlink()
    marker = checkpoint / "executed"

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Bomb()}))
    error = attempt(checkpoint, target)
    assert error.message.startswith("torch cannot read pytorch_model.bin: ")
    assert not marker.exists()


def test_shard_with_a_name_that_no_disk_takes_is_missing(tmp_path: Path, target: Path) -> None:
    source = checkpoints.write_checkpoint(tmp_path / "c", shards=2)
    index = source / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    shard = "x" * 300 + ".safetensors"
    data["weight_map"]["norm.weight"] = shard
    index.write_text(json.dumps(data))
    assert attempt(source, target).message == f"1 of 3 shards are missing: {shard}"


@pytest.mark.parametrize("form", ["expanded", "sparse", "meta", "negative"])
def test_torch_tensor_larger_than_its_data_is_refused(
    form: str, checkpoint: Path, target: Path
) -> None:
    torch = pytest.importorskip("torch")
    strange = {
        "expanded": torch.zeros(1).expand(2**50),
        "sparse": torch.ones(32).to_sparse(),
        "meta": torch.zeros(2**40, device="meta"),
        "negative": torch._neg_view(torch.ones(32)),
    }
    weights(checkpoint).unlink()
    torch.save({"norm.weight": strange[form]}, checkpoint / "pytorch_model.bin")
    assert attempt(checkpoint, target).message == (
        "tensor 'norm.weight' of pytorch_model.bin is not stored element by element"
    )


def test_number_larger_than_any_float_is_refused(tmp_path: Path, target: Path) -> None:
    data = checkpoints.config(dflash__output_multiplier=10**400)
    error = attempt(checkpoints.write_checkpoint(tmp_path / "c", data=data), target)
    assert error.message == f"config.json: output_multiplier is {10**400}, not a number"
