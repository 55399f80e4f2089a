"""``--draft-vocab``: which rows of a head are kept, where they come from, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2_gguf.convert.pipeline import make_plan, run
from dflash2_gguf.convert.reduced_head import choose_tokens
from dflash2_gguf.errors import CheckpointError, DFlash2Error
from dflash2_gguf.presets import load_preset
from tests.convert import checkpoints
from tests.convert.conftest import Program
from tests.convert.conversion import convert
from tests.convert.test_imatrix import write_imatrix
from tests.convert.test_mask_embedding import TABLES, lender
from tests.convert.test_variants import with_tables

N = 8
COUNTS = [0, 7, 0, 0, 3, 3, 0, 9, 0, 1] + [0] * (checkpoints.N_VOCAB - 10)
KEPT = [0, 1, 2, 3, 4, 5, 7, 9]  # those that were seen, then the smallest ids


def counted(path: Path, counts: Sequence[float] | None = COUNTS) -> Path:
    """An importance matrix that says how often tokens were chosen, or does not."""
    columns = ("fc.weight", np.ones(64, dtype=np.float32), 1.0)
    return write_imatrix(path, columns, token_counts=counts)


def reduced(
    source: Path, target: Path | None, out: Path, n: int = N, preset: str = "f32", **more: Any
) -> gguf.GGUFReader:
    imatrix = more.get("imatrix", out.with_name("counts.gguf"))
    if not imatrix.exists():
        counted(imatrix)
    plan = make_plan(source, target, [(load_preset(preset), out)], imatrix=imatrix, draft_vocab=n)
    run(plan, force=False, progress=lambda _count: None)
    return gguf.GGUFReader(out)


def head_and_map(reader: gguf.GGUFReader) -> tuple[Any, list[int]]:
    (ids,) = (t for t in reader.tensors if t.name == "d2t")
    assert ids.tensor_type is gguf.GGMLQuantizationType.I64
    return checkpoints.dequantized(reader)["output.weight"], np.array(ids.data).tolist()


@settings(deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(0, 4), min_size=4, max_size=40),
    n=st.integers(3, 40),
    always=st.sets(st.integers(0, 3), max_size=3),
)
def test_the_tokens_seen_most_often_are_kept(counts: list[int], n: int, always: set[int]) -> None:
    found = choose_tokens(np.array(counts), min(n, len(counts)), always).tolist()
    ranked = sorted(range(len(counts)), key=lambda t: (t not in always, -counts[t], t))
    assert found == sorted(ranked[:n])


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_the_targets_head_are_taken(tied: bool, checkpoint: Path, tmp_path: Path) -> None:
    target = lender(tmp_path / "target.gguf", tied=tied)
    theirs = checkpoints.dequantized(gguf.GGUFReader(target))
    head, ids = head_and_map(reduced(checkpoint, target, tmp_path / "out.gguf"))
    assert ids == KEPT
    np.testing.assert_array_equal(
        head, theirs["token_embd.weight" if tied else "output.weight"][KEPT]
    )


def test_the_rest_of_the_file_is_what_it_is_without(checkpoint: Path, tmp_path: Path) -> None:
    target = lender(tmp_path / "target.gguf", tied=True)
    convert(checkpoint, target, tmp_path / "whole.gguf", "q8_0")
    whole = gguf.GGUFReader(tmp_path / "whole.gguf")
    small = reduced(checkpoint, target, tmp_path / "out.gguf", preset="q8_0")
    added = {t.name: t for t in small.tensors}
    for tensor in whole.tensors:
        assert added.pop(tensor.name).data.tobytes() == tensor.data.tobytes()
    assert set(added) == {"output.weight", "d2t"}
    # the source's table is stored as it was: rows of it are copied, not quantized again
    (table,) = (t for t in gguf.GGUFReader(target).tensors if t.name == "token_embd.weight")
    assert added["output.weight"].data.tobytes() == table.data[KEPT].tobytes()
    keys = {"general.size_label", "dflash2.draft_vocab.counts"}
    counted_anyway = ("GGUF.", "quantize.imatrix.")
    differing = {
        name
        for name in small.fields
        if not name.startswith(counted_anyway)
        and (
            name not in whole.fields
            or small.fields[name].contents() != whole.fields[name].contents()
        )
    }
    assert differing <= keys
    assert small.fields["dflash2.draft_vocab.counts"].contents() == str(tmp_path / "counts.gguf")


def test_of_a_split_target_the_part_with_the_head_is_read(checkpoint: Path, tmp_path: Path) -> None:
    whole = lender(tmp_path / "whole.gguf", tied=False)
    for number, table in enumerate(TABLES, 1):
        part = tmp_path / f"target-{number:05d}-of-00002.gguf"
        lender(part, tied=False, tables=(table,))
    first = tmp_path / "target-00001-of-00002.gguf"
    theirs = checkpoints.dequantized(gguf.GGUFReader(whole))["output.weight"]
    head, _ = head_and_map(reduced(checkpoint, first, tmp_path / "out.gguf"))
    np.testing.assert_array_equal(head, theirs[KEPT])
    (tmp_path / "target-00002-of-00002.gguf").unlink()
    message, hint = refusal(checkpoint, first, tmp_path / "b.gguf")
    missing = "target-00002-of-00002.gguf is missing"
    assert message == f"{first.name} is part of a split model and {missing}"
    assert hint == "download all of its files"


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_the_drafters_own_head_come_first(tied: bool, target: Path, tmp_path: Path) -> None:
    values = with_tables(checkpoints.tensors(checkpoints.config()))
    if tied:
        del values["lm_head.weight"]
    data = checkpoints.config(tie_word_embeddings=tied)
    source = checkpoints.write_checkpoint(tmp_path / "c", data=data, values=values)
    small = reduced(source, target, tmp_path / "out.gguf")
    head, ids = head_and_map(small)
    table = values["embed_tokens.weight"]
    assert ids == KEPT
    np.testing.assert_array_equal(head, (table if tied else values["lm_head.weight"])[KEPT])
    np.testing.assert_array_equal(checkpoints.dequantized(small)["token_embd.weight"], table)


def test_a_gguf_file_is_reduced_with_its_target(checkpoint: Path, tmp_path: Path) -> None:
    target = lender(tmp_path / "target.gguf", tied=True)
    convert(checkpoint, target, tmp_path / "whole.gguf", "bf16")
    expected = head_and_map(reduced(checkpoint, target, tmp_path / "a.gguf", preset="bf16"))
    found = head_and_map(
        reduced(tmp_path / "whole.gguf", target, tmp_path / "b.gguf", preset="bf16")
    )
    np.testing.assert_array_equal(found[0], expected[0])
    assert found[1] == expected[1]


def test_tokens_that_end_an_answer_are_kept(checkpoint: Path, tmp_path: Path) -> None:
    target = lender(tmp_path / "target.gguf", tied=True, ending=(20, 22))
    _, ids = head_and_map(reduced(checkpoint, target, tmp_path / "out.gguf"))
    assert ids == [0, 1, 4, 5, 7, 9, 20, 22]


def refusal(source: Path, target: Path | None, out: Path, **more: Any) -> tuple[str, str | None]:
    with pytest.raises(DFlash2Error) as caught:
        reduced(source, target, out, **more)
    assert not out.exists()
    return caught.value.message, caught.value.hint


def test_what_cannot_be_reduced_is_told(checkpoint: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    lending = lender(tmp_path / "lender.gguf", tied=True)
    assert refusal(checkpoint, target, out) == (
        f"{target} has no token_embd.weight, and --draft-vocab keeps rows of it",
        "give the target with its weights: a GGUF file, or its whole Hugging Face folder",
    )
    for n in (3, 24, 25):
        assert refusal(checkpoint, lending, out, n=n) == (
            f"--draft-vocab {n} of a vocabulary of 24",
            "it can be 4 to 23",
        )
    without = counted(tmp_path / "without.gguf", None)
    assert refusal(checkpoint, lending, out, imatrix=without) == (
        f"{without} does not say how often tokens were chosen",
        "`dflash2-convert calibrate` of this version counts them",
    )
    other = counted(tmp_path / "other.gguf", [1] * 23)
    assert refusal(checkpoint, lending, out, imatrix=other) == (
        f"{other} counts 23 tokens, the vocabulary has 24",
        "make it with this drafter and its target",
    )
    convert(checkpoint, lending, tmp_path / "whole.gguf")
    assert refusal(tmp_path / "whole.gguf", None, out) == (
        "the drafter has no head of its own, and rows of the target's are kept",
        "name the target's file with --target",
    )
    reduced(checkpoint, lending, tmp_path / "small.gguf")
    assert refusal(tmp_path / "small.gguf", lending, out, n=6) == (
        "the drafter's head has 8 rows already",
        "leave --draft-vocab out",
    )


def test_counts_of_another_type_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = counted(tmp_path / "m.gguf", [0.5])
    with pytest.raises(CheckpointError, match=r"m\.gguf counts tokens in another type than U32"):
        reduced(checkpoint, lender(tmp_path / "t", tied=True), tmp_path / "o", imatrix=path)


def test_the_program_says_what_was_kept(checkpoint: Path, tmp_path: Path, program: Program) -> None:
    target = lender(tmp_path / "target.gguf", tied=True)
    counts = counted(tmp_path / "counts.gguf")
    words = ["convert", checkpoint, "--target", target, "--preset", "bf16", "-o", "out.gguf"]
    done = program(*words, "--imatrix", counts, "--draft-vocab", N)
    assert (done.code, done.out) == (0, "out.gguf\n")
    line = (
        f"the head keeps 8 of 24 tokens, 100.0 % of those counted in {counts}; 3 of them were "
        "never seen"
    )
    assert line in " ".join(done.err.split())
    done = program(*words, "--draft-vocab", N)
    assert done.code == 2
    assert "--draft-vocab needs to know which tokens are chosen often" in done.err
