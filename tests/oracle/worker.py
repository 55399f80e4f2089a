"""Runs jobs on one libllama in a process of its own: ``python -m tests.oracle.worker JOBS.json OUT``.

JOBS.json is a list of objects with "job" and its arguments. Each job runs in a fork, because the pin aborts
where this project reports an error; the result of job i is OUT/i.npz, and a job that died leaves none.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle import libllama
from tests.oracle.capture import Capture

__all__ = ["main"]

Arrays = dict[str, np.ndarray]


def job_greedy(path: str, prompts: list[list[int]], n_predict: int, **options: int) -> Arrays:
    """Plain greedy continuation of each prompt: tokens and top-2 margins, [n_prompts, n_predict]."""
    chosen = libllama.Options(**options)
    with libllama.model(path) as model, libllama.context(model, chosen) as ctx:
        pairs = [libllama.greedy(ctx, prompt, n_predict, chosen.n_batch) for prompt in prompts]
    return {
        "tokens": np.array([tokens for tokens, _ in pairs]),
        "margins": np.array([margins for _, margins in pairs]),
    }


def job_noise(path: str, texts: list[list[int]], width: int, **options: int) -> Arrays:
    """Largest |logit difference| between width-1 and width-n evaluation of the last rows of each text."""
    chosen = libllama.Options(**options)
    differences = []
    with libllama.model(path) as model, libllama.context(model, chosen) as ctx:
        for text in texts:
            narrow = _last_rows(ctx, text, width, 1, chosen.n_batch)
            wide = _last_rows(ctx, text, width, width, chosen.n_batch)
            differences.append(np.abs(narrow - wide).max(axis=1))
    return {"differences": np.array(differences)}


def _last_rows(ctx: Any, text: list[int], n_rows: int, width: int, n_batch: int) -> np.ndarray:
    head = len(text) - n_rows
    libllama.prefill(ctx, text[:head], n_batch)
    rows = [(token, head + i, 0) for i, token in enumerate(text[head:])]
    parts = [libllama.evaluate(ctx, rows[i : i + width]) for i in range(0, n_rows, width)]
    return np.concatenate(parts)


def job_layers(
    path: str, rows: list[list[int]], layers: list[int], capture: bool, **options: int
) -> Arrays:
    """Published layer inputs as "input-<id>", and captured outputs of the layers before as "output-<id>"."""
    seen = Capture()
    callback = seen.callback() if capture else None
    with libllama.model(path) as model:
        with libllama.context(model, libllama.Options(**options), callback) as ctx:
            inputs = libllama.layer_inputs(ctx, [(t, p, s) for t, p, s in rows], layers)
    result = {f"input-{layer}": value for layer, value in inputs.items()}
    tokens = [token for token, _, _ in rows]
    for layer in layers:
        if seen.complete(layer - 1):
            result[f"output-{layer}"] = seen.rows(layer - 1, tokens)
    return result


def job_shape(path: str) -> Arrays:
    """Sizes of a model: layers, hidden size, vocabulary."""
    with libllama.model(path) as model:
        vocab = libllama.llama_cpp.llama_model_get_vocab(model)
        return {
            "n_layer": np.array(libllama.llama_cpp.llama_model_n_layer(model)),
            "n_embd": np.array(libllama.llama_cpp.llama_model_n_embd(model)),
            "n_vocab": np.array(libllama.llama_cpp.llama_vocab_n_tokens(vocab)),
        }


JOBS: dict[str, Callable[..., Arrays]] = {
    "greedy": job_greedy,
    "layers": job_layers,
    "noise": job_noise,
    "shape": job_shape,
}


def _in_fork(work: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    os.waitpid(pid, 0)


def _run(job: dict[str, Any], out: Path) -> None:
    arguments = dict(job)
    arrays = JOBS[arguments.pop("job")](**arguments)
    temporary = out.with_suffix(".part.npz")
    np.savez(temporary, **arrays)
    temporary.rename(out)


def main(argv: Sequence[str]) -> None:
    """Run every job of a list, each in a fork."""
    jobs = json.loads(Path(argv[0]).read_text())
    libllama.silence()
    for number, job in enumerate(jobs):
        _in_fork(lambda: _run(job, Path(argv[1]) / f"{number}.npz"))


if __name__ == "__main__":
    main(sys.argv[1:])
