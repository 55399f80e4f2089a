"""The pin of llama.cpp: reading it, fetching its archive, unpacking its source.

The archive is the sdist of llama-cpp-python, fetched through pip and checked by sha256; the
unpacked source is checked once more by its git tree id. ``LLAMA_CPP_DIR`` names a checkout to use
instead.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

__all__ = [
    "PIN_FILE",
    "REPO",
    "PatchError",
    "Pin",
    "download",
    "fetch_archive",
    "git",
    "read_pin",
    "run",
    "sha256",
    "unpack_source",
]

REPO = Path(__file__).resolve().parent.parent
PIN_FILE = REPO / "cpp_patches" / "UPSTREAM.toml"


class PatchError(Exception):
    """Something that the person at the keyboard can put right; the hint says how."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True)
class Pin:
    """One version of llama.cpp, as UPSTREAM.toml states it."""

    package: str
    version: str
    archive: str
    sha256: str
    source: str
    commit: str
    tree: str

    def __post_init__(self) -> None:
        for name, length in (("sha256", 64), ("commit", 40), ("tree", 40)):
            value = getattr(self, name)
            if len(value) != length or set(value) - set("0123456789abcdef"):
                raise PatchError(f"UPSTREAM.toml: {name} is '{value}', not {length} hex digits")


def read_pin(path: Path = PIN_FILE) -> Pin:
    """Read the pin; raises PatchError if a key is missing or malformed."""
    data = _load_toml(path)
    try:
        package, llama = data["package"], data["llama_cpp"]
        return Pin(
            package=package["name"],
            version=package["version"],
            archive=package["archive"],
            sha256=package["sha256"],
            source=package["source"],
            commit=llama["commit"],
            tree=llama["tree"],
        )
    except KeyError as error:
        raise PatchError(f"{path.name}: key {error} is missing") from None


def _load_toml(path: Path) -> dict[str, Any]:
    try:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            from pip._vendor import tomli as tomllib
    except ImportError:
        raise PatchError(
            f"cannot read {path.name}: this Python has neither tomllib nor pip",
            "use Python 3.11 or newer, or install pip into this one",
        ) from None
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise PatchError(f"cannot read {path}: {error}") from None


def run(
    command: list[str],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    hint: str | None = None,
) -> str:
    """Run a command and return what it printed; PatchError carries the end of its output."""
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except FileNotFoundError:
        raise PatchError(f"{command[0]} is not installed", f"install {command[0]}") from None
    output = done.stdout.decode("utf-8", "surrogateescape")  # not text=True, which rewrites CRLF
    if done.returncode:
        tail = "\n".join(output.strip().splitlines()[-20:])
        raise PatchError(f"`{' '.join(command[:6])}` failed with {done.returncode}\n{tail}", hint)
    return output


def git(tree: Path, *arguments: str, identity: dict[str, str] | None = None) -> str:
    """Run git inside a tree, free of what the user's own configuration would change."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env.update(GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_SYSTEM=os.devnull, LC_ALL="C")
    # a tree inside our own checkout must never fall back to the checkout's repository
    env["GIT_CEILING_DIRECTORIES"] = str(tree.resolve().parent)
    env.update(identity or {})
    return run(["git", *arguments], cwd=tree, env=env)


def fetch_archive(pin: Pin, downloads: Path) -> Path:
    """Path of the pin's sdist, downloaded through pip unless it is there; checked by sha256."""
    archive = downloads / pin.archive
    if not archive.exists():
        download(pin.package, pin.version, downloads)
    if not archive.exists():
        raise PatchError(f"pip brought no {pin.archive}", "check name and version in UPSTREAM.toml")
    found = sha256(archive)
    if found != pin.sha256:
        raise PatchError(
            f"{pin.archive} has sha256 {found}, UPSTREAM.toml says {pin.sha256}",
            f"delete {archive} and fetch again; if it stays so, do not use the file",
        )
    return archive


def download(package: str, version: str, downloads: Path) -> None:
    """Bring the sdist of a version into ``downloads`` through pip."""
    print(f"fetching the source of {package} {version} through pip", file=sys.stderr)
    downloads.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        package,
        "--dest",
        str(downloads),
        f"{package}=={version}",
    ]
    # pip prepares metadata of an sdist, which must not set off a compilation
    env = {**os.environ, "CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"}
    run(
        command, env=env, hint="check the network, or name a checkout of the pin with LLAMA_CPP_DIR"
    )


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def unpack_source(pin: Pin, downloads: Path, into: Path) -> str:
    """Put the pin's llama.cpp source into the empty folder ``into``; the git tree id it must have.

    It comes from ``LLAMA_CPP_DIR`` where that is set, else from the archive.
    """
    checkout = os.environ.get("LLAMA_CPP_DIR")
    if checkout:
        return _copy_checkout(pin, Path(checkout), into)
    _unpack(fetch_archive(pin, downloads), PurePosixPath(pin.source), into)
    return pin.tree


def _unpack(archive: Path, source: PurePosixPath, into: Path) -> None:
    """Unpack one folder of a tar archive; no entry may leave ``into``."""
    depth = 1 + len(source.parts)
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            if parts[1:depth] != source.parts or len(parts) <= depth or parts[depth] == ".git":
                continue
            if ".." in parts or not (member.isfile() or member.isdir()):
                raise PatchError(f"{archive.name}: refusing to unpack '{member.name}'")
            _unpack_member(tar, member, into.joinpath(*parts[depth:]))


def _unpack_member(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    data = tar.extractfile(member)
    assert data is not None  # the member is a file
    with data, target.open("wb") as file:
        shutil.copyfileobj(data, file)
    target.chmod(0o755 if member.mode & 0o100 else 0o644)


def _copy_checkout(pin: Pin, checkout: Path, into: Path) -> str:
    if not (checkout / "ggml" / "CMakeLists.txt").is_file():
        raise PatchError(
            f"LLAMA_CPP_DIR={checkout} is no llama.cpp source tree",
            "correct it, or unset it to fetch the pinned archive",
        )
    print(f"copying llama.cpp from {checkout}", file=sys.stderr)
    if _is_repository(checkout):
        return _copy_commit(pin, checkout, into)
    shutil.copytree(checkout, into, symlinks=True, dirs_exist_ok=True, ignore=_skip_build)
    return pin.tree


def _skip_build(folder: str, names: list[str]) -> set[str]:
    is_top = (Path(folder) / "ggml" / "CMakeLists.txt").is_file()
    return {name for name in names if is_top and name in (".git", "build")}


def _is_repository(checkout: Path) -> bool:
    try:
        git(checkout, "rev-parse", "--verify", "--quiet", "HEAD")
    except PatchError:
        return (
            False  # a submodule taken out of its repository keeps a .git file that points nowhere
        )
    return True


def _copy_commit(pin: Pin, checkout: Path, into: Path) -> str:
    """Copy HEAD of a git checkout that stands at the pin and has no changes."""
    head, tree = git(checkout, "rev-parse", "HEAD", "HEAD^{tree}").split()
    if pin.commit != head and pin.tree != tree:
        raise PatchError(
            f"LLAMA_CPP_DIR={checkout} stands at {head[:12]}, the pin is {pin.commit[:12]}",
            f"git -C {checkout} checkout {pin.commit}",
        )
    if git(checkout, "status", "--porcelain", "--untracked-files=no").strip():
        raise PatchError(
            f"LLAMA_CPP_DIR={checkout} has uncommitted changes", "commit, stash or undo them first"
        )
    git(checkout, "checkout-index", "--all", f"--prefix={into.resolve()}{os.sep}")
    return tree
