"""Every way two files can be wrong has its own message, found before anything is loaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dflash2_gguf.errors import CheckpointError, DFlash2Error, PairError
from dflash2_gguf.gguf_header import read_header
from dflash2_gguf.pair import check_complete, check_headers
from tests.runtime.gguf_files import SELECTOR, drafter_fields, target_fields, write_gguf


def _check(
    folder: Path,
    *,
    target: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    tensors: dict[str, tuple[int, ...]] | None = None,
) -> None:
    selector = {SELECTOR: (8, 4)} if tensors is None else tensors
    target_path = write_gguf(folder / "target.gguf", target or target_fields())
    draft_path = write_gguf(folder / "drafter.gguf", draft or drafter_fields(), selector)
    check_headers(read_header(target_path), read_header(draft_path))


def test_a_matching_pair_passes(tmp_path: Path) -> None:
    _check(tmp_path)


@pytest.mark.parametrize(
    ("kind", "target", "draft", "message"),
    [
        (PairError, {}, {"general_architecture": "llama"}, "is not a drafter"),
        (PairError, {}, {"general_architecture": "dflash-draft"}, "is not a drafter"),
        (PairError, {}, {"dflash_embedding_length": 16}, "hidden size differs: target 8, drafter"),
        (PairError, {}, {"ggml_tokens": ["a", "b", "c", "d", "e"]}, "target 4 tokens, drafter 5"),
        (PairError, {}, {"ggml_tokens": ["a", "x", "y", "d"]}, "differs in 2 of 4 tokens, first"),
        (PairError, {}, {"target_layers": [1, 5]}, "reads layer 4, the target has layers 0 to 3"),
        (PairError, {}, {"target_layers": [0, 4]}, "reads layer -1, the target has layers 0 to 3"),
        (PairError, {"llama.nextn_predict_layers": 1}, {}, "reads layer 3, the target has layers"),
        (CheckpointError, {}, {"target_layers": None}, "has no dflash.target_layers"),
        (CheckpointError, {}, {"mask_token_id": None}, "has no tokenizer.ggml.mask_token_id"),
        (CheckpointError, {}, {"mask_token_id": 4}, "mask_token_id is 4, the vocabulary has 4"),
        (CheckpointError, {}, {"mask_token_id": -1}, "mask_token_id is -1, the vocabulary has 4"),
        (CheckpointError, {}, {"ggml_tokens": None}, "has no vocabulary"),
        (CheckpointError, {}, {"block_size": None}, "has no dflash.block_size"),
        (CheckpointError, {}, {"selector_rank": None}, "has no dflash.selector_rank"),
        (CheckpointError, {}, {"selector_top_k": None}, "has no dflash.selector_top_k"),
        (CheckpointError, {}, {"conv_kernel_size": None}, "has no dflash.conv_kernel_size"),
        (CheckpointError, {}, {"conv_group_size": None}, "has no dflash.conv_group_size"),
        (CheckpointError, {}, {"dflash_embedding_length": None}, "has no dflash.embedding_length"),
        (
            CheckpointError,
            {},
            {"dflash.embedding_length_out": 32},
            "dflash.embedding_length_out is 32, dflash.embedding_length is 8",
        ),
        (CheckpointError, {"block_count": None}, {}, "has no llama.block_count"),
        (CheckpointError, {"block_count": 0}, {}, "has 0 as llama.block_count"),
        (CheckpointError, {"block_count": 513}, {}, "has 513 as llama.block_count"),
        (CheckpointError, {}, {"block_count": 100000}, "has 100000 as dflash.block_count"),
        (CheckpointError, {}, {"rms_epsilon": math.nan}, "has nan as dflash.attention.layer_norm"),
        (CheckpointError, {}, {"rms_epsilon": -1.0}, "has -1.0 as dflash.attention.layer_norm"),
        (CheckpointError, {"block_count": "four"}, {}, "block_count is str, expected int"),
        (CheckpointError, {"ggml_tokens": None}, {}, "has no vocabulary"),
        (CheckpointError, {"general_architecture": None}, {}, "has no general.architecture"),
    ],
)
def test_a_wrong_file_is_named_with_its_fault(
    tmp_path: Path,
    kind: type[DFlash2Error],
    target: dict[str, Any],
    draft: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(kind, match=message) as caught:
        _check(tmp_path, target=target_fields(**target), draft=drafter_fields(**draft))
    assert caught.value.hint


def test_a_drafter_without_selector_is_of_another_generation(tmp_path: Path) -> None:
    with pytest.raises(PairError, match="DFlash 1 or DSpark"):
        _check(tmp_path, tensors={"fc.weight": (16, 8)})


def test_swapped_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(PairError, match="is a drafter, not a target") as caught:
        _check(tmp_path, target=drafter_fields())
    assert caught.value.hint == "are target (-m) and drafter (-d) swapped?"


def test_a_few_renamed_tokens_do_not_make_another_vocabulary(tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(200)]
    renamed = ["<pad>", *tokens[1:]]
    _check(
        tmp_path,
        target=target_fields(ggml_tokens=tokens),
        draft=drafter_fields(ggml_tokens=renamed),
    )


def test_missing_parts_of_a_split_target_are_named(tmp_path: Path) -> None:
    fields = target_fields() | {"split.count": 3}
    first = write_gguf(tmp_path / "t-00001-of-00003.gguf", fields)
    write_gguf(tmp_path / "t-00002-of-00003.gguf", {})
    draft = write_gguf(tmp_path / "drafter.gguf", drafter_fields(), {SELECTOR: (8, 4)})
    with pytest.raises(CheckpointError, match=r"t-00003-of-00003\.gguf does not exist"):
        check_headers(read_header(first), read_header(draft))


def test_a_later_part_of_a_split_target_is_not_the_target(tmp_path: Path) -> None:
    second = write_gguf(tmp_path / "t-00002-of-00002.gguf", target_fields() | {"split.count": 2})
    draft = write_gguf(tmp_path / "drafter.gguf", drafter_fields(), {SELECTOR: (8, 4)})
    with pytest.raises(CheckpointError, match="is not the first of 2 files") as caught:
        check_headers(read_header(second), read_header(draft))
    assert caught.value.hint == "name the file that ends in -00001-of-00002.gguf"


def test_missing_tensor_data_is_counted(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "drafter.gguf", drafter_fields(), {SELECTOR: (8, 4)})
    check_complete(read_header(path), lambda _type, n: 4 * n)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is truncated: 100 bytes are missing"):
        check_complete(read_header(path), lambda _type, n: 4 * n)
