"""Importance matrices: what is read of a file, what is refused, and what quantizers do with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash2_gguf.convert.imatrix import ImportanceMatrix, read_imatrix
from dflash2_gguf.convert.quantize import Floats, encode_rows
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.ggml_types import GGMLType
from tests.convert.conftest import Program

QUANTIZED = [kind for kind in GGMLType if kind.is_quantized]
MAKE = "make it with `dflash2-convert calibrate` for this drafter"

FC = ("fc.weight", np.array([2.0, 6.0, 0.0, 1.0], dtype=np.float32), 2.0)


def write_imatrix(
    path: Path,
    *entries: tuple[str, Floats, float],
    leave_out: str = "",
    kind: str = "imatrix",
    token_counts: Sequence[float] | None = None,
) -> Path:
    """An importance matrix of (weight, sums, count), by the gguf package alone."""
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_type(kind)
    if leave_out != "imatrix.datasets":
        writer.add_array("imatrix.datasets", ["some/prompts.txt"])
    for key, value in (("imatrix.chunk_count", 5), ("imatrix.chunk_size", 8)):
        if key != leave_out:
            writer.add_uint32(key, value)
    if token_counts is not None:
        types = gguf.GGUFValueType
        of = types.UINT32 if all(type(n) is int for n in token_counts) else types.FLOAT32
        writer.add_key_value("dflash2.token_counts", token_counts, types.ARRAY, sub_type=of)
    for name, sums, count in entries:
        writer.add_tensor(f"{name}.in_sum2", sums.reshape(1, -1))
        if leave_out != f"{name}.counts":
            writer.add_tensor(f"{name}.counts", np.array([[count]], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def matrix(weights: Mapping[str, Floats]) -> ImportanceMatrix:
    return ImportanceMatrix(path=Path("m"), datasets=(), n_chunks=1, weights=dict(weights))


def test_a_columns_weight_is_its_sum_by_the_count(tmp_path: Path) -> None:
    unseen = ("unseen.weight", np.array([0.0, 0.0], dtype=np.float32), 0.0)
    found = read_imatrix(write_imatrix(tmp_path / "m.gguf", FC, unseen))
    assert (found.datasets, found.n_chunks) == (("some/prompts.txt",), 5)
    assert {name: values.tolist() for name, values in found.weights.items()} == {
        "fc.weight": [1.0, 3.0, 0.0, 0.5],
        "unseen.weight": [1.0, 1.0],
    }


def bad(values: list[float], count: float = 1.0) -> tuple[str, Floats, float]:
    return "a.weight", np.array(values, dtype=np.float32), count


@pytest.mark.parametrize(
    ("entries", "options", "message"),
    [
        ([FC], {"kind": "model"}, "is no importance matrix"),
        ([FC], {"leave_out": "imatrix.datasets"}, "does not say what it was computed with"),
        ([FC], {"leave_out": "imatrix.chunk_count"}, "does not say what it was computed with"),
        ([FC], {"leave_out": "imatrix.chunk_size"}, "does not say what it was computed with"),
        ([FC], {"leave_out": "fc.weight.counts"}, "lacks the tensor fc.weight.counts"),
        ([], {}, "holds other tensors than sums and counts"),
        ([bad([1, float("nan")])], {}, "has NaN or no values in a.weight.in_sum2"),
        ([bad([1, float("inf")])], {}, "has NaN or no values in a.weight.in_sum2"),
        ([bad([1, -1])], {}, "has negative sums or counts for a.weight"),
        ([bad([1], -4)], {}, "has negative sums or counts for a.weight"),
        ([bad([1], float("nan"))], {}, "has NaN or no values in a.weight.counts"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    tmp_path: Path,
    entries: list[tuple[str, Floats, float]],
    options: dict[str, str],
    message: str,
) -> None:
    path = write_imatrix(tmp_path / "m.gguf", *entries, **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as caught:
        read_imatrix(path)
    assert (caught.value.message, caught.value.hint) == (f"{path} {message}", MAKE)


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "dflash")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["x"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 8)
    writer.add_tensor("a.weight.in_sum2", np.ones((1, 4), dtype=np.float16))
    writer.add_tensor("a.weight.counts", np.ones((1, 1), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"does not store a\.weight\.in_sum2 as F32"):
        read_imatrix(tmp_path / "m.gguf")


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_truncated_file_is_refused(tmp_path: Path, part: float) -> None:
    path = write_imatrix(tmp_path / "m.gguf", FC, bad([1.0] * 64))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(CheckpointError, match=r"broken GGUF file|not a GGUF file"):
        read_imatrix(path)


def test_a_matrix_of_another_drafter_is_refused() -> None:
    found = matrix({"fc.weight": np.ones(4, dtype=np.float32)})
    found.require_columns([("fc.weight", 4), ("other.weight", 7)])
    with pytest.raises(CheckpointError, match=r"m has 4 columns for fc\.weight, the drafter 8"):
        found.require_columns([("fc.weight", 8)])
    with pytest.raises(CheckpointError, match=r"m has no weight of this drafter, but fc\.weight"):
        found.require_columns([("other.weight", 4)])


def test_tensors_without_weights_are_counted() -> None:
    found = matrix({"a": np.ones(4, dtype=np.float32)})
    assert found.missing(["a"]) is None
    assert found.missing(["a", "b", "c", "d", "e"]) == (
        "4 of 5 quantized tensors are not in m and go without: b, c, d and 1 more"
    )


@pytest.mark.native
@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_errors_move_to_where_they_count_little(kind: GGMLType) -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(64, 256)).astype(np.float32)
    importance = rng.lognormal(sigma=2.0, size=256).astype(np.float32)

    def error(weights: Floats | None) -> float:
        raw = encode_rows(values, kind, "t", weights).reshape(len(values), -1)
        back = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name])
        return float((importance * (back - values) ** 2).sum())

    if kind is GGMLType.Q8_0:  # its quantizer has no choice to make
        assert error(importance) == error(None)
    else:
        assert error(importance) < error(None)


@pytest.mark.native
@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_columns_that_nothing_met_do_no_harm(kind: GGMLType) -> None:
    values = np.random.default_rng(4).normal(size=(5, 512)).astype(np.float32)
    importance = np.zeros(512, dtype=np.float32)
    importance[300:] = 1.0
    raw = encode_rows(values, kind, "t", importance).reshape(len(values), -1)
    back = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name])
    assert np.isfinite(back).all()


@pytest.mark.native
def test_a_conversion_says_which_tensors_go_without(
    checkpoint: Path, target: Path, program: Program, tmp_path: Path
) -> None:
    sums = np.arange(1, 65, dtype=np.float32)
    write_imatrix(tmp_path / "m.gguf", ("fc.weight", sums, 3.0))
    words = ["tiny", "--target", "target.gguf", "--preset", "q4_0", "--imatrix", "m.gguf"]
    done = program(*words, "-o", "x.gguf")
    assert (done.code, done.out) == (0, "x.gguf\n")
    assert done.err == (
        "warning: 21 of 22 quantized tensors are not in m.gguf and go without: "
        "selector_hidden.weight, selector_predecessor.weight, selector_successor.weight "
        "and 18 more\n"
    )
    program(*words[:-2], "-o", "plain.gguf")
    fields = gguf.GGUFReader(tmp_path / "x.gguf").fields
    assert [name for name in fields if "imatrix" in name] == [
        "quantize.imatrix.file",
        "quantize.imatrix.dataset",
        "quantize.imatrix.entries_count",
        "quantize.imatrix.chunks_count",
    ]
    with_it, plain = (
        {t.name: t.data.tobytes() for t in gguf.GGUFReader(tmp_path / name).tensors}
        for name in ("x.gguf", "plain.gguf")
    )
    assert [name for name in plain if plain[name] != with_it[name]] == ["fc.weight"]


def test_an_importance_matrix_that_no_tensor_needs_is_not_used(
    checkpoint: Path, target: Path, program: Program, tmp_path: Path
) -> None:
    write_imatrix(tmp_path / "m.gguf", ("fc.weight", np.ones(64, dtype=np.float32), 3.0))
    words = ["tiny", "--target", "target.gguf", "--preset", "bf16", "--imatrix", "m.gguf"]
    done = program(*words, "-o", "x.gguf")
    assert (done.code, done.err) == (0, "warning: no tensor is quantized, m.gguf is not used\n")
    assert not any("imatrix" in name for name in gguf.GGUFReader(tmp_path / "x.gguf").fields)


def test_a_wrong_importance_matrix_ends_a_conversion(
    checkpoint: Path, target: Path, program: Program, tmp_path: Path
) -> None:
    write_imatrix(tmp_path / "m.gguf", FC)
    words = ["tiny", "--target", "target.gguf", "--preset", "q4_0", "--imatrix", "m.gguf"]
    done = program(*words, "-o", "x.gguf")
    assert done.err == f"error: m.gguf has 4 columns for fc.weight, the drafter 64\nhint: {MAKE}\n"
    assert (done.code, (tmp_path / "x.gguf").exists()) == (1, False)
    done = program(*words, "-o", "m.gguf", "--force")
    assert done.code != 0
    assert read_imatrix(tmp_path / "m.gguf").n_chunks == 5


def test_an_importance_matrix_is_never_the_output(
    checkpoint: Path, target: Path, program: Program, tmp_path: Path
) -> None:
    write_imatrix(tmp_path / "m.gguf", ("fc.weight", np.ones(64, dtype=np.float32), 3.0))
    words = ["tiny", "--target", "target.gguf", "--preset", "q4_0", "--imatrix", "m.gguf"]
    done = program(*words, "-o", "m.gguf", "--force")
    assert done.err.splitlines()[0] == "error: m.gguf is an input of this conversion"
