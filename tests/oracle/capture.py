"""Values of graph nodes as they are computed, through the scheduler's eval callback.

Nothing here knows how layer inputs are published: it reads the nodes that upstream's graphs name
l_out-<layer>.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np

__all__ = ["Capture"]

_LAYER_OUTPUT = re.compile(r"l_out-(\d+)")


class _Tensor(ctypes.Structure):
    """Head of struct ggml_tensor (ggml.h), as far as it is read here."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    )


@dataclass
class Capture:
    """Collects token ids, in the order of evaluation, and layer outputs per micro-batch.

    With distinct token ids in a batch, tokens says which captured row belongs to which batch row.
    """

    tokens: list[np.ndarray] = field(default_factory=list)
    outputs: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def callback(self) -> Any:
        """The function for llama_context_params.cb_eval; keep it alive as long as the context."""
        return llama_cpp.llama_cpp.ggml_backend_sched_eval_callback(self._see)

    def _see(self, address: int, ask: bool, user_data: Any) -> bool:
        tensor = _Tensor.from_address(address)
        layer = _LAYER_OUTPUT.fullmatch(tensor.name.decode(errors="replace"))
        if ask:
            return layer is not None or _token_ids(tensor) is not None
        if layer is not None:
            self.outputs.setdefault(int(layer[1]), []).append(_values(tensor, np.float32))
        ids = _token_ids(tensor)
        if ids is not None and self._new_batch():
            self.tokens.append(_values(ids, np.int32).ravel())
        return True

    def _new_batch(self) -> bool:
        seen = max((len(parts) for parts in self.outputs.values()), default=0)
        return len(self.tokens) == seen

    def rows(self, layer: int, batch_tokens: list[int]) -> np.ndarray:
        """Output of layer in batch order, [n, H]; mean over hyper-connection streams."""
        parts = zip(self.outputs[layer], self.tokens, strict=True)
        rows = np.concatenate(
            [part.reshape(len(ids), -1, part.shape[-1]).mean(1) for part, ids in parts]
        )
        place = {int(token): row for row, token in enumerate(np.concatenate(self.tokens))}
        return rows[[place[token] for token in batch_tokens]]

    def complete(self, layer: int) -> bool:
        """Does layer's output hold every token? The last layer's often does not."""
        parts = self.outputs.get(layer, [])
        if not parts or len(parts) != len(self.tokens):
            return False
        pairs = zip(parts, self.tokens, strict=True)
        return all(part.size >= len(ids) * part.shape[-1] for part, ids in pairs)


def _token_ids(tensor: _Tensor) -> _Tensor | None:
    for address in tensor.src[:2]:
        if address:
            source = _Tensor.from_address(address)
            if source.name == b"inp_tokens":
                return source
    return None


def _values(tensor: _Tensor, dtype: Any) -> np.ndarray:
    """Copy of a CPU tensor as a 4-dimensional array, slowest axis first."""
    shape = tuple(tensor.ne)[::-1]
    strides = tuple(tensor.nb)[::-1]
    size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    memory = (ctypes.c_char * size).from_address(tensor.data)
    view = np.ndarray(shape, dtype=dtype, buffer=memory, strides=strides)
    return view.copy()
