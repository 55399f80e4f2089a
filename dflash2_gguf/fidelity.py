"""``dflash2-convert fidelity``: what a drafter loses by its quantization, measured.

The real pair answers prompts once; the features of these texts are then replayed through every
drafter, which drafts a block after each token. All see the same rows and anchors, one after the
other, so figures differ by the drafters alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from dflash2_gguf.agreement import (
    Agreement,
    Interval,
    accepted,
    agreement,
    bootstrap,
    rounds,
    survival,
)
from dflash2_gguf.engine import EngineOptions
from dflash2_gguf.errors import NativeError, UsageError
from dflash2_gguf.ggml_types import GGMLType
from dflash2_gguf.gguf_header import read_header
from dflash2_gguf.gguf_schema import Key, Name, tensor_name
from dflash2_gguf.launch import Launch, open_session
from dflash2_gguf.prompts import Prompt, prompt_tokens
from dflash2_gguf.replay import Replay
from dflash2_gguf.sampling import SamplingParams
from dflash2_gguf.ui import Terminal
from dflash2_gguf.words import counted

__all__ = ["Acceptance", "Drafter", "FidelitySettings", "Measured", "measure", "name_drafters"]

Reals = np.ndarray[Any, np.dtype[np.float64]]

_TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class FidelitySettings:
    """What is compared: ``drafts``, the first of them the reference, over answers to ``prompts``.

    raw: texts are taken as they are, not as messages through the target's chat template.
    """

    target: Path
    drafts: tuple[Path, ...]
    prompts: tuple[Prompt, ...]
    max_tokens: int
    n_ctx: int | None = None
    n_threads: int | None = None
    raw: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        if len(self.drafts) < 2:
            raise UsageError("there is nothing to compare with the reference", "name more drafters")
        if self.max_tokens < 3:
            raise UsageError(
                f"answers of {counted(self.max_tokens, 'token')} judge no draft",
                "-n can be 3 or more",
            )


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """A file and what its header says.

    preset: the recipe; imatrix: was it quantized with an importance matrix? n_tokens: those that a
    reduced head can draft, None for all; nbytes: of all tensors; bits: per weight; types: of its
    matrices, in words.
    """

    path: Path
    preset: str
    imatrix: bool
    n_tokens: int | None = None
    nbytes: int
    bits: float
    types: str

    @property
    def label(self) -> str:
        """Recipe, whether with an importance matrix, and the size of a reduced head, in words."""
        name = f"{self.preset} + imatrix" if self.imatrix else self.preset
        return name if self.n_tokens is None else f"{name}, {self.n_tokens} tokens"


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """At one temperature: tokens per verification step, and what it is of the reference's.

    survival [n]: mean probability that at least so many drafts of a block are accepted.
    """

    temperature: float
    length: Interval
    relative: Interval
    survival: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One drafter against the reference; lists are per drafted position.

    time_ratio: median of the time of a draft pass by the reference's for the same block.
    """

    drafter: Drafter
    n_blocks: int
    acceptance: tuple[Acceptance, ...]
    top1: tuple[float, ...]
    path: tuple[float, ...]
    kl: tuple[float, ...]
    overlap: tuple[float, ...]
    draft_ms: float
    time_ratio: float


@dataclass(frozen=True)
class _Answer:
    tokens: list[int]
    n_prompt: int
    temperature: float
    stops: bool  # at a token that ends it, not at the length


@dataclass
class _Record:
    """What one drafter did: per answer the chances of its blocks, per block the rest."""

    chances: list[list[Reals]] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def measure(settings: FidelitySettings, terminal: Terminal) -> list[Measured]:
    """Answer, replay and compare; one result per drafter, the reference's first.

    Raises CheckpointError, PairError or NativeError when files cannot be used.
    """
    drafters = name_drafters(settings.drafts)
    answers = _answers(settings, terminal)
    options = EngineOptions(n_ctx=settings.n_ctx, n_threads=settings.n_threads)
    records = [_Record() for _ in drafters]
    with (
        Replay(settings.target, settings.drafts, options) as replay,
        terminal.progress("replaying") as on_progress,
    ):
        for number, answer in enumerate(answers):
            _replay(replay, answer, records)
            on_progress((number + 1) / len(answers))
        width = replay.draft_max
    return [
        _measured(drafter, record, records[0], answers, width)
        for drafter, record in zip(drafters, records, strict=True)
    ]


def name_drafters(paths: Sequence[Path]) -> list[Drafter]:
    """What the headers say; a file of another converter is called by its name."""
    found = []
    for path in paths:
        header = read_header(path)
        tensors = header.tensors.values()
        kinds = Counter(_type_name(t.type_id) for t in tensors if len(t.shape) == 2)
        rows = header.tensors.get(str(tensor_name(Name.HF_VOCAB_MAP)))
        nbytes = header.file_size - header.data_offset
        found.append(
            Drafter(
                path=path,
                preset=header.get(Key.PRESET, str) or path.stem,
                imatrix=Key.QUANTIZE_IMATRIX_FILE in header.fields,
                n_tokens=None if rows is None else rows.shape[0],
                nbytes=nbytes,
                bits=8 * nbytes / sum(prod(tensor.shape) for tensor in tensors),
                types=", ".join(f"{name} {count}" for name, count in kinds.most_common()),
            )
        )
    return found


def _type_name(number: int) -> str:
    return GGMLType(number).name if number in list(GGMLType) else f"type {number}"


def _answers(settings: FidelitySettings, terminal: Terminal) -> list[_Answer]:
    """Answers of the pair at both temperatures, long enough to judge a draft."""
    launch = Launch(
        target=settings.target,
        draft=settings.drafts[0],
        n_ctx=settings.n_ctx,
        n_threads=settings.n_threads,
        verbose=settings.verbose,
    )
    found = []
    with open_session(launch, terminal) as session, terminal.progress("answering") as on_progress:
        for number, prompt in enumerate(settings.prompts):
            ids = prompt_tokens(session, prompt, raw=settings.raw)
            for temperature in _TEMPERATURES:
                session.reset()
                sampling = SamplingParams(
                    temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=number
                )
                pieces = list(
                    session.generate(ids, max_tokens=settings.max_tokens, sampling=sampling)
                )
                tokens = [*ids, *(token for piece in pieces for token in piece.tokens)]
                stops = pieces[-1].finish_reason == "stop"
                if len(tokens) > len(ids) + 2:
                    found.append(_Answer(tokens, len(ids), temperature, stops))
            on_progress((number + 1) / len(settings.prompts))
    if {answer.temperature for answer in found} != set(_TEMPERATURES):
        raise NativeError("every answer ends after two tokens, so no draft can be judged")
    return found


def _replay(replay: Replay, answer: _Answer, records: Sequence[_Record]) -> None:
    """Draft after every token of an answer but the last, with every drafter in turn."""
    tokens, first = answer.tokens, answer.n_prompt
    rows, log_p = replay.read(tokens, first)
    for record in records:
        record.chances.append([])
    for anchor in range(first, len(tokens) - 1):
        begin = 0 if anchor == first else anchor - 1
        blocks = {}
        for drafter in _order(len(records), anchor):
            replay.inject(drafter, begin, rows[begin:anchor])
            start = time.perf_counter()
            blocks[drafter] = replay.draft(drafter, tokens[anchor], replay.draft_max)
            records[drafter].seconds.append(time.perf_counter() - start)
        ahead = tokens[anchor + 1 : anchor + 1 + replay.draft_max]
        known = log_p[anchor + 1 - first :][: len(ahead)].astype(np.float64)
        judge = known if answer.temperature else None
        for drafter, block in blocks.items():
            records[drafter].chances[-1].append(accepted(block, ahead, judge))
            records[drafter].agreements.append(agreement(blocks[0], block))


def _order(n: int, turn: int) -> Iterator[int]:
    """Everybody is first, second and so on equally often, forwards and backwards."""
    shifted = [(index + turn) % n for index in range(n)]
    return iter(shifted if turn // n % 2 == 0 else shifted[::-1])


def _measured(
    drafter: Drafter, record: _Record, reference: _Record, answers: Sequence[_Answer], width: int
) -> Measured:
    ratios = np.array(record.seconds) / np.array(reference.seconds)
    found = record.agreements
    return Measured(
        drafter=drafter,
        n_blocks=len(found),
        acceptance=tuple(
            _acceptance(record, reference, answers, temperature, width)
            for temperature in _TEMPERATURES
        ),
        top1=_mean([one.top1 for one in found]),
        path=_mean([one.path for one in found]),
        kl=_mean([one.kl for one in found]),
        overlap=_mean([one.overlap for one in found]),
        draft_ms=1000 * float(np.median(record.seconds)),
        time_ratio=float(np.median(ratios)),
    )


def _mean(values: Sequence[Reals]) -> tuple[float, ...]:
    return tuple(np.nanmean(np.stack(values), axis=0).tolist())


def _acceptance(
    record: _Record,
    reference: _Record,
    answers: Sequence[_Answer],
    temperature: float,
    width: int,
) -> Acceptance:
    chosen = [i for i, answer in enumerate(answers) if answer.temperature == temperature]
    steps, theirs = (
        np.array([rounds(r.chances[i], stops=answers[i].stops) for i in chosen])
        for r in (record, reference)
    )
    tokens = np.array([float(len(record.chances[i])) for i in chosen])
    blocks = [chances for i in chosen for chances in record.chances[i]]
    return Acceptance(
        temperature=temperature,
        length=bootstrap(tokens, steps),
        relative=bootstrap(theirs, steps),
        survival=tuple(survival(blocks, width).tolist()),
    )
