"""Typed reads from config.json; a wrong type is a CheckpointError that names key and value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dflash2_gguf.errors import CheckpointError

__all__ = ["Config"]

# numbers are stored as 32-bit floats
_F32_MAX = 3.4e38


@dataclass(frozen=True)
class Config:
    """A config.json. ``draft*`` methods look in ``dflash_config`` first, then at the top level."""

    data: dict[str, Any]

    def top(self, key: str) -> Any:
        """Top-level value or None."""
        return self.data.get(key)

    def nested(self, key: str) -> Any:
        """Value inside ``dflash_config`` or None."""
        return self.data.get("dflash_config", {}).get(key)

    def draft(self, key: str) -> Any:
        """``dflash_config[key]``, else the top-level key, else None, as the reference does."""
        nested = self.data.get("dflash_config", {})
        return nested[key] if key in nested else self.data.get(key)

    def optional_int(self, key: str) -> int | None:
        """Top-level integer or None."""
        return _integer(key, self.top(key))

    def positive(self, key: str, *, allow_zero: bool = False) -> int:
        """Required top-level integer, at least 1 (or 0)."""
        value = _integer(key, _required(key, self.top(key)))
        if value is None or value < (0 if allow_zero else 1):
            raise CheckpointError(f"config.json: {key} is {value}")
        return value

    def number(self, key: str) -> float:
        """Required top-level number."""
        value = _float(key, _required(key, self.top(key)))
        if value is None:
            raise CheckpointError(f"config.json has no {key}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Top-level boolean."""
        return _flag(key, self.top(key), default)

    def optional_str(self, key: str) -> str | None:
        """Top-level string, None if it is something else."""
        value = self.top(key)
        return value if isinstance(value, str) else None

    def draft_int(self, key: str, default: int | None = None) -> int:
        """Integer of the drafter; required without a default."""
        value = self.draft(key)
        result = _integer(key, default if value is None else value)
        if result is None:
            raise CheckpointError(f"config.json has no {key} in dflash_config")
        return result

    def draft_float(self, key: str) -> float | None:
        """Number of the drafter or None."""
        return _float(key, self.draft(key))

    def draft_flag(self, key: str, default: bool) -> bool:
        """Boolean of the drafter."""
        return _flag(key, self.draft(key), default)


def _required(key: str, value: Any) -> Any:
    if value is None:
        raise CheckpointError(f"config.json has no {key}")
    return value


def _integer(key: str, value: Any) -> int | None:
    if value is not None and (type(value) is not int or abs(value) >= 2**31):
        raise CheckpointError(f"config.json: {key} is {value!r}, not an integer")
    return value


def _float(key: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _fits_f32(value):
        raise CheckpointError(f"config.json: {key} is {value!r}, not a number")
    return float(value)


def _fits_f32(value: float) -> bool:
    return abs(value) < _F32_MAX and math.isfinite(value)


def _flag(key: str, value: Any, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} is {value!r}, not true or false")
    return value
