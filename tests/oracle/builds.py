"""The two builds that are compared, and how jobs get run on either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.prompts import Prompt, chat_texts

__all__ = ["OURS", "PIN", "ROOT", "Build", "tokenized"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Build:
    """A folder with libllama.so and its ggml libraries."""

    libraries: Path

    def run(self, jobs: Sequence[dict[str, Any]]) -> list[dict[str, np.ndarray] | None]:
        """Results of jobs (see worker.py) in order; None where the library aborted."""
        libraries = str(self.libraries)
        with tempfile.TemporaryDirectory() as folder:
            todo = Path(folder) / "jobs.json"
            todo.write_text(json.dumps(list(jobs)))
            subprocess.run(
                [sys.executable, "-m", "tests.oracle.worker", str(todo), folder],
                cwd=ROOT,
                env={
                    **os.environ,
                    "LLAMA_CPP_LIB_PATH": libraries,
                    "DFLASH2_LIB_DIR": libraries,
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

    def run_parallel(
        self, job: str, prompts: Sequence[Any], **arguments: Any
    ) -> dict[str, np.ndarray]:
        """A job over prompts, split between as many processes as there are CPUs."""
        parts = [list(part) for part in np.array_split(np.arange(len(prompts)), _cpus())]
        jobs = [{"job": job, "prompts": [prompts[i] for i in part], **arguments} for part in parts]
        with ThreadPoolExecutor(len(jobs)) as pool:
            results = list(pool.map(lambda one: self.run_one(**one), jobs))
        for part, result in zip(parts, results, strict=True):
            if "prompt" in result:  # which prompt a round belongs to
                result["prompt"] += part[0]
        return {name: np.concatenate([result[name] for result in results]) for name in results[0]}


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def _load(path: Path) -> dict[str, np.ndarray] | None:
    error = path.with_suffix(".error")
    if error.exists():
        raise RuntimeError(error.read_text())
    if not path.exists():
        return None
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


PIN = Build(ROOT / "build" / "llama.cpp" / "pristine" / "build" / "bin")
OURS = Build(ROOT / "dflash2_gguf" / "lib")


def tokenized(build: Build, target: Path, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of prompts in the target's chat template, by a build's tokenizer."""
    texts = chat_texts(target, prompts)
    ids = build.run_one(job="tokenize", path=str(target), texts=texts)
    return [ids[f"tokens-{number}"].tolist() for number in range(len(texts))]
