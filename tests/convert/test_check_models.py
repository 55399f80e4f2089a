"""`check` on targets of every form, published drafters at their true size, and what it prints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from dflash2_gguf import check as module
from dflash2_gguf.check import CheckRequest, check, find_facts
from dflash2_gguf.check_fact import Fact, Verdict, ok, warning
from dflash2_gguf.convert.pipeline import make_plan
from dflash2_gguf.convert.ui import Terminal
from dflash2_gguf.known_models import (
    HF_ARCHITECTURES,
    NO_ROLLBACK,
    PUBLISHES_INNER,
    PUBLISHES_LAST,
    RELEASES,
    UNUSABLE,
)
from dflash2_gguf.native import MAX_DRAFT
from dflash2_gguf.presets import load_preset
from tests.convert import checkpoints
from tests.convert.conftest import Program
from tests.convert.hf_targets import write_hf_target
from tests.convert.pairs import (
    Edit,
    edit,
    write_holes,
    write_right_drafter,
    write_right_target,
)
from tests.convert.releases import PUBLISHED, write_checkpoint_of, write_target_of
from tests.convert.test_check import CONVERT, OTHER, error, found, note
from tests.convert.test_check import warning as warned
from tests.convert.test_target import write_folder

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
KINDS = gguf.GGMLQuantizationType


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_right_drafter(tmp_path / "drafter.gguf")


def message(facts: tuple[Fact, ...], name: str) -> str:
    (fact,) = [fact for fact in facts if fact.name == name]
    return fact.message


def write_drafter_of(
    release: str,
    folder: Path,
    target: Path,
    *,
    changes: dict[str, Any] | None = None,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """The GGUF file of a release as this converter describes it, with holes for weights."""
    checkpoint = write_checkpoint_of(release, folder / release)
    path = folder / "drafter.gguf"
    plan = make_plan(checkpoint, target, [(load_preset("f32"), path)])
    values = plan.metadata(plan.outputs[0], {"model.safetensors": "ab" * 32})
    shapes = {tensor.spec.name: tensor.spec.shape for tensor in plan.tensors}
    return write_holes(path, {**values, **(changes or {})}, shapes, kinds)


@pytest.mark.parametrize("release", PUBLISHED)
def test_published_checkpoints_pass(release: str, tmp_path: Path) -> None:
    target = write_target_of(release, tmp_path / "target.gguf")
    facts = find_facts(target, write_checkpoint_of(release, tmp_path / release))
    assert [f.name for f in facts if f.verdict is not Verdict.OK] == ["licence"]
    assert message(facts, "release") == f"every number is that of {release}"


@pytest.mark.parametrize("release", PUBLISHED)
def test_published_drafters_pass(release: str, tmp_path: Path) -> None:
    target = write_target_of(release, tmp_path / "target.gguf")
    facts = find_facts(target, write_drafter_of(release, tmp_path, target))
    assert [f.name for f in facts if f.verdict is not Verdict.OK] == ["licence"]
    assert message(facts, "release") == f"every number is that of {release}"


def test_the_real_pair_passes_in_every_form(
    target_gguf: Path,
    drafter_gguf: Callable[[str], Path],
    drafter_dir: Path,
    tmp_path: Path,
) -> None:
    folder = write_hf_target(tmp_path / "hf", target_gguf)
    for target in (target_gguf, folder):
        for drafter in (drafter_gguf("q8_0"), drafter_gguf("q4_k_m"), drafter_dir):
            facts = find_facts(target, drafter)
            left = {f.name for f in facts if f.verdict is not Verdict.OK}
            assert left - {"licence", "embeddings and head"} == set()
            assert message(facts, "target graph") == "architecture 'llama' publishes them"


def test_every_release_is_compared() -> None:
    assert {release.name for release in RELEASES} == set(PUBLISHED)


@pytest.mark.parametrize(
    ("release", "changes", "difference"),
    [
        (
            "Qwen3.8-27B-DFlash2",
            {"dflash.rope.freq_base": 1e6},
            "rope base 1e+06 instead of 1e+07",
        ),
        (
            "GLM-5.3-Flash-DFlash2",
            {"dflash.target_layers": [5, 14, 24, 33, 42]},
            "target layers 4/13/23/32/41 instead of 5/14/24/33/42",
        ),
        (
            "Muse-Glimmer-30B-DFlash2",
            {"tokenizer.ggml.mask_token_id": 4, "dflash.block_size": 8},
            "mask token id 4 instead of 201818, block size 8 instead of 16",
        ),
    ],
)
def test_numbers_that_are_not_those_of_the_release_are_named(
    release: str, changes: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    target = write_target_of(release, tmp_path / "target.gguf")
    wrong = write_drafter_of(release, tmp_path, target, changes=changes)
    expected = error("release", f"differs from {release}: {difference}", CONVERT)
    assert expected in found(find_facts(target, wrong), tmp_path)


def test_another_drafter_of_a_published_shape_is_only_suspicious(tmp_path: Path) -> None:
    release = "Qwen3.8-27B-DFlash2"
    target = write_target_of(release, tmp_path / "target.gguf")
    changes = {
        "general.name": "mine",
        "dflash2.source.name": "me/mine",
        "dflash.attention.sliding_window": 4096,
    }
    facts = find_facts(target, write_drafter_of(release, tmp_path, target, changes=changes))
    assert found(facts, tmp_path)[0] == warned(
        "release",
        f"has the shape of {release} and differs from it: sliding window 4096 instead of 2048",
        f"right if it is another drafter of that shape; else {CONVERT}",
    )


def test_a_selector_of_few_bits_is_named(tmp_path: Path) -> None:
    release = "GLM-5.3-Flash-DFlash2"
    target = write_target_of(release, tmp_path / "target.gguf")
    kinds = {"selector_predecessor.weight": KINDS.Q2_K, "selector_successor.weight": KINDS.IQ2_XXS}
    wrong = write_drafter_of(release, tmp_path, target, kinds=kinds)
    assert found(find_facts(target, wrong), tmp_path)[0] == warned(
        "selector precision",
        "less than 4 bits per weight: selector_predecessor.weight Q2_K, "
        "selector_successor.weight type 16",
        "measure it with --run, or take a quantization that spares the selector",
    )


def test_the_feature_of_several_streams_is_as_wide_as_one(tmp_path: Path, drafter: Path) -> None:
    def with_streams(n_embd: int) -> Path:
        bare = write_right_target(tmp_path / "bare.gguf", arch="glm5-next", n_embd=n_embd)
        streams = {"glm5-next.hyper_connection.count": 4}
        return edit(bare, tmp_path / "target.gguf", Edit(set=streams))

    of_arch = Edit(set={"dflash2.target.architecture": "glm5-next"})
    drafter = edit(drafter, tmp_path / "glm.gguf", of_arch)
    facts = find_facts(with_streams(32), drafter)
    assert message(facts, "hidden size") == "32 in both; the mean of 4 streams is read"
    assert found(facts, tmp_path) == []
    assert found(find_facts(with_streams(8), drafter), tmp_path) == [
        error(
            "hidden size",
            "the drafter's 32 are all 4 residual streams of the target side by side, the features "
            "are their mean of 8",
            "the checkpoint was exported with the wrong feature width; take another one",
        )
    ]


def with_padding(path: Path, *, n_vocab: int, n_padding: int) -> Path:
    bare = write_right_target(path.with_name("bare.gguf"), n_vocab=n_vocab)
    types = [1] * (n_vocab - n_padding) + [5] * n_padding
    return edit(bare, path, Edit(set={"tokenizer.ggml.token_type": types}))


def test_padding_of_the_target_is_told(tmp_path: Path, drafter: Path) -> None:
    target = with_padding(tmp_path / "target.gguf", n_vocab=24, n_padding=4)
    facts = find_facts(target, drafter)
    assert message(facts, "vocabulary") == "24 tokens in both, the last 4 of them without text"
    assert found(facts, tmp_path) == []
    of_padding = edit(drafter, tmp_path / "d.gguf", Edit(set={"tokenizer.ggml.mask_token_id": 21}))
    facts = find_facts(target, of_padding)
    assert message(facts, "mask token") == "21, 't21', one of the rows without text"


def test_a_drafter_without_the_padding_of_its_target_is_told_apart(
    tmp_path: Path, drafter: Path
) -> None:
    target = with_padding(tmp_path / "target.gguf", n_vocab=28, n_padding=4)
    assert found(find_facts(target, drafter), tmp_path) == [
        error(
            "vocabulary",
            "target 28 tokens with 4 rows of padding, drafter 24 without",
            "the drafter was converted for a target without its padding; convert it for this one",
        )
    ]


def test_a_few_renamed_tokens_are_a_note(tmp_path: Path) -> None:
    target = write_right_target(tmp_path / "target.gguf", n_vocab=200)
    drafter = write_right_drafter(tmp_path / "right.gguf")
    tokens = ["<pad>", *(f"t{i}" for i in range(1, 200))]
    renamed = edit(
        drafter,
        tmp_path / "drafter.gguf",
        Edit(
            set={"tokenizer.ggml.tokens": tokens},
            drop=("selector_predecessor.weight", "selector_successor.weight"),
            add={
                "selector_predecessor.weight": (200, 32),
                "selector_successor.weight": (200, 32),
            },
        ),
    )
    assert found(find_facts(target, renamed), tmp_path) == [
        note(
            "tokens",
            "1 of 200 differ, the first is 0: 't0' in the target, '<pad>' in the drafter",
            "harmless where they are unused; else convert the drafter for this file",
        )
    ]


def test_a_target_without_weights_lends_no_head(tmp_path: Path, drafter: Path) -> None:
    target = checkpoints.write_target(tmp_path / "target.gguf")
    assert found(find_facts(target, drafter), tmp_path) == [
        error(
            "embeddings and head",
            "the drafter uses the target's head and embeddings, and target.gguf has none",
            "give the file that holds the target's weights",
        )
    ]


def test_a_reduced_head_is_the_drafters_own(tmp_path: Path, drafter: Path) -> None:
    target = write_right_target(tmp_path / "target.gguf")
    reduced = Edit(maps={"d2t": 16}, add={"output.weight": (16, 32)})
    facts = find_facts(target, edit(drafter, tmp_path / "d.gguf", reduced))
    assert found(facts, tmp_path) == []
    assert message(facts, "embeddings and head") == (
        "the drafter's own head, the target's embeddings, with a head of 16 tokens"
    )


def test_a_reduced_head_that_was_lost_is_told(tmp_path: Path, drafter: Path) -> None:
    target = write_right_target(tmp_path / "target.gguf")
    facts = find_facts(target, edit(drafter, tmp_path / "d.gguf", Edit(maps={"d2t": 16})))
    assert found(facts, tmp_path)[-1] == error(
        "embeddings and head",
        "the drafter has a vocabulary of 16 tokens and lost its head; the target's has other rows",
        CONVERT,
    )


def test_a_target_with_other_embeddings_than_tokens_is_told(tmp_path: Path, drafter: Path) -> None:
    bare = checkpoints.write_target(tmp_path / "bare.gguf")
    target = edit(bare, tmp_path / "target.gguf", Edit(add={"token_embd.weight": (32, 32)}))
    assert found(find_facts(target, drafter), tmp_path) == [
        error(
            "vocabulary",
            "the target names 24 tokens and has embeddings for 32",
            "llama.cpp refuses the target; convert it again",
        )
    ]


def test_a_target_is_cut_off(tmp_path: Path, drafter: Path) -> None:
    whole = write_right_target(tmp_path / "whole.gguf")
    target = edit(whole, tmp_path / "target.gguf", Edit(cut=100))
    assert found(find_facts(target, drafter), tmp_path) == [
        error(
            "target",
            "broken GGUF file target.gguf: it ends inside the data of tensor 'token_embd.weight'",
            "download or convert the file again",
        )
    ]


def test_a_target_of_a_type_this_project_does_not_write_is_cut_off(
    tmp_path: Path, drafter: Path
) -> None:
    reader = gguf.GGUFReader(write_right_target(tmp_path / "right.gguf"))
    values = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    shapes = {"token_embd.weight": (24, 32), "output.weight": (24, 256)}
    target = write_holes(tmp_path / "target.gguf", values, shapes, {"output.weight": KINDS.IQ2_XXS})
    with target.open("r+b") as file:
        file.truncate(target.stat().st_size - 100)
    size = target.stat().st_size
    assert found(find_facts(target, drafter), tmp_path) == [
        error(
            "target",
            f"target.gguf is truncated: tensor output.weight ends at byte {size + 100 - 16}, "
            f"the file has {size}",
            "the download probably stopped half-way: fetch the file again",
        )
    ]


def test_swapped_files_are_told(tmp_path: Path, drafter: Path) -> None:
    target = write_right_target(tmp_path / "target.gguf")
    assert found(find_facts(drafter, target), tmp_path) == [
        error(
            "target",
            "drafter.gguf is a drafter, not a target",
            "name the model that it drafts for",
        ),
        error(
            "drafter",
            "target.gguf is not a drafter: its architecture is 'llama'",
            "are target and drafter swapped?",
        ),
    ]


def test_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    path = "check the path; it can be a GGUF file or a {} folder"
    assert found(find_facts(tmp_path / "t.gguf", tmp_path / "d.gguf"), tmp_path) == [
        error("target", "there is no target at t.gguf", path.format("Hugging Face")),
        error("drafter", "there is no file or folder d.gguf", path.format("checkpoint")),
    ]


def split(target: Path, folder: Path, count: int) -> Path:
    """Parts as llama-gguf-split makes them: metadata in the first, one tensor in each."""
    for number in range(1, count + 1):
        part = folder / f"t-{number:05}-of-{count:05}.gguf"
        if number == 1:
            first = edit(target, part, Edit(set={"split.count": count, "split.no": 0}))
        else:
            shapes = {f"blk.{number}.attn_q.weight": (32, 32)}
            write_holes(part, {"split.count": count, "split.no": number - 1}, shapes)
    return first


def test_a_split_target_passes(tmp_path: Path, drafter: Path) -> None:
    first = split(write_right_target(tmp_path / "target.gguf"), tmp_path, 3)
    facts = find_facts(first, drafter)
    assert found(facts, tmp_path) == []
    assert message(facts, "target").endswith("hidden size 32, 3 files")


def test_a_split_target_lacks_a_part(tmp_path: Path, drafter: Path) -> None:
    first = split(write_right_target(tmp_path / "target.gguf"), tmp_path, 3)
    (tmp_path / "t-00002-of-00003.gguf").unlink()
    assert found(find_facts(first, drafter), tmp_path) == [
        error(
            "target",
            "t-00002-of-00003.gguf does not exist: the target has 3 files",
            "download or convert the file again",
        )
    ]


def test_a_later_part_is_not_the_target(tmp_path: Path, drafter: Path) -> None:
    first = split(write_right_target(tmp_path / "target.gguf"), tmp_path, 2)
    second = first.with_name("t-00002-of-00002.gguf")
    assert found(find_facts(second, drafter), tmp_path) == [
        error(
            "target",
            "t-00002-of-00002.gguf is not the first of 2 files",
            "name the file that ends in -00001-of-00002.gguf",
        )
    ]


def test_a_folder_as_target_leaves_open_what_only_its_file_tells(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "target", model_type="gpt2")
    checkpoint = checkpoints.write_checkpoint(tmp_path / "tiny")
    assert found(find_facts(folder, checkpoint), tmp_path) == [
        note("licence", "not stated", "look at the drafter's source before you share the file"),
        note(
            "target graph",
            "which architecture SomeForCausalLM becomes is told when the target is converted",
            "check the target's GGUF file",
        ),
        note(
            "embeddings and head",
            "head and embeddings are the target's; its weights are not in this folder's config",
            "check the target's GGUF file",
        ),
    ]


def test_a_checkpoint_that_cannot_be_converted_is_told(tmp_path: Path) -> None:
    target = write_right_target(tmp_path / "target.gguf")
    data = checkpoints.config(license="mit")
    values = checkpoints.tensors(data)
    del values["layers.0.mlp_conv.base_kernel"]
    checkpoint = checkpoints.write_checkpoint(tmp_path / "tiny", data=data, values=values)
    assert found(find_facts(target, checkpoint), tmp_path) == [
        error(
            "tensors",
            "1 of 36 tensors are missing: layers.0.mlp_conv.base_kernel",
            "config.json and weights do not belong together, or a shard was not downloaded",
        )
    ]


def test_known_targets_are_those_of_the_table() -> None:
    inner, last, refused = set(), set(), set()
    for line in (ROOT / "docs" / "targets.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        match = re.fullmatch(r"(.+)-(dense|moe)", cells[1]) if len(cells) > 9 else None
        if match is None:
            continue
        inner |= {match[1]} if cells[5] == "yes" else set()
        last |= {match[1]} if cells[6] == "yes" else set()
        refused |= {match[1]} if cells[10] else set()
    assert (inner, last) == (PUBLISHES_INNER, PUBLISHES_LAST)
    assert refused == set(UNUSABLE) - PUBLISHES_INNER


def architectures(source: str, function: str) -> set[str]:
    """Enum names for which a function of upstream's llama-arch.cpp is true."""
    body = source.split(f"bool {function}(")[1].split("default:", maxsplit=1)[0]
    return set(re.findall(r"case (LLM_ARCH_\w+):", body))


@pytest.mark.peer
def test_what_targets_cannot_do_is_upstreams_word(peer_dir: Path) -> None:
    source = (peer_dir.parents[1] / "src" / "llama-arch.cpp").read_text()
    names = dict(re.findall(r'{ (LLM_ARCH_\w+), +"([^"]+)" *}', source))
    keeps = architectures(source, "llm_arch_supports_rs_rollback")
    state = architectures(source, "llm_arch_is_recurrent")
    state |= architectures(source, "llm_arch_is_hybrid")
    assert {names[a] for a in state - keeps} & PUBLISHES_INNER == NO_ROLLBACK
    diffusion = {names[a] for a in architectures(source, "llm_arch_is_diffusion")}
    assert {a for a, why in UNUSABLE.items() if "diffusion" in why} == diffusion


@pytest.mark.peer
def test_names_of_model_classes_are_upstreams(peer_dir: Path) -> None:
    folder = peer_dir.parents[1] / "conversion"
    text = "".join(path.read_text() for path in sorted(folder.glob("*.py")))
    found_names: dict[str, set[str]] = {}
    for part in text.split("@ModelBase.register(")[1:]:
        arch_name = re.search(r"model_arch = gguf\.MODEL_ARCH\.(\w+)", part)
        for name in re.findall(r'"(\w+)"', part.split(")", maxsplit=1)[0]):
            arch = arch_name[1] if arch_name else "none"
            found_names.setdefault(name, set()).add(arch.lower().replace("_", ""))
    for name, arch in HF_ARCHITECTURES.items():
        assert re.sub("[-_]", "", arch) in found_names[name]


def test_the_longest_block_is_the_librarys() -> None:
    from dflash2_gguf import check_draft

    assert check_draft._MAX_BLOCK == MAX_DRAFT


def test_a_fact_says_the_way_out_where_it_is_not_ok() -> None:
    assert ok("window", "none").hint is None
    with pytest.raises(ValueError, match="window: warning with the hint None"):
        Fact(name="window", verdict=Verdict.WARNING, message="none")
    with pytest.raises(ValueError, match="window: ok with the hint 'x'"):
        Fact(name="window", verdict=Verdict.OK, message="none", hint="x")
    assert warning("window", "none", "x").as_dict() == {
        "name": "window",
        "verdict": "warning",
        "message": "none",
        "hint": "x",
    }


def test_transcript_of_a_right_pair(tmp_path: Path, drafter: Path, program: Program) -> None:
    write_right_target(tmp_path / "target.gguf")
    done = program("check", "target.gguf", "drafter.gguf")
    assert done.out == (GOLDEN / "check.txt").read_text()
    assert (done.code, done.err) == (0, "23 ok\n")


def test_transcript_of_a_wrong_pair(tmp_path: Path, drafter: Path, program: Program) -> None:
    write_right_target(tmp_path / "target.gguf")
    wrong = Edit(set={"dflash.target_layers": [2, 7], "general.license": "cc-by-nc-4.0"})
    edit(drafter, tmp_path / "wrong.gguf", wrong)
    done = program("check", "target.gguf", "wrong.gguf")
    flagged = [line for line in done.out.splitlines() if not line.startswith("ok")]
    assert flagged == [
        "warning  licence                    cc-by-nc-4.0: non-commercial use only",
        "                                    hint: read the licence of the checkpoint first",
        "error    target layers              outputs of 1, 6 are read, the target has 0 to 5",
        f"                                    hint: {OTHER}",
    ]
    assert (done.code, done.err) == (1, "1 error, 1 warning, 20 ok\n")


def test_facts_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = [Verdict.ERROR, Verdict.WARNING, Verdict.NOTE]
    once = [Fact(name="x", verdict=kind, message="y", hint="z") for kind in kinds]
    request = CheckRequest(target=Path("t"), draft=Path("d"))
    for facts, told in (
        ([ok("x", "y"), *once], "1 error, 1 warning, 1 note, 1 ok\n"),
        ([ok("x", "y"), *once] * 2, "2 errors, 2 warnings, 2 notes, 2 ok\n"),
    ):
        monkeypatch.setattr(module, "find_facts", lambda *_, facts=facts: facts)
        assert check(request, Terminal()) == 1
        assert capsys.readouterr().err == told


def test_json_has_every_fact(tmp_path: Path, drafter: Path, program: Program) -> None:
    write_right_target(tmp_path / "target.gguf", n_embd=64)
    done = program("check", "target.gguf", "drafter.gguf", "--json")
    result = json.loads(done.out)
    facts = [
        fact.as_dict() for fact in find_facts(tmp_path / "target.gguf", tmp_path / "drafter.gguf")
    ]
    assert result == {
        "target": "target.gguf",
        "draft": "drafter.gguf",
        "verdict": "error",
        "facts": facts,
        "run": None,
    }
    assert (done.code, done.err) == (1, "")


def test_folders_cannot_be_run(tmp_path: Path, drafter: Path, program: Program) -> None:
    checkpoints.write_checkpoint(tmp_path / "tiny")
    write_right_target(tmp_path / "target.gguf")
    done = program("check", "target.gguf", "tiny", "--run")
    assert done.err == ("error: --run needs GGUF files, tiny is a folder\nhint: convert it first\n")
    assert (done.code, done.out) == (2, "")


def test_a_pair_that_cannot_work_is_not_run(
    tmp_path: Path, drafter: Path, program: Program
) -> None:
    write_right_target(tmp_path / "target.gguf", n_embd=64)
    done = program("check", "target.gguf", "drafter.gguf", "--run", "--json")
    result = json.loads(done.out)
    assert result["run"] is None
    assert result["facts"][-1] == {
        "name": "run",
        "verdict": "note",
        "message": "not run: the headers say already that the pair does not work",
        "hint": "see the errors above",
    }
    assert done.code == 1
