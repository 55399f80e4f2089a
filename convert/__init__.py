"""Checkpoint to GGUF: source -> hparams -> tensors -> quantize -> writer -> verify, and the command line."""

from __future__ import annotations

__all__: list[str] = []
