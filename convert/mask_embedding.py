"""``mask_embedding.pt``: a vector that replaces the row of the mask token in the target's table.

A GGUF drafter has no place for the vector alone, so it gets tables of its own: its checkpoint's,
or the target's, with that row replaced (``conversion/qwen.py:DFlashModel.generate_extra_tensors``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash2_gguf.convert.hparams import DraftHparams
from dflash2_gguf.convert.quantize import Floats
from dflash2_gguf.convert.torch_file import is_plain, load_weights_only
from dflash2_gguf.errors import CheckpointError

__all__ = ["MASK_FILE", "read_mask"]

MASK_FILE = "mask_embedding.pt"
_APART = "config.json and the vector do not belong together"
_AGAIN = "fetch the checkpoint again"


def read_mask(directory: Path, hparams: DraftHparams) -> Floats | None:
    """The vector [n_embd], None when the checkpoint has none.

    Raises CheckpointError when it belongs to another token or is not of the hidden size.
    """
    path = directory / MASK_FILE
    if not path.is_file():
        return None
    torch, state = load_weights_only(path)
    token, vector = _entries(state, torch)
    if token != hparams.mask_token_id:
        raise CheckpointError(
            f"{MASK_FILE} is of token {token}, config.json masks with {hparams.mask_token_id}",
            _APART,
        )
    if tuple(vector.shape) != (hparams.n_embd,):
        raise CheckpointError(
            f"{MASK_FILE} has a vector of {list(vector.shape)}, "
            f"the hidden size is {hparams.n_embd}",
            _APART,
        )
    values: Floats = vector.detach().float().numpy()
    if not np.isfinite(values).all():
        raise CheckpointError(f"{MASK_FILE} has NaN or infinite values", _AGAIN)
    return values


def _entries(state: object, torch: Any) -> tuple[int, Any]:
    token = state.get("mask_token_id") if isinstance(state, dict) else None
    vector = state.get("embedding") if isinstance(state, dict) else None
    if isinstance(token, torch.Tensor) and token.numel() == 1 and is_plain(token):
        token = token.item()
    if type(token) is not int or not isinstance(vector, torch.Tensor):
        raise CheckpointError(f"{MASK_FILE} has no mask_token_id and embedding", _AGAIN)
    if not vector.is_floating_point() or not is_plain(vector):
        raise CheckpointError(f"{MASK_FILE} has an embedding that is no vector of floats", _AGAIN)
    return token, vector
