"""Trees of llama.cpp under build/: git repositories, "pin" first, then one commit per patch.

A tree is its own repository because `git apply` inside an ignored folder of another one exits 0 and
changes nothing. Work that is not exported to patches/ is never thrown away.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from upstream import REPO, PatchError, Pin, git, unpack_source

__all__ = [
    "BUILD",
    "DOWNLOADS",
    "PATCHED",
    "PRISTINE",
    "UnexportedError",
    "am",
    "apply",
    "create",
    "ensure",
    "export",
    "has_work",
    "head",
    "is_dirty",
    "patch_name",
    "pin_commit",
    "refuse_unexported",
    "remember",
    "series_id",
    "starts_at",
    "state_id",
]

BUILD = REPO / "build" / "llama.cpp"
DOWNLOADS = REPO / "build" / "downloads"
PRISTINE = BUILD / "pristine"
PATCHED = BUILD / "patched"

# fixed, so that the same pin and series give the same commit ids everywhere
_WHO, _MAIL, _DATE = "dflash2-gguf", "dflash2-gguf@localhost", "2026-01-01T00:00:00+00:00"
_COMMITTER = {"GIT_COMMITTER_NAME": _WHO, "GIT_COMMITTER_EMAIL": _MAIL}
_IDENTITY = _COMMITTER | {
    "GIT_COMMITTER_DATE": _DATE,
    "GIT_AUTHOR_NAME": _WHO,
    "GIT_AUTHOR_EMAIL": _MAIL,
    "GIT_AUTHOR_DATE": _DATE,
}
_CONFIG = {"user.name": _WHO, "user.email": _MAIL, "core.autocrlf": "false"}

# everything that git lets a user's configuration or version decide is said here
_FORMAT = (
    "--zero-commit",
    "--no-signature",
    "--no-numbered",
    "--no-stat",
    "--full-index",
    "--no-renames",
    "--no-color",
    "--no-ext-diff",
    "--diff-algorithm=myers",
    "--unified=3",
    "--subject-prefix=PATCH",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)


def create(tree: Path, pin: Pin, *, is_known: bool = True) -> str:
    """Make ``tree`` a repository whose only commit is the pin; its git tree id.

    With ``is_known`` the content must be what UPSTREAM.toml says.
    """
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent, prefix=f".{tree.name}-") as folder:
        fresh = Path(folder) / tree.name
        fresh.mkdir()
        expected = unpack_source(pin, DOWNLOADS, fresh)
        git(fresh, "init", "--quiet", "--initial-branch=dflash2")
        for key, value in _CONFIG.items():
            git(fresh, "config", key, value)
        git(fresh, "add", "--all", "--force")
        git(fresh, "commit", "--quiet", "--no-verify", "-m", "pin", identity=_IDENTITY)
        if is_known:
            _check_content(fresh, expected)
        git(fresh, "config", "dflash2.pin", pin.commit)
        fresh.rename(tree)
    return _pin_tree(tree)


def _check_content(tree: Path, expected: str) -> None:
    found = _pin_tree(tree)
    if found != expected:
        raise PatchError(
            f"the llama.cpp source has git tree {found}, UPSTREAM.toml says {expected}",
            "it is another version than the pin, or was changed",
        )


def _pin_tree(tree: Path) -> str:
    return git(tree, "rev-parse", f"{pin_commit(tree)}^{{tree}}").strip()


def pin_commit(tree: Path) -> str:
    """Commit id of the unpatched pin in ``tree``."""
    return git(tree, "rev-list", "--max-parents=0", "HEAD").split()[-1]


def starts_at(tree: Path, pin: Pin) -> bool:
    """Does ``tree`` hold this pin as its first commit?"""
    config = git(tree, "config", "--default", "", "--get", "dflash2.pin").strip()
    return config == pin.commit or _pin_tree(tree) == pin.tree


def is_dirty(tree: Path) -> bool:
    """Are there changes in ``tree`` that no commit holds?"""
    return bool(git(tree, "status", "--porcelain").strip())


def head(tree: Path) -> str:
    """Commit id that ``tree`` stands at."""
    return git(tree, "rev-parse", "HEAD").strip()


def ensure(tree: Path, pin: Pin, series: Mapping[str, str]) -> None:
    """Make sure ``tree`` is a repository that starts at this pin; one at another pin is replaced.

    ``series`` is what patches/ holds (name to text); commits beyond it make this refuse.
    """
    if (tree / ".git").is_dir():
        if starts_at(tree, pin):
            return
        refuse_unexported(tree, series)
        shutil.rmtree(tree)
    if tree.exists() and any(tree.iterdir()):
        raise PatchError(f"{tree} is there but is no git repository", "move it away first")
    if tree.exists():
        tree.rmdir()
    create(tree, pin)


class UnexportedError(PatchError):
    """A tree has work that patches/ does not hold."""


def refuse_unexported(tree: Path, series: Mapping[str, str]) -> None:
    """Raise UnexportedError if ``tree`` has work that patches/ does not hold."""
    if is_dirty(tree):
        raise UnexportedError(
            f"{tree} has uncommitted changes",
            "commit them there and run `make patches-refresh`, or undo them",
        )
    lost = _unexported(tree, series)
    if lost:
        raise UnexportedError(
            f"{tree} has commits that are not in patches/: {', '.join(lost)}",
            "run `make patches-refresh`, put them on top of the series with "
            "`patchtool.py apply --keep`, or drop them with `git reset` in that tree",
        )


def _unexported(tree: Path, series: Mapping[str, str]) -> list[str]:
    if head(tree) == _remembered(tree).get("head"):
        return []
    return [name for name, text in export(tree).items() if series.get(name) != text]


def has_work(tree: Path, series: Mapping[str, str]) -> bool:
    """Is there anything in ``tree`` that ``refuse_unexported`` would protect?"""
    return is_dirty(tree) or bool(_unexported(tree, series))


def state_id(tree: Path) -> str:
    """Hash of the tracked content of ``tree`` as it is now, committed or not."""
    content = git(tree, "rev-parse", "HEAD^{tree}") + git(
        tree, "diff", "HEAD", "--binary", "--no-color"
    )
    untracked = git(tree, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    digest = hashlib.sha256(content.encode("utf-8", "surrogateescape"))
    for name in filter(None, untracked):
        digest.update(name.encode("utf-8", "surrogateescape") + (tree / name).read_bytes())
    return digest.hexdigest()[:12]


def apply(tree: Path, pin: Pin, series: Mapping[str, str], *, keep: bool = False) -> bool:
    """Bring ``tree`` to pin plus series; False if it stood there already.

    With ``keep`` the tree's own commits stay: they replace a patch of the same name, or follow the
    series.
    Files whose content stays are not touched, so that a rebuild compiles no more than it must.
    """
    ensure(tree, pin, series)
    state = {"head": head(tree), "series": series_id(series)}
    if _remembered(tree) == state and not is_dirty(tree):
        return False
    wanted = dict(series)
    if keep and not is_dirty(tree):
        wanted.update(export(tree))
    refuse_unexported(tree, wanted)
    with _worktree(tree, pin_commit(tree)) as scratch:
        for name, text in wanted.items():
            am(scratch, name, text)
        new = head(scratch)
    git(tree, "reset", "--quiet", "--hard", new)
    if wanted == series:
        remember(tree, series)
    return True


@contextmanager
def _worktree(tree: Path, commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=tree.parent, prefix=f".{tree.name}-am-") as folder:
        scratch = Path(folder) / "tree"
        git(tree, "worktree", "add", "--quiet", "--detach", str(scratch), commit)
        try:
            yield scratch
        finally:
            git(tree, "worktree", "remove", "--force", str(scratch))


def am(tree: Path, name: str, text: str, *extra: str) -> None:
    """Commit one patch on top of ``tree``; no fuzz, undone on failure."""
    with tempfile.TemporaryDirectory() as folder:
        mail = Path(folder) / name
        mail.write_bytes(text.encode("utf-8", "surrogateescape"))
        options = ("--quiet", "--keep-cr", "--no-scissors", "--whitespace=nowarn", "--no-gpg-sign")
        try:
            git(
                tree,
                "am",
                *options,
                *extra,
                "--committer-date-is-author-date",
                str(mail),
                identity=_COMMITTER,
            )
        except PatchError as error:
            git(tree, "am", "--abort")
            raise PatchError(
                f"{name} does not apply: {error.message}", "see CONTRIBUTING.md, patch life"
            ) from None


def export(tree: Path) -> dict[str, str]:
    """The commits after the pin as patches, name to text; the same bytes wherever it runs."""
    commits = git(tree, "rev-list", "--reverse", f"{pin_commit(tree)}..HEAD").split()
    patches: dict[str, str] = {}
    for commit in commits:
        name = patch_name(git(tree, "log", "-1", "--format=%B", commit))
        if name in patches:
            raise PatchError(f"two commits in {tree} export to {name}", "give one a Patch-Name")
        patches[name] = git(tree, "format-patch", *_FORMAT, "--stdout", "-1", commit)
    return patches


def patch_name(message: str) -> str:
    """File name of a commit's patch: its `Patch-Name:` line, or its subject as a slug."""
    named = re.search(r"^Patch-Name: *([a-z0-9][a-z0-9-]*)$", message, re.MULTILINE)
    slug = (
        named[1]
        if named
        else re.sub(r"[^a-z0-9]+", "-", message.splitlines()[0].lower()).strip("-")
    )
    return f"{slug}.patch"


def series_id(series: Mapping[str, str]) -> str:
    """Hash of names, order and texts of a series, 12 hex digits."""
    digest = hashlib.sha256()
    for name, text in series.items():
        data = text.encode("utf-8", "surrogateescape")
        digest.update(f"{name}\n{len(data)}\n".encode() + data)
    return digest.hexdigest()[:12]


def remember(tree: Path, series: Mapping[str, str]) -> None:
    """Note in the tree's repository that its HEAD is this series."""
    state = {"head": head(tree), "series": series_id(series)}
    (tree / ".git" / "dflash2.json").write_text(json.dumps(state), encoding="utf-8")


def _remembered(tree: Path) -> dict[str, str]:
    try:
        state: dict[str, str] = json.loads(
            (tree / ".git" / "dflash2.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return {}
    return state
