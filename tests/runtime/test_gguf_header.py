"""Reading headers: what is in them, and one clear error for each kind of damage."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.gguf_header import StringArray, read_header
from tests.runtime.gguf_files import SELECTOR, drafter_fields, write_gguf


def _drafter(folder: Path) -> Path:
    return write_gguf(folder / "drafter.gguf", drafter_fields(), {SELECTOR: (8, 4)})


def test_fields_and_tensors_are_read(tmp_path: Path) -> None:
    header = read_header(_drafter(tmp_path))
    assert header.architecture == "dflash"
    assert header.arch("block_size", int) == 8
    assert header.arch("target_layers", tuple) == (1, 4)
    tokens = header.get("tokenizer.ggml.tokens", StringArray)
    assert tokens is not None
    assert tokens.items() == [b"a", b"b", b"c", b"d"]
    assert header.tensors[SELECTOR].shape == (8, 4)
    assert header.data_offset % 32 == 0


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_header(tmp_path / "nothing.gguf")


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        read_header(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\3\4" + bytes(60)])
def test_another_file_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        read_header(path)


def test_a_big_endian_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(CheckpointError, match="big-endian"):
        read_header(path)


def test_another_version_is_refused_by_number(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, version=9)
    with pytest.raises(CheckpointError, match="GGUF version 9"):
        read_header(path)


def test_every_truncation_of_the_header_is_an_error(tmp_path: Path) -> None:
    whole = _drafter(tmp_path).read_bytes()
    end = read_header(tmp_path / "drafter.gguf").data_offset - 31
    path = tmp_path / "cut.gguf"
    for length in range(end):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_header(path)


@settings(max_examples=300, deadline=None)
@given(position=st.integers(min_value=0), value=st.integers(min_value=0, max_value=255))
def test_a_damaged_header_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    path = _drafter(tmp_path_factory.getbasetemp())
    data = bytearray(path.read_bytes())
    data[position % len(data)] = value
    path.write_bytes(data)
    try:
        read_header(path)
    except CheckpointError as error:
        assert str(path) in error.message
