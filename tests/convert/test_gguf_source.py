"""A drafter's GGUF file as the source: the same drafter in other types."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dflash2_gguf.errors import CheckpointError, DFlash2Error, UsageError
from tests.convert import checkpoints
from tests.convert.conftest import Program
from tests.convert.conversion import convert
from tests.convert.test_peer import QUANTIZED, differing, metadata, wide_checkpoint
from tests.convert.test_variants import reduced

TO_F32 = ["f16", "bf16", "q8_0", "q5_0", "q4_0"]


@pytest.fixture
def f32(checkpoint: Path, target: Path, tmp_path: Path) -> Path:
    convert(checkpoint, target, tmp_path / "tiny-f32.gguf", "f32")
    return tmp_path / "tiny-f32.gguf"


@pytest.mark.native
@pytest.mark.parametrize("preset", ["bf16", "f16", "q8_0", "q4_k_m", "q2_k"])
def test_a_float_file_gives_what_its_checkpoint_gives(
    preset: str, f32: Path, checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    warnings = convert(f32, None, tmp_path / "again.gguf", preset)
    convert(checkpoint, target, tmp_path / "once.gguf", preset)
    assert warnings == ()
    assert differing(tmp_path / "again.gguf", tmp_path / "once.gguf") == []
    again, once = metadata(tmp_path / "again.gguf"), metadata(tmp_path / "once.gguf")
    assert again == once


def test_the_file_it_came_from_is_named_with_its_hash(f32: Path, tmp_path: Path) -> None:
    convert(f32, None, tmp_path / "out.gguf", "bf16")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert checkpoints.read_field(reader, "dflash2.source.gguf") == "tiny-f32.gguf"
    digest = hashlib.sha256(f32.read_bytes()).hexdigest()
    assert checkpoints.read_field(reader, "dflash2.source.gguf_sha256") == digest
    # and the checkpoint before it is still known
    assert checkpoints.read_field(reader, "dflash2.source.name") == "tiny"


@pytest.mark.native
@pytest.mark.parametrize("preset", TO_F32)
def test_every_type_is_decoded_as_the_gguf_package_does(
    preset: str, checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    convert(checkpoint, target, tmp_path / "a.gguf", preset)
    warnings = convert(tmp_path / "a.gguf", None, tmp_path / "b.gguf", "f32")
    expected = checkpoints.dequantized(gguf.GGUFReader(tmp_path / "a.gguf"))
    found = checkpoints.dequantized(gguf.GGUFReader(tmp_path / "b.gguf"))
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
    lossy = preset not in ("f16", "bf16")
    assert bool(warnings) is lossy
    if lossy:
        assert warnings[0].startswith("the source is quantized (")


def test_a_map_of_tokens_is_copied(target: Path, tmp_path: Path) -> None:
    ids = [0, 2, 3, 5, 11, 23]
    convert(reduced(tmp_path / "c", ids), target, tmp_path / "a.gguf", "f32")
    convert(tmp_path / "a.gguf", None, tmp_path / "b.gguf", "bf16")
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "b.gguf").tensors}
    assert tensors["d2t"].data.tolist() == ids


@pytest.mark.peer
@pytest.mark.native
def test_requantized_tensors_equal_those_of_llama_quantize(
    peer_bin: Callable[[str], Path], tmp_path: Path
) -> None:
    target = checkpoints.write_target(tmp_path / "target.gguf", n_embd=256)
    source = wide_checkpoint(tmp_path / "wide")
    convert(source, target, tmp_path / "bf16.gguf", "bf16")
    for preset in QUANTIZED:
        theirs = tmp_path / f"theirs-{preset}.gguf"
        command = [peer_bin("llama-quantize"), tmp_path / "bf16.gguf", theirs, preset.upper(), "2"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        convert(tmp_path / "bf16.gguf", None, tmp_path / f"{preset}.gguf", preset)
        assert differing(tmp_path / f"{preset}.gguf", theirs) == [], preset


def refusal(source: Path, target: Path | None, output: Path) -> tuple[type, str, str | None]:
    with pytest.raises(DFlash2Error) as caught:
        convert(source, target, output, "bf16")
    return type(caught.value), caught.value.message, caught.value.hint


def test_what_a_source_needs_is_told(
    f32: Path, checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.gguf"
    assert refusal(f32, target, out) == (
        UsageError,
        "tiny-f32.gguf has its tokenizer already",
        "leave --target out for a GGUF file",
    )
    assert refusal(checkpoint, None, out) == (
        UsageError,
        "a checkpoint is converted for its target",
        "name the target's file with --target",
    )
    assert refusal(f32, None, f32) == (
        UsageError,
        f"{f32} is an input of this conversion",
        None,
    )
    assert refusal(target, None, out)[:2] == (
        CheckpointError,
        f"{target} is a model of architecture 'llama', not a DFlash drafter",
    )


def test_mixed_up_files_are_named(
    f32: Path, checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.gguf"
    assert refusal(target, checkpoint, out)[1:] == (
        f"{target} is a model of architecture 'llama', not a DFlash drafter",
        "is it the target? a drafter is wanted here",
    )
    assert refusal(checkpoint, f32, out)[1:] == (
        f"{f32} is a drafter, not a target",
        "name the model that it drafts for",
    )
    writer = gguf.GGUFWriter(tmp_path / "imatrix.gguf", "dflash")
    writer.add_type("imatrix")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert refusal(tmp_path / "imatrix.gguf", None, out)[1:] == (
        f"{tmp_path / 'imatrix.gguf'} is an importance matrix, not a DFlash drafter",
        "it goes to --imatrix",
    )


def test_a_truncated_source_leaves_nothing(f32: Path, tmp_path: Path) -> None:
    f32.write_bytes(f32.read_bytes()[:-1000])
    kind, message, _ = refusal(f32, None, tmp_path / "out.gguf")
    assert kind is CheckpointError
    assert "it ends inside the data of tensor" in message
    assert not (tmp_path / "out.gguf").exists()


def test_a_file_with_a_missing_tensor_is_refused(f32: Path, tmp_path: Path) -> None:
    reader = gguf.GGUFReader(f32)
    writer = gguf.GGUFWriter(tmp_path / "cut.gguf", "dflash")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            items: dict[str, Any] = {"sub_type": field.types[-1]} if len(field.types) > 1 else {}
            writer.add_key_value(key, field.contents(), kind, **items)
    for tensor in reader.tensors[1:]:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    kind, message, hint = refusal(tmp_path / "cut.gguf", None, tmp_path / "out.gguf")
    assert (kind, message) == (
        CheckpointError,
        f"{tmp_path / 'cut.gguf'}: missing tensors: {reader.tensors[0].name}",
    )
    assert hint == "`dflash2-convert migrate` brings older files up to date"


def test_the_program_names_outputs_after_the_file(program: Program, f32: Path) -> None:
    done = program(f32, "--preset", "bf16", "--preset", "f16", "-o", "out")
    assert (done.code, done.err) == (0, "")
    assert done.out == "out/tiny-f32-BF16.gguf\nout/tiny-f32-F16.gguf\n"


def test_a_file_whose_tensors_share_bytes_is_refused(f32: Path, tmp_path: Path) -> None:
    name = b"enc.output_norm.weight"
    raw = bytearray(f32.read_bytes())
    at = raw.index(name) + len(name) + 4 + 8 + 4  # dimensions, their number, type
    raw[at : at + 8] = bytes(8)
    (tmp_path / "shared.gguf").write_bytes(raw)
    kind, message, hint = refusal(tmp_path / "shared.gguf", None, tmp_path / "out.gguf")
    assert kind is CheckpointError
    assert message.startswith(f"broken GGUF file {tmp_path / 'shared.gguf'}: tensor ")
    assert message.endswith(" runs into another's data")
    assert hint == "download or convert the file again"
    assert not (tmp_path / "out.gguf").exists()
