"""Patch ggml-cpu-amx-tile-config: the tile configuration that the CPU loads is the one written.

No AMX is needed for the first tests: the load instruction of the compiled function is replaced by a
copy of the 64 bytes it would read, which is then compared with what the source says.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import native
import series
import trees
from upstream import git

SOURCE = "ggml/src/ggml-cpu/amx/mmq.cpp"
PATCH = "ggml-cpu-amx-tile-config.patch"

# palette 1; rows and bytes per row of the eight tiles, as ggml_tile_config_init states them
COLSB = [64, 64, 32, 32, 64, 64, 64, 64]
ROWS = [8, 8, 16, 16, 16, 16, 16, 16]
EXPECTED = (
    bytes([1, 0])
    + bytes(14)
    + b"".join(n.to_bytes(2, "little") for n in [*COLSB, *[0] * 8])
    + bytes([*ROWS, *[0] * 8])
)

pytestmark = pytest.mark.native  # the patched tree is there once the libraries are built

GCC = shutil.which("g++-12") or shutil.which("g++")
needs_gcc = pytest.mark.skipif(
    platform.machine() != "x86_64" or not GCC, reason="AMX code needs g++ on x86-64"
)


def cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def kernels() -> str:
    """Which kernels products run on here, for the test's name."""
    known = ("amx_int8", "avx512f", "avx2")
    return next((name for name in known if name in cpu_flags()), platform.machine())


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pin's file in a repository of its own."""
    tree = tmp_path_factory.mktemp("unpatched")
    path = tree / SOURCE
    path.parent.mkdir(parents=True)
    text = git(trees.PATCHED, "show", f"{trees.pin_commit(trees.PATCHED)}:{SOURCE}")
    path.write_text(text)
    git(tree, "init", "--quiet")
    return path


@pytest.fixture(scope="module")
def patched(unpatched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("patched")
    path = tree / SOURCE
    path.parent.mkdir(parents=True)
    shutil.copy(unpatched, path)
    git(tree, "init", "--quiet")
    git(tree, "apply", str(series.PATCHES / PATCH))
    return path


def loaded_config(source: Path, scratch: Path) -> bytes:
    """The 64 bytes at the address that the compiled ggml_tile_config_init gives to ldtilecfg."""
    text = source.read_text()
    struct = re.search(r"struct tile_config_t\s*\{.*?\n\};", text, re.DOTALL)
    function = re.search(r"inline void ggml_tile_config_init\(void\) \{.*?\n\}\n", text, re.DOTALL)
    assert struct and function
    scratch.joinpath("init.cpp").write_text(
        "#include <immintrin.h>\n#include <cstdint>\n"
        'extern "C" { alignas(64) char captured[64]; }\n'
        f"{struct[0]}\n{function[0]}"
        'extern "C" void init(void) { ggml_tile_config_init(); }\n'
    )
    compile_ = [str(GCC), "-O3", "-mamx-tile", "-fPIC"]
    run(scratch, *compile_, "-S", "init.cpp", "-o", "init.s")
    assembly, count = re.subn(
        r"\tldtilecfg\t(-?\d*)(\(\S+\))", copy_instead, (scratch / "init.s").read_text()
    )
    assert count == 1
    scratch.joinpath("copy.s").write_text(assembly)
    run(scratch, *compile_, "-shared", "copy.s", "-o", "init.so")
    library = ctypes.CDLL(str(scratch / "init.so"))
    library.init()
    return bytes((ctypes.c_char * 64).in_dll(library, "captured"))


def copy_instead(match: re.Match[str]) -> str:
    """Assembly that copies what ldtilecfg would read; xmm15 is not used by so small a function."""
    base, address = int(match[1] or 0), match[2]
    lines = ["\tmovq\tcaptured@GOTPCREL(%rip), %r11"]
    for offset in range(0, 64, 16):
        lines.append(f"\tmovups\t{base + offset}{address}, %xmm15")
        lines.append(f"\tmovups\t%xmm15, {offset}(%r11)")
    return "\n".join(lines)


def run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_gcc
def test_patched_function_loads_the_configuration_it_states(patched: Path, tmp_path: Path) -> None:
    assert loaded_config(patched, tmp_path) == EXPECTED


@needs_gcc
def test_gcc_12_drops_the_configuration_without_the_patch(unpatched: Path, tmp_path: Path) -> None:
    version = subprocess.run([str(GCC), "-dumpversion"], capture_output=True, text=True, check=True)
    if version.stdout.split(".")[0].strip() != "12":
        pytest.skip(f"the flaw is gcc 12's, this is {version.stdout.strip()}")
    assert loaded_config(unpatched, tmp_path) != EXPECTED


@pytest.mark.parametrize("path", [kernels()])
def test_quantized_products_of_1_2_8_and_32_rows_equal_the_float_reference(path: str) -> None:
    program = native.build_tests() / "test-quantized-products"
    required = ["AMX"] if path == "amx_int8" else []
    done = subprocess.run([str(program), *required], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for n_rows in (1, 2, 8, 32):
        assert f"{n_rows:2d} rows" in done.stdout
