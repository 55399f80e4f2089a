"""Read a written file back and compare its header with what was meant to be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dflash2_gguf.convert.gguf_reader import read_gguf
from dflash2_gguf.convert.gguf_values import Value
from dflash2_gguf.errors import CheckpointError, OutputError
from dflash2_gguf.ggml_types import GGMLType

__all__ = ["verify_file"]

_HINT = "the disk or its driver is at fault; check it before trusting the file"


class _Tensor(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def type(self) -> GGMLType | int: ...

    @property
    def nbytes(self) -> int: ...


def verify_file(
    path: Path,
    *,
    values: Mapping[str, Value],
    tensors: Sequence[_Tensor],
    offsets: Mapping[str, int],
) -> None:
    """Raise OutputError when names, shapes, types, offsets or metadata differ from the plan."""
    try:
        header = read_gguf(path)
    except CheckpointError as error:
        raise OutputError(
            f"the written file cannot be read back: {error.message}", _HINT
        ) from error
    if header.values != dict(values):
        raise OutputError("the written file has other metadata than planned", _HINT)
    found = {t.name: (t.shape, t.type, t.offset, t.nbytes) for t in header.tensors.values()}
    for tensor in tensors:
        # the reader does not know the size of types that are not written here
        nbytes = tensor.nbytes if isinstance(tensor.type, GGMLType) else 0
        expected = (tensor.shape, tensor.type, offsets[tensor.name], nbytes)
        if found.pop(tensor.name, None) != expected:
            raise OutputError(f"the written file differs from the plan at {tensor.name}", _HINT)
    if found:
        raise OutputError(f"the written file has the unplanned tensor {min(found)}", _HINT)
