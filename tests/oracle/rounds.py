"""Sessions of libdflash2, step by step, with every round written down. Runs in a worker."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import numpy as np

from dflash2_gguf.native import (
    DraftView,
    ImportanceStruct,
    SeqParams,
    SessionParams,
    StatsStruct,
    StepResult,
    api,
    check,
    failure,
)

__all__ = [
    "Record",
    "arrays",
    "failures",
    "importance",
    "native_session",
    "record",
    "record_restored",
    "serve",
]

_GREEDY = 1  # enum dflash2_verifier


@dataclass
class Record:
    """What happened to one sequence; one entry per round in all lists but tokens."""

    tokens: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)  # tokens produced before the round
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    lattices: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)


@contextmanager
def native_session(target: Any, draft: Any, **options: int) -> Iterator[int]:
    """A dflash2_session over two loaded models; options are fields of dflash2_session_params."""
    library = api().dflash2
    params: SessionParams = library.dflash2_session_default_params()
    for name, value in options.items():
        setattr(params, name, value)
    status = ctypes.c_int32(0)
    session = library.dflash2_session_init(
        target, draft, ctypes.byref(params), ctypes.byref(status)
    )
    if not session:
        raise failure(status.value, "dflash2_session_init")
    try:
        yield session
    finally:
        library.dflash2_session_free(session)


def record(
    session: int, prompts: Sequence[Sequence[int]], n_predict: int, lattices: bool
) -> list[Record]:
    """Generate n_predict tokens greedily for all prompts at once, one sequence each."""
    # an automatic width has a clock
    width = api().dflash2.dflash2_session_n_draft_max(session)
    options = {"verifier": _GREEDY, "n_predict": n_predict, "n_draft_max": width}
    for number, prompt in enumerate(prompts):
        _begin(session, number, prompt, options)
    records = [Record() for _ in prompts]
    for results in _steps(session, len(prompts)):
        for result in results:
            _note(session, result, records[result.seq_id], lattices)
    for number in range(len(prompts)):
        check(api().dflash2.dflash2_session_seq_clear(session, number), "dflash2_session_seq_clear")
    return records


def record_restored(
    sessions: tuple[int, int], prompts: Sequence[Sequence[int]], n_predict: int, after: int
) -> list[Record]:
    """As ``record``, one by one: begun in the first session, saved, and finished in the second."""
    library, records = api().dflash2, []
    width = library.dflash2_session_n_draft_max(sessions[0])
    options = {"verifier": _GREEDY, "n_predict": n_predict, "n_draft_max": width}
    for prompt in prompts:
        found = Record()
        _begin(sessions[0], 0, prompt, options)
        for _, results in zip(range(after), _steps(sessions[0], 1), strict=False):
            _note(sessions[0], results[0], found, lattices=False)
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        status = library.dflash2_session_seq_save(
            sessions[0], 0, ctypes.byref(data), ctypes.byref(size)
        )
        check(status, "dflash2_session_seq_save")
        saved = ctypes.string_at(data.value or 0, size.value)
        check(library.dflash2_session_seq_restore(sessions[1], 0, saved, len(saved)), "restore")
        for results in _steps(sessions[1], 1):
            _note(sessions[1], results[0], found, lattices=False)
        records.append(found)
    return records


def serve(session: int, requests: Sequence[Mapping[str, Any]], together: int) -> list[Record]:
    """Answer requests, ``together`` at a time; whoever ends makes room for the next.

    A request is the token ids of a "prompt" and fields of dflash2_seq_params. Neighbours with the
    same prompt follow each other in one sequence, which reads it once.
    """
    records = [Record() for _ in requests]
    runs = groupby(range(len(requests)), key=lambda number: requests[number]["prompt"])
    waiting = iter([list(numbers) for _, numbers in runs])
    todo = {sequence: next(waiting, []) for sequence in range(together)}

    def begin(sequence: int) -> None:
        if todo[sequence]:
            options = dict(requests[todo[sequence][0]])
            prompt = options.pop("prompt")
            # where only the last token is left to read, the first step would draft already
            _begin(session, sequence, prompt[:-1] or prompt, options)
            _begin(session, sequence, prompt, options)

    for sequence in todo:
        begin(sequence)
    for results in _steps(session, together):
        for result in results:
            _note(session, result, records[todo[result.seq_id][0]], lattices=False)
        # beginning anew invalidates the tokens of the step
        for sequence in [result.seq_id for result in results if result.finish]:
            todo[sequence] = todo[sequence][1:] or next(waiting, [])
            begin(sequence)
    return records


def _begin(session: int, sequence: int, prompt: Sequence[int], options: Mapping[str, Any]) -> None:
    library = api().dflash2
    params: SeqParams = library.dflash2_seq_default_params()
    params.ignore_eos = True
    for name, value in options.items():
        setattr(params, name, value.encode() if isinstance(value, str) else value)
    ids = (ctypes.c_int32 * len(prompt))(*prompt)
    status = library.dflash2_session_seq_begin(
        session, sequence, ids, len(prompt), ctypes.byref(params)
    )
    check(status, "dflash2_session_seq_begin")


def _steps(session: int, together: int) -> Iterator[list[StepResult]]:
    step, results = api().dflash2.dflash2_session_step, (StepResult * together)()
    while count := check(step(session, results), "dflash2_session_step"):
        yield results[:count]


def arrays(records: Sequence[Record]) -> dict[str, np.ndarray]:
    """records as arrays: tokens [n_prompts, n_predict], and one entry per round of all the rest."""
    result = {"tokens": np.array([record.tokens for record in records])}
    result["prompt"] = np.repeat(range(len(records)), [len(record.before) for record in records])
    for name in ("before", "drafted", "accepted"):
        result[name] = np.array([n for record in records for n in getattr(record, name)], dtype=int)
    lattices = chain.from_iterable(record.lattices for record in records)
    for number, lattice in enumerate(lattices):
        for name, value in zip(("path", "candidates", "scores"), lattice, strict=True):
            result[f"{name}-{number}"] = value
    return result


def _note(session: int, result: StepResult, record: Record, lattices: bool) -> None:
    if result.n_drafted > 0 or record.tokens:
        record.before.append(len(record.tokens))
        record.drafted.append(result.n_drafted)
        record.accepted.append(result.n_accepted)
        if lattices:
            record.lattices.append(_lattice(session, result.seq_id))
    record.tokens.extend(result.tokens[: result.n_tokens])


def _lattice(session: int, sequence: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    view = DraftView()
    read = api().dflash2.dflash2_session_draft_view
    read.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(DraftView)]
    check(read(session, sequence, ctypes.byref(view)), "dflash2_session_draft_view")
    n, k = view.n_drafted, view.top_k
    if n == 0:
        return np.zeros(0, np.int32), np.zeros((0, k), np.int32), np.zeros((0, k, k), np.float32)
    return (
        np.ctypeslib.as_array(view.path, (n,)).copy(),
        np.ctypeslib.as_array(view.candidates, (n, k)).copy(),
        np.ctypeslib.as_array(view.scores, (n, k, k)).copy(),
    )


def failures(session: int) -> list[int]:
    """Rounds that had to be decoded without a draft, by dflash2_draft_failure."""
    raw = StatsStruct()
    api().dflash2.dflash2_session_stats(session, ctypes.byref(raw))
    return list(raw.draft_failures)


def importance(session: int) -> dict[str, np.ndarray]:
    """What a session with calibrate recorded: "sums-<weight>" and "rows-<weight>"."""
    library, raw, found = api().dflash2, ImportanceStruct(), {}
    size = check(library.dflash2_session_importance_size(session), "size")
    for index in range(size):
        check(library.dflash2_session_importance(session, index, ctypes.byref(raw)), "importance")
        name = raw.name.decode()
        found[f"sums-{name}"] = np.ctypeslib.as_array(raw.sums, (raw.n_cols,)).copy()
        found[f"rows-{name}"] = np.array(raw.n_rows)
    return found
