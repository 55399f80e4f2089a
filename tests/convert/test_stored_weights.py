"""Quantized checkpoints give the weights that their integers and scales mean, or one error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash2_gguf.convert.dequantize import _float8
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.gguf_schema import tensor_name
from tests.convert import checkpoints
from tests.convert.conversion import convert
from tests.convert.stored_forms import FORMS, Stored, write_quantized


@pytest.mark.parametrize("name", FORMS)
def test_a_quantized_checkpoint_means_its_weights(name: str, tmp_path: Path, target: Path) -> None:
    weights = write_quantized(tmp_path / "c", name)
    warnings = convert(tmp_path / "c", target, tmp_path / "out.gguf")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    found = checkpoints.dequantized(reader)
    for tensor, expected in weights.items():
        got = found[tensor_name(tensor) or ""]
        np.testing.assert_allclose(got, expected.astype(np.float32), rtol=2e-6, err_msg=tensor)
    method = FORMS[name][1]["quant_method"]
    assert (
        f"14 of 36 weights are stored quantized ({method}): what that lost stays lost" in warnings
    )
    assert checkpoints.read_field(reader, "dflash2.source.quantization") == method


def test_layers_quantized_in_different_ways_mean_their_weights(
    tmp_path: Path, target: Path
) -> None:
    """FP8 and NVFP4 in two groups of one config, as targets are mixed."""
    forms = {"layers.0.": "fp8 by rows", "layers.1.": "nvfp4"}
    stored: Stored = {}
    weights = {}
    for start, form in forms.items():
        found = write_quantized(tmp_path / form, form)
        weights |= {name: value for name, value in found.items() if name.startswith(start)}
        tensors = load_file(tmp_path / form / "model.safetensors")
        others = tuple(set(forms) - {start})
        stored |= {name: value for name, value in tensors.items() if not name.startswith(others)}
    groups = {
        f"group_{i}": FORMS[form][1]["config_groups"]["group_0"]
        for i, form in enumerate(forms.values())
    }
    scheme = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    data = checkpoints.config(quantization_config={**scheme, "config_groups": groups})
    source = checkpoints.write_checkpoint(tmp_path / "c", data=data)
    save_file(stored, source / "model.safetensors")
    warnings = convert(source, target, tmp_path / "out.gguf")
    assert warnings == (
        "14 of 36 weights are stored quantized (compressed-tensors): what that lost stays lost",
    )
    got = checkpoints.dequantized(gguf.GGUFReader(tmp_path / "out.gguf"))
    for tensor, expected in weights.items():
        name = tensor_name(tensor) or ""
        np.testing.assert_allclose(got[name], expected.astype(np.float32), rtol=2e-6)


def test_integers_of_several_widths_are_refused(tmp_path: Path, target: Path) -> None:
    write_quantized(tmp_path / "c", "int4")
    path = tmp_path / "c" / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = {"weights": {**groups["group_0"]["weights"], "num_bits": 8}}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "c", target, tmp_path / "out.gguf")
    assert (caught.value.message, caught.value.hint) == (
        "config.json: quantization_config packs weights of 4 and 8 bits",
        "checkpoints with 4 or 8 bits throughout are read; take the unquantized one",
    )


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_every_8_bit_float_is_torchs(dtype: str) -> None:
    kind = {
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
    }[dtype]
    theirs = torch.arange(256, dtype=torch.uint8).view(kind).float().numpy()
    np.testing.assert_array_equal(_float8(dtype), theirs)


def edit(folder: Path, change: Callable[[Stored], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def drop(suffix: str) -> Callable[[Stored], None]:
    def change(tensors: Stored) -> None:
        del tensors[f"layers.0.self_attn.q_proj.{suffix}"]

    return change


def cut(suffix: str) -> Callable[[Stored], None]:
    def change(tensors: Stored) -> None:
        name = f"layers.0.self_attn.q_proj.{suffix}"
        tensors[name] = tensors[name][:, :1].repeat(1, 3).contiguous()

    return change


def put_nan(tensors: Stored) -> None:
    tensors["layers.0.self_attn.q_proj.weight_scale"][0] = float("nan")


def add_plain(tensors: Stored) -> None:
    tensors["layers.0.self_attn.q_proj.weight"] = torch.ones(32, 32)


def wild_groups(tensors: Stored) -> None:
    tensors["layers.0.self_attn.q_proj.g_idx"][3] = 77


Q = "layers.0.self_attn.q_proj"
UNQUANTIZED = "take the unquantized checkpoint"
INCOMPLETE = (
    "the weights of a group share one scale; "
    "fetch the whole checkpoint, or take the unquantized one"
)
DAMAGED = "the quantized checkpoint is damaged or of a kind that is not read"


@pytest.mark.parametrize(
    ("form", "change", "message", "hint"),
    [
        (
            "fp8 by rows",
            drop("weight_scale"),
            f"tensor {Q}.weight is quantized and has no scale beside it",
            INCOMPLETE,
        ),
        (
            "awq",
            drop("qzeros"),
            f"tensor {Q}.qweight is quantized and has no zeros beside it",
            INCOMPLETE,
        ),
        (
            "int4",
            drop("weight_packed"),
            f"1 of 36 tensors are missing: {Q}.weight",
            "config.json and weights do not belong together, or a shard was not downloaded",
        ),
        (
            "int4",
            cut("weight_scale"),
            f"tensor {Q}.weight of [32, 32] has a scale of [32, 3]",
            DAMAGED,
        ),
        (
            "nvfp4",
            cut("weight_scale"),
            f"tensor {Q}.weight of [32, 32] has a scale of [32, 3]",
            DAMAGED,
        ),
        (
            "fp8 by blocks",
            cut("weight_scale_inv"),
            f"tensor {Q}.weight of [32, 32] has a scale of [2, 3]",
            DAMAGED,
        ),
        ("gptq", wild_groups, f"tensor {Q}.weight of [32, 32] has a group index of [32]", DAMAGED),
        (
            "gptq",
            add_plain,
            f"the checkpoint holds {Q}.weight twice, quantized and not",
            None,
        ),
        (
            "fp8 by rows",
            put_nan,
            f"tensor {Q}.weight has NaN or infinite values",
            "the download probably stopped half-way: fetch the checkpoint again",
        ),
    ],
)
def test_a_part_that_does_not_fit_is_named(
    form: str,
    change: Callable[[Stored], None],
    message: str,
    hint: str | None,
    tmp_path: Path,
    target: Path,
) -> None:
    write_quantized(tmp_path / "c", form)
    edit(tmp_path / "c", change)
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "c", target, tmp_path / "out.gguf")
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", target.name]


def test_a_config_that_speaks_of_quantization_over_plain_weights_is_told(
    tmp_path: Path, target: Path
) -> None:
    data = checkpoints.config(quantization_config={"quant_method": "fp8"})
    source = checkpoints.write_checkpoint(tmp_path / "c", data=data)
    warnings = convert(source, target, tmp_path / "out.gguf")
    assert warnings == ("config.json speaks of fp8, and no weight is stored quantized",)


@pytest.mark.parametrize("part", ["absmax", "quant_map"])
def test_bitsandbytes_is_refused_by_name(part: str, tmp_path: Path, target: Path) -> None:
    values = checkpoints.tensors(checkpoints.config())
    values[f"fc.weight.{part}"] = np.ones(4, dtype=np.float32)
    source = checkpoints.write_checkpoint(tmp_path / "c", values=values)
    with pytest.raises(CheckpointError) as caught:
        convert(source, target, tmp_path / "out.gguf")
    assert (caught.value.message, caught.value.hint) == (
        f"tensor fc.weight.{part} belongs to a checkpoint quantized by bitsandbytes",
        UNQUANTIZED,
    )


def test_interleaved_rotation_reorders_what_was_quantized(tmp_path: Path, target: Path) -> None:
    weights = write_quantized(tmp_path / "c", "awq")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    config["dflash_config"]["is_neox_style"] = False
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "c", target, tmp_path / "out.gguf")
    found = checkpoints.dequantized(gguf.GGUFReader(tmp_path / "out.gguf"))
    expected = weights[f"{Q}.weight"].reshape(4, 4, 2, 32).transpose(0, 2, 1, 3).reshape(32, 32)
    np.testing.assert_allclose(found["blk.0.attn_q.weight"], expected, rtol=2e-6)


@pytest.mark.parametrize(
    ("form", "part", "stored", "message"),
    [
        ("int4", "weight_packed", torch.zeros(32, dtype=torch.int32), "(I32 [32])"),
        ("int4", "weight_packed", torch.zeros(32, 4, dtype=torch.int64), "(I64 [32, 4])"),
        ("gptq", "qzeros", torch.zeros(4, dtype=torch.int32), "(I32 [4])"),
        ("awq", "qweight", torch.zeros(32, 4, dtype=torch.int64), "(I64 [32, 4])"),
    ],
)
def test_packed_integers_of_another_kind_are_refused(
    form: str, part: str, stored: torch.Tensor, message: str, tmp_path: Path, target: Path
) -> None:
    write_quantized(tmp_path / "c", form)
    path = tmp_path / "c" / "model.safetensors"
    save_file({**load_file(path), f"{Q}.{part}": stored}, path)
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "c", target, tmp_path / "out.gguf")
    assert (caught.value.message, caught.value.hint) == (
        f"tensor {Q}.{part} {message} is no table of packed integers",
        UNQUANTIZED,
    )


def test_a_scale_without_values_is_refused(tmp_path: Path, target: Path) -> None:
    write_quantized(tmp_path / "c", "fp8 by rows")
    path = tmp_path / "c" / "model.safetensors"
    save_file({**load_file(path), f"{Q}.weight_scale": torch.zeros(0, 1)}, path)
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "c", target, tmp_path / "out.gguf")
    assert caught.value.message == f"tensor {Q}.weight_scale is empty"


@pytest.mark.parametrize(
    "stored", [torch.zeros(32, 32, dtype=torch.int64), torch.ones(32, 32).bool()]
)
def test_scales_beside_anything_but_bytes_are_refused(
    stored: torch.Tensor, tmp_path: Path, target: Path
) -> None:
    write_quantized(tmp_path / "c", "fp8 by rows")
    path = tmp_path / "c" / "model.safetensors"
    save_file({**load_file(path), f"{Q}.weight": stored}, path)
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "c", target, tmp_path / "out.gguf")
    kind = "I64" if stored.dtype is torch.int64 else "BOOL"
    assert (caught.value.message, caught.value.hint) == (
        f"tensor {Q}.weight has scales and is stored as {kind}",
        UNQUANTIZED,
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "gptq", "config_groups": {"g": {"weights": {"num_bits": [4]}}}},
            "config.json: quantization_config packs weights of '[4]' bits",
        ),
        ({"quant_method": "\ud800"}, "'\\ud800' is no Unicode text"),
    ],
)
def test_quantization_config_with_values_of_another_type_is_refused(
    config: dict[str, object], message: str, tmp_path: Path, target: Path
) -> None:
    write_quantized(tmp_path / "c", "fp8 by rows")
    path = tmp_path / "c" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "c", target, tmp_path / "out.gguf")
    assert caught.value.message == message
