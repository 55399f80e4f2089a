"""Whatever a file's bytes are, reading it gives a header or one CheckpointError, quickly."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash2_gguf.convert.gguf_reader import GGUFHeader, read_gguf
from dflash2_gguf.convert.safetensors_file import SafetensorsHeader, read_header
from dflash2_gguf.errors import CheckpointError
from tests.convert import checkpoints

BOUNDED = settings(
    max_examples=300,
    deadline=2000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

SAFETENSORS = checkpoints.safetensors_bytes(
    {
        name: values
        for name, values in checkpoints.tensors(checkpoints.config()).items()
        if values.size <= 32
    }
)
GGUF = (Path(__file__).parent / "golden" / "tiny-bf16.gguf").read_bytes()

NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.integers(0, 4096), st.floats(allow_nan=False), st.booleans()
)
VALUES = st.recursive(
    st.one_of(st.none(), st.text(max_size=8), NUMBERS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["BF16", "F32", "I64", "F9", ""]) | VALUES,
        "shape": st.lists(NUMBERS, max_size=10) | VALUES,
        "data_offsets": st.lists(NUMBERS, max_size=3) | VALUES,
    },
)
HEADERS = st.dictionaries(st.text(max_size=10), ENTRIES | VALUES, max_size=4)


def survives(
    path: Path, raw: bytes, read: Callable[[Path], SafetensorsHeader | GGUFHeader]
) -> SafetensorsHeader | GGUFHeader | None:
    """Read ``raw``; None where it was refused in one line."""
    path.write_bytes(raw)
    try:
        return read(path)
    except CheckpointError as error:
        assert error.message.isprintable()
        return None


def check_cover(header: SafetensorsHeader, size: int) -> None:
    """An accepted header covers its data exactly."""
    end = header.data_start
    for tensor in header.tensors:
        assert tensor.begin == end - header.data_start
        end += tensor.nbytes
    assert end == size


@BOUNDED
@given(position=st.integers(0, 400), replacement=st.binary(min_size=1, max_size=6))
def test_safetensors_with_changed_bytes(tmp_path: Path, position: int, replacement: bytes) -> None:
    raw = SAFETENSORS[:position] + replacement + SAFETENSORS[position + len(replacement) :]
    header = survives(tmp_path / "m.safetensors", raw, read_header)
    if isinstance(header, SafetensorsHeader):
        check_cover(header, len(raw))


@BOUNDED
@given(header=HEADERS, data=st.binary(max_size=64))
def test_safetensors_with_any_json_header(
    tmp_path: Path, header: dict[str, Any], data: bytes
) -> None:
    text = json.dumps(header).encode()
    raw = struct.pack("<Q", len(text)) + text + data
    found = survives(tmp_path / "m.safetensors", raw, read_header)
    if isinstance(found, SafetensorsHeader):
        check_cover(found, len(raw))


@BOUNDED
@given(length=st.integers(0, len(SAFETENSORS)))
def test_safetensors_cut_anywhere(tmp_path: Path, length: int) -> None:
    found = survives(tmp_path / "m.safetensors", SAFETENSORS[:length], read_header)
    assert (found is None) == (length < len(SAFETENSORS))


@BOUNDED
@given(position=st.integers(0, 4500), replacement=st.binary(min_size=1, max_size=8))
def test_gguf_with_changed_bytes(tmp_path: Path, position: int, replacement: bytes) -> None:
    raw = GGUF[:position] + replacement + GGUF[position + len(replacement) :]
    header = survives(tmp_path / "m.gguf", raw, read_gguf)
    if isinstance(header, GGUFHeader):
        ends = [header.data_offset + t.offset + t.nbytes for t in header.tensors.values()]
        assert all(end <= len(raw) for end in ends)


@BOUNDED
@given(length=st.integers(0, len(GGUF) - 1))
def test_gguf_cut_anywhere(tmp_path: Path, length: int) -> None:
    found = survives(tmp_path / "m.gguf", GGUF[:length], read_gguf)
    # the last tensor is followed by up to 31 bytes that pad it
    assert found is None or length > len(GGUF) - 32
