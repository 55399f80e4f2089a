"""The two builds under comparison as fixtures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.oracle.builds import ROOT, Build


@pytest.fixture(scope="session")
def pin(peer_dir: Path) -> Build:
    """The unpatched pin; mark the test ``peer``."""
    return Build(peer_dir)


@pytest.fixture(scope="session")
def ours(native_lib: Path) -> Build:
    """This project's libraries; mark the test ``native``."""
    return Build(native_lib)


@pytest.fixture(scope="session")
def convert() -> Callable[..., Path]:
    """Convert a checkpoint directory with dflash2-convert: ``convert(source, target, preset, out)``."""

    def run(source: Path, target: Path, preset: str, out: Path) -> Path:
        command = [sys.executable, "-m", "dflash2_gguf.convert.cli", "convert", str(source)]
        options = ["--target", str(target), "--preset", preset, "-o", str(out)]
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return out

    return run
