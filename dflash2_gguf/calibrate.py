"""``dflash2-convert calibrate``: an importance matrix for a drafter, from really drafting.

For every matrix of the drafter it holds the squared sums of what each column was multiplied with,
over rows of target features and rows of drafted blocks, in the format of llama.cpp's
``tools/imatrix``, so that its ``llama-quantize --imatrix`` reads it too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from dflash2_gguf.engine import Importance
from dflash2_gguf.errors import NativeError, UsageError
from dflash2_gguf.gguf_schema import ARCHITECTURE, IMATRIX_TYPE, Key, Name
from dflash2_gguf.launch import Launch, open_session
from dflash2_gguf.prompts import Prompt, prompt_tokens
from dflash2_gguf.replacing import replacing, require_writable
from dflash2_gguf.sampling import SamplingParams
from dflash2_gguf.session import Session
from dflash2_gguf.stats import Stats
from dflash2_gguf.ui import Terminal

Counts = np.ndarray[Any, np.dtype[np.int64]]

__all__ = ["CalibrationSettings", "calibrate", "write_imatrix"]


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """What to answer while recording, and where to: ``dataset`` names the prompts in the file.

    raw: texts are taken as they are, not as messages through the target's chat template.
    """

    prompts: tuple[Prompt, ...]
    dataset: str
    output: Path
    max_tokens: int
    sampling: SamplingParams
    raw: bool = False
    force: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise UsageError(
                f"answers of {self.max_tokens} token draft nothing", "-n can be 2 or more"
            )


def calibrate(launch: Launch, settings: CalibrationSettings, terminal: Terminal) -> int:
    """Answer every prompt, drafting whole blocks, and write what was recorded; returns 0.

    Raises OutputError when the file exists or cannot be written, NativeError when nothing could be
    drafted, and what opening a session raises.
    """
    require_writable(settings.output, force=settings.force)
    with open_session(launch, terminal) as session:
        counts = _decode(session, settings, terminal)
        stats, width = session.stats, session.draft_max
        entries = session.importance()
    if not stats.n_draft_passes:
        raise NativeError("no step drafted, so nothing was recorded", "; ".join(stats.warnings()))
    write_imatrix(
        settings.output,
        entries,
        token_counts=counts,
        dataset=settings.dataset,
        n_blocks=stats.n_draft_passes,
        block_rows=width + 1,
    )
    terminal.write(_summary(settings, stats, len(entries)))
    return 0


def write_imatrix(
    path: Path,
    entries: Sequence[Importance],
    *,
    token_counts: Counts,
    dataset: str,
    n_blocks: int,
    block_rows: int,
) -> None:
    """Write an importance matrix, whole or not at all (``tools/imatrix/imatrix.cpp:save_imatrix``).

    A chunk of upstream's is a block of ``block_rows`` tokens here. ``token_counts`` [n_vocab], how
    often each token stood in prompts and answers, is for ``--draft-vocab``; upstream passes over
    it. Raises OutputError.
    """
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, ARCHITECTURE)
        writer.add_type(IMATRIX_TYPE)
        writer.add_array(Key.IMATRIX_DATASETS, [dataset])
        writer.add_uint32(Key.IMATRIX_CHUNK_COUNT, n_blocks)
        writer.add_uint32(Key.IMATRIX_CHUNK_SIZE, block_rows)
        writer.add_key_value(
            Key.IMATRIX_TOKEN_COUNTS,
            token_counts.tolist(),
            gguf.GGUFValueType.ARRAY,
            sub_type=gguf.GGUFValueType.UINT32,
        )
        for entry in entries:
            sums = np.array(entry.sums, dtype=np.float32).reshape(1, -1)
            count = np.array([[entry.n_rows]], dtype=np.float32)
            writer.add_tensor(entry.name + Name.IMATRIX_SUMS, sums)
            writer.add_tensor(entry.name + Name.IMATRIX_COUNTS, count)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _decode(session: Session, settings: CalibrationSettings, terminal: Terminal) -> Counts:
    """How often each token stood in prompts and answers [n_vocab]."""
    counts = np.zeros(session.n_vocab, dtype=np.int64)
    with terminal.progress("answering") as on_progress:
        for number, prompt in enumerate(settings.prompts):
            tokens = prompt_tokens(session, prompt, raw=settings.raw)
            session.reset()
            np.add.at(counts, tokens, 1)
            for piece in session.generate(
                tokens,
                max_tokens=settings.max_tokens,
                sampling=settings.sampling,
                draft=session.draft_max,
            ):
                np.add.at(counts, list(piece.tokens), 1)
            on_progress((number + 1) / len(settings.prompts))
    return counts


def _summary(settings: CalibrationSettings, stats: Stats, n_weights: int) -> str:
    if not settings.as_json:
        return f"{settings.output}\n"
    found: dict[str, Any] = {
        "output": str(settings.output),
        "weights": n_weights,
        "answers": len(settings.prompts),
        "tokens": stats.n_generated,
        "acceptance_length": stats.acceptance_length,
        "blocks": stats.n_draft_passes,
        "block_rows": stats.n_draft_passes + stats.n_drafted,
        "context_rows": stats.n_injected,
    }
    return json.dumps(found) + "\n"
