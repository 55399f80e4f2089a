"""The series of patches: reading it, linting headers, counting lines against the budget."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from upstream import REPO, PatchError

__all__ = [
    "BUDGET",
    "HEADERS",
    "PATCHES",
    "Patch",
    "budget_errors",
    "drop_errors",
    "lint",
    "parse",
    "read_series",
    "write_series",
]

PATCHES = REPO / "cpp_patches" / "patches"

HEADERS = ("Why", "Why-Patch", "Upstream-Status", "Drop-When", "Test")

_HEAD_COMMENT = """\
# Patches to the pinned llama.cpp, in the order they are applied; one concern each.
# Written by `make patches-refresh` from the commits in build/llama.cpp/patched.
"""


@dataclass(frozen=True)
class Budget:
    """How much of upstream the stack may touch; a reason in CONTRIBUTING.md when it must grow."""

    patches: int = 8
    added: int = 250
    deleted: int = 10


BUDGET = Budget()


@dataclass(frozen=True)
class Patch:
    """One patch: what its header says and what it changes."""

    name: str
    subject: str
    headers: Mapping[str, str]
    files: tuple[str, ...]
    new_files: tuple[str, ...]
    added: int
    deleted: int


def read_series(folder: Path = PATCHES) -> dict[str, str]:
    """Names and texts of the patches in order; raises PatchError if series and folder disagree."""
    listing = folder.parent / "series"
    if not listing.is_file():
        raise PatchError(f"{listing} is missing", "git checkout cpp_patches/series")
    lines = listing.read_text(encoding="utf-8").splitlines()
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    present = {path.name for path in folder.glob("*")} if folder.is_dir() else set()
    _check_names(names, present)
    texts = ((folder / name).read_bytes().decode("utf-8", "surrogateescape") for name in names)
    return dict(zip(names, texts, strict=True))


def _check_names(names: list[str], present: set[str]) -> None:
    doubled = sorted({name for name in names if names.count(name) > 1})
    missing = [name for name in names if name not in present]
    unlisted = sorted(present - set(names))
    for what, found in (
        ("names twice", doubled),
        ("names what patches/ lacks", missing),
        ("does not name what is in patches/", unlisted),
    ):
        if found:
            raise PatchError(
                f"series {what}: {', '.join(found)}", "make patches-refresh writes both"
            )


def write_series(series: Mapping[str, str], folder: Path = PATCHES) -> list[str]:
    """Write patches and series; the names of files that changed, appeared or went."""
    folder.mkdir(exist_ok=True)
    changed = []
    for path in folder.glob("*.patch"):
        if path.name not in series:
            path.unlink()
            changed.append(path.name)
    for name, text in series.items():
        data = text.encode("utf-8", "surrogateescape")
        path = folder / name
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)
            changed.append(name)
    listing = _HEAD_COMMENT + "".join(f"{name}\n" for name in series)
    (folder.parent / "series").write_text(listing, encoding="utf-8")
    return sorted(changed)


def parse(name: str, text: str) -> Patch:
    """Take a patch apart; raises PatchError if it is not one that format-patch wrote."""
    head, separator, body = text.partition("\ndiff --git ")
    if not separator or not head.startswith("From "):
        raise PatchError(f"{name} is not an exported commit", "commit in the tree and refresh")
    body = separator[1:] + body
    subject = re.search(r"^Subject: \[PATCH\] (.*(?:\n .*)*)", head, re.MULTILINE)
    files = re.findall(r"^diff --git a/(\S+) b/", body, re.MULTILINE)
    new = re.findall(r"^diff --git a/(\S+) b/\S+\nnew file", body, re.MULTILINE)
    lines = body.splitlines()
    return Patch(
        name=name,
        subject=subject[1].replace("\n", "") if subject else "",
        headers=_headers(head),
        files=tuple(files),
        new_files=tuple(new),
        added=sum(line.startswith("+") and not line.startswith("+++ ") for line in lines),
        deleted=sum(line.startswith("-") and not line.startswith("--- ") for line in lines),
    )


def _headers(head: str) -> dict[str, str]:
    """`Key: value` lines of the commit message; indented lines go on with the value above."""
    message = head.partition("\n\n")[2].partition("\n---\n")[0]
    found: dict[str, str] = {}
    key = None
    for line in message.splitlines():
        match = re.match(r"([A-Z][A-Za-z-]+): *(.*)", line)
        if match:
            key = match[1]
            found[key] = match[2].strip()
        elif key and line.startswith(" "):
            found[key] = f"{found[key]} {line.strip()}".strip()
        else:
            key = None
    return found


def lint(patch: Patch, *, root: Path = REPO) -> list[str]:
    """What is wrong with a patch's header, one line each."""
    errors = [
        f"{patch.name}: header {key} is missing" for key in HEADERS if not patch.headers.get(key)
    ]
    if not re.match(r"[a-z0-9-]+: \S", patch.subject):
        errors.append(f"{patch.name}: subject '{patch.subject}' is not 'area: imperative'")
    for file in patch.new_files:
        errors.append(f"{patch.name}: adds {file}; own code belongs in cpp_patches/src")
    for test in patch.headers.get("Test", "").split():
        if not (root / test.partition("::")[0]).exists():
            errors.append(f"{patch.name}: Test names {test}, which does not exist")
    return errors


def budget_errors(patches: list[Patch], budget: Budget = BUDGET) -> list[str]:
    """Where the stack as a whole is over its budget, one line each."""
    counts = (
        ("patches", len(patches), budget.patches),
        ("lines added", sum(patch.added for patch in patches), budget.added),
        ("lines deleted", sum(patch.deleted for patch in patches), budget.deleted),
    )
    return [
        f"budget: {count} {what}, {limit} allowed" for what, count, limit in counts if count > limit
    ]


def drop_errors(name: str, text: str, tree: Path) -> list[str]:
    """Run the patch's Drop-When in an unpatched tree; anything but exit 1 (keep it) is an error."""
    command = parse(name, text).headers.get("Drop-When")
    if not command:
        return []  # the lint says so
    done = subprocess.run(
        ["sh", "-c", command], check=False, cwd=tree, capture_output=True, text=True
    )
    if done.returncode == 1:
        return []
    if done.returncode == 0:
        return [f"{name}: Drop-When is true, the patch is not needed any more"]
    return [f"{name}: Drop-When exits {done.returncode}: {done.stderr.strip()}"]
