"""Fixtures of all tests, and the marks that say what a test needs.

A test whose needs are not met is deselected, and the end of the run names what was left out and the
command that brings it. With ``DFLASH2_PEER=1`` the unpatched pin is built, and nothing is left out.

``make test`` runs the files of tests side by side with pytest-xdist, one process per CPU.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import native
import trees
from tests import provisions

# A shell starts background jobs with SIGINT ignored, nohup ignores SIGHUP, and programs under test
# would inherit that. What is caught here is back at its default in them.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

_LEFT_OUT = pytest.StashKey[dict[str, int]]()
_SHARED = {"real_run"}  # fixtures that take minutes

_HOW = {
    "native": "make build",
    "peer": "make test DFLASH2_PEER=1 (builds the unpatched llama.cpp once)",
    "reference": "make test (installs torch, transformers and dflash)",
}


def _has_native() -> bool:
    folder = os.environ.get("DFLASH2_LIB_DIR", native.LIB_DIR)
    return (Path(folder) / "build_info.json").is_file()


def _has_peer() -> bool:
    folder = trees.PRISTINE / "build" / "bin"
    built = all((folder / name).is_file() for name in native.PEER_TARGETS)
    return built or os.environ.get("DFLASH2_PEER") == "1"


def _has_reference() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers", "dflash"))


_PRESENT = {"native": _has_native, "peer": _has_peer, "reference": _has_reference}


def pytest_report_header() -> list[str]:
    """Libraries of other sources make tests fail for no reason of theirs, so say it first."""
    if "DFLASH2_LIB_DIR" in os.environ or not _has_native():
        return []
    is_current = any(native.is_current(native.Options(portable=kind)) for kind in (False, True))
    return [] if is_current else ["native libraries are out of date: make build"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {mark for mark, present in _PRESENT.items() if not present()}
    left_out: dict[str, int] = {}
    kept, dropped = [], []
    for item in items:
        lacking = [mark for mark in missing if item.get_closest_marker(mark)]
        (dropped if lacking else kept).append(item)
        for mark in lacking:
            left_out[mark] = left_out.get(mark, 0) + 1
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    config.stash[_LEFT_OUT] = left_out
    if "PYTEST_XDIST_WORKER" in os.environ:
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    """Tests of one name run in one process: those of a file, and those that share a long run."""
    shared = _SHARED & set(getattr(item, "fixturenames", ()))
    return shared.pop() if shared else item.path.relative_to(provisions.ROOT / "tests").as_posix()


def pytest_configure(config: pytest.Config) -> None:
    """Processes that run side by side share the CPUs: torch would take all of them in each."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # of pytest-xdist: back to its parent
    if output is not None:
        output["left_out"] = session.config.stash.get(_LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """The end of a process of pytest-xdist, seen by its parent; all of them left out the same."""
    if hasattr(node, "workeroutput"):
        node.config.stash[_LEFT_OUT] = node.workeroutput["left_out"]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for mark, count in sorted(config.stash.get(_LEFT_OUT, {}).items()):
        terminalreporter.write_line(f"left out: {count} tests marked '{mark}'; run {_HOW[mark]}")


@pytest.fixture(scope="session")
def target_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return provisions.target_gguf()


@pytest.fixture(scope="session")
def drafter_dir() -> Path:
    """The bundled drafter as published: config.json and model.safetensors."""
    return provisions.DRAFTER


@pytest.fixture(scope="session")
def drafter_gguf() -> Callable[[str], Path]:
    """The bundled drafter converted with a preset, e.g. ``drafter_gguf("q8_0")``."""
    return provisions.drafter_gguf


@pytest.fixture(scope="session")
def native_lib() -> Path:
    """Folder of the native libraries; mark the test ``native``."""
    return Path(os.environ.get("DFLASH2_LIB_DIR", native.LIB_DIR))


@pytest.fixture(scope="session")
def peer_dir() -> Path:
    """Folder of the unpatched pin's programs and libraries; mark the test ``peer``."""
    if os.environ.get("DFLASH2_PEER") == "1":
        return native.build_peer()
    return trees.PRISTINE / "build" / "bin"


@pytest.fixture(scope="session")
def peer_bin(peer_dir: Path) -> Callable[[str], Path]:
    """A program of the unpatched pin by name; mark the test ``peer``."""

    def find(name: str) -> Path:
        path = peer_dir / name
        assert path.is_file(), f"{path} was not built"
        return path

    return find


@pytest.fixture(scope="session")
def tiny_models(peer_bin: Callable[[str], Path]) -> Path:
    """Folder of upstream's tiny models, one per architecture; mark the test ``peer``."""
    return provisions.tiny_models(peer_bin("test-llama-archs"))
