"""Files of older converters and forks: what they become, what is refused, what is left behind."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dflash2_gguf.convert.gguf_reader import read_gguf
from dflash2_gguf.convert.inspection import inspect
from dflash2_gguf.convert.migration import Migration, plan_migration, write_migrated
from dflash2_gguf.convert.pipeline import make_plan, run
from dflash2_gguf.errors import CheckpointError, DFlash2Error, PairError, UsageError
from dflash2_gguf.presets import load_preset
from tests.convert import checkpoints
from tests.convert.conftest import Program
from tests.convert.old_files import ARRAY, F32, I32, KINDS, U32, Kind, dropped, write_old
from tests.convert.test_peer import differing, metadata

ORIGINAL = "convert the original checkpoint instead"
NAMES_ONLY = "only names and metadata can be migrated; convert the original checkpoint instead"
CONFIG = "--config with the config.json of its checkpoint tells"
MROPE = [8, 8, 8, 0]
GOLDEN = Path(__file__).parent / "golden"


def converted(source: Path, target: Path, path: Path, preset: str = "bf16") -> Path:
    """What the converter writes for this drafter."""
    run(make_plan(source, target, [(load_preset(preset), path)]), force=False, progress=ignore)
    return path


def ignore(_count: int) -> None:
    """Nobody watches the progress."""


def migrated(path: Path, out: Path, **options: Any) -> Migration:
    migration = plan_migration(path, **options)
    write_migrated(migration, out, force=False, progress=ignore)
    return migration


@pytest.fixture
def good(checkpoint: Path, target: Path, tmp_path: Path) -> Path:
    """The converter's file of the small drafter."""
    return converted(checkpoint, target, tmp_path / "good.gguf")


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


@pytest.mark.parametrize(
    ("adds", "given", "kind", "message", "hint"),
    [
        (
            {"dflash.target_layers": ([0, 3], ARRAY, I32)},
            {},
            CheckpointError,
            (
                "the drafter would read the input of layer 0 of its target, which comes before any "
                "layer"
            ),
            "--layer-ids outputs if the file counts outputs of layers from 0",
        ),
        (
            {"dflash.target_layers": ([2, 7], ARRAY, I32)},
            {"target"},
            PairError,
            "the drafter would read layer 6 of its target, but tiny target has layers 0 to 5",
            "--layer-ids inputs if the file counts inputs of layers, or another target",
        ),
        (
            {"dflash.target_layers": ([1, 4], ARRAY, I32)},
            {"config"},
            CheckpointError,
            (
                "config.json is another drafter's: target layers [1, 3], dflash.target_layers is "
                "[1, 4]"
            ),
            "give the config.json of the checkpoint this file was made from",
        ),
        (
            {
                "dflash.target_layers": ([2, 4], ARRAY, I32),
                "dflash.dflash.target_layer_ids": ([2, 4], ARRAY, I32),
            },
            {},
            CheckpointError,
            (
                "the file contradicts itself: dflash.target_layers [2, 4] and "
                "dflash.dflash.target_layer_ids [2, 4]"
            ),
            "--config config.json tells which is right",
        ),
        (
            {"dflash.target_layers": ([2, 2], ARRAY, I32)},
            {},
            CheckpointError,
            "target layers [1, 1] repeat",
            None,
        ),
    ],
)
def test_wrong_layers_are_refused(
    good: Path,
    checkpoint: Path,
    target: Path,
    tmp_path: Path,
    adds: dict[str, Any],
    given: set[str],
    kind: type[DFlash2Error],
    message: str,
    hint: str | None,
) -> None:
    old = write_old(
        good, tmp_path / "old.gguf", Kind(keys=dropped("dflash.target_layers"), adds=adds)
    )
    both = {"target": target, "config": checkpoint}
    with pytest.raises(kind) as caught:
        plan_migration(old, **{name: both[name] for name in given})
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_layer_ids_that_contradict_the_config_are_a_usage_error(
    good: Path, checkpoint: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        plan_migration(good, config=checkpoint, layer_ids="outputs")
    assert caught.value.message == (
        "--layer-ids outputs contradicts config.json: target layers [1, 3], "
        "dflash.target_layers is [2, 4]"
    )
    with pytest.raises(UsageError) as caught:
        plan_migration(good, layer_ids="both")
    assert caught.value.message == "layer ids are inputs or outputs of layers, not 'both'"


FORK = KINDS["dflash-draft"]


@pytest.mark.parametrize(
    ("kind", "message", "hint"),
    [
        (
            replace(FORK, adds={**FORK.adds, "dflash-draft.dflash.zero_mask": (1, U32, None)}),
            (
                "the file has the field dflash-draft.dflash.zero_mask, which this version does not "
                "know"
            ),
            f"what it changes would be lost; {ORIGINAL}",
        ),
        (
            replace(FORK, adds={**FORK.adds, "dflash-draft.dflash.domino.enabled": (1, U32, None)}),
            (
                "dflash-draft.dflash.domino.enabled belongs to a Domino drafter, not to a DFlash "
                "drafter"
            ),
            None,
        ),
        (
            replace(FORK, adds={**FORK.adds, "dflash-draft.decoder_arch": ("laguna", None, None)}),
            "dflash-draft.decoder_arch belongs to a Laguna drafter, not to a DFlash drafter",
            None,
        ),
        (
            replace(FORK, adds={**FORK.adds, "dflash-draft.block_size": (8, U32, None)}),
            (
                "the file contradicts itself: dflash-draft.dflash.block_size is 4, "
                "dflash-draft.block_size is 8"
            ),
            ORIGINAL,
        ),
        (
            replace(
                FORK, adds={**FORK.adds, "dflash-draft.dflash.n_target_features": (96, U32, None)}
            ),
            "dflash-draft.dflash.n_target_features is 96, but features are 64",
            None,
        ),
        (
            replace(FORK, adds={**FORK.adds, "dflash-draft.rope_theta": (float("nan"), F32, None)}),
            "dflash-draft.rope_theta is nan, which makes no sense there",
            ORIGINAL,
        ),
        (
            replace(FORK, tensors={**FORK.tensors, "output_norm.weight": "markov_w1.weight"}),
            "tensor markov_w1.weight belongs to a DSpark drafter",
            "DFlash drafters can be migrated",
        ),
        (
            replace(FORK, tensors={**FORK.tensors, "output_norm.weight": "mystery.weight"}),
            "{old} lacks tensor output_norm.weight",
            NAMES_ONLY,
        ),
        (
            replace(FORK, tensors={**FORK.tensors, "blk.1.attn_k.weight": "blk.1.attn_kk.weight"}),
            "{old} lacks tensor blk.1.attn_k.weight",
            NAMES_ONLY,
        ),
        (
            replace(FORK, arch="gemma4-dflash-draft"),
            (
                "{old} is a fork's drafter with Gemma's graph, which llama.cpp does not have "
                "(architecture 'gemma4-dflash-draft')"
            ),
            "known drafters are dflash, dflash-draft, qwen35-dflash-draft",
        ),
        (
            replace(FORK, arch="llama"),
            "{old} is not a DFlash drafter (architecture 'llama')",
            "known drafters are dflash, dflash-draft, qwen35-dflash-draft",
        ),
        (
            Kind(adds={"split.count": (2, gguf.GGUFValueType.UINT16, None)}),
            "{old} is one part of a split file",
            "merge the parts with llama-gguf-split",
        ),
        (
            Kind(
                keys=dropped("dflash.attention.head_count"),
                adds={"dflash.attention.head_count": (8, U32, None)},
            ),
            "dflash.attention.head_count is 8, but by the shape of blk.0.attn_q.weight it is 4",
            "the file is damaged or was edited; convert the original checkpoint instead",
        ),
        (
            Kind(
                keys=dropped("dflash.attention.sliding_window_pattern"),
                adds={
                    "dflash.attention.sliding_window_pattern": (
                        [True] * 3,
                        ARRAY,
                        gguf.GGUFValueType.BOOL,
                    )
                },
            ),
            "dflash.attention.sliding_window_pattern has 3 entries for 2 layers",
            "--config with the config.json of its checkpoint corrects it",
        ),
        (
            Kind(keys=dropped("dflash.attention.sliding_window_pattern")),
            "{old} does not say: which layers slide",
            CONFIG,
        ),
        (
            Kind(adds={"dflash.rope.scaling.factor": (64.0, F32, None)}),
            "{old} does not say: kind of RoPE scaling",
            CONFIG,
        ),
        (
            Kind(
                keys=dropped("tokenizer.ggml.mask_token_id"),
                adds={"tokenizer.ggml.mask_token_id": (24, U32, None)},
            ),
            "mask token 24 is outside the vocabulary of 24",
            None,
        ),
        (
            Kind(adds={"dflash.dflash.mask_token_id": (5, U32, None)}),
            (
                "the file contradicts itself: tokenizer.ggml.mask_token_id is 3 and "
                "dflash.dflash.mask_token_id is 5"
            ),
            "--config config.json tells which is right",
        ),
        (
            Kind(
                keys=dropped("dflash.block_size"),
                adds={"dflash.block_size": ([4], ARRAY, I32)},
            ),
            "dflash.block_size is a list",
            ORIGINAL,
        ),
    ],
)
def test_what_cannot_be_migrated_is_refused_by_name(
    checkpoint: Path, good: Path, tmp_path: Path, kind: Kind, message: str, hint: str | None
) -> None:
    kind = replace(
        kind, adds={k: (v, t or gguf.GGUFValueType.STRING, i) for k, (v, t, i) in kind.adds.items()}
    )
    old = write_old(good, tmp_path / "old.gguf", kind)
    given = {"config": checkpoint} if kind.arch != "dflash" else {}
    with pytest.raises(CheckpointError) as caught:
        plan_migration(old, **given)
    assert (caught.value.message, caught.value.hint) == (message.format(old=old), hint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 96}, "feed-forward size 96, the file has 64"),
        (
            {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3},
            "layers 3, the file has 2",
        ),
    ],
)
def test_config_of_another_drafter_is_refused(
    good: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = tmp_path / "other.json"
    config.write_text(json.dumps(checkpoints.config(**changes)))
    with pytest.raises(CheckpointError) as caught:
        plan_migration(good, config=config)
    assert caught.value.message == f"config.json is another drafter's: {message}"


def test_interleaved_weights_of_a_fork_are_refused(good: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(checkpoints.config(dflash__rope_is_neox_style=False)))
    old = write_old(good, tmp_path / "old.gguf", FORK)
    with pytest.raises(CheckpointError) as caught:
        plan_migration(old, config=config)
    assert caught.value.message == (
        "config.json asks for interleaved rotation, and forks do not reorder such weights"
    )
    assert caught.value.hint == NAMES_ONLY


@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"n_embd": 64}, "hidden size differs: the drafter was made for 32, tiny target has 64"),
        ({"n_vocab": 25}, "vocabulary differs: the drafter was made for 24, tiny target has 25"),
    ],
)
def test_target_of_another_drafter_is_refused(
    good: Path, tmp_path: Path, other: dict[str, int], message: str, tokenizer: bool
) -> None:
    old = write_old(good, tmp_path / "old.gguf", Kind(tokenizer=tokenizer, keys=_WITH_MASK))
    path = checkpoints.write_target(tmp_path / "other.gguf", **other)
    with pytest.raises(PairError) as caught:
        plan_migration(old, target=path)
    assert caught.value.message == message
    assert caught.value.hint == "give the target the drafter was trained for"


_WITH_MASK = {"tokenizer.ggml.mask_token_id": "tokenizer.ggml.mask_token_id"}


def test_overlapping_tensors_are_refused(good: Path, tmp_path: Path) -> None:
    old = write_old(good, tmp_path / "old.gguf", KINDS["no causality"])
    raw = bytearray(old.read_bytes())
    place = raw.index(b"enc.output_norm.weight") + len("enc.output_norm.weight") + 4 + 8 + 4
    struct.pack_into("<Q", raw, place, 0)
    old.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        plan_migration(old, config=tmp_path / "tiny")
    assert caught.value.message.startswith(f"broken GGUF file {old}: tensor ")
    assert caught.value.message.endswith(" runs into another's data")


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


_KILLED = """
import os, signal, sys
from dflash2_gguf.convert import migration
copy = migration._copy
def kill_while_writing(plan, writer, progress):
    assert len(os.listdir("out")) == 1, "the temporary file is there"
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    return copy(plan, writer, progress)
migration._copy = kill_while_writing
from dflash2_gguf.convert_cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_signal_leaves_nothing(good: Path, tmp_path: Path, name: str, code: int) -> None:
    write_old(good, tmp_path / "old.gguf", KINDS["dflash, dotted names"])
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, name, "migrate", "old.gguf", "-o", "out/x.gguf", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        # an ignored signal would be inherited from the shell that runs the tests
        preexec_fn=lambda: signal.signal(getattr(signal, name), signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert list((tmp_path / "out").iterdir()) == []


def test_full_disk_leaves_nothing(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> int:
        raise OSError(28, "No space left on device")

    old = write_old(good, tmp_path / "old.gguf", KINDS["dflash, dotted names"])
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DFlash2Error) as caught:
        migrated(old, tmp_path / "out" / "x.gguf")
    assert caught.value.message == f"cannot write {tmp_path / 'out' / 'x.gguf'}: the disk is full"
    assert list((tmp_path / "out").iterdir()) == []


def test_file_that_shrinks_while_it_is_read_is_refused(good: Path, tmp_path: Path) -> None:
    old = write_old(good, tmp_path / "old.gguf", KINDS["dflash, dotted names"])
    migration = plan_migration(old)
    size = old.stat().st_size
    os.truncate(old, size - 100)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError) as caught:
        write_migrated(migration, tmp_path / "out" / "x.gguf", force=False, progress=ignore)
    assert caught.value.message == (
        f"{old} changed while it was read: {size - 100} bytes, {size} before"
    )
    assert list((tmp_path / "out").iterdir()) == []


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
        "old-migrated.gguf needs no migration\n",
    )
    assert not (tmp_path / "x.gguf").exists()


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
    old = write_old(good, tmp_path / "old.gguf", FORK)
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
