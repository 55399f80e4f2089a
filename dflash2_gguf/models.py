"""Opening a target and its drafter in the order that finds a wrong pair cheapest.

Headers first, then the drafter, then the target without its weights for what only its graph can
tell; the target's weights, which may be hundreds of GB, come last.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.errors import CheckpointError, NativeError
from dflash2_gguf.gguf_header import read_header
from dflash2_gguf.libraries import load
from dflash2_gguf.native import MemoryStruct, SessionParams, api, check
from dflash2_gguf.pair import check_complete, check_headers, check_target
from dflash2_gguf.stats import Memory

__all__ = ["Model", "Progress", "memory_from", "open_pair"]

# called with 0..1 while the target's weights are read
Progress = Callable[[float], None]

_REASON = "error loading model: "
_OUTSIDE_FILE = "is not within the file bounds"


@dataclass
class Model:
    """A llama_model that is freed by ``close``."""

    path: Path
    handle: int | None

    def close(self) -> None:
        """Free the model; again is harmless."""
        if self.handle is not None:
            api().llama.llama_model_free(self.handle)
            self.handle = None


def open_pair(
    target: Path,
    draft: Path | None,
    params: SessionParams,
    *,
    on_progress: Progress | None = None,
) -> tuple[Model, Model | None]:
    """Load ``target`` and, when given, ``draft``, after checking that they belong together.

    Raises CheckpointError for a wrong file, PairError for a wrong pair, NativeError when llama.cpp
    cannot load one of them or the memory does not suffice.
    """
    _check_files(target, draft)
    drafter = None if draft is None else _load(draft)
    try:
        with closing(_load(target, no_alloc=True)) as plan:
            if drafter is not None:
                status = api().dflash2.dflash2_check_pair(plan.handle, drafter.handle)
                check(status, "dflash2_check_pair")
            _require_memory(plan, drafter, params)
        return _load(target, on_progress=on_progress), drafter
    except BaseException:
        if drafter is not None:
            drafter.close()
        raise


def memory_from(memory: MemoryStruct) -> Memory:
    """The native struct as a value."""
    return Memory(**{field[0]: getattr(memory, field[0]) for field in MemoryStruct._fields_})


def _check_files(target: Path, draft: Path | None) -> None:
    headers = [read_header(target)]
    if draft is None:
        check_target(headers[0])
    else:
        headers.append(read_header(draft))
        check_headers(*headers)
    row_size = load("ggml-base").ggml_row_size
    row_size.restype, row_size.argtypes = ctypes.c_size_t, [ctypes.c_int, ctypes.c_int64]
    for header in headers:
        check_complete(header, row_size)


def _load(path: Path, *, no_alloc: bool = False, on_progress: Progress | None = None) -> Model:
    llama, log = api().llama, api().log
    params = llama.llama_model_default_params()
    if no_alloc:
        params.no_alloc, params.load_mode = True, llama.LLAMA_LOAD_MODE_NONE
    watch = _Watch(on_progress)
    params.progress_callback = llama.llama_progress_callback(watch)
    log.lines.clear()
    handle = llama.llama_model_load_from_file(os.fsencode(path), params)
    if watch.raised is not None:
        if handle:
            llama.llama_model_free(handle)
        raise watch.raised
    if not handle:
        raise _load_error(path, list(log.lines))
    return Model(path, handle)


class _Watch:
    """llama_progress_callback; keeps what the caller's function raises: ctypes swallows it."""

    def __init__(self, on_progress: Progress | None) -> None:
        self._on_progress = on_progress
        self.raised: BaseException | None = None

    def __call__(self, progress: float, _user_data: Any) -> bool:
        try:
            if self._on_progress is not None:
                self._on_progress(progress)
        except BaseException as error:  # KeyboardInterrupt must reach the caller too
            self.raised = error
        return self.raised is None


def _load_error(path: Path, lines: list[str]) -> CheckpointError | NativeError:
    named = [line.split(_REASON, 1)[1] for line in lines if _REASON in line]
    reason = (named or lines or ["no reason given"])[-1]
    if _OUTSIDE_FILE in reason:
        return CheckpointError(f"{path} is truncated: {reason}", "download or convert it again")
    return NativeError(f"llama.cpp cannot load {path}: {reason}", "-v shows llama.cpp's own log")


def _require_memory(target: Model, draft: Model | None, params: SessionParams) -> None:
    """Too large a cache gets the process killed without a word, long after it was granted."""
    plan = MemoryStruct()
    status = api().dflash2.dflash2_plan(
        target.handle, draft.handle if draft else None, ctypes.byref(params), ctypes.byref(plan)
    )
    check(status, "dflash2_plan")
    memory = memory_from(plan)
    available = _available_bytes(Path("/proc/meminfo"))
    needed = memory.total - memory.target_weights - memory.draft_weights
    if api().llama.llama_supports_gpu_offload() or available is None or needed <= available:
        return
    raise NativeError(
        f"caches and buffers need {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free",
        "use a smaller context (--ctx-size)",
    )


def _available_bytes(meminfo: Path) -> int | None:
    """MemAvailable of Linux in bytes, None on other systems."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(values[0]) * 1024 if values else None
