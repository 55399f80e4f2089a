"""Files that appear under their name complete, or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash2_gguf.errors import OutputError

__all__ = ["replacing", "require_writable"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file next to ``path`` that takes its place, unless writing it fails.

    Raises OutputError when the folder or the disk refuses it.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            yield Path(name)
            Path(name).chmod(0o666 & ~_umask())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error}") from error


def require_writable(path: Path, *, force: bool) -> None:
    """Raise OutputError when ``path`` exists (without ``force``), is a folder, or has no folder."""
    if path.is_dir():
        raise OutputError(f"{path} is a folder", "name a file in it")
    if path.exists() and not force:
        raise OutputError(f"{path} exists", "use --force to replace it")
    if not path.parent.is_dir():
        raise OutputError(f"there is no folder {path.parent}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
