"""Runs jobs on one libllama in a process of its own.

``python -m tests.oracle.worker JOBS.json OUT``: JOBS.json is a list of objects with "job" and its
arguments. Each job runs in a fork, because the pin aborts where this project reports an error; the
result of job i is OUT/i.npz. A job that raised leaves OUT/i.error, one that aborted leaves nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle import libllama
from tests.oracle.capture import Capture

__all__ = ["main"]

Arrays = dict[str, np.ndarray]


def job_greedy(path: str, prompts: list[list[int]], n_predict: int, **options: int) -> Arrays:
    """Plain greedy answers: tokens and top-2 margins, [n_prompts, n_predict]."""
    chosen = libllama.Options(**options)
    with libllama.model(path) as model, libllama.context(model, chosen) as ctx:
        pairs = [libllama.greedy(ctx, prompt, n_predict, chosen.n_batch) for prompt in prompts]
    return {
        "tokens": np.array([tokens for tokens, _ in pairs]),
        "margins": np.array([margins for _, margins in pairs]),
    }


def job_noise(path: str, texts: list[list[int]], width: int, **options: int) -> Arrays:
    """Largest |logit difference| of the last rows of each text, singly against 2..n at a time.

    differences [n_texts, n - 1]: of one text and one width.
    """
    chosen = libllama.Options(**options)
    widths = range(2, width + 1)
    differences = []
    with libllama.model(path) as model, libllama.context(model, chosen) as ctx:
        for text in texts:
            libllama.forget(ctx)
            single = _last_rows(ctx, text, width, 1, chosen.n_batch)
            rows = [_last_rows(ctx, text, width, n, chosen.n_batch) for n in widths]
            differences.append([np.abs(single - wide).max() for wide in rows])
    return {"differences": np.array(differences)}


def _last_rows(ctx: Any, text: list[int], n_rows: int, width: int, n_batch: int) -> np.ndarray:
    head = len(text) - n_rows
    if not libllama.rewind(ctx, head):
        libllama.prefill(ctx, text[:head], n_batch)
    rows = [(token, head + i, 0) for i, token in enumerate(text[head:])]
    parts = [libllama.evaluate(ctx, rows[i : i + width]) for i in range(0, n_rows, width)]
    return np.concatenate(parts)


def job_last_logits(path: str, texts: list[list[int]], **options: int) -> Arrays:
    """Logits after each text, [n_texts, V]."""
    chosen = libllama.Options(**options)
    with libllama.model(path) as model, libllama.context(model, chosen) as ctx:
        return {"logits": np.stack([libllama.prefill(ctx, t, chosen.n_batch) for t in texts])}


def job_layers(
    path: str,
    rows: list[list[int]],
    layers: Sequence[int] = (),
    captured: Sequence[int] = (),
    **options: int,
) -> Arrays:
    """Published inputs of layers, "input-<layer>", and captured outputs, "output-<layer>".

    rows are (token, position, sequence); with captured, tokens must be distinct.
    """
    seen = Capture()
    callback = seen.callback() if captured else None
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(libllama.model(path))
        ctx = stack.enter_context(libllama.context(model, libllama.Options(**options), callback))
        inputs = libllama.layer_inputs(ctx, [(t, p, s) for t, p, s in rows], layers)
    result = {f"input-{layer}": value for layer, value in inputs.items()}
    tokens = [token for token, _, _ in rows]
    for layer in captured:
        if seen.complete(layer):
            result[f"output-{layer}"] = seen.rows(layer, tokens)
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


def job_session(
    path: str,
    draft: str | None,
    prompts: list[list[int]],
    n_predict: int,
    lattices: bool = False,
    **options: int,
) -> Arrays:
    """Greedy generation by libdflash2, n_seq_max prompts at a time; what happened in every round.

    tokens [n_prompts, n_predict]; per round: prompt, before, drafted, accepted, and with
    lattices its "path-<round>", "candidates-<round>" and "scores-<round>". With the option
    calibrate also what was recorded, see rounds.importance.
    """
    from tests.oracle import rounds

    together = options.get("n_seq_max", 1)
    records: list[rounds.Record] = []
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(libllama.model(path))
        drafter = stack.enter_context(libllama.model(draft)) if draft else None
        session = stack.enter_context(rounds.native_session(target, drafter, **options))
        for start in range(0, len(prompts), together):
            group = prompts[start : start + together]
            records += rounds.record(session, group, n_predict, lattices)
        failures = rounds.failures(session)
        recorded = rounds.importance(session) if options.get("calibrate") else {}
    return rounds.arrays(records) | {"failures": np.array(failures)} | recorded


def job_restored(
    path: str,
    draft: str | None,
    prompts: list[list[int]],
    n_predict: int,
    after: int,
    **options: int,
) -> Arrays:
    """As job_session, each sequence saved after some steps and finished in another session."""
    from tests.oracle import rounds

    with contextlib.ExitStack() as stack:
        target = stack.enter_context(libllama.model(path))
        drafter = stack.enter_context(libllama.model(draft)) if draft else None
        first, second = (
            stack.enter_context(rounds.native_session(target, drafter, **options)) for _ in range(2)
        )
        records = rounds.record_restored((first, second), prompts, n_predict, after)
    return rounds.arrays(records)


def job_serve(
    path: str,
    draft: str | None,
    prompts: list[dict[str, Any]],
    width: int,
    **options: int,
) -> Arrays:
    """Requests (see rounds.serve) answered by libdflash2, n_seq_max at a time.

    tokens [n_requests, width], -1 behind the end; per round: prompt (number of the request),
    before, drafted, accepted.
    """
    from tests.oracle import rounds

    with contextlib.ExitStack() as stack:
        target = stack.enter_context(libllama.model(path))
        drafter = stack.enter_context(libllama.model(draft)) if draft else None
        session = stack.enter_context(rounds.native_session(target, drafter, **options))
        records = rounds.serve(session, prompts, options.get("n_seq_max", 1))
        failures = rounds.failures(session)
    for record in records:
        record.tokens += [-1] * (width - len(record.tokens))
    return rounds.arrays(records) | {"failures": np.array([failures])}


def job_end_tokens(path: str) -> Arrays:
    """Ids of the tokens that end a generation."""
    with libllama.model(path) as model:
        return {"ids": np.array(libllama.end_tokens(model))}


def job_publishes(path: str, layers: list[int]) -> Arrays:
    """dflash2_target_publishes for each layer, and the reasons where it says no."""
    from dflash2_gguf.native import api

    library = api().dflash2
    library.dflash2_target_publishes.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    answers, reasons = [], []
    with libllama.model(path) as model:
        for layer in layers:
            answers.append(library.dflash2_target_publishes(model, layer))
            reasons.append(library.dflash2_last_error().decode() if answers[-1] != 1 else "")
    return {"publishes": np.array(answers), "reasons": np.array(reasons)}


def job_tokenize(path: str, texts: list[str]) -> Arrays:
    """Token ids of texts with special tokens read, as "tokens-<i>"."""
    with libllama.model(path) as model:
        return {f"tokens-{i}": libllama.tokenize(model, text) for i, text in enumerate(texts)}


JOBS: dict[str, Callable[..., Arrays]] = {
    "end_tokens": job_end_tokens,
    "greedy": job_greedy,
    "last_logits": job_last_logits,
    "layers": job_layers,
    "noise": job_noise,
    "publishes": job_publishes,
    "restored": job_restored,
    "serve": job_serve,
    "session": job_session,
    "shape": job_shape,
    "tokenize": job_tokenize,
}


def _in_fork(job: dict[str, Any], out: Path) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            _run(job, out)
        except Exception:
            out.with_suffix(".error").write_text(traceback.format_exc())
        finally:
            os._exit(0)
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
        _in_fork(job, Path(argv[1]) / f"{number}.npz")


if __name__ == "__main__":
    main(sys.argv[1:])
