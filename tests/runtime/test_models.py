"""What llama.cpp's log says about a failed load."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash2_gguf.errors import CheckpointError, NativeError
from dflash2_gguf.models import _load_error


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        (CheckpointError, "tensor 'x' data is not within the file bounds", "is truncated: tensor"),
        (NativeError, "unknown model architecture: 'y'", "cannot load m.gguf: unknown model"),
    ],
)
def test_a_failed_load_gives_llama_cpps_reason(
    kind: type[Exception], line: str, message: str
) -> None:
    log = [f"llama_model_load: error loading model: {line}", "failed to load model"]
    error = _load_error(Path("m.gguf"), log)
    assert type(error) is kind
    assert message in error.message
