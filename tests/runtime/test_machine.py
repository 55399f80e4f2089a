"""What the system has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash2_gguf.machine import available_bytes, free_memory


def test_available_memory_is_read_in_bytes(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:   42 kB\n")
    assert available_bytes(meminfo) == 42 * 1024


def test_available_memory_is_unknown_on_other_systems(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "meminfo") is None


@pytest.mark.native
def test_gpu_memory_is_told_where_llama_cpp_can_use_a_gpu() -> None:
    from dflash2_gguf.native import api

    has_gpu = bool(api().llama.llama_supports_gpu_offload())
    assert (free_memory().device is not None) is has_gpu
