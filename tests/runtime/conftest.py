"""Sessions on the real pair, opened once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash2_gguf import Session


@pytest.fixture(scope="session")
def drafter(drafter_gguf: Callable[[str], Path]) -> Path:
    """The real pair's drafter in q8_0."""
    return drafter_gguf("q8_0")


@pytest.fixture(scope="session")
def open_session(target_gguf: Path, drafter: Path) -> Iterator[Session]:
    """The real pair with a small context, on one thread: tests share their machine.

    The width is fixed, because an automatic one depends on the clock.
    """
    with Session(target_gguf, drafter, n_ctx=1024, n_threads=1, draft_max=7) as session:
        yield session


@pytest.fixture
def session(open_session: Session) -> Session:
    """The real pair with empty caches."""
    open_session.reset()
    return open_session
