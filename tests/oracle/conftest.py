"""The two builds under comparison as fixtures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.oracle.builds import ROOT, Build, tokenized
from tests.oracle.prompts import load_prompts
from tests.provisions import alone

REAL_PAIR: dict[str, int] = {"n_predict": 128, "n_ctx": 1024, "n_threads": 1}


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
    """dflash2-convert as a function: ``convert(source, target, preset, out)``."""

    def run(source: Path, target: Path, preset: str, out: Path) -> Path:
        command = [sys.executable, "-m", "dflash2_gguf.convert_cli", "convert", str(source)]
        options = ["--target", str(target), "--preset", preset, "-o", str(out)]
        done = subprocess.run(
            [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return out

    return run


@dataclass(frozen=True)
class RealRun:
    """The real pair on 100 prompts x 128 tokens, greedy, end-of-text tokens not stopping it."""

    prompts: list[list[int]]
    drafted: dict[str, np.ndarray]  # see worker.job_session

    def lengths(self, prompt: int) -> list[int]:
        """Tokens committed per round of a prompt."""
        return (self.drafted["accepted"][self.drafted["prompt"] == prompt] + 1).tolist()


@pytest.fixture(scope="session")
def real_run(
    target_gguf: Path,
    drafter_gguf: Callable[[str], Path],
    ours: Build,
    tmp_path_factory: pytest.TempPathFactory,
) -> RealRun:
    """Several minutes of work, shared by several tests and processes; mark them ``slow``."""
    prompts = tokenized(ours, target_gguf, load_prompts(100))
    pair = {"path": str(target_gguf), "draft": str(drafter_gguf("bf16"))}
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the folder of all processes of this run
        folder = folder.parent
    path = folder / "real_run.npz"
    with alone(folder / "real_run.lock"):
        if not path.exists():
            np.savez(path, **ours.run_parallel("session", prompts, **pair, **REAL_PAIR))
    with np.load(path) as arrays:
        return RealRun(prompts, {name: arrays[name] for name in arrays.files})
