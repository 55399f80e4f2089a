"""Numbers in sentences."""

from __future__ import annotations

__all__ = ["counted"]


def counted(n: int, noun: str) -> str:
    """So many of a noun with a regular plural: 1 layer, 2 layers."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
