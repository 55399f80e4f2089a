"""Several drafters on the same rows of target features (``struct dflash2_replay``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from dflash2_gguf.engine import EngineOptions, context_length, session_params
from dflash2_gguf.errors import NativeError
from dflash2_gguf.models import Progress, open_drafter, open_pair
from dflash2_gguf.native import DraftView, api, check, failure

__all__ = ["Lattice", "Replay"]

Floats = np.ndarray[Any, np.dtype[np.float32]]
Reals = np.ndarray[Any, np.dtype[np.float64]]
Tokens = np.ndarray[Any, np.dtype[np.int32]]

_FLOATS = ctypes.POINTER(ctypes.c_float)


@dataclass(frozen=True)
class Lattice:
    """A drafted block of n positions with K candidates each.

    candidates [n, K]: token ids, unordered. scores [n, K, K]: [t, a, b] of candidate b of position
    t after candidate a of t - 1; all a are equal for t = 0.
    """

    candidates: Tokens
    scores: Floats

    def index(self, position: int, token: int) -> int | None:
        """Which candidate of a position a token is, None if it is not one."""
        found = np.flatnonzero(self.candidates[position] == token)
        return int(found[0]) if found.size else None

    def log_q(self, position: int, before: int) -> Reals:
        """Log-probabilities [K] at temperature 1 after candidate ``before``."""
        row = self.scores[position, before].astype(np.float64)
        row -= row.max()
        values: Reals = row - np.log(np.exp(row).sum())
        return values

    def path(self) -> list[int]:
        """Candidates that the greedy walk takes, one per position."""
        chosen: list[int] = []
        for row in self.scores:
            chosen.append(int(np.argmax(row[chosen[-1] if chosen else 0])))
        return chosen

    def path_tokens(self) -> list[int]:
        """The tokens of the greedy walk."""
        return [int(self.candidates[t, index]) for t, index in enumerate(self.path())]


class Replay:
    """One target, several drafters of it; a context manager.

    Raises what ``open_pair`` raises, PairError also for drafters that read different layers.
    """

    def __init__(
        self,
        target: Path,
        drafts: Sequence[Path],
        options: EngineOptions,
        *,
        on_progress: Progress | None = None,
    ) -> None:
        self._api = api()
        params = session_params(options)
        with ExitStack() as stack:
            large, first = open_pair(target, drafts[0], params, on_progress=on_progress)
            stack.enter_context(closing(large))
            models = [first] if first else []
            models += [open_drafter(path, large) for path in drafts[1:]]
            for model in models:
                stack.enter_context(closing(model))
            params.n_ctx = context_length(large, options)
            handles = (ctypes.c_void_p * len(models))(*(model.handle for model in models))
            status = ctypes.c_int32(0)
            self._handle: int | None = self._api.dflash2.dflash2_replay_init(
                large.handle, handles, len(models), ctypes.byref(params), ctypes.byref(status)
            )
            if not self._handle:
                raise failure(status.value, "dflash2_replay_init")
            self._models = stack.pop_all()
        self.n_ctx = int(params.n_ctx)
        self.n_features: int = self._api.dflash2.dflash2_replay_n_features(self._handle)
        self.draft_max: int = self._api.dflash2.dflash2_replay_n_draft_max(self._handle)

    def read(self, tokens: Sequence[int], n_prompt: int) -> tuple[Floats, Floats]:
        """Features [n - 1, n_features] of a text, log p [n - n_prompt] of what follows the prompt.

        The target evaluates the text anew, in batches as decoding has them.
        """
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        rows = np.empty((len(tokens) - 1, self.n_features), dtype=np.float32)
        log_p = np.empty(len(tokens) - n_prompt, dtype=np.float32)
        status = self._api.dflash2.dflash2_replay_read(
            self._handle, ids, len(tokens), n_prompt, _pointer(rows), _pointer(log_p)
        )
        check(status, "dflash2_replay_read")
        return rows, log_p

    def inject(self, drafter: int, position: int, rows: Floats) -> None:
        """Give a drafter feature rows from ``position`` on; what does not continue replaces."""
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        status = self._api.dflash2.dflash2_replay_inject(
            self._handle, drafter, position, _pointer(rows), len(rows)
        )
        check(status, "dflash2_replay_inject")

    def draft(self, drafter: int, anchor: int, n: int) -> Lattice:
        """What a drafter proposes for ``n`` tokens after ``anchor`` and the injected rows."""
        view = DraftView()
        status = self._api.dflash2.dflash2_replay_draft(
            self._handle, drafter, anchor, n, ctypes.byref(view)
        )
        check(status, "dflash2_replay_draft")
        if view.n_drafted != n:
            raise NativeError(f"{view.n_drafted} positions were drafted, not {n}")
        shape = (n, view.top_k)
        candidates = np.ctypeslib.as_array(view.candidates, shape).copy()
        return Lattice(candidates, np.ctypeslib.as_array(view.scores, (*shape, view.top_k)).copy())

    def close(self) -> None:
        """Free everything; again is harmless."""
        if self._handle is not None:
            self._api.dflash2.dflash2_replay_free(self._handle)
            self._handle = None
        self._models.close()

    def __enter__(self) -> Replay:  # typing.Self needs Python 3.11
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _pointer(values: Floats) -> Any:
    return values.ctypes.data_as(_FLOATS)
