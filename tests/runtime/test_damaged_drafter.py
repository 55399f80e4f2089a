"""A real drafter with wrong numbers in its metadata: an error or the same text, never an abort."""

from __future__ import annotations

import math
import struct
import subprocess
from pathlib import Path

import pytest

from dflash2_gguf.ggml_types import ValueType
from dflash2_gguf.gguf_schema import Key, arch_key
from tests.runtime.terminal import ENVIRONMENT, PROGRAM

pytestmark = pytest.mark.native

_CODES = {ValueType.UINT32: "I", ValueType.INT32: "i", ValueType.FLOAT32: "f"}


def _with_value(data: bytes, key: str, value: float) -> bytes:
    """``data`` with another value for the number at ``key``, or the first of its array."""
    name = struct.pack("<Q", len(key)) + key.encode()
    at = data.index(name) + len(name)
    (kind,) = struct.unpack_from("<I", data, at)
    if kind == ValueType.ARRAY:
        (kind,) = struct.unpack_from("<I", data, at + 4)
        at += 12
    encoded = struct.pack(f"<{_CODES[ValueType(kind)]}", value)
    return data[: at + 4] + encoded + data[at + 4 + len(encoded) :]


def _generate(target: Path, drafter: Path) -> subprocess.CompletedProcess[str]:
    pair = ["-m", str(target), "-d", str(drafter), "-c", "256", "-t", "1", "--temp", "0"]
    return subprocess.run(
        [*PROGRAM, "generate", *pair, "-p", "The capital of France is", "-n", "8"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (Key.Arch.BLOCK_COUNT, 0),
        (Key.Arch.BLOCK_COUNT, 2),
        (Key.Arch.BLOCK_COUNT, 100_000),
        (Key.Arch.BLOCK_SIZE, 1),
        (Key.Arch.BLOCK_SIZE, 2**32 - 1),
        (Key.Arch.CONV_GROUP_SIZE, 7),
        (Key.Arch.CONV_KERNEL_SIZE, 3),
        (Key.Arch.SELECTOR_TOP_K, 100),
        (Key.Arch.SELECTOR_RANK, 32),
        (Key.Arch.HEAD_COUNT, 0),
        (Key.Arch.HEAD_COUNT_KV, 2),
        (Key.Arch.KEY_LENGTH, 32),
        (Key.Arch.VALUE_LENGTH, 32),
        (Key.Arch.FEED_FORWARD_LENGTH, 1000),
        (Key.Arch.RMS_EPS, math.nan),
        (Key.Arch.TARGET_LAYERS, 31),
        (Key.Arch.TARGET_LAYERS, 30),
    ],
)
def test_a_number_that_cannot_be_is_one_error(
    tmp_path: Path, target_gguf: Path, drafter: Path, field: str, value: float
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(_with_value(drafter.read_bytes(), arch_key(field), value))
    done = _generate(target_gguf, damaged)
    assert (done.returncode, done.stdout) == (1, "")
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (Key.Arch.SELECTOR_TOP_K, 1),
        (Key.Arch.SLIDING_WINDOW, 1),
        (Key.Arch.ROPE_FREQ_BASE, math.nan),
        (Key.Arch.TARGET_LAYERS, 20),
    ],
)
def test_a_number_that_only_drafts_badly_does_not_change_the_text(
    tmp_path: Path, target_gguf: Path, drafter: Path, field: str, value: float
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(_with_value(drafter.read_bytes(), arch_key(field), value))
    assert _generate(target_gguf, damaged).stdout == _generate(target_gguf, drafter).stdout


def test_drafts_that_cannot_be_used_are_counted_and_told(
    tmp_path: Path, target_gguf: Path, drafter: Path
) -> None:
    damaged = tmp_path / "damaged.gguf"
    key = arch_key(Key.Arch.ROPE_FREQ_BASE)
    damaged.write_bytes(_with_value(drafter.read_bytes(), key, math.nan))
    done = _generate(target_gguf, damaged)
    assert done.returncode == 0
    assert "steps had no draft (the drafter returned unusable values)" in done.stderr
