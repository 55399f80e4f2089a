"""Opening a target and its drafter in the order that finds a wrong pair cheapest.

Headers first, then the drafter, then the target without its weights for what only its graph can
tell; the target's weights, which may be hundreds of GB, come last.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.errors import CheckpointError, NativeError, UsageError
from dflash2_gguf.gguf_header import read_header
from dflash2_gguf.libraries import load
from dflash2_gguf.machine import free_memory
from dflash2_gguf.native import MemoryStruct, SessionParams, api, check
from dflash2_gguf.pair import check_complete, check_headers, check_target
from dflash2_gguf.stats import Memory
from dflash2_gguf.words import counted

__all__ = [
    "Model",
    "Progress",
    "measure",
    "memory_from",
    "open_drafter",
    "open_pair",
    "open_unloaded",
]

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
    n_gpu_layers: int | None = None,
    on_progress: Progress | None = None,
) -> tuple[Model, Model | None]:
    """Load ``target`` and, when given, ``draft``, after checking that they belong together.

    ``n_gpu_layers`` of the target go to the GPU, all by default; the drafter goes there unless it
    is 0. Raises CheckpointError for a wrong file, PairError for a wrong pair, NativeError when
    llama.cpp cannot load one of them or the memory does not suffice, UsageError for GPU layers
    without a GPU.
    """
    _require_gpu(n_gpu_layers)
    _check_files(target, draft)
    drafter = None if draft is None else _load(draft, n_gpu_layers=_draft_layers(n_gpu_layers))
    try:
        with closing(_load(target, no_alloc=True, n_gpu_layers=n_gpu_layers)) as plan:
            if drafter is not None:
                _require_pair(plan, drafter)
            _require_memory(plan, drafter, params)
        return _load(target, n_gpu_layers=n_gpu_layers, on_progress=on_progress), drafter
    except BaseException:
        if drafter is not None:
            drafter.close()
        raise


def open_drafter(path: Path, target: Model) -> Model:
    """Load one more drafter of a loaded target. Raises as ``open_pair``."""
    _check_files(target.path, path)
    drafter = _load(path)
    try:
        _require_pair(target, drafter)
    except BaseException:
        drafter.close()
        raise
    return drafter


@contextmanager
def open_unloaded(
    target: Path, draft: Path | None, *, n_gpu_layers: int | None = None
) -> Iterator[tuple[Model, Model | None]]:
    """Both models without their weights, for what can be told beforehand; checked as a pair.

    Reads headers and vocabularies only, so it works for models larger than the memory. Raises as
    ``open_pair``.
    """
    _require_gpu(n_gpu_layers)
    _check_files(target, draft)
    with ExitStack() as opened:
        large = opened.enter_context(
            closing(_load(target, no_alloc=True, n_gpu_layers=n_gpu_layers))
        )
        small = None
        if draft is not None:
            layers = _draft_layers(n_gpu_layers)
            small = opened.enter_context(closing(_load(draft, no_alloc=True, n_gpu_layers=layers)))
            _require_pair(large, small)
        yield large, small


def measure(target: Model, draft: Model | None, params: SessionParams) -> Memory:
    """Memory that a session with ``params`` takes; nothing of it is allocated.

    Raises NativeError when llama.cpp cannot set the session up, UsageError for parameters that are
    out of range.
    """
    plan = MemoryStruct()
    status = api().dflash2.dflash2_plan(
        target.handle, draft.handle if draft else None, ctypes.byref(params), ctypes.byref(plan)
    )
    check(status, "dflash2_plan")
    return memory_from(plan)


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


def _require_gpu(n_gpu_layers: int | None) -> None:
    if n_gpu_layers and not api().llama.llama_supports_gpu_offload():
        are = "is" if n_gpu_layers == 1 else "are"
        raise UsageError(
            f"{counted(n_gpu_layers, 'layer')} {are} wanted on a GPU, and these libraries see none",
            'build them with CMAKE_ARGS="... -DGGML_CUDA=ON", or leave out --gpu-layers',
        )


def _draft_layers(n_gpu_layers: int | None) -> int | None:
    """A drafter is small and runs every round: it stays out of the GPU only when all does."""
    return 0 if n_gpu_layers == 0 else None


def _require_pair(target: Model, draft: Model) -> None:
    status = api().dflash2.dflash2_check_pair(target.handle, draft.handle)
    check(status, "dflash2_check_pair")


def _load(
    path: Path,
    *,
    no_alloc: bool = False,
    n_gpu_layers: int | None = None,
    on_progress: Progress | None = None,
) -> Model:
    llama, log = api().llama, api().log
    params = llama.llama_model_default_params()
    if n_gpu_layers is not None:
        params.n_gpu_layers = n_gpu_layers
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
    memory = measure(target, draft, params)
    available = free_memory().host
    needed = memory.total - memory.target_weights - memory.draft_weights
    if api().llama.llama_supports_gpu_offload() or available is None or needed <= available:
        return
    raise NativeError(
        f"caches and buffers need {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free",
        "use a smaller context (--ctx-size), or --fit",
    )
