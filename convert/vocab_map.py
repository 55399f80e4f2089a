"""The map of a reduced head's rows to token ids (``d2t``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash2_gguf.errors import CheckpointError

__all__ = ["token_ids"]

_MEANING = "its entries are the distance from row to token id"
_WIDTHS = {"I64": "<i8", "I32": "<i4"}


def token_ids(raw: bytes, dtype: str, n_vocab: int, name: str) -> np.ndarray[Any, Any]:
    """Ids [rows], int64, of what a checkpoint stores: by how much the id exceeds its row.

    Raises CheckpointError for ids outside the vocabulary or twice, as upstream's converter does
    (``conversion/qwen.py:DSparkModel.prepare_tensors``).
    """
    offsets = np.frombuffer(raw, dtype=_WIDTHS[dtype]).astype(np.int64)
    ids = offsets + np.arange(len(offsets))
    outside = ids[(ids < 0) | (ids >= n_vocab)]
    if len(outside):
        raise CheckpointError(
            f"tensor {name} names token {outside[0]}, the vocabulary has {n_vocab}",
            _MEANING,
        )
    if len(np.unique(ids)) != len(ids):
        raise CheckpointError(f"tensor {name} names a token twice", _MEANING)
    return ids
