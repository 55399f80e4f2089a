"""What a migration refuses, by name and with the way out, and that it leaves nothing behind."""

from __future__ import annotations

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
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash2_gguf.convert import fork_names
from dflash2_gguf.convert.gguf_reader import read_gguf
from dflash2_gguf.convert.gguf_values import Value, array, boolean, f32, string, u32
from dflash2_gguf.convert.migration import plan_migration, write_migrated
from dflash2_gguf.convert.writer import CopiedTensor, GGUFWriter
from dflash2_gguf.errors import CheckpointError, DFlash2Error, PairError, UsageError
from dflash2_gguf.ggml_types import ValueType
from tests.convert import checkpoints
from tests.convert.old_files import (
    ARRAY,
    F32,
    I32,
    KINDS,
    U32,
    Kind,
    dropped,
    ignore,
    migrated,
    write_old,
)

ORIGINAL = "convert the original checkpoint instead"
NAMES_ONLY = "only names and metadata can be migrated; convert the original checkpoint instead"
CONFIG = "--config with the config.json of its checkpoint tells"


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
            Kind(
                keys=dropped("dflash.attention.sliding_window_pattern"),
                adds={
                    "dflash.attention.sliding_window_pattern": (
                        [True],
                        ARRAY,
                        gguf.GGUFValueType.BOOL,
                    )
                },
            ),
            "dflash.attention.sliding_window_pattern has 1 entry for 2 layers",
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


def test_checkpoint_is_not_a_file_to_migrate(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan_migration(checkpoint)
    assert caught.value.message == f"{checkpoint} is a folder"
    assert caught.value.hint == "a checkpoint is converted, not migrated"


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


VALUES = st.one_of(
    st.integers(0, 2**32 - 1).map(u32),
    st.sampled_from([0, 1, 2, 3, 4, 8, 16, 24, 32, 64]).map(u32),
    st.floats(width=32).map(f32),
    st.booleans().map(boolean),
    st.sampled_from(["", "linear", "yarn", "silu", "\x1b[31m"]).map(string),
    st.lists(st.integers(-2, 70), max_size=5).map(lambda items: array(ValueType.INT32, items)),
    st.lists(st.booleans(), max_size=3).map(lambda items: array(ValueType.BOOL, items)),
    st.integers(0, 2**64 - 1).map(lambda n: Value(type=ValueType.UINT64, raw=struct.pack("<Q", n))),
    st.just(
        Value(type=ValueType.ARRAY, item=ValueType.ARRAY, count=1, raw=struct.pack("<IQ", 4, 0))
    ),
)
FIELDS = st.sampled_from(
    sorted(
        {
            *fork_names.SCALARS,
            *fork_names.ARRAYS,
            *fork_names.ALIASES,
            *fork_names.LAYER_IDS,
            *fork_names.MASK_FIELDS,
            *fork_names.REDUNDANT,
        }
    )
)
EDITS = st.lists(st.tuples(FIELDS, st.none() | VALUES), min_size=1, max_size=3)


@settings(
    max_examples=150,
    deadline=5000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(name=st.sampled_from(sorted(KINDS)), edits=EDITS, config=st.booleans())
def test_any_metadata_is_migrated_for_good_or_refused(
    checkpoint: Path,
    good: Path,
    target: Path,
    tmp_path: Path,
    name: str,
    edits: list[tuple[str, Value | None]],
    config: bool,
) -> None:
    """What comes out of a migration needs none."""
    path, kind = tmp_path / "old.gguf", KINDS[name]
    header = read_gguf(write_old(good, path, kind))
    values = dict(header.values)
    for field, value in edits:
        values.pop(f"{kind.arch}.{field}", None)
        if value is not None:
            values[f"{kind.arch}.{field}"] = value
    tensors = [
        CopiedTensor(name=t.name, shape=t.shape, type=t.type, nbytes=t.nbytes)
        for t in header.tensors.values()
    ]
    with GGUFWriter(path, values=values, tensors=tensors, force=True) as writer:
        writer.finish(values)
    more = {"target": target, "config": checkpoint if config else None}
    try:
        migration = plan_migration(path, **more)
    except DFlash2Error as error:
        assert error.message.isprintable()
        return
    if migration.changes:
        write_migrated(migration, tmp_path / "new.gguf", force=True, progress=ignore)
        assert plan_migration(tmp_path / "new.gguf", **more).changes == ()
