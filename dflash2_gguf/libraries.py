"""Where the native libraries are, and whether this CPU can run them.

The folder holds what one build of the patched llama.cpp left there: ``libggml*.so``,
``libllama.so``, ``libdflash2.so`` and ``build_info.json``, a JSON object with

- ``build_info``: what ``dflash2_build_info()`` of that build returns, and
- ``cpu_features``: what the compiler was allowed to use, as in ``/proc/cpuinfo`` (may be empty).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dflash2_gguf.errors import NativeError

__all__ = ["BuildInfo", "build_hint", "library_dir", "load", "read_build_info"]

_DIR_VARIABLE = "DFLASH2_LIB_DIR"
_PACKAGE = Path(__file__).parent
_FLAG_LINES = ("flags", "Features")  # x86 and ARM name the line differently


@dataclass(frozen=True)
class BuildInfo:
    """Contents of ``build_info.json``: the build's identity and the CPU features it needs."""

    build_info: str
    cpu_features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.build_info:
            raise NativeError("build_info.json does not name a build", build_hint())


def build_hint() -> str:
    """The command that makes the libraries: the checkout's own, or a reinstall elsewhere."""
    if (_PACKAGE.parent / "cpp_patches" / "UPSTREAM.toml").is_file():
        return f"run `make build` in {_PACKAGE.parent}"
    return "run `pip install --force-reinstall dflash2-gguf`"


def library_dir() -> Path:
    """Folder of the native libraries: ``DFLASH2_LIB_DIR``, or ``lib`` of this package.

    Raises NativeError when the folder does not exist.
    """
    override = os.environ.get(_DIR_VARIABLE)
    folder = Path(override).absolute() if override else _PACKAGE / "lib"
    if not folder.is_dir():
        source = f" (from {_DIR_VARIABLE})" if override else ""
        raise NativeError(f"the native libraries are not there: {folder}{source}", build_hint())
    return folder


def load(name: str) -> ctypes.CDLL:
    """Load library ``name`` ("ggml-base", "llama", "dflash2") of our build.

    Raises NativeError when it is missing, cannot be loaded, or needs features this CPU lacks.
    """
    folder = library_dir()
    _refuse_other_cpu(folder)
    path = folder / _file_name(name)
    if not path.is_file():
        raise NativeError(f"the native library is not there: {path}", build_hint())
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"cannot load {path}: {error}", build_hint()) from error


def read_build_info(folder: Path) -> BuildInfo:
    """Read ``build_info.json`` of a library folder; NativeError when it is missing or malformed."""
    path = folder / "build_info.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        features = tuple(str(feature) for feature in data.get("cpu_features", ()))
        return BuildInfo(build_info=str(data["build_info"]), cpu_features=features)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise NativeError(f"cannot read {path}: {error}", build_hint()) from error


def _file_name(name: str) -> str:
    if sys.platform == "win32":
        return f"{name}.dll"
    return f"lib{name}.dylib" if sys.platform == "darwin" else f"lib{name}.so"


@lru_cache(maxsize=8)
def _refuse_other_cpu(folder: Path) -> None:
    """An unknown instruction would kill the process without a word, so ask before loading."""
    available = _cpu_features(Path("/proc/cpuinfo"))
    missing = sorted(set(read_build_info(folder).cpu_features) - available) if available else []
    if missing:
        raise NativeError(
            f"the libraries in {folder} were built for a CPU with {', '.join(missing)}, "
            "which this one lacks",
            build_hint(),
        )


def _cpu_features(cpuinfo: Path) -> frozenset[str]:
    """Feature names of the first CPU; empty where the system does not tell (not Linux)."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in _FLAG_LINES:
            return frozenset(value.split())
    return frozenset()
