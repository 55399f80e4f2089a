"""libdflash2's random numbers (cpp_patches/src/random.h), written a second time."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

__all__ = ["Purpose", "gumbel", "uniform"]


class Purpose(IntEnum):
    """enum class dflash2_purpose."""

    TARGET = 1
    DRAFT = 2
    ACCEPT = 3


def _mix(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _uniforms(seed: int, position: int, purpose: Purpose, tokens: np.ndarray) -> np.ndarray:
    place = _mix(np.array([seed << 32 | position], np.uint64))
    key = _mix(place ^ np.uint64(purpose))
    bits = _mix(key ^ _mix(tokens.astype(np.uint64))) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """The number in (0, 1) of a position and purpose that belongs to no token."""
    nobody = np.array([0xFFFFFFFF], np.uint64)
    return float(_uniforms(seed, position, purpose, nobody)[0])


def gumbel(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """Noise of tokens at a position: argmax(log p + noise) is a draw from p."""
    return -np.log(-np.log(_uniforms(seed, position, Purpose.TARGET, tokens)))
