"""Files of older converters and forks: what they become, and what the program says of it."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dflash2_gguf.convert.gguf_reader import read_gguf
from dflash2_gguf.convert.inspection import inspect
from dflash2_gguf.convert.migration import plan_migration
from dflash2_gguf.errors import CheckpointError
from tests.convert import checkpoints
from tests.convert.conftest import Program
from tests.convert.old_files import (
    ARRAY,
    F32,
    I32,
    KINDS,
    U32,
    Kind,
    converted,
    dropped,
    migrated,
    write_old,
)
from tests.convert.test_peer import differing, metadata

CONFIG = "--config with the config.json of its checkpoint tells"
MROPE = [8, 8, 8, 0]
GOLDEN = Path(__file__).parent / "golden"


def options(kind: Kind, checkpoint: Path, target: Path) -> dict[str, Path]:
    """What a migration of this kind needs besides the file."""
    given = {"config": checkpoint / "config.json", "target": target}
    return {name: path for name, path in given.items() if name in kind.needs}


@pytest.mark.parametrize("name", KINDS)
def test_file_of_each_kind_becomes_what_the_converter_writes(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    kind = KINDS[name]
    sections = MROPE if "target with M-RoPE" in kind.needs else None
    target = checkpoints.write_target(tmp_path / "target.gguf", sections=sections)
    good = converted(checkpoint, target, tmp_path / "good.gguf")
    old = write_old(good, tmp_path / "old.gguf", kind)
    before = old.read_bytes()
    more = {"target": target} if sections else options(kind, checkpoint, target)
    migrated(old, tmp_path / "new.gguf", **more)
    new = metadata(tmp_path / "new.gguf")
    if name == "nested tags":
        assert new.pop("general.tags") == (["ARRAY", "STRING"], ["a", "b", "c"])
    assert new == metadata(good)
    assert differing(tmp_path / "new.gguf", good) == []
    assert inspect(tmp_path / "new.gguf").problems == ()
    assert old.read_bytes() == before
    again = plan_migration(tmp_path / "new.gguf", **more)
    assert again.changes == ()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.needs])
def test_what_a_kind_needs_is_asked_for(
    checkpoint: Path, good: Path, target: Path, tmp_path: Path, name: str
) -> None:
    """Without the option, the file is refused, or the user is told what cannot be known."""
    kind = KINDS[name]
    old = write_old(good, tmp_path / "old.gguf", kind)
    if name in ("no window", "ids one too low", "no RoPE sections"):
        assert any("tells" in warning for warning in plan_migration(old).warnings) or (
            name == "ids one too low"
        )
        return
    with pytest.raises(CheckpointError) as caught:
        plan_migration(old)
    assert caught.value.message.startswith(f"{old} does not say: ")
    assert caught.value.hint is not None and all(f"--{n}" in caught.value.hint for n in kind.needs)


def test_everything_that_is_missing_is_named_at_once(good: Path, tmp_path: Path) -> None:
    old = write_old(good, tmp_path / "old.gguf", KINDS["dflash-draft, dflash2 keys"])
    with pytest.raises(CheckpointError) as caught:
        plan_migration(old)
    assert caught.value.message == (
        f"{old} does not say: context length, epsilon of the norms, whether attention is causal, "
        "tokenizer"
    )
    assert caught.value.hint == (
        f"{CONFIG}; --target with the model it drafts for brings the tokenizer"
    )


def test_first_drafters_of_a_fork_are_migrated(target: Path, tmp_path: Path) -> None:
    parts = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    data = checkpoints.config(
        architectures=["DFlashDraftModel"], **{f"dflash__{part}": ... for part in parts}
    )
    values = {
        name: value
        for name, value in checkpoints.tensors(checkpoints.config()).items()
        if "conv." not in name and "selector" not in name
    }
    source = checkpoints.write_checkpoint(tmp_path / "tiny", data=data, values=values)
    good = converted(source, target, tmp_path / "good.gguf")
    old = write_old(good, tmp_path / "old.gguf", KINDS["dflash-draft"])
    migrated(old, tmp_path / "new.gguf", config=source)
    assert metadata(tmp_path / "new.gguf") == metadata(good)
    assert differing(tmp_path / "new.gguf", good) == []


def test_file_without_fault_needs_nothing(good: Path, checkpoint: Path, target: Path) -> None:
    for given in ({}, {"config": checkpoint, "target": target}):
        migration = plan_migration(good, **given)
        assert migration.changes == ()


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_any_alignment_is_kept(good: Path, tmp_path: Path, alignment: int) -> None:
    kind = KINDS["dflash, dotted names"]
    old = write_old(good, tmp_path / "old.gguf", kind, alignment=alignment)
    migrated(old, tmp_path / "new.gguf")
    new = metadata(tmp_path / "new.gguf")
    assert new.pop("general.alignment") == (["UINT32"], alignment)
    assert new == metadata(good)
    assert differing(tmp_path / "new.gguf", good) == []
    reader = gguf.GGUFReader(tmp_path / "new.gguf")
    assert {tensor.data_offset % alignment for tensor in reader.tensors} == {0}


@pytest.mark.parametrize("kind_of", [24, 39, 42, 104])
def test_bytes_of_any_tensor_type_are_copied(good: Path, tmp_path: Path, kind_of: int) -> None:
    """A number in place of the type of a tensor that may have any: its bytes stay as they are."""
    old = write_old(good, tmp_path / "old.gguf", KINDS["dflash, dotted names"])
    header = read_gguf(old)
    entry = header.tensors["blk.0.ffn_up.weight"]
    raw = bytearray(old.read_bytes())
    name = raw.index(b"blk.0.ffn_up.weight")
    place = name + len("blk.0.ffn_up.weight") + 4 + 8 * len(entry.shape)
    assert struct.unpack_from("<I", raw, place) == (int(entry.type),)
    struct.pack_into("<I", raw, place, kind_of)
    old.write_bytes(raw)
    migration = migrated(old, tmp_path / "new.gguf")
    new = read_gguf(tmp_path / "new.gguf")
    same = new.tensors["blk.0.ffn_up.weight"]
    assert (same.type, same.shape) == (kind_of, entry.shape)
    begin, end = header.data_offset + entry.offset, new.data_offset + same.offset
    n_bytes = {24: 64 * 32, 39: 64 * 17}.get(kind_of, 64 * 64)
    written = (tmp_path / "new.gguf").read_bytes()[end : end + n_bytes]
    assert written == bytes(raw[begin : begin + n_bytes])
    strange = any("llama.cpp may not know" in warning for warning in migration.warnings)
    assert strange == (kind_of in (42, 104))


def test_quantized_bytes_are_copied(checkpoint: Path, target: Path, tmp_path: Path) -> None:
    good = quantized(converted(checkpoint, target, tmp_path / "f32.gguf", "f32"), tmp_path)
    old = write_old(good, tmp_path / "old.gguf", KINDS["qwen35-dflash-draft"])
    migrated(old, tmp_path / "new.gguf", config=checkpoint, target=target)
    assert differing(tmp_path / "new.gguf", good) == []
    types = {t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "new.gguf").tensors}
    assert types == {"F32", "Q8_0", "Q4_0"}


def quantized(path: Path, folder: Path) -> Path:
    """The file with matrices in two types, by the ``gguf`` package's own quantizers."""
    reader, out = gguf.GGUFReader(path), folder / "quantized.gguf"
    writer = gguf.GGUFWriter(out, "dflash")
    for key, entry in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            item = entry.types[-1] if entry.types[0] is ARRAY else None
            writer.add_key_value(key, entry.contents(), entry.types[0], item)
    for tensor in reader.tensors:
        kind = gguf.GGMLQuantizationType.F32
        if len(tensor.shape) == 2:
            is_up = "ffn_up" in tensor.name
            kind = gguf.GGMLQuantizationType.Q4_0 if is_up else gguf.GGMLQuantizationType.Q8_0
        data = gguf.quantize(np.asarray(tensor.data), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_note_says_which_file_it_was(
    good: Path, checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    old = write_old(good, tmp_path / "old.gguf", KINDS["no RoPE base"])
    migrated(old, tmp_path / "new.gguf", config=checkpoint, target=target)
    reader = gguf.GGUFReader(tmp_path / "new.gguf")
    notes = {
        key: checkpoints.read_field(reader, key)
        for key in reader.fields
        if key.startswith("dflash2.")
    }
    assert notes == {
        "dflash2.format": 1,
        "dflash2.source.name": "tiny",
        "dflash2.source.files": ["old.gguf"],
        "dflash2.source.sha256": [hashlib.sha256(old.read_bytes()).hexdigest()],
        "dflash2.source.rope_freq_base": "rope_parameters.rope_theta",
        "dflash2.target.name": "tiny target",
        "dflash2.target.architecture": "llama",
        "dflash2.target.block_count": 6,
    }


@pytest.mark.parametrize(
    ("key", "value", "kind_of", "corrected"),
    [
        ("rope.freq_base", 1e6, F32, 1e4),
        ("context_length", 64, U32, 128),
        ("block_size", 16, U32, 4),
        ("attention.sliding_window", 8, U32, 16),
        ("attention.causal", True, gguf.GGUFValueType.BOOL, False),
        ("final_logit_softcapping", 30.0, F32, None),
        ("rope.scaling.factor", 64.0, F32, None),
        ("rope.dimension_count", 4, U32, None),
    ],
)
def test_config_corrects_what_the_file_says(
    good: Path, checkpoint: Path, tmp_path: Path, key: str, value: Any, kind_of: Any, corrected: Any
) -> None:
    key = f"dflash.{key}"
    kind = Kind(keys=dropped(key), adds={key: (value, kind_of, None)})
    old = write_old(good, tmp_path / "old.gguf", kind)
    migration = migrated(old, tmp_path / "new.gguf", config=checkpoint)
    assert metadata(tmp_path / "new.gguf") == metadata(good)
    change = next(change for change in migration.changes if change.old_name == key)
    assert (change.new_name, "config.json" in change.source) == (corrected and key, True) or (
        corrected is False
    )


def test_user_may_say_what_layer_ids_count(good: Path, tmp_path: Path) -> None:
    old = write_old(good, tmp_path / "old.gguf", KINDS["ids one too low"])
    migrated(old, tmp_path / "new.gguf", layer_ids="outputs")
    assert metadata(tmp_path / "new.gguf") == metadata(good)


def test_target_s_tokenizer_replaces_another(good: Path, checkpoint: Path, tmp_path: Path) -> None:
    kind = Kind(
        keys=dropped("tokenizer.ggml.pre"),
        adds={"tokenizer.ggml.pre": ("qwen2", gguf.GGUFValueType.STRING, None)},
    )
    old = write_old(good, tmp_path / "old.gguf", kind)
    assert plan_migration(old).changes == ()
    migrated(old, tmp_path / "new.gguf", target=tmp_path / "target.gguf")
    assert metadata(tmp_path / "new.gguf") == metadata(good)


def test_sections_a_target_does_not_have_are_removed(
    good: Path, target: Path, tmp_path: Path
) -> None:
    kind = Kind(adds={"dflash.rope.dimension_sections": ([4, 0, 0, 0], ARRAY, I32)})
    old = write_old(good, tmp_path / "old.gguf", kind)
    assert plan_migration(old).changes == ()
    migrated(old, tmp_path / "new.gguf", target=target)
    assert metadata(tmp_path / "new.gguf") == metadata(good)


def test_program_writes_next_to_the_file_and_lists_the_changes(
    good: Path, target: Path, program: Program, tmp_path: Path
) -> None:
    write_old(good, tmp_path / "old.gguf", KINDS["dflash, ids of outputs"])
    done = program("migrate", "old.gguf", "--target", "target.gguf")
    assert (done.code, done.out) == (0, "old-migrated.gguf\n")
    assert done.err == (
        "dflash.target_layer_ids = [1, 3] -> dflash.target_layers = [2, 4] (the file)\n"
        "dflash.mask_token_id = 3 -> tokenizer.ggml.mask_token_id = 3 (the file)\n"
        "nothing -> dflash2.format = 1 (note of this migration)\n"
        "nothing -> dflash2.source.name = tiny (note of this migration)\n"
        "nothing -> dflash2.source.files = [old.gguf] (note of this migration)\n"
        "nothing -> dflash2.source.sha256 = that of the file (note of this migration)\n"
        "nothing -> dflash2.target.name = tiny target (note of this migration)\n"
        "nothing -> dflash2.target.architecture = llama (note of this migration)\n"
        "nothing -> dflash2.target.block_count = 6 (note of this migration)\n"
    )
    again = program("migrate", "old.gguf", "--target", "target.gguf")
    assert again.code == 1
    assert again.err.endswith("error: old-migrated.gguf exists\nhint: use --force to replace it\n")
    forced = program("migrate", "old.gguf", "--target", "target.gguf", "--force")
    assert (forced.code, forced.out) == (0, "old-migrated.gguf\n")
    nothing = program("migrate", "old-migrated.gguf", "--target", "target.gguf", "-o", "x.gguf")
    assert (nothing.code, nothing.out, nothing.err) == (
        0,
        "",
        "old-migrated.gguf needs no migration: x.gguf was not written, use the file as it is\n",
    )
    assert not (tmp_path / "x.gguf").exists()
    tried = program("migrate", "old-migrated.gguf", "--target", "target.gguf", "--dry-run")
    assert (tried.code, tried.out, tried.err) == (0, "", "old-migrated.gguf needs no migration\n")


def test_dry_run_lists_and_writes_nothing(good: Path, program: Program, tmp_path: Path) -> None:
    write_old(good, tmp_path / "old.gguf", KINDS["dflash, ids of outputs"])
    done = program("migrate", "old.gguf", "--dry-run")
    assert done.out.splitlines()[0] == (
        "dflash.target_layer_ids = [1, 3] -> dflash.target_layers = [2, 4] (the file)"
    )
    assert (done.code, done.err) == (
        0,
        "warning: no RoPE sections; a target with M-RoPE needs them, --target tells\n",
    )
    assert not (tmp_path / "old-migrated.gguf").exists()


def test_verbose_names_every_tensor(good: Path, program: Program, tmp_path: Path) -> None:
    write_old(good, tmp_path / "old.gguf", KINDS["dflash, dotted names"])
    done = program("migrate", "old.gguf", "--dry-run", "-v")
    lines = [line for line in done.err.splitlines() if line.endswith(" bytes copied")]
    assert len(lines) == 36
    assert lines[0] == "fc.weight: BF16, 4096 bytes copied"


def test_json_result_is_complete(good: Path, program: Program, tmp_path: Path) -> None:
    write_old(good, tmp_path / "old.gguf", KINDS["dflash, ids of outputs"])
    done = program("migrate", "old.gguf", "-o", "new.gguf", "--json")
    result = json.loads(done.out)
    assert result["changes"][0] == {
        "old_name": "dflash.target_layer_ids",
        "old": "[1, 3]",
        "new_name": "dflash.target_layers",
        "new": "[2, 4]",
        "source": "the file",
    }
    assert len(result.pop("changes")) == 6
    assert result == {
        "file": "old.gguf",
        "output": "new.gguf",
        "written": True,
        "warnings": ["no RoPE sections; a target with M-RoPE needs them, --target tells"],
    }
    done = program("migrate", "new.gguf", "--json")
    assert json.loads(done.out)["output"] is None


def test_inputs_are_never_the_output(
    good: Path, target: Path, program: Program, tmp_path: Path
) -> None:
    old = write_old(good, tmp_path / "old.gguf", KINDS["dflash, ids of outputs"])
    before = old.read_bytes()
    for name in ("old.gguf", "target.gguf"):
        done = program("migrate", "old.gguf", "--target", "target.gguf", "-o", name, "--force")
        assert (done.code, done.out) == (2, "")
        assert done.err == (
            f"error: {name} is an input of this migration\nhint: give another file with -o\n"
        )
    assert old.read_bytes() == before


def test_help_is_golden(program: Program) -> None:
    done = program("migrate", "--help")
    assert done.out == (GOLDEN / "help-migrate.txt").read_text()


def test_inspect_names_the_command(good: Path, tmp_path: Path) -> None:
    old = write_old(good, tmp_path / "old.gguf", KINDS["dflash-draft"])
    with pytest.raises(CheckpointError) as caught:
        inspect(old)
    assert caught.value.hint == (
        "`dflash2-convert migrate` rewrites files of older converters and forks"
    )
    nested = write_old(good, tmp_path / "nested.gguf", KINDS["nested tags"])
    assert inspect(nested).problems == (
        "general.tags is a list of lists, which llama.cpp refuses; `dflash2-convert migrate`",
    )


_LOADS = """
import sys, llama_cpp
@llama_cpp.llama_log_callback
def drop(level, text, data): pass
llama_cpp.llama_log_set(drop, None)
for path in sys.argv[1:]:
    model = llama_cpp.llama_model_load_from_file(
        path.encode(), llama_cpp.llama_model_default_params()
    )
    print(bool(model))
"""


@pytest.mark.peer
def test_the_unpatched_pin_loads_what_it_refused(
    checkpoint: Path, good: Path, target: Path, tmp_path: Path, peer_dir: Path
) -> None:
    """Of the kinds that a loader can tell; the others draft badly without a word."""
    names = [
        "dflash-draft",
        "qwen35-dflash-draft",
        "dflash-draft, dflash2 keys",
        "dflash, dotted names",
        "dflash, ids of outputs",
        "wide integers",
        "nested tags",
    ]
    old, new = [], []
    for i, name in enumerate(names):
        old.append(write_old(good, tmp_path / f"old-{i}.gguf", KINDS[name]))
        new.append(tmp_path / f"new-{i}.gguf")
        migrated(old[i], new[i], **options(KINDS[name], checkpoint, target))
    done = subprocess.run(
        [sys.executable, "-c", _LOADS, *map(str, (*old, *new))],
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(peer_dir)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False"] * len(old) + ["True"] * len(new)
