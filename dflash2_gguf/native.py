"""ctypes view of ``dflash2.h``, on top of llama-cpp-python's view of ``llama.h``.

Both must come from the same build: llama-cpp-python is pointed at our folder before it loads
anything, and a second copy of libllama in the process is refused.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from dflash2_gguf.errors import DFlash2Error, NativeError, PairError, StateError, UsageError
from dflash2_gguf.libraries import build_hint, library_dir, load, read_build_info

__all__ = [
    "ABI_VERSION",
    "ABORTED",
    "FINISH_REASONS",
    "Api",
    "DraftView",
    "ImportanceStruct",
    "LogitBias",
    "MemoryStruct",
    "SeqParams",
    "SessionParams",
    "StatsStruct",
    "StepResult",
    "api",
    "check",
    "failure",
]

ABI_VERSION = 4
MAX_DRAFT = 32

# enum dflash2_status
_ARGUMENT, _PAIR, ABORTED, _STATE = -1, -2, -6, -7

# enum dflash2_finish
FINISH_REASONS = (None, "stop", "length", "context")

_LIB_PATH_VARIABLE = "LLAMA_CPP_LIB_PATH"
_LEVEL_DEBUG, _LEVEL_WARN, _LEVEL_ERROR, _LEVEL_CONT = 1, 3, 4, 5  # enum ggml_log_level


class SessionParams(ctypes.Structure):
    """struct dflash2_session_params."""

    _fields_ = [
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_batch_shared", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("n_draft_max", ctypes.c_int32),
        ("n_threads", ctypes.c_int32),
        ("n_threads_batch", ctypes.c_int32),
        ("type_k", ctypes.c_int32),
        ("type_v", ctypes.c_int32),
        ("flash_attn", ctypes.c_int32),
        ("offload_kqv", ctypes.c_bool),
        ("exact", ctypes.c_bool),
        ("calibrate", ctypes.c_bool),
        ("noise_min", ctypes.c_float),
    ]


class LogitBias(ctypes.Structure):
    """struct llama_logit_bias."""

    _fields_ = [("token", ctypes.c_int32), ("bias", ctypes.c_float)]


class SeqParams(ctypes.Structure):
    """struct dflash2_seq_params."""

    _fields_ = [
        ("verifier", ctypes.c_int32),
        ("n_predict", ctypes.c_int32),
        ("n_draft_max", ctypes.c_int32),
        ("ignore_eos", ctypes.c_bool),
        ("stop", ctypes.POINTER(ctypes.c_int32)),
        ("n_stop", ctypes.c_size_t),
        ("seed", ctypes.c_uint32),
        ("temp", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("penalty_last_n", ctypes.c_int32),
        ("penalty_repeat", ctypes.c_float),
        ("penalty_freq", ctypes.c_float),
        ("penalty_present", ctypes.c_float),
        ("typical_p", ctypes.c_float),
        ("top_n_sigma", ctypes.c_float),
        ("xtc_probability", ctypes.c_float),
        ("xtc_threshold", ctypes.c_float),
        ("dry_multiplier", ctypes.c_float),
        ("dry_base", ctypes.c_float),
        ("dry_allowed_length", ctypes.c_int32),
        ("dry_penalty_last_n", ctypes.c_int32),
        ("logit_bias", ctypes.POINTER(LogitBias)),
        ("n_logit_bias", ctypes.c_size_t),
        ("grammar", ctypes.c_char_p),
    ]


class StepResult(ctypes.Structure):
    """struct dflash2_step_result."""

    _fields_ = [
        ("seq_id", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
        ("tokens", ctypes.POINTER(ctypes.c_int32)),
        ("n_drafted", ctypes.c_int32),
        ("n_accepted", ctypes.c_int32),
        ("n_prompt_left", ctypes.c_int32),
        ("finish", ctypes.c_int32),
    ]


class StatsStruct(ctypes.Structure):
    """struct dflash2_stats."""

    _fields_ = [
        ("n_prompt", ctypes.c_uint64),
        ("n_prompt_reused", ctypes.c_uint64),
        ("n_injected", ctypes.c_uint64),
        ("n_generated", ctypes.c_uint64),
        ("n_steps", ctypes.c_uint64),
        ("n_draft_passes", ctypes.c_uint64),
        ("n_drafted", ctypes.c_uint64),
        ("n_accepted", ctypes.c_uint64),
        ("accepted_at", ctypes.c_uint64 * MAX_DRAFT),
        ("drafted_at", ctypes.c_uint64 * MAX_DRAFT),
        ("draft_failures", ctypes.c_uint64 * 3),
        ("t_prompt_us", ctypes.c_uint64),
        ("t_inject_us", ctypes.c_uint64),
        ("t_draft_us", ctypes.c_uint64),
        ("t_verify_us", ctypes.c_uint64),
        ("t_sample_us", ctypes.c_uint64),
        ("n_prompt_sampled", ctypes.c_uint64),
        ("verified_width", ctypes.c_uint64 * (MAX_DRAFT + 1)),
        ("rounds_by_reason", ctypes.c_uint64 * 5),
        ("n_doubts", ctypes.c_uint64),
        ("n_replayed", ctypes.c_uint64),
        ("noise", ctypes.c_double),
    ]


class MemoryStruct(ctypes.Structure):
    """struct dflash2_memory."""

    _fields_ = [
        ("target_weights", ctypes.c_uint64),
        ("target_cache", ctypes.c_uint64),
        ("target_snapshots", ctypes.c_uint64),
        ("target_compute", ctypes.c_uint64),
        ("draft_weights", ctypes.c_uint64),
        ("draft_cache", ctypes.c_uint64),
        ("draft_compute", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
    ]


class ImportanceStruct(ctypes.Structure):
    """struct dflash2_importance."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("sums", ctypes.POINTER(ctypes.c_double)),
        ("n_cols", ctypes.c_int64),
        ("n_rows", ctypes.c_int64),
    ]


class DraftView(ctypes.Structure):
    """struct dflash2_draft_view."""

    _fields_ = [
        ("n_drafted", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("path", ctypes.POINTER(ctypes.c_int32)),
        ("candidates", ctypes.POINTER(ctypes.c_int32)),
        ("scores", ctypes.POINTER(ctypes.c_float)),
    ]


_POINTER = ctypes.c_void_p
_I32, _U32 = ctypes.c_int32, ctypes.c_uint32
_POINTERS, _FLOATS = ctypes.POINTER(_POINTER), ctypes.POINTER(ctypes.c_float)

# name: (result, arguments), in the header's order
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dflash2_abi_version": (_I32, ()),
    "dflash2_build_info": (ctypes.c_char_p, ()),
    "dflash2_last_error": (ctypes.c_char_p, ()),
    "dflash2_check_pair": (_I32, (_POINTER, _POINTER)),
    "dflash2_plan": (
        _I32,
        (_POINTER, _POINTER, ctypes.POINTER(SessionParams), ctypes.POINTER(MemoryStruct)),
    ),
    "dflash2_session_default_params": (SessionParams, ()),
    "dflash2_seq_default_params": (SeqParams, ()),
    "dflash2_session_init": (
        _POINTER,
        (_POINTER, _POINTER, ctypes.POINTER(SessionParams), ctypes.POINTER(_I32)),
    ),
    "dflash2_session_free": (None, (_POINTER,)),
    "dflash2_session_seq_begin": (
        _I32,
        (_POINTER, _I32, ctypes.POINTER(_I32), ctypes.c_size_t, ctypes.POINTER(SeqParams)),
    ),
    "dflash2_session_seq_end": (_I32, (_POINTER, _I32)),
    "dflash2_session_seq_clear": (_I32, (_POINTER, _I32)),
    "dflash2_session_step": (_I32, (_POINTER, ctypes.POINTER(StepResult))),
    "dflash2_session_abort": (None, (_POINTER,)),
    "dflash2_session_n_ctx": (_U32, (_POINTER,)),
    "dflash2_session_n_draft_max": (_I32, (_POINTER,)),
    "dflash2_session_seq_save": (
        _I32,
        (_POINTER, _I32, ctypes.POINTER(_POINTER), ctypes.POINTER(ctypes.c_size_t)),
    ),
    "dflash2_session_seq_restore": (_I32, (_POINTER, _I32, ctypes.c_char_p, ctypes.c_size_t)),
    "dflash2_session_seq_is_active": (_I32, (_POINTER, _I32)),
    "dflash2_session_seq_tokens": (_I32, (_POINTER, _I32, ctypes.POINTER(ctypes.POINTER(_I32)))),
    "dflash2_session_seq_n_past": (_I32, (_POINTER, _I32)),
    "dflash2_session_seq_logits": (
        _I32,
        (_POINTER, _I32, ctypes.POINTER(ctypes.POINTER(ctypes.c_float))),
    ),
    "dflash2_session_seq_stats": (_I32, (_POINTER, _I32, ctypes.POINTER(StatsStruct))),
    "dflash2_session_importance_size": (_I32, (_POINTER,)),
    "dflash2_session_importance": (_I32, (_POINTER, _I32, ctypes.POINTER(ImportanceStruct))),
    "dflash2_session_stats": (None, (_POINTER, ctypes.POINTER(StatsStruct))),
    "dflash2_session_stats_reset": (None, (_POINTER,)),
    "dflash2_session_memory": (None, (_POINTER, ctypes.POINTER(MemoryStruct))),
    "dflash2_replay_init": (
        _POINTER,
        (_POINTER, _POINTERS, _I32, ctypes.POINTER(SessionParams), ctypes.POINTER(_I32)),
    ),
    "dflash2_replay_free": (None, (_POINTER,)),
    "dflash2_replay_n_features": (_I32, (_POINTER,)),
    "dflash2_replay_n_draft_max": (_I32, (_POINTER,)),
    "dflash2_replay_read": (
        _I32,
        (_POINTER, ctypes.POINTER(_I32), _I32, _I32, _FLOATS, _FLOATS),
    ),
    "dflash2_replay_inject": (_I32, (_POINTER, _I32, _I32, _FLOATS, _I32)),
    "dflash2_replay_draft": (_I32, (_POINTER, _I32, _I32, _I32, ctypes.POINTER(DraftView))),
}


@dataclass
class Log:
    """Keeps llama.cpp's last warnings and errors; ``echo`` prints everything to stderr."""

    echo: bool = False
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=64))
    _level: int = 0

    def write(self, level: int, text: bytes, _user_data: Any = None) -> None:
        """The callback: ``text`` may be a part of a line."""
        self._level = self._level if level == _LEVEL_CONT else level
        line = text.decode("utf-8", errors="replace")
        if self.echo and self._level != _LEVEL_DEBUG:
            print(line, end="", file=sys.stderr, flush=True)
        if self._level in (_LEVEL_WARN, _LEVEL_ERROR) and line.strip():
            self.lines.append(line.strip())


@dataclass(frozen=True)
class Api:
    """The loaded libraries: ``llama`` is llama-cpp-python's ctypes module, ``dflash2`` ours."""

    llama: Any
    dflash2: ctypes.CDLL
    log: Log


@lru_cache(maxsize=1)
def api() -> Api:
    """Load the libraries once per process.

    Raises NativeError when they are missing, from another build, or when llama_cpp was imported
    before with a library of its own.
    """
    folder = library_dir()
    load("ggml-base")  # says what is missing before llama-cpp-python would
    llama = _import_llama(folder)
    dflash2 = load("dflash2")
    _declare(dflash2)
    _require_same_build(dflash2, folder)
    _require_one_llama(dflash2, llama)
    log = _install_log(llama)
    llama.llama_backend_init()
    return Api(llama=llama, dflash2=dflash2, log=log)


def check(status: int, what: str) -> int:
    """``status`` of a dflash2 call when it is a success, else its error (see ``failure``)."""
    if status < 0:
        raise failure(status, what)
    return status


def failure(status: int, what: str) -> DFlash2Error:
    """The error for a dflash2_status, with the library's reason as its message."""
    reason = api().dflash2.dflash2_last_error().decode("utf-8", errors="replace")
    message = reason or f"{what} failed with status {status}"
    if status == _PAIR:
        return PairError(message, "use another drafter, or decode plainly without one")
    if status == _STATE:
        return StateError(message, "restore it in a session like the one that saved it")
    return UsageError(message) if status == _ARGUMENT else NativeError(message)


def _import_llama(folder: Path) -> ModuleType:
    loaded = sys.modules.get("llama_cpp.llama_cpp")
    if loaded is None:
        with _environment(_LIB_PATH_VARIABLE, str(folder)):
            loaded = _first_import()
    used = Path(loaded._base_path)
    if used.resolve() != folder.resolve():
        raise NativeError(
            f"llama_cpp was imported before dflash2_gguf and loaded its library from {used}",
            f"import dflash2_gguf first, or set {_LIB_PATH_VARIABLE}={folder}",
        )
    return loaded


def _first_import() -> ModuleType:
    try:
        import llama_cpp.llama_cpp as llama
    except ImportError as error:
        raise NativeError(
            f"llama-cpp-python cannot be imported: {error}",
            "run `pip install llama-cpp-python` with "
            'CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" in the environment',
        ) from error
    except (AttributeError, OSError, RuntimeError) as error:
        message = f"llama-cpp-python does not fit this libllama: {error}"
        raise NativeError(message, build_hint()) from error
    module: ModuleType = llama
    return module


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _declare(library: ctypes.CDLL) -> None:
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise NativeError(f"libdflash2 lacks {name}", build_hint()) from error
        function.restype = result
        function.argtypes = list(arguments)


def _require_same_build(dflash2: ctypes.CDLL, folder: Path) -> None:
    version = dflash2.dflash2_abi_version()
    if version != ABI_VERSION:
        raise NativeError(
            f"libdflash2 has ABI version {version}, this package needs {ABI_VERSION}", build_hint()
        )
    found = dflash2.dflash2_build_info().decode()
    expected = read_build_info(folder).build_info
    if found != expected:
        raise NativeError(
            f"libdflash2 in {folder} is build {found}, build_info.json says {expected}",
            build_hint(),
        )


def _require_one_llama(dflash2: ctypes.CDLL, llama: Any) -> None:
    """Two copies of libllama share no state: models of one would crash the other."""
    ours = ctypes.cast(dflash2.llama_model_free, _POINTER).value
    theirs = ctypes.cast(llama.llama_model_free, _POINTER).value
    if ours != theirs:
        raise NativeError(
            f"libdflash2 and llama-cpp-python use two copies of libllama ({llama._base_path})",
            build_hint(),
        )


def _install_log(llama: Any) -> Log:
    log = Log()
    callback = llama.llama_log_callback(log.write)
    log.callback = callback  # type: ignore[attr-defined]  # lives as long as the library calls it
    llama.llama_log_set(callback, None)
    return log
