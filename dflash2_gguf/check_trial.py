"""Numbers of a drafter's header tried against others, on answers that the target has given.

A layer id that is off by one or a wrong rope base costs a drafter some percent, which no look at
its acceptance alone tells. Both files therefore draft after every token of the same answers, and
the drafts that are kept are compared block by block: several hundred pairs of numbers, whose mean
difference is known far better than either mean.

Bundled pair, 441 blocks: layer ids one lower or higher keep 0.25 drafts less of 1.54, which is 4.1
and 4.4 standard errors; a rope base of a tenth 0.20, which is 3.5; one of ten times 0.06, which is
1.0 and cannot be told in texts this short.
"""

from __future__ import annotations

import math
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash2_gguf.agreement import accepted
from dflash2_gguf.check_fact import Fact, error, note, ok
from dflash2_gguf.engine import EngineOptions
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.gguf_header import Header
from dflash2_gguf.gguf_schema import Key, arch_key
from dflash2_gguf.replay import Replay
from dflash2_gguf.words import counted

__all__ = ["Answer", "Trial", "alternatives", "judge_trial", "try_out"]

_OUTPUTS = "`dflash2-convert migrate --layer-ids outputs` adds one to each"
_CONVERT = "convert the drafter's checkpoint again with `dflash2-convert`"
_CONFIG = (
    "compare with rope_theta in the checkpoint's config.json; "
    "`dflash2-convert migrate --config config.json` corrects it"
)
_SURE = 3.0  # standard errors; a handful of trials are made, by chance one in 700 goes beyond
_BATCH = 8  # neighbouring blocks draft the same tokens, so their mean counts as one observation


@dataclass(frozen=True)
class Answer:
    """Token ids of a prompt, and of what the target said."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Another value for a field of the header; ``raw`` as it stands in the file.

    as_is, other: the values in words.
    """

    field: str
    name: str
    as_is: str
    other: str
    raw: bytes
    hint: str


def alternatives(
    draft: Header, *, n_layer: int, target_base: float | None, shifts: Sequence[int]
) -> list[Trial]:
    """The target's rope base where the drafter has another, and layer ids moved by ``shifts``."""
    found = []
    base = draft.arch(Key.Arch.ROPE_FREQ_BASE, float)
    if base is not None and target_base is not None and not math.isclose(base, target_base):
        found.append(
            Trial(
                field=Key.Arch.ROPE_FREQ_BASE,
                name="rope base",
                as_is=f"{base:g}",
                other=f"the target's {target_base:g}",
                raw=struct.pack("<f", target_base),
                hint=_CONFIG,
            )
        )
    ids = [int(i) for i in draft.arch(Key.Arch.TARGET_LAYERS, tuple) or ()]
    for shift in shifts:
        moved = [i + shift for i in ids]
        if ids and min(moved) >= 1 and max(moved) < n_layer:
            found.append(
                Trial(
                    field=Key.Arch.TARGET_LAYERS,
                    name="layer ids",
                    as_is="/".join(str(i - 1) for i in ids),
                    other="/".join(str(i - 1) for i in moved),
                    raw=struct.pack(f"<{len(moved)}i", *moved),
                    hint=_OUTPUTS if shift > 0 else _CONVERT,
                )
            )
    return found


def try_out(
    target: Path,
    draft: Header,
    trials: Sequence[Trial],
    answers: Sequence[Answer],
    *,
    n_ctx: int,
    n_threads: int | None = None,
) -> list[Fact]:
    """Draft with the file and with copies of it that differ in one field each.

    Raises what loading a pair raises, CheckpointError when there is no room for a copy.
    """
    if not trials:
        return []
    options = EngineOptions(n_ctx=n_ctx, n_threads=n_threads)
    own = _kept(target, draft.path, answers, options)
    facts = []
    for trial in trials:
        with tempfile.TemporaryDirectory() as folder:
            other = _write_variant(draft, trial, Path(folder) / "variant.gguf")
            facts.append(judge_trial(trial, own, _kept(target, other, answers, options)))
    return facts


def judge_trial(trial: Trial, own: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Fact:
    """Which value has more drafts kept, if that can be told; drafts kept per block and answer."""
    pairs = [zip(a, b, strict=True) for a, b in zip(own, other, strict=True)]
    gains = [[b - a for a, b in pair] for pair in pairs]
    gain, doubt = _mean_and_error(gains)
    n = sum(map(len, gains))
    means = [sum(map(sum, kept)) / n for kept in (own, other)]
    figures = f"{means[0]:.2f} drafts of a block are kept with {trial.as_is}, {means[1]:.2f} with "
    figures += f"{trial.other}, over {counted(n, 'block')}"
    if gain > _SURE * doubt:
        return error(trial.name, f"{trial.other} fits better: {figures}", trial.hint)
    if gain < -_SURE * doubt:
        return ok(trial.name, f"{trial.as_is} fits better: {figures}")
    return note(
        trial.name, f"{trial.as_is} and {trial.other} cannot be told apart: {figures}", trial.hint
    )


def _mean_and_error(gains: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Mean and its standard error, from batches of blocks that follow each other."""
    batches = [answer[i : i + _BATCH] for answer in gains for i in range(0, len(answer), _BATCH)]
    n = sum(map(len, batches))
    mean = sum(map(sum, batches)) / n
    spread = sum((sum(batch) - mean * len(batch)) ** 2 for batch in batches)
    k = len(batches)
    return mean, math.sqrt(spread * k / max(k - 1, 1)) / n


def _write_variant(draft: Header, trial: Trial, path: Path) -> Path:
    """A copy with other bytes of the same length in the place of one value."""
    key = arch_key(trial.field)
    name = struct.pack("<Q", len(key)) + key.encode()
    is_array = isinstance(draft.fields[key], tuple)
    try:
        shutil.copyfile(draft.path, path)
        with path.open("r+b") as file:
            head = file.read(draft.data_offset)
            at = head.index(name) + len(name) + (16 if is_array else 4)  # after type and count
            file.seek(at)
            file.write(trial.raw)
    except OSError as problem:
        raise CheckpointError(
            f"cannot copy {draft.path} to try other numbers: {problem.strerror}",
            "set TMPDIR to a folder with room for a copy",
        ) from problem
    return path


def _kept(
    target: Path, draft: Path, answers: Sequence[Answer], options: EngineOptions
) -> list[list[int]]:
    """Per answer, how many drafts are kept of the block after each of its tokens but the last."""
    with Replay(target, [draft], options) as replay:
        return [list(_kept_of(replay, answer)) for answer in answers]


def _kept_of(replay: Replay, answer: Answer) -> Iterator[int]:
    start = len(answer.prompt)
    if len(answer.tokens) < 2:
        return
    rows, _ = replay.read([*answer.prompt, *answer.tokens], start)
    replay.inject(0, 0, rows[:start])
    for i, anchor in enumerate(answer.tokens[:-1]):
        if i:
            replay.inject(0, start + i - 1, rows[start + i - 1 : start + i])
        following = answer.tokens[i + 1 : i + 1 + replay.draft_max]
        drafted = replay.draft(0, anchor, replay.draft_max)
        yield int(np.cumprod(accepted(drafted, following, None)).sum())
