"""Every error a user can cause, as one small tree.

The message names the thing and the value; the hint says the way out. Command lines print both on
one line each and exit with ``exit_code``; tracebacks appear only with ``-v``.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "DFlash2Error",
    "NativeError",
    "OutputError",
    "PairError",
    "StateError",
    "UsageError",
]


class DFlash2Error(Exception):
    """Base of all errors this package raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(DFlash2Error):
    """An argument is missing or has a value that cannot work."""

    exit_code = 2


class CheckpointError(DFlash2Error):
    """A checkpoint or GGUF file is missing, truncated, malformed or of an unsupported kind."""


class PairError(DFlash2Error):
    """Target and drafter do not belong together, or the target cannot feed this drafter."""


class StateError(DFlash2Error):
    """A saved state is damaged, or of another model, build or kind of cache."""


class OutputError(DFlash2Error):
    """The destination exists, is read-only or full."""


class NativeError(DFlash2Error):
    """The native library is missing, is not ours, or a call into it failed."""
