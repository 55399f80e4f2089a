"""From the bytes of tokens to text that can be shown at once: whole characters, no stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from dflash2_gguf.errors import UsageError

__all__ = ["TextStream"]


class TextStream:
    """Decodes UTF-8 that tokens may split anywhere, and ends at the first stop string.

    Bytes that are no UTF-8 become U+FFFD. Text that could be the beginning of a stop string is held
    back until it is decided, so a stop string spanning several tokens is never shown in part.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise UsageError(f"stop is {stop!r}", "it can be a list of texts that are not empty")
        self.stopped = False
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def feed(self, data: bytes) -> str:
        """Text that became certain with ``data``; "" after a stop string was found."""
        return self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """The rest: what was held back, and U+FFFD for a character that never got complete."""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        end = min((at for at in map(text.find, self._stop) if at >= 0), default=-1)
        self.stopped = end >= 0
        keep = end if self.stopped else len(text) - self._undecided(text)
        self._held = "" if self.stopped else text[keep:]
        return text[:keep]

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max(map(len, self._stop), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
