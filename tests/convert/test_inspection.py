"""`inspect` names what is wrong with a drafter's file; conversion refuses it in the same words."""

from __future__ import annotations

import hashlib
from pathlib import Path

import gguf
import pytest

from dflash2_gguf.check import find_facts
from dflash2_gguf.convert.inspection import inspect
from dflash2_gguf.convert.migration import plan_migration
from dflash2_gguf.errors import CheckpointError
from tests.convert import checkpoints
from tests.convert.conversion import convert
from tests.convert.old_files import KINDS, Kind, write_old
from tests.convert.pairs import Edit, edit, write_right_drafter, write_right_target
from tests.convert.test_check import error, found

OLDER = "`dflash2-convert migrate` brings older files up to date"
ORIGINAL = "convert the original checkpoint instead"
CONVERT = "convert the drafter's checkpoint with `dflash2-convert`"
SECOND = (
    *(f"selector_{part}.weight" for part in ("hidden", "predecessor", "successor")),
    *(
        f"blk.{layer}.{part}_conv_{kind}"
        for layer in range(2)
        for part in ("attn", "ffn")
        for kind in ("base", "proj.weight")
    ),
)


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_right_drafter(tmp_path / "drafter.gguf")


def refusal(path: Path) -> tuple[str, str | None]:
    with pytest.raises(CheckpointError) as caught:
        convert(path, None, path.with_name("out.gguf"), "bf16")
    assert not path.with_name("out.gguf").exists()
    return caught.value.message, caught.value.hint


WRONG: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "DFlash 2 without its tensors": (
        Edit(drop=SECOND),
        (
            "the metadata is that of a DFlash 2 drafter, the tensors are not",
            (
                "missing tensors: selector_hidden.weight, selector_predecessor.weight, "
                "selector_successor.weight, blk.0.attn_conv_base, blk.0.attn_conv_proj.weight "
                "and 6 more"
            ),
        ),
    ),
    "tensors that nothing claims": (
        Edit(
            add={
                "aux_norm.weight": (32,),
                "blk.0.attn_gate.weight": (4, 32),
                "blk.1.attn_gate.weight": (4, 32),
            }
        ),
        ("unknown tensors: aux_norm.weight, blk.0.attn_gate.weight, blk.1.attn_gate.weight",),
    ),
    "features of another width": (
        Edit(set={"dflash.embedding_length_out": 128}),
        ("unknown fields: dflash.embedding_length_out",),
    ),
    "outputs of layers where inputs are meant": (
        Edit(set={"dflash.target_layers": [0, 2]}),
        (
            (
                "target layers -1, 1: the file counts outputs where inputs are meant; "
                "`dflash2-convert migrate --layer-ids outputs`"
            ),
        ),
    ),
    "a layer that the target does not have": (
        Edit(set={"dflash.target_layers": [2, 7]}),
        ("target layer 6 of a target with layers 0 to 5",),
    ),
    "mask token without a row": (
        Edit(set={"tokenizer.ggml.mask_token_id": 24}),
        ("mask token 24 is outside the vocabulary of 24",),
    ),
    "norm epsilon that is no number": (
        Edit(set={"dflash.attention.layer_norm_rms_epsilon": float("nan")}),
        ("dflash.attention.layer_norm_rms_epsilon is nan",),
    ),
    "no heads": (
        Edit(set={"dflash.attention.head_count": 0}),
        (
            "dflash.attention.head_count is 0",
            "the numbers that fix the tensor shapes are incomplete",
        ),
    ),
    "block size as text": (
        Edit(set={"dflash.block_size": "four"}, as_given=True),
        ("dflash.block_size is four",),
    ),
    "layers as a number": (
        Edit(set={"dflash.target_layers": 2}, as_given=True),
        (
            "dflash.target_layers is 2",
            "the numbers that fix the tensor shapes are incomplete",
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_file_is_named(name: str, tmp_path: Path, drafter: Path) -> None:
    changes, problems = WRONG[name]
    wrong = edit(drafter, tmp_path / "wrong.gguf", changes)
    assert inspect(wrong).problems == problems
    assert refusal(wrong) == (f"{wrong}: {problems[0]}", OLDER)


@pytest.mark.parametrize(
    "key",
    [
        "dflash.block_count",
        "dflash.context_length",
        "dflash.embedding_length",
        "dflash.feed_forward_length",
        "dflash.attention.head_count",
        "dflash.attention.head_count_kv",
        "dflash.attention.layer_norm_rms_epsilon",
        "dflash.rope.freq_base",
        "dflash.block_size",
        "dflash.conv_kernel_size",
        "dflash.conv_group_size",
        "dflash.selector_rank",
        "dflash.selector_top_k",
        "dflash.target_layers",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.mask_token_id",
    ],
)
def test_a_missing_key_is_named(key: str, tmp_path: Path, drafter: Path) -> None:
    wrong = edit(drafter, tmp_path / "wrong.gguf", Edit(set={key: None}))
    assert inspect(wrong).problems[0] == f"{key} is missing"
    assert refusal(wrong) == (f"{wrong}: {key} is missing", OLDER)


def test_features_of_another_width_are_refused_wherever_a_file_is_taken(
    tmp_path: Path, drafter: Path
) -> None:
    """llama.cpp ends the process at the first draft."""
    target = write_right_target(tmp_path / "target.gguf")
    wide = {"dflash.embedding_length_out": 128}
    wrong = edit(drafter, tmp_path / "wrong.gguf", Edit(set=wide))
    assert found(find_facts(target, wrong), tmp_path) == [
        error(
            "loading",
            "wrong.gguf: dflash.embedding_length_out is 128, dflash.embedding_length is 32",
            f"the features of a drafter have its own width; {CONVERT}",
        )
    ]
    with pytest.raises(CheckpointError) as caught:
        plan_migration(wrong)
    assert (caught.value.message, caught.value.hint) == (
        "the file has the field dflash.embedding_length_out, which this version does not know",
        f"what it changes would be lost; {ORIGINAL}",
    )


def test_a_path_where_nothing_is_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        inspect(tmp_path / "Qwen3.8-27B-DFlash2-IQ4_XS.gguf")
    assert (caught.value.message, caught.value.hint) == (
        f"there is no file or folder {tmp_path / 'Qwen3.8-27B-DFlash2-IQ4_XS.gguf'}",
        "check the path; it can be a GGUF file or a checkpoint folder",
    )


def hashes(path: Path) -> dict[str, str]:
    found: dict[str, str] = inspect(path).facts["source_sha256"]
    return found


@pytest.mark.parametrize("shards", [1, 3])
def test_checkpoints_of_one_name_and_different_bytes_are_told_apart(
    shards: int, target: Path, tmp_path: Path
) -> None:
    data = checkpoints.config()
    other = checkpoints.tensors(data)
    other["norm.weight"][0] += 1
    for folder, values in (("a", checkpoints.tensors(data)), ("b", other)):
        source = checkpoints.write_checkpoint(
            tmp_path / folder / "tiny", values=values, shards=shards
        )
        convert(source, target, tmp_path / f"{folder}.gguf")
    a, b = hashes(tmp_path / "a.gguf"), hashes(tmp_path / "b.gguf")
    changed = "model.safetensors" if shards == 1 else "model-00003-of-00003.safetensors"
    assert len(a) == shards + 1
    assert {name for name in a if a[name] != b[name]} == {changed}
    assert inspect(tmp_path / "a.gguf").facts["source"] == "tiny"


def test_a_file_made_from_a_file_names_both_sources(good: Path, tmp_path: Path) -> None:
    convert(good, None, tmp_path / "out.gguf", "f16")
    digest = hashlib.sha256(good.read_bytes()).hexdigest()
    assert inspect(tmp_path / "out.gguf").facts["source_gguf"] == {"good.gguf": digest}
    assert hashes(tmp_path / "out.gguf") == hashes(good)


@pytest.mark.parametrize(
    ("kind", "warning"),
    [
        (
            KINDS["no window"],
            (
                "no layer has a sliding window; converters of old left windows out, "
                "--config with the config.json of the checkpoint tells"
            ),
        ),
        (Kind(), None),
        (
            Kind(adds={"general.license": ("cc-by-nc-nd-4.0", gguf.GGUFValueType.STRING, None)}),
            "licence cc-by-nc-nd-4.0: non-commercial use only, a converted file must not be shared",
        ),
    ],
)
def test_a_migration_warns_of_what_it_cannot_know(
    kind: Kind, warning: str | None, good: Path, tmp_path: Path
) -> None:
    old = write_old(good, tmp_path / "old.gguf", kind)
    sections = "no RoPE sections; a target with M-RoPE needs them, --target tells"
    assert set(plan_migration(old).warnings) == {sections, warning} - {None}


def test_embeddings_without_a_head_are_a_forks_until_a_config_ties_them(
    target: Path, tmp_path: Path
) -> None:
    data = checkpoints.config(tie_word_embeddings=True)
    values = checkpoints.tensors(checkpoints.config())
    values["embed_tokens.weight"] = checkpoints.round_bf16(range(24 * 32)).reshape(24, 32)
    tied = checkpoints.write_checkpoint(tmp_path / "tied", data=data, values=values)
    convert(tied, target, tmp_path / "good.gguf", "bf16")
    untied = checkpoints.write_checkpoint(tmp_path / "untied")
    old = write_old(tmp_path / "good.gguf", tmp_path / "old.gguf", KINDS["dflash-draft"])
    with pytest.raises(CheckpointError) as caught:
        plan_migration(old, config=untied)
    assert (caught.value.message, caught.value.hint) == (
        f"{old} has token_embd.weight but no output.weight, and nothing ties them",
        "llama.cpp would use the embeddings as head; a --config that ties them allows it",
    )
    assert plan_migration(old, config=tied).changes
