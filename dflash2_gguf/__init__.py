"""DFlash 2 block drafting for GGUF models: the same text as plain decoding, in fewer steps.

>>> from dflash2_gguf import SamplingParams, Session
>>> with Session("target.gguf", "drafter.gguf") as session:
...     for piece in session.generate("Once upon a time", max_tokens=64):
...         print(piece.text, end="")

Names are loaded when they are first used: importing the package loads no library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash2_gguf.errors import DFlash2Error
    from dflash2_gguf.sampling import SamplingParams
    from dflash2_gguf.session import Generation, Session
    from dflash2_gguf.stats import Stats

__all__ = ["DFlash2Error", "Generation", "SamplingParams", "Session", "Stats"]

_HOMES = {
    "DFlash2Error": "dflash2_gguf.errors",
    "Generation": "dflash2_gguf.session",
    "SamplingParams": "dflash2_gguf.sampling",
    "Session": "dflash2_gguf.session",
    "Stats": "dflash2_gguf.stats",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
