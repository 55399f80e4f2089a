"""Fixtures: a small checkpoint, a target for it, and the program run as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.convert import checkpoints, old_files


@dataclass(frozen=True)
class Outcome:
    """What a run of the program left: exit code, both streams."""

    code: int
    out: str
    err: str


Program = Callable[..., Outcome]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small bf16 checkpoint named ``tiny``."""
    return checkpoints.write_checkpoint(tmp_path / "tiny")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The target that belongs to ``checkpoint``."""
    return checkpoints.write_target(tmp_path / "target.gguf")


@pytest.fixture
def good(checkpoint: Path, target: Path, tmp_path: Path) -> Path:
    """What the converter makes of ``checkpoint``."""
    return old_files.converted(checkpoint, target, tmp_path / "good.gguf")


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Run ``dflash2-convert`` in the test's folder, with no terminal and no home of its own."""
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("DFLASH2_", "NO_COLOR"))},
        "COLUMNS": "80",
        "HOME": str(tmp_path),
    }
    if "DFLASH2_LIB_DIR" in os.environ:
        env["DFLASH2_LIB_DIR"] = os.environ["DFLASH2_LIB_DIR"]

    def run(*words: object, environment: dict[str, str] | None = None) -> Outcome:
        command = [sys.executable, "-m", "dflash2_gguf.convert_cli", *map(str, words)]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**env, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run
