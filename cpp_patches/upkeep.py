"""What is done to the stack as a whole: leaving a fork, moving the pin, cleaning up."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import native
import series as stack
import trees
from upstream import PIN_FILE, REPO, PatchError, Pin, download, git, read_pin, sha256

__all__ = ["GOOD", "bump", "clean", "fork"]

APPLIES, MERGED = "applies", "applies after a 3-way merge"
GOOD = (APPLIES, MERGED)

_INCLUDE = """
# dflash2-gguf: own code, kept out of upstream's files
set(DFLASH2_BUILD_INFO "{info}" CACHE STRING "")
include(dflash2/cmake/dflash2.cmake)
"""


def fork(folder: Path) -> None:
    """Leave pin, series and our own sources in ``folder``: a git repository for plain CMake."""
    if folder.exists() and any(folder.iterdir()):
        raise PatchError(f"{folder} is not empty", "name a folder that does not exist")
    if folder.exists():
        folder.rmdir()
    trees.create(folder, read_pin())
    for name, text in stack.read_series().items():
        trees.am(folder, name, text)
    for part in ("cmake", "src", "tests"):
        shutil.copytree(REPO / "cpp_patches" / part, folder / "dflash2" / part)
    with (folder / "CMakeLists.txt").open("a", encoding="utf-8") as file:
        file.write(_INCLUDE.format(info=native.build_info()))
    git(folder, "add", "--all", "--force", "dflash2", "CMakeLists.txt")
    git(folder, "commit", "--quiet", "--no-verify", "-m", "dflash2: add the overlay")


def bump(version: str, commit: str, *, dry: bool) -> dict[str, str]:
    """Try every patch on another version: name to outcome.

    If all are GOOD and not ``dry``, the pin moves (UPSTREAM.toml, and the dependency in
    pyproject.toml) and the series is exported anew.
    """
    old = read_pin()
    archive = f"{old.package}-{version}.tar.gz"
    if not (trees.DOWNLOADS / archive).exists():
        download(old.package, version, trees.DOWNLOADS)
    digest = sha256(trees.DOWNLOADS / archive)
    new = replace(old, version=version, archive=archive, sha256=digest, commit=commit)
    with tempfile.TemporaryDirectory(prefix="bump-") as folder:
        tree = Path(folder) / "llama.cpp"
        new = replace(new, tree=trees.create(tree, new, is_known=False))
        _borrow_objects(tree)
        outcomes = {name: _try(tree, name, text) for name, text in stack.read_series().items()}
        if not dry and all(outcome in GOOD for outcome in outcomes.values()):
            stack.write_series(trees.export(tree))
            _write_pin(old, new)
    return outcomes


def _borrow_objects(tree: Path) -> None:
    """Bring the old pin's blobs in, which a 3-way merge starts from."""
    if (trees.PATCHED / ".git").is_dir():
        git(tree, "fetch", "--quiet", str(trees.PATCHED), "HEAD")


def _try(tree: Path, name: str, text: str) -> str:
    for error in stack.drop_errors(name, text, tree):
        return error.partition(": ")[2]
    for outcome, options in ((APPLIES, ()), (MERGED, ("--3way",))):
        try:
            trees.am(tree, name, text, *options)
        except PatchError as error:
            reason = error.message.splitlines()[-1]
        else:
            return outcome
    return f"conflict: {reason}"


def _write_pin(old: Pin, new: Pin) -> None:
    text = PIN_FILE.read_text(encoding="utf-8")
    for field in ("archive", "version", "sha256", "commit", "tree"):
        before, after = getattr(old, field), getattr(new, field)
        text = text.replace(f'{field} = "{before}"', f'{field} = "{after}"')
    PIN_FILE.write_text(text, encoding="utf-8")
    project = REPO / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    text = re.sub(r'"llama-cpp-python==[^"]*"', f'"llama-cpp-python=={new.version}"', text)
    project.write_text(text, encoding="utf-8")


def clean() -> None:
    """Delete build/ and the installed libraries; refuse while a tree has work in progress."""
    if (trees.PATCHED / ".git").is_dir():
        trees.refuse_unexported(trees.PATCHED, stack.read_series())
    for folder in (REPO / "build", native.LIB_DIR):
        shutil.rmtree(folder, ignore_errors=True)
