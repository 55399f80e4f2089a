"""``mask_embedding.pt``: a vector that replaces the row of the mask token in the target's table.

A GGUF drafter has no place for the vector alone, so it gets tables of its own: its checkpoint's,
or the target's, with that row replaced (``conversion/qwen.py:DFlashModel.generate_extra_tensors``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash2_gguf.convert.gguf_reader import read_gguf
from dflash2_gguf.convert.gguf_source import stored_checkpoint, stored_weight
from dflash2_gguf.convert.hparams import DraftHparams
from dflash2_gguf.convert.quantize import Floats
from dflash2_gguf.convert.source import open_checkpoint, read_json
from dflash2_gguf.convert.stored_weights import Scheme, Tables, find_weights
from dflash2_gguf.convert.target import first_part
from dflash2_gguf.convert.torch_file import is_plain, load_weights_only
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.gguf_schema import Name

__all__ = ["lend_tables", "read_mask"]

_FILE = "mask_embedding.pt"


def read_mask(directory: Path, hparams: DraftHparams) -> Floats | None:
    """The vector [n_embd], None when the checkpoint has none.

    Raises CheckpointError when it belongs to another token or is not of the hidden size.
    """
    path = directory / _FILE
    if not path.is_file():
        return None
    torch, state = load_weights_only(path)
    token, vector = _entries(state, torch)
    if token != hparams.mask_token_id:
        raise CheckpointError(
            f"{_FILE} is of token {token}, config.json masks with {hparams.mask_token_id}",
            "config.json and the vector do not belong together",
        )
    if tuple(vector.shape) != (hparams.n_embd,):
        raise CheckpointError(
            f"{_FILE} has a vector of {list(vector.shape)}, the hidden size is {hparams.n_embd}"
        )
    values: Floats = vector.detach().float().numpy()
    if not np.isfinite(values).all():
        raise CheckpointError(f"{_FILE} has NaN or infinite values")
    return values


def _entries(state: object, torch: Any) -> tuple[int, Any]:
    token = state.get("mask_token_id") if isinstance(state, dict) else None
    vector = state.get("embedding") if isinstance(state, dict) else None
    if isinstance(token, torch.Tensor) and token.numel() == 1 and is_plain(token):
        token = token.item()
    if type(token) is not int or not isinstance(vector, torch.Tensor):
        raise CheckpointError(f"{_FILE} has no mask_token_id and embedding")
    if not vector.is_floating_point() or not is_plain(vector):
        raise CheckpointError(f"{_FILE} has an embedding that is no vector of floats")
    return token, vector


def lend_tables(target: Path) -> Tables:
    """The tables of a target, from its GGUF file or its Hugging Face folder with weights.

    Raises CheckpointError when they are not there.
    """
    return _from_folder(target) if target.is_dir() else _from_gguf(target)


def _from_gguf(path: Path) -> Tables:
    header = read_gguf(first_part(path))
    names = {Name.HF_EMBEDDINGS: Name.TOKEN_EMBD, Name.HF_HEAD: Name.OUTPUT}
    if Name.OUTPUT not in header.tensors:  # tied
        names[Name.HF_HEAD] = Name.TOKEN_EMBD
    missing = [name for name in names.values() if name not in header.tensors]
    if missing:
        raise _absent(path, missing[0])
    checkpoint = stored_checkpoint(header, set(names.values()))
    weights = {ours: stored_weight(checkpoint.tensors[name]) for ours, name in names.items()}
    return Tables(checkpoint=checkpoint, weights=weights)


def _from_folder(folder: Path) -> Tables:
    config = read_json(folder / "config.json")
    text = config.get("text_config", config)
    scheme = Scheme.read(config.get("quantization_config"))
    checkpoint = open_checkpoint(folder)
    stored, _ = find_weights(checkpoint, scheme)
    tied = isinstance(text, dict) and text.get("tie_word_embeddings") is True
    ends = {Name.HF_EMBEDDINGS: Name.HF_EMBEDDINGS, Name.HF_HEAD: Name.HF_HEAD}
    if tied:
        ends[Name.HF_HEAD] = Name.HF_EMBEDDINGS
    weights = {}
    for ours, end in ends.items():
        found = [name for name in stored if name == end or name.endswith(f".{end}")]
        if len(found) != 1:
            raise _absent(folder, end)
        weights[ours] = stored[found[0]]
    return Tables(checkpoint=checkpoint, weights=weights)


def _absent(target: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{target} has no {name}, and the drafter's {_FILE} replaces a row of it",
        "give the target with its weights: its first GGUF file, or its whole Hugging Face folder",
    )
