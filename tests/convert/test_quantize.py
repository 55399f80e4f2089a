"""Conversion of values: exact where it can be, ggml's own bytes where it is lossy."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dflash2_gguf.convert.quantize import encode_rows, rope_halves, to_float32
from dflash2_gguf.ggml_types import GGMLType
from tests.convert import checkpoints

QUANTIZED = [kind for kind in GGMLType if kind.is_quantized]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_reading_inverts_writing(dtype: str) -> None:
    values = np.array([0.0, -0.0, 1.0, -2.5, 65504.0, 2.0**-14], dtype=np.float32)
    if dtype == "BF16":
        values = checkpoints.round_bf16(values)
    raw = memoryview(checkpoints.to_bytes(values, dtype))
    np.testing.assert_array_equal(to_float32(raw, dtype), values)


@settings(max_examples=200, deadline=None)
@given(
    values=arrays.arrays(
        np.float32,
        (2, 32),
        elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True),
    )
)
def test_bf16_rounds_like_the_gguf_package(values: np.ndarray) -> None:  # type: ignore[type-arg]
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
    found = encode_rows(values, GGMLType.BF16, "t")
    np.testing.assert_array_equal(found, expected.reshape(-1).view(np.uint8))


@pytest.mark.native
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_simple_types_equal_those_of_the_gguf_package(name: str) -> None:
    values = np.random.default_rng(0).normal(size=(37, 64)).astype(np.float32)
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    found = encode_rows(values, GGMLType[name], "t")
    np.testing.assert_array_equal(found, expected.reshape(-1))


# relative root-mean-square error of normal weights; a wrong scale or layout gives about 1
@pytest.mark.native
@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        (GGMLType.Q2_K, 0.35),
        (GGMLType.Q3_K, 0.18),
        (GGMLType.Q4_K, 0.09),
        (GGMLType.Q5_K, 0.05),
        (GGMLType.Q6_K, 0.025),
        (GGMLType.IQ4_NL, 0.09),
        (GGMLType.IQ4_XS, 0.09),
    ],
)
def test_values_survive_quantization(kind: GGMLType, limit: float) -> None:
    values = np.random.default_rng(1).normal(size=(8, 512)).astype(np.float32)
    raw = encode_rows(values, kind, "t").reshape(8, -1)
    back = gguf.dequantize(raw, gguf.GGMLQuantizationType(int(kind)))
    error = np.sqrt(np.mean((back - values) ** 2) / np.mean(values**2))
    assert error < limit


@pytest.mark.native
@pytest.mark.parametrize("kind", QUANTIZED)
def test_rows_are_independent_of_their_company(kind: GGMLType) -> None:
    values = np.random.default_rng(2).normal(size=(11, 512)).astype(np.float32)
    together = encode_rows(values, kind, "t")
    alone = [encode_rows(values[i : i + 1], kind, "t") for i in range(11)]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for kind in GGMLType:
        theirs = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]]
        assert (int(kind), kind.block_size, kind.block_bytes) == (
            int(gguf.GGMLQuantizationType[kind.name]),
            *theirs,
        )


def test_rope_halves_puts_even_dimensions_first() -> None:
    heads = np.arange(16, dtype=np.float32).reshape(16, 1)
    found = rope_halves(heads, 8).reshape(-1).tolist()
    assert found == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    norm = rope_halves(np.arange(8, dtype=np.float32).reshape(1, 8), 8)
    assert norm.tolist() == [[0, 2, 4, 6, 1, 3, 5, 7]]
