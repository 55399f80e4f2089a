"""Checkpoint to GGUF: source -> hparams -> tensors -> quantize -> writer -> verify; cli."""

from __future__ import annotations

__all__: list[str] = []
