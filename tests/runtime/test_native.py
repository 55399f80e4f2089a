"""Loading the libraries: ours, one build, one copy; and status codes as errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash2_gguf import libraries
from dflash2_gguf.errors import NativeError, PairError, UsageError
from dflash2_gguf.native import Log


def _python(code: str, **environment: str) -> str:
    """Output of a fresh process, where nothing is loaded yet; errors are printed as messages."""
    program = (
        "from dflash2_gguf.errors import DFlash2Error\n"
        f"try:\n    {code}\n"
        "except DFlash2Error as error:\n    print(error.message, '|', error.hint)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_importing_the_package_loads_no_library() -> None:
    code = "import dflash2_gguf, sys; print('llama_cpp' in sys.modules, 'numpy' in sys.modules)"
    assert _python(code) == "False False\n"


def test_a_missing_folder_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    shown = _python("from dflash2_gguf.native import api; api()", DFLASH2_LIB_DIR=missing)
    assert missing in shown
    assert "DFLASH2_LIB_DIR" in shown
    assert "make build" in shown


def test_an_empty_folder_has_no_build_info(tmp_path: Path) -> None:
    shown = _python("from dflash2_gguf.native import api; api()", DFLASH2_LIB_DIR=str(tmp_path))
    assert "build_info.json" in shown
    assert "make build" in shown


def test_a_cpu_without_what_was_compiled_in_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"build_info": "x", "cpu_features": ["avx2", "amx_from_the_future"]}
    (tmp_path / "build_info.json").write_text(json.dumps(info))
    monkeypatch.setenv("DFLASH2_LIB_DIR", str(tmp_path))
    monkeypatch.setattr(libraries, "_cpu_features", lambda _path: frozenset({"avx2"}))
    with pytest.raises(NativeError, match="a CPU with amx_from_the_future, which this one lacks"):
        libraries.load("ggml-base")


@pytest.mark.parametrize("line", ["flags\t\t: sse avx2", "Features\t: sse avx2"])
def test_cpu_features_are_read_on_both_kinds_of_machine(tmp_path: Path, line: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n")
    assert libraries._cpu_features(cpuinfo) == {"sse", "avx2"}


def test_where_the_system_tells_no_features_none_are_required(tmp_path: Path) -> None:
    assert libraries._cpu_features(tmp_path / "cpuinfo") == frozenset()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"build_info": ""}'])
def test_a_malformed_build_info_is_an_error_with_a_way_out(tmp_path: Path, content: str) -> None:
    (tmp_path / "build_info.json").write_text(content)
    with pytest.raises(NativeError) as caught:
        libraries.read_build_info(tmp_path)
    assert caught.value.hint


@pytest.mark.native
def test_a_library_of_another_build_is_refused(tmp_path: Path, native_lib: Path) -> None:
    for path in native_lib.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "build_info.json").unlink()
    (tmp_path / "build_info.json").write_text('{"build_info": "another"}')
    shown = _python("from dflash2_gguf.native import api; api()", DFLASH2_LIB_DIR=str(tmp_path))
    assert "build_info.json says another" in shown


@pytest.mark.peer
@pytest.mark.native
def test_llama_cpp_with_another_library_is_refused_by_name(peer_dir: Path) -> None:
    code = "import llama_cpp; from dflash2_gguf.native import api; api()"
    shown = _python(code, LLAMA_CPP_LIB_PATH=str(peer_dir))
    assert (
        f"llama_cpp was imported before dflash2_gguf and loaded its library from {peer_dir}"
        in shown
    )


@pytest.mark.native
def test_a_library_path_of_the_users_own_is_left_alone() -> None:
    code = (
        "import os; from dflash2_gguf.native import api; api(); "
        "print(os.environ['LLAMA_CPP_LIB_PATH'])"
    )
    assert _python(code, LLAMA_CPP_LIB_PATH="/elsewhere") == "/elsewhere\n"


@pytest.mark.native
@pytest.mark.parametrize(
    ("status", "kind"), [(-1, UsageError), (-2, PairError), (-3, NativeError), (-5, NativeError)]
)
def test_every_status_has_its_error(status: int, kind: type[Exception]) -> None:
    from dflash2_gguf.native import check

    with pytest.raises(kind):
        check(status, "dflash2_session_step")


@pytest.mark.native
def test_the_librarys_reason_becomes_the_message() -> None:
    from dflash2_gguf.native import api, check

    status = api().dflash2.dflash2_check_pair(None, None)
    with pytest.raises(UsageError, match="target and drafter are required"):
        check(status, "dflash2_check_pair")


def test_the_log_keeps_warnings_and_errors_only() -> None:
    log = Log()
    log.write(2, b"info\n")
    log.write(4, b"load failed: ")
    log.write(5, b"no such tensor\n")
    log.write(1, b"debug\n")
    log.write(3, b"\n")
    assert list(log.lines) == ["load failed:", "no such tensor"]


def test_the_log_is_printed_only_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    log = Log()
    log.write(2, b"quiet\n")
    log.echo = True
    log.write(2, b"loud\n")
    log.write(1, b"debug\n")
    assert capsys.readouterr().err == "loud\n"
