"""The bytes that are written, checked against literals and the ``gguf`` package's reader."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dflash2_gguf.convert.gguf_reader import read_gguf
from dflash2_gguf.convert.gguf_values import Value, array, boolean, f32, string, u32
from dflash2_gguf.convert.pipeline import make_plan, run
from dflash2_gguf.convert.writer import CopiedTensor, GGUFWriter, OutputTensor
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.ggml_types import GGMLType, ValueType
from dflash2_gguf.presets import load_preset
from tests.convert import checkpoints


def convert(source: Path, target: Path, path: Path, preset: str = "f32") -> gguf.GGUFReader:
    plan = make_plan(source, target, [(load_preset(preset), path)])
    run(plan, force=False, progress=lambda _count: None)
    return gguf.GGUFReader(path)


def test_file_of_one_key_and_one_tensor_has_these_bytes(tmp_path: Path) -> None:
    values: dict[str, Value] = {"a.b": u32(7)}
    tensor = OutputTensor(name="t", shape=(1, 2), type=GGMLType.F32)
    with GGUFWriter(tmp_path / "x.gguf", values=values, tensors=[tensor]) as writer:
        writer.write_rows("t", 0, np.array([1.0, -2.0], dtype="<f4").view(np.uint8))
        writer.finish(values)
    assert (tmp_path / "x.gguf").read_bytes() == (
        b"GGUF\x03\0\0\0"
        b"\x01\0\0\0\0\0\0\0"  # tensors
        b"\x01\0\0\0\0\0\0\0"  # keys
        b"\x03\0\0\0\0\0\0\0a.b\x04\0\0\0\x07\0\0\0"
        b"\x01\0\0\0\0\0\0\0t\x02\0\0\0"
        b"\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0"  # fastest dimension first
        b"\0\0\0\0"  # F32
        b"\0\0\0\0\0\0\0\0"  # offset
        b"\0\0\0\0\0\0\0\0\0\0\0\0"  # to a multiple of 32
        b"\0\0\x80\x3f\0\0\0\xc0" + bytes(24)
    )


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (boolean(True), b"\x07\0\0\0\x01"),
        (f32(1.0), b"\x06\0\0\0\0\0\x80\x3f"),
        (string("é"), b"\x08\0\0\0\x02\0\0\0\0\0\0\0\xc3\xa9"),
        (
            array(ValueType.INT32, [-1]),
            b"\x09\0\0\0\x05\0\0\0\x01\0\0\0\0\0\0\0\xff\xff\xff\xff",
        ),
        (
            array(ValueType.BOOL, [True, False]),
            b"\x09\0\0\0\x07\0\0\0\x02\0\0\0\0\0\0\0\x01\0",
        ),
    ],
)
def test_metadata_values_have_these_bytes(value: Value, encoded: bytes) -> None:
    assert value.encode() == encoded


def test_alignment_of_the_metadata_is_kept(tmp_path: Path) -> None:
    values: dict[str, Value] = {"general.alignment": u32(64)}
    tensors = [CopiedTensor(name=name, shape=(3,), type=24, nbytes=3) for name in "ab"]
    with GGUFWriter(tmp_path / "x.gguf", values=values, tensors=tensors) as writer:
        writer.write_bytes("a", 0, memoryview(b"\x01\x02\x03"))
        writer.write_bytes("b", 1, memoryview(b"\x05\x06"))
        writer.finish(values)
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert [tensor.data.tolist() for tensor in reader.tensors] == [[1, 2, 3], [0, 5, 6]]
    assert [tensor.data_offset % 64 for tensor in reader.tensors] == [0, 0]
    assert (tmp_path / "x.gguf").stat().st_size % 64 == 0


def nested_file(path: Path) -> Path:
    """A file whose tags are lists of lists, by the ``gguf`` package."""
    writer = gguf.GGUFWriter(path, "x")
    writer.add_array("general.tags", [["a", "b"], ["c"]])
    writer.add_array("mixed", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_nested_arrays_are_read_and_written_back(tmp_path: Path) -> None:
    header = read_gguf(nested_file(tmp_path / "x.gguf"))
    tags, mixed = header.values["general.tags"], header.values["mixed"]
    assert (tags.is_nested, tags.items(), mixed.items()) == (True, ["a", "b", "c"], [1, 2, 3])
    assert tags.flat() == array(ValueType.STRING, ["a", "b", "c"])
    assert mixed.flat() == array(ValueType.INT32, [1, 2, 3])
    with GGUFWriter(tmp_path / "y.gguf", values=header.values, tensors=[]) as writer:
        writer.finish(header.values)
    assert (tmp_path / "y.gguf").read_bytes() == (tmp_path / "x.gguf").read_bytes()


def test_arrays_of_arrays_without_end_are_refused(tmp_path: Path) -> None:
    deep = struct.pack("<IQ", ValueType.ARRAY, 1) * 5000
    raw = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9) + deep
    (tmp_path / "x.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(tmp_path / "x.gguf")
    assert caught.value.message == (
        f"broken GGUF file {tmp_path / 'x.gguf'}: the value of 'k' is an array 9 levels deep"
    )


def test_small_drafter_has_the_golden_bytes(checkpoint: Path, target: Path, tmp_path: Path) -> None:
    convert(checkpoint, target, tmp_path / "out.gguf", "bf16")
    golden = Path(__file__).parent / "golden" / "tiny-bf16.gguf"
    assert (tmp_path / "out.gguf").read_bytes() == golden.read_bytes()


def test_every_tensor_arrives_with_its_values(
    checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    found = checkpoints.dequantized(convert(checkpoint, target, tmp_path / "out.gguf"))
    expected = checkpoints.tensors(checkpoints.config())
    names = {
        "fc.weight": "fc.weight",
        "hidden_norm.weight": "enc.output_norm.weight",
        "norm.weight": "output_norm.weight",
        "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
        "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
        "candidate_selector.successor_codebook": "selector_successor.weight",
        "layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
        "layers.1.post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
        "layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
        "layers.1.self_attn.k_proj.weight": "blk.1.attn_k.weight",
        "layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight",
        "layers.1.self_attn.q_norm.weight": "blk.1.attn_q_norm.weight",
        "layers.1.self_attn.k_norm.weight": "blk.1.attn_k_norm.weight",
        "layers.1.mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
        "layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
        "layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "layers.1.attention_conv.base_kernel": "blk.1.attn_conv_base",
        "layers.1.attention_conv.kernel_projection.weight": "blk.1.attn_conv_proj.weight",
        "layers.1.mlp_conv.base_kernel": "blk.1.ffn_conv_base",
        "layers.1.mlp_conv.kernel_projection.weight": "blk.1.ffn_conv_proj.weight",
    }
    assert len(found) == len(expected) == 6 + 2 * 15
    for hf_name, name in names.items():
        np.testing.assert_array_equal(found[name], expected[hf_name], err_msg=name)


@pytest.mark.parametrize("preset", ["f32", "f16", "bf16"])
def test_norms_and_conv_bases_are_f32(
    checkpoint: Path, target: Path, tmp_path: Path, preset: str
) -> None:
    reader = convert(checkpoint, target, tmp_path / "out.gguf", preset)
    for tensor in reader.tensors:
        small = "norm" in tensor.name or tensor.name.endswith("_conv_base")
        expected = "F32" if small else preset.upper()
        assert tensor.tensor_type.name == expected, tensor.name


def test_metadata_says_what_the_config_says(checkpoint: Path, target: Path, tmp_path: Path) -> None:
    reader = convert(checkpoint, target, tmp_path / "out.gguf")
    expected: dict[str, Any] = {
        "general.architecture": "dflash",
        "general.type": "model",
        "general.name": "tiny",
        "general.file_type": 0,
        "general.quantization_version": 2,
        "dflash.block_count": 2,
        "dflash.context_length": 128,
        "dflash.embedding_length": 32,
        "dflash.feed_forward_length": 64,
        "dflash.attention.head_count": 4,
        "dflash.attention.head_count_kv": 2,
        "dflash.attention.key_length": 8,
        "dflash.attention.value_length": 8,
        "dflash.attention.causal": False,
        "dflash.attention.sliding_window": 16,
        "dflash.attention.sliding_window_pattern": [True, True],
        "dflash.rope.freq_base": 10000.0,
        "dflash.block_size": 4,
        "dflash.conv_kernel_size": 2,
        "dflash.conv_group_size": 8,
        "dflash.selector_rank": 32,
        "dflash.selector_top_k": 4,
        "dflash.target_layers": [2, 4],  # inputs: one more than the outputs in the config
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(24)],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.mask_token_id": 3,
        "tokenizer.chat_template": "{{ messages }}",
        "dflash2.preset": "f32",
        "dflash2.source.rope_freq_base": "rope_parameters.rope_theta",
        "dflash2.target.name": "tiny target",
        "dflash2.target.architecture": "llama",
        "dflash2.target.block_count": 6,
    }
    assert {key: checkpoints.read_field(reader, key) for key in expected} == expected
    for absent in ("rope.dimension_sections", "logit_scale", "rope.dimension_count"):
        assert f"dflash.{absent}" not in reader.fields


def test_source_hashes_are_those_of_the_files(
    checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    reader = convert(checkpoint, target, tmp_path / "out.gguf")
    files = ["model.safetensors", "config.json"]
    digests = [hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in files]
    assert checkpoints.read_field(reader, "dflash2.source.files") == files
    assert checkpoints.read_field(reader, "dflash2.source.sha256") == digests


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"dflash__output_multiplier": 0.5}, "logit_scale", 0.5),
        ({"output_multiplier": 0.25}, "logit_scale", 0.25),
        ({"dflash__final_logit_softcapping": 20.0}, "final_logit_softcapping", 20.0),
        ({"dflash__input_embedding_scale": 1.5}, "embedding_scale", 1.5),
        ({"dflash__attention_value_scale": 0.5}, "attention.value_scale", 0.5),
        ({"is_causal": True}, "attention.causal", True),
        ({"is_causal": ..., "dflash__causal": True}, "attention.causal", True),
        ({"is_causal": ...}, "attention.causal", True),
        ({"is_causal": ..., "use_sliding_window": False}, "attention.causal", True),
        ({"is_causal": ..., "layer_types": ["full_attention"] * 2}, "attention.causal", False),
        ({"layer_types": ..., "max_window_layers": 1}, "attention.sliding_window_pattern", [0, 1]),
        ({"dflash__use_swa": True, "dflash__swa_window_size": 9}, "attention.sliding_window", 9),
        ({"dflash__target_layer_ids": ...}, "target_layers", [2, 4]),
        ({"dflash__block_size": ...}, "block_size", 16),
        ({"dflash__rope_dim": 4}, "rope.dimension_count", 4),
        ({"rope_parameters": ..., "rope_theta": 5e5}, "rope.freq_base", 5e5),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "beta_fast": 16.0,
                }
            },
            "rope.scaling.yarn_beta_fast",
            16.0,
        ),
    ],
)
def test_config_value_reaches_its_key(
    tmp_path: Path, target: Path, changes: dict[str, Any], key: str, value: Any
) -> None:
    changed = checkpoints.config(**changes)
    source = checkpoints.write_checkpoint(
        tmp_path / "c", data=changed, values=checkpoints.tensors(checkpoints.config())
    )
    reader = convert(source, target, tmp_path / "out.gguf")
    assert checkpoints.read_field(reader, f"dflash.{key}") == value


def test_full_attention_writes_no_window(tmp_path: Path, target: Path) -> None:
    data = checkpoints.config(use_sliding_window=False, layer_types=["full_attention"] * 2)
    source = checkpoints.write_checkpoint(tmp_path / "c", data=data)
    reader = convert(source, target, tmp_path / "out.gguf")
    assert not [key for key in reader.fields if "sliding" in key]


def test_mixed_layers_are_told_apart(tmp_path: Path, target: Path) -> None:
    data = checkpoints.config(layer_types=["full_attention", "sliding_attention"])
    source = checkpoints.write_checkpoint(tmp_path / "c", data=data)
    reader = convert(source, target, tmp_path / "out.gguf")
    pattern = checkpoints.read_field(reader, "dflash.attention.sliding_window_pattern")
    assert pattern == [False, True]


@pytest.mark.parametrize("key", ["rope_is_neox_style", "is_neox_style"])
def test_interleaved_rotation_is_reordered(tmp_path: Path, target: Path, key: str) -> None:
    data = checkpoints.config(**{f"dflash__{key}": False})
    source = checkpoints.write_checkpoint(tmp_path / "c", data=data)
    found = checkpoints.dequantized(convert(source, target, tmp_path / "out.gguf"))
    original = checkpoints.tensors(data)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for hf, name, heads in (("q", "attn_q", 4), ("k", "attn_k", 2)):
        proj = original[f"layers.0.self_attn.{hf}_proj.weight"].reshape(heads, 8, 32)
        expected = proj[:, order].reshape(-1, 32)
        np.testing.assert_array_equal(found[f"blk.0.{name}.weight"], expected)
        norm = original[f"layers.0.self_attn.{hf}_norm.weight"][order]
        np.testing.assert_array_equal(found[f"blk.0.{name}_norm.weight"], norm)
    value = original["layers.0.self_attn.v_proj.weight"]
    np.testing.assert_array_equal(found["blk.0.attn_v.weight"], value)


@pytest.mark.parametrize(
    ("dtype", "shards", "prefix"),
    [("BF16", 3, ""), ("BF16", 1, "model."), ("F16", 1, ""), ("F32", 2, "model.")],
)
def test_layout_of_the_checkpoint_does_not_matter(
    tmp_path: Path, target: Path, dtype: str, shards: int, prefix: str
) -> None:
    values = {
        name: plain.astype(np.float16).astype(np.float32)
        for name, plain in checkpoints.tensors(checkpoints.config()).items()
    }
    values = {name: checkpoints.round_bf16(half) for name, half in values.items()}
    source = checkpoints.write_checkpoint(
        tmp_path / "c", values=values, dtype=dtype, shards=shards, prefix=prefix
    )
    found = checkpoints.dequantized(convert(source, target, tmp_path / "out.gguf"))
    plain = checkpoints.write_checkpoint(tmp_path / "d", values=values)
    expected = checkpoints.dequantized(convert(plain, target, tmp_path / "plain.gguf"))
    assert list(found) == list(expected)
    for name, values_of in expected.items():
        np.testing.assert_array_equal(found[name], values_of, err_msg=name)


def test_own_embeddings_and_head_are_kept(tmp_path: Path, target: Path) -> None:
    data = checkpoints.config()
    values = checkpoints.tensors(data)
    rng = np.random.default_rng(1)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        values[name] = checkpoints.round_bf16(rng.normal(size=(24, 32)))
    source = checkpoints.write_checkpoint(tmp_path / "c", values=values)
    found = checkpoints.dequantized(convert(source, target, tmp_path / "out.gguf"))
    np.testing.assert_array_equal(found["token_embd.weight"], values["embed_tokens.weight"])
    np.testing.assert_array_equal(found["output.weight"], values["lm_head.weight"])


def test_torch_checkpoint_gives_the_same_tensors(tmp_path: Path, target: Path) -> None:
    torch = pytest.importorskip("torch")
    values = checkpoints.tensors(checkpoints.config())
    source = checkpoints.write_checkpoint(tmp_path / "c", values=values)
    (source / "model.safetensors").unlink()
    state = {name: torch.from_numpy(plain).bfloat16() for name, plain in values.items()}
    torch.save(state, source / "pytorch_model.bin")
    found = checkpoints.dequantized(convert(source, target, tmp_path / "out.gguf"))
    np.testing.assert_array_equal(found["fc.weight"], values["fc.weight"])
    np.testing.assert_array_equal(
        found["blk.1.ffn_conv_base"], values["layers.1.mlp_conv.base_kernel"]
    )


def test_own_reader_agrees_with_the_gguf_package(target_gguf: Path) -> None:
    ours, theirs = read_gguf(target_gguf), gguf.GGUFReader(target_gguf)
    assert list(ours.values) == [key for key in theirs.fields if not key.startswith("GGUF.")]
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "llama.rope.freq_base"):
        value = ours.values[key]
        mine = value.items() if value.item is not None else value.scalar()
        assert mine == checkpoints.read_field(theirs, key)
    places = {t.name: ours.data_offset + t.offset for t in ours.tensors.values()}
    assert places == {t.name: t.data_offset for t in theirs.tensors}
