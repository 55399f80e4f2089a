"""Building llama.cpp: our libraries from the patched tree, upstream's programs from the pristine.

A build is identified by a hash over all that goes into it; the same hash means nothing is to do.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import series as stack
import trees
from trees import UnexportedError
from upstream import REPO, PatchError, read_pin, run

__all__ = [
    "LIB_DIR",
    "PEER_TARGETS",
    "Options",
    "build_info",
    "build_libraries",
    "build_peer",
    "build_tests",
    "is_current",
]

LIB_DIR = REPO / "dflash2_gguf" / "lib"
PEER_TARGETS = ("llama-server", "llama-quantize", "llama-speculative-simple", "test-llama-archs")

_OWN = REPO / "cpp_patches"
_INJECTION = _OWN / "cmake" / "dflash2.cmake"
_OFF = ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP", "UI")
# about x86-64-v3, what x86 desktops have had since 2013; no OpenMP, whose runtime comes with gcc
_PORTABLE = ("-DGGML_NATIVE=OFF", "-DGGML_OPENMP=OFF")

# macro of the compiler -> name in /proc/cpuinfo
_FEATURES = {
    "__SSE4_2__": "sse4_2",
    "__AVX__": "avx",
    "__AVX2__": "avx2",
    "__FMA__": "fma",
    "__F16C__": "f16c",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__LZCNT__": "abm",
    "__MOVBE__": "movbe",
    "__AVX512F__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512VBMI__": "avx512vbmi",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BF16__": "avx512_bf16",
    "__AVXVNNI__": "avx_vnni",
    "__AMX_TILE__": "amx_tile",
    "__AMX_INT8__": "amx_int8",
    "__AMX_BF16__": "amx_bf16",
    "__ARM_FEATURE_DOTPROD": "asimddp",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm",
    "__ARM_FEATURE_SVE": "sve",
}


_AMX = "ggml-cpu-amx-tile-config.patch"


@dataclass(frozen=True)
class Options:
    """What kind of build: for this machine, or for any of its architecture."""

    portable: bool = False

    @property
    def folder(self) -> str:
        """Name of the build folder inside a tree; the two kinds keep apart."""
        return "build-portable" if self.portable else "build"


@dataclass(frozen=True)
class _Tools:
    cmake: str
    generator: str
    make: str


def build_libraries(options: Options, lib_dir: Path = LIB_DIR) -> bool:
    """Build libdflash2 and what it needs into ``lib_dir``; False if it was there already."""
    with _lock():
        _prepare()
        if is_current(options, lib_dir):
            return False
        # taken before compiling: sources edited meanwhile must not pass for this build
        identity = {"build_info": build_info(), "stamp": _stamp(options)}
        _compile_patched(options, ["llama", "dflash2"], identity["build_info"], tests=False)
        _install(options, lib_dir, identity)
    return True


def build_tests() -> Path:
    """Build the C++ tests against the native build; the folder that holds the programs."""
    with _lock():
        _prepare()
        _compile_patched(Options(), ["dflash2-tests"], build_info(), tests=True)
    return trees.PATCHED / Options().folder / "bin"


def is_current(options: Options, lib_dir: Path = LIB_DIR) -> bool:
    """Does ``lib_dir`` hold the build that ``build_libraries`` would make now?"""
    try:
        built = json.loads((lib_dir / "build_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (trees.PATCHED / ".git").is_dir() and built.get("stamp") == _stamp(options)


def build_info() -> str:
    """Identity of the build: llama.cpp's commit, and a hash of the patch stack with our sources."""
    series = stack.read_series()
    digest = hashlib.sha256(trees.series_id(series).encode())
    for path in _own_files():
        digest.update(f"{path.relative_to(_OWN).as_posix()}\n".encode() + path.read_bytes())
    suffix = ""
    if trees.has_work(trees.PATCHED, series):
        digest.update(trees.state_id(trees.PATCHED).encode())
        suffix = "-dev"
    return f"{read_pin().commit}+{digest.hexdigest()[:12]}{suffix}"


def _own_files() -> list[Path]:
    return sorted(
        path for part in ("cmake", "src") for path in (_OWN / part).rglob("*") if path.is_file()
    )


def _stamp(options: Options) -> str:
    parts = [
        build_info(),
        trees.state_id(trees.PATCHED),
        options.folder,
        *_user_flags(),
        platform.machine(),
    ]
    if not options.portable:
        parts.append(_cpu_id())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _cpu_id() -> str:
    """Hash of what this CPU can do: its objects fit no other CPU, which ccache does not know."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    model = re.search(r"^model name\s*:(.*)$", text, re.MULTILINE)
    known = (flags[1] if flags else platform.processor()) + (model[1] if model else "")
    return hashlib.sha256(known.encode()).hexdigest()[:12]


def _prepare() -> None:
    """Apply the series; a tree with work in progress is built as it is, and the build says so."""
    try:
        trees.apply(trees.PATCHED, read_pin(), stack.read_series())
    except UnexportedError as error:
        print(f"warning: building work in progress: {error.message}", file=sys.stderr)


def build_peer(targets: tuple[str, ...] = PEER_TARGETS) -> Path:
    """Build the unpatched pin's programs unless they are there; the folder that holds them.

    A CPU with AMX gets the one patch without which gcc 12's build of the pin ends with SIGILL.
    """
    tree = trees.PRISTINE
    programs, stamp = tree / "build" / "bin", tree / "build" / "dflash2-stamp"
    series = stack.read_series() if _has_amx() else {}
    with _lock():
        trees.apply(tree, read_pin(), {_AMX: series[_AMX]} if _AMX in series else {})
        flags = [
            *_base_flags(),
            *(f"-DLLAMA_BUILD_{part}=ON" for part in ("TESTS", "EXAMPLES", "TOOLS", "SERVER")),
            *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("APP", "UI")),
        ]
        made_of = "\n".join([trees.state_id(tree), _cpu_id(), *flags, *_user_flags(), *targets])
        is_there = all((programs / name).is_file() for name in targets)
        if not is_there or not stamp.is_file() or stamp.read_text(encoding="utf-8") != made_of:
            _compile(tree, "build", flags, list(targets))
            stamp.write_text(made_of, encoding="utf-8")
    return programs


def _has_amx() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and " amx_int8" in cpuinfo.read_text(errors="replace")


def _base_flags() -> list[str]:
    return [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        "-DLLAMA_OPENSSL=OFF",
        "-DLLAMA_BUILD_NUMBER=0",
        f"-DLLAMA_BUILD_COMMIT={read_pin().commit[:9]}",
    ]


def _compile_patched(options: Options, targets: list[str], info: str, *, tests: bool) -> None:
    flags = [
        *_base_flags(),
        *(f"-DLLAMA_BUILD_{part}=OFF" for part in _OFF),
        "-DBUILD_SHARED_LIBS=ON",
        f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={_INJECTION}",
        f"-DDFLASH2_BUILD_INFO={info}",
        f"-DDFLASH2_BUILD_TESTS={'ON' if tests else 'OFF'}",
        "-DDFLASH2_UNVERSIONED=ON",
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        "-DCMAKE_INSTALL_RPATH=" + ("@loader_path" if sys.platform == "darwin" else "$ORIGIN"),
        *(_PORTABLE if options.portable else ()),
    ]
    _compile(trees.PATCHED, options.folder, flags, targets)


def _user_flags() -> list[str]:
    """CMAKE_ARGS of the environment, less what is meant for llama-cpp-python's own build."""
    flags = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    return [flag for flag in flags if not re.match(r"-D(LLAMA|LLAVA)_BUILD(:\w+)?=", flag)]


def _compile(tree: Path, folder: str, flags: list[str], targets: list[str]) -> None:
    tools = _find_tools()
    flags = [*flags, *_user_flags()]
    if shutil.which("ccache"):
        flags += [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX")]
    if tools.generator == "Ninja":
        flags.append(f"-DCMAKE_MAKE_PROGRAM={tools.make}")
    # with these, the same file in two trees is compiled once
    env = os.environ | {
        "CCACHE_BASEDIR": str(REPO),
        "CCACHE_NOHASHDIR": "1",
        "CCACHE_NAMESPACE": _cpu_id(),
    }
    build = tree / folder
    _forget_moved(build, tree, tools)
    print(f"building {', '.join(targets)} in {build}", file=sys.stderr)
    _stream([tools.cmake, "-S", str(tree), "-B", str(build), "-G", tools.generator, *flags], env)
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(_jobs())
    _stream([tools.cmake, "--build", str(build), "--parallel", jobs, "--target", *targets], env)


def _forget_moved(build: Path, tree: Path, tools: _Tools) -> None:
    """Delete a build folder configured for another place or generator; CMake would refuse it."""
    cache = build / "CMakeCache.txt"
    if not cache.is_file():
        return
    text = cache.read_text(encoding="utf-8", errors="replace")
    known = dict(
        re.findall(r"^(CMAKE_HOME_DIRECTORY|CMAKE_GENERATOR):INTERNAL=(.*)$", text, re.MULTILINE)
    )
    if known != {"CMAKE_HOME_DIRECTORY": str(tree), "CMAKE_GENERATOR": tools.generator}:
        shutil.rmtree(build)


def _stream(command: list[str], env: dict[str, str]) -> None:
    """Run a command that talks for minutes; what it says goes to stderr as it comes."""
    done = subprocess.run(
        command, check=False, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr
    )
    if done.returncode:
        raise PatchError(
            f"`{shlex.join(command[:4])} ...` failed with {done.returncode}", "its output is above"
        )


def _jobs() -> int:
    """Parallel compilers: one per CPU, but 2 GiB of memory for each."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return cpus
    return max(1, min(cpus, memory // 2**31))


def _find_tools() -> _Tools:
    if not any(_program(name) for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name):
        raise PatchError(
            "no C++ compiler found", "install one (Debian, Ubuntu: apt install g++), or set CXX"
        )
    cmake = _program("cmake")
    if not cmake:
        raise PatchError("cmake is not installed", f"{sys.executable} -m pip install cmake ninja")
    found = re.search(r"version (\d+)\.(\d+)", run([cmake, "--version"]))
    if not found or (int(found[1]), int(found[2])) < (3, 19):
        raise PatchError(f"{cmake} is older than 3.19", f"{sys.executable} -m pip install cmake")
    for program, generator in (("ninja", "Ninja"), ("make", "Unix Makefiles")):
        path = _program(program)
        if path:
            return _Tools(cmake=cmake, generator=generator, make=path)
    raise PatchError(
        "neither ninja nor make is installed", f"{sys.executable} -m pip install ninja"
    )


def _program(name: str) -> str | None:
    """Where a program is: on PATH, or beside this Python, where wheels put cmake and ninja."""
    return shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))


@contextmanager
def _lock() -> Iterator[None]:
    """One build at a time; a second one waits, and then mostly finds its work done."""
    trees.BUILD.mkdir(parents=True, exist_ok=True)
    with (trees.BUILD / ".lock").open("w") as file:
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(options: Options, lib_dir: Path, identity: dict[str, str]) -> None:
    """Put the libraries and build_info.json into ``lib_dir``, all or nothing."""
    build = trees.PATCHED / options.folder
    libraries = sorted(
        path
        for path in (build / "bin").iterdir()
        if re.fullmatch(r"(lib)?(ggml[a-z0-9-]*|llama|dflash2)\.(so|dylib|dll)", path.name)
    )
    lib_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=lib_dir.parent, prefix=".lib-") as folder:
        fresh = Path(folder) / "lib"
        fresh.mkdir()
        for library in libraries:
            shutil.copy2(library.resolve(), fresh / library.name)
        facts = json.dumps(identity | _facts(build, options), indent=2) + "\n"
        (fresh / "build_info.json").write_text(facts, encoding="utf-8")
        if lib_dir.exists():
            lib_dir.rename(Path(folder) / "old")
        fresh.rename(lib_dir)


def _facts(build: Path, options: Options) -> dict[str, object]:
    compiler, flags = _cpu_compilation(build)
    version = run([compiler, "--version"]).splitlines()[0]
    return {
        "portable": options.portable,
        "machine": platform.machine(),
        "compiler": version,
        "flags": flags,
        "cmake_args": _user_flags(),
        "cpu_features": _cpu_features(compiler, flags),
    }


def _cpu_compilation(build: Path) -> tuple[str, list[str]]:
    """Compiler and target flags that ggml's CPU kernels were compiled with."""
    commands = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    for entry in commands:
        if entry["file"].endswith("ggml-cpu/ggml-cpu.c"):
            words = shlex.split(entry["command"])
            compiler = words[1] if Path(words[0]).name == "ccache" else words[0]
            return compiler, [word for word in words if word.startswith(("-m", "-O"))]
    raise PatchError(f"{build} compiled no CPU backend", "leave GGML_CPU on in CMAKE_ARGS")


def _cpu_features(compiler: str, flags: list[str]) -> list[str]:
    """Names of /proc/cpuinfo that code compiled with these flags may use."""
    macros = run([compiler, *flags, "-dM", "-E", "-x", "c", os.devnull])
    defined = {line.split()[1] for line in macros.splitlines() if line.startswith("#define ")}
    return sorted(name for macro, name in _FEATURES.items() if macro in defined)
