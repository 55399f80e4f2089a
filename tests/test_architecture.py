"""House rules that a program can check: who imports whom, who spells what, how long things are."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from upstream import read_pin

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"dflash2_gguf": "dflash2_gguf", "dflash2_gguf.convert": "convert"}
TOOL = sorted((ROOT / "cpp_patches").glob("*.py"))

# what both sides may use; the converter sees nothing else of the runtime
SHARED = {"errors", "ggml_types", "gguf_schema", "libraries", "presets"}

# commands of dflash2-convert; those that run a pair stand on both sides, and nobody stands on them
BRIDGES = {"check", "check_both", "check_draft", "check_files", "convert_cli"}

# outermost first: no module reaches one that stands further out, directly or through others
ONION = (
    {"cli", "demo", "bench"},
    {"chat", "generate", "show_plan"},
    {"session"},
    {"plan"},
    {"engine"},
    {"native"},
    {"libraries"},
    {"errors"},
)


def modules() -> dict[str, Path]:
    """Modules of the package by name below ``dflash2_gguf``."""
    found = {}
    for package, folder in PACKAGES.items():
        prefix = package.partition(".")[2]
        for path in sorted((ROOT / folder).glob("*.py")):
            name = path.stem if path.stem != "__init__" else ""
            found[".".join(filter(None, (prefix, name)))] = path
    return found


MODULES = modules()
SOURCES = [*MODULES.values(), *TOOL]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> set[str]:
    """Full names of what a file imports, wherever the statement stands."""
    names: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def uses(name: str) -> set[str]:
    """Modules of the package that a module imports."""
    own = {n.partition(".")[2] for n in imported(MODULES[name]) if n.startswith("dflash2_gguf.")}
    return {module for module in own if module in MODULES} - {name}


def reaches(name: str) -> set[str]:
    """Modules that a module imports, directly or through others."""
    found: set[str] = set()
    todo = [name]
    while todo:
        fresh = uses(todo.pop()) - found
        found |= fresh
        todo.extend(fresh)
    return found


def is_converter(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] == "convert"


@pytest.mark.parametrize("name", [name for name in MODULES if is_converter(name)])
def test_converter_uses_only_what_is_shared(name: str) -> None:
    assert {used for used in uses(name) if not is_converter(used)} <= SHARED


@pytest.mark.parametrize(
    "name", [name for name in MODULES if name and not is_converter(name) and name not in BRIDGES]
)
def test_runtime_never_imports_the_converter(name: str) -> None:
    assert not any(is_converter(used) or used in BRIDGES for used in reaches(name))


@pytest.mark.parametrize("name", sorted(SHARED))
def test_shared_modules_import_only_shared_modules(name: str) -> None:
    assert uses(name) <= SHARED


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_imports_go_one_way(name: str) -> None:
    assert name not in reaches(name), "a circle of imports"
    for depth, ring in enumerate(ONION):
        if name in ring:
            outer = set().union(*ONION[:depth])
            assert not reaches(name) & outer


@pytest.mark.parametrize("name", MODULES)
def test_only_ui_imports_rich(name: str) -> None:
    uses_rich = any(used.split(".")[0] == "rich" for used in imported(MODULES[name]))
    assert not uses_rich or name.rsplit(".", maxsplit=1)[-1] == "ui"


def texts(path: Path) -> Iterator[str]:
    """String constants of a file that are not docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(parse(path))
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.Constant) or id(node) in docstrings:
            continue
        if isinstance(node.value, str):
            yield node.value


GGUF_NAME = re.compile(
    r"^(general|tokenizer\.ggml|tokenizer\.chat|dflash)\.[a-z_.]+$"
    r"|^(token_embd|output_norm|output|blk\.[^ ]*|enc\.[^ ]*)\.weight$"
)


# the format's own names, and those that older and fork files have instead
NAMES = {"gguf_schema", "convert.fork_names"}


@pytest.mark.parametrize("name", [name for name in MODULES if name not in NAMES])
def test_only_gguf_schema_spells_keys_and_tensor_names(name: str) -> None:
    assert [text for text in texts(MODULES[name]) if GGUF_NAME.match(text)] == []


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_only_upstream_toml_spells_the_upstream_version() -> None:
    pin = read_pin()
    spelled = re.compile(f"{re.escape(pin.version)}\\b|{pin.commit[:9]}|{pin.sha256[:12]}")
    allowed = {ROOT / "cpp_patches" / "UPSTREAM.toml", ROOT / "pyproject.toml"}
    found = [
        path
        for path in tracked_files()
        if path.suffix in {".py", ".toml", ".md", ".cmake", ".cpp", ".h", ""}
        and path.is_file()
        and path not in allowed
        and spelled.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_dependency_on_llama_cpp_python_is_the_pin() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'"llama-cpp-python==([^"]+)"', text) == [read_pin().version]
    assert text.count(read_pin().version) == 1


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length in lines of every function, docstring included."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_and_functions_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500
    assert [(name, length) for name, length in functions(path) if length > 60] == []


def test_half_of_all_functions_have_at_most_12_lines() -> None:
    lengths = [length for path in MODULES.values() for _, length in functions(path)]
    assert statistics.median(lengths) <= 12


CPP = sorted((ROOT / "cpp_patches" / "src").rglob("*.cpp"))


def cpp_functions(path: Path) -> Iterator[tuple[int, int]]:
    """First line and length of what starts at an unindented line with ``(`` and ends at ``}``."""
    start = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("}") and start:
            yield start, number - start + 1
            start = 0
        elif re.match(r"\w.*\(", line) and not line.endswith(";"):
            start = number


@pytest.mark.parametrize("path", CPP, ids=lambda path: path.name)
def test_cpp_functions_have_at_most_80_lines(path: Path) -> None:
    assert [start for start, length in cpp_functions(path) if length > 80] == []


def test_cpp_functions_are_found() -> None:
    assert sum(1 for path in CPP for _ in cpp_functions(path)) > 2 * len(CPP)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_all_is_short_and_sorted(path: Path) -> None:
    for node in parse(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign)
            names = ast.literal_eval(node.value)
            # ruff's order: constants, classes, the rest
            ranked = sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
            assert names == ranked
            return
    has_public = any(not name.startswith("_") for name, _ in functions(path))
    assert not has_public, "public functions, but no __all__"


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert {path.stem for path in SOURCES} & drawers == set()
