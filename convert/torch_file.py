"""Checkpoints pickled by torch, the only place of the converter that needs it (extra ``torch``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash2_gguf.errors import CheckpointError

__all__ = ["TorchState", "is_plain", "load_weights_only", "open_torch"]

# name -> dtype in safetensors' words, shape, bytes
TorchState = dict[str, tuple[str, tuple[int, ...], np.ndarray[Any, np.dtype[np.uint8]]]]

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def open_torch(path: Path) -> TorchState:
    """Map a ``.bin`` or ``.pt`` state dict without executing code from it.

    Raises CheckpointError when torch is missing, the file cannot be read with ``weights_only=True``
    or holds anything but a flat dictionary of tensors.
    """
    torch, state = load_weights_only(path)
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise CheckpointError(f"{path.name} is not a flat dictionary of tensors")
    return {str(name): _view(path, str(name), tensor) for name, tensor in state.items()}


def load_weights_only(path: Path) -> tuple[Any, Any]:
    """The torch module and the content of ``path``, read without executing code from it.

    Raises CheckpointError when torch is missing or cannot read the file so.
    """
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"{path.name} needs torch to be read",
            "run `pip install dflash2-gguf[torch]`, or use the safetensors checkpoint",
        ) from None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds for a broken or unsafe file
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"torch cannot read {path.name}: {reason}") from error
    return torch, state


def is_plain(tensor: Any) -> bool:
    """Is every element of it stored? Sparse, meta and expanded tensors are larger than that."""
    if str(tensor.layout) != "torch.strided" or tensor.device.type != "cpu":
        return False
    if tensor.is_quantized or tensor.is_neg() or tensor.is_conj():
        return False
    stored = tensor.untyped_storage().nbytes()
    return bool(tensor.numel() * tensor.element_size() <= stored)


def _view(
    path: Path, name: str, tensor: Any
) -> tuple[str, tuple[int, ...], np.ndarray[Any, np.dtype[np.uint8]]]:
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise CheckpointError(f"tensor {name!r} of {path.name} has the unsupported dtype {dtype}")
    if not is_plain(tensor):
        raise CheckpointError(f"tensor {name!r} of {path.name} is not stored element by element")
    shape = tuple(int(n) for n in tensor.shape)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _DTYPES[dtype], shape, flat
