"""The two builds that are compared, and how jobs get run on either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["ROOT", "Build"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Build:
    """A folder with libllama.so and its ggml libraries."""

    libraries: Path

    def run(self, jobs: Sequence[dict[str, Any]]) -> list[dict[str, np.ndarray] | None]:
        """Results of jobs (see worker.py) in order; None where the library aborted."""
        with tempfile.TemporaryDirectory() as folder:
            todo = Path(folder) / "jobs.json"
            todo.write_text(json.dumps(list(jobs)))
            subprocess.run(
                [sys.executable, "-m", "tests.oracle.worker", str(todo), folder],
                cwd=ROOT,
                env={
                    **os.environ,
                    "LLAMA_CPP_LIB_PATH": str(self.libraries),
                    "GGML_NO_BACKTRACE": "1",
                },
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=True,
            )
            return [_load(Path(folder) / f"{number}.npz") for number in range(len(jobs))]

    def run_one(self, **job: Any) -> dict[str, np.ndarray]:
        """Result of one job that must not die."""
        (result,) = self.run([job])
        if result is None:
            raise RuntimeError(f"job {job['job']} died on {self.libraries}")
        return result


def _load(path: Path) -> dict[str, np.ndarray] | None:
    if not path.exists():
        return None
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}
