"""One dflash2_session with its two models, in Python's types. Not thread-safe but for ``abort``."""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash2_gguf.errors import NativeError, UsageError
from dflash2_gguf.json_schema import to_gbnf
from dflash2_gguf.models import Model, Progress, memory_from, open_pair
from dflash2_gguf.native import (
    ABORTED,
    FINISH_REASONS,
    ImportanceStruct,
    LogitBias,
    MemoryStruct,
    SeqParams,
    SessionParams,
    StatsStruct,
    StepResult,
    api,
    check,
    failure,
)
from dflash2_gguf.sampling import VERIFIERS, SamplingParams
from dflash2_gguf.stats import DRAFT_FAILURES, WIDTH_REASONS, Memory, Stats
from dflash2_gguf.vocab import Vocab

__all__ = [
    "AbortedError",
    "Engine",
    "EngineOptions",
    "Importance",
    "Step",
    "context_length",
    "echo_log",
    "physical_cores",
    "session_params",
    "trained_context",
]

_DEFAULT_CTX = 8192
_RANDOM_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED
_MAX_PARALLEL = 64
# fields that SamplingParams and struct dflash2_seq_params call the same
_SAME_NAME = (
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
)


class AbortedError(Exception):
    """A step ended early because of ``Engine.abort``; the sequence is intact."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Size of a session; tokens unless said otherwise.

    n_ctx: None is the smaller of 8192 and what the model was trained with, 0 the latter.
    n_batch, n_ubatch: prompt tokens per step and per evaluation.
    n_threads: None is the number of physical cores this process may use.
    draft_max: drafted tokens per round; None is as many as pay, 0 drafts never.
    n_gpu_layers: layers of the target that go to the GPU; None is all, if there is a GPU.
    n_parallel: sequences held at once, each with a context of its own.
    exact: the very tokens of decoding without a drafter; rounding cannot turn a decision.
    calibrate: record what the drafter's weights are multiplied with, see ``Engine.importance``.

    Raises UsageError for a value out of range.
    """

    n_ctx: int | None = None
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int | None = None
    draft_max: int | None = None
    n_gpu_layers: int | None = None
    n_parallel: int = 1
    exact: bool = False
    calibrate: bool = False

    def __post_init__(self) -> None:
        limits = {"n_ctx": 0, "n_batch": 1, "n_ubatch": 1, "n_threads": 1}
        limits |= {"draft_max": 0, "n_gpu_layers": 0}
        for name, low in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value < 2**31:
                raise UsageError(f"{name} is {value}", f"it can be {low} or more")
        if not 1 <= self.n_parallel <= _MAX_PARALLEL:
            raise UsageError(f"n_parallel is {self.n_parallel}", f"it can be 1 to {_MAX_PARALLEL}")


@dataclass(frozen=True)
class Step:
    """What one step produced: none while the prompt is read, up to a whole block afterwards."""

    tokens: tuple[int, ...]
    n_accepted: int
    n_prompt_left: int
    finish: str | None


@dataclass(frozen=True)
class Importance:
    """What a weight of the drafter was multiplied with (``struct dflash2_importance``).

    sums: of the squares of the values that met each column; n_rows: rows of values summed.
    """

    name: str
    sums: array[float]
    n_rows: int


class Engine:
    """Life of the native session; ``close`` frees it and the models.

    Raises what ``open_pair`` raises, and NativeError when the session cannot be created.
    """

    def __init__(
        self,
        target: Path,
        draft: Path | None,
        options: EngineOptions,
        *,
        on_progress: Progress | None = None,
    ) -> None:
        self._api = api()
        params = session_params(options)
        self._options = options
        self._handle: int | None = None
        self._target, self._draft = open_pair(
            target, draft, params, n_gpu_layers=options.n_gpu_layers, on_progress=on_progress
        )
        try:
            self._handle = self._init(params, options)
        except BaseException:
            self.close()
            raise
        self.vocab = Vocab(self._target.handle or 0)
        self.n_ctx: int = self._api.dflash2.dflash2_session_n_ctx(self._handle)
        self.n_ctx_trained = trained_context(self._target)
        self.draft_max: int = self._api.dflash2.dflash2_session_n_draft_max(self._handle)
        self.n_parallel = options.n_parallel

    def begin(
        self,
        seq: int,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        max_tokens: int | None,
        draft_max: int | None,
    ) -> int:
        """Start a sequence on this whole prompt; number of tokens that its caches already hold."""
        params = _seq_params(self._api.dflash2.dflash2_seq_default_params(), sampling)
        params.n_predict = -1 if max_tokens is None else max_tokens
        wanted = self._options.draft_max if draft_max is None else draft_max
        params.n_draft_max = -1 if wanted is None else wanted
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        status = self._api.dflash2.dflash2_session_seq_begin(
            self._handle, seq, ids, len(tokens), ctypes.byref(params)
        )
        return check(status, "dflash2_session_seq_begin")

    def step(self) -> list[tuple[int, Step]]:
        """Advance sequences by a chunk of their prompt or a round; AbortedError after ``abort``."""
        results = (StepResult * self.n_parallel)()
        status = self._api.dflash2.dflash2_session_step(self._handle, results)
        if status == ABORTED:
            raise AbortedError
        if check(status, "dflash2_session_step") == 0:
            raise NativeError("dflash2_session_step has no active sequence")
        return [(result.seq_id, _step_from(result)) for result in results[:status]]

    def end(self, seq: int) -> None:
        """Stop producing; the caches stay for the next ``begin``."""
        check(self._api.dflash2.dflash2_session_seq_end(self._handle, seq), "seq_end")

    def clear(self, seq: int) -> None:
        """Forget a sequence and its caches."""
        check(self._api.dflash2.dflash2_session_seq_clear(self._handle, seq), "seq_clear")

    def is_active(self, seq: int) -> bool:
        """Is the sequence still to produce tokens?"""
        status = self._api.dflash2.dflash2_session_seq_is_active(self._handle, seq)
        return check(status, "dflash2_session_seq_is_active") > 0

    def tokens(self, seq: int) -> list[int]:
        """All tokens known of a sequence."""
        ids = ctypes.POINTER(ctypes.c_int32)()
        status = self._api.dflash2.dflash2_session_seq_tokens(self._handle, seq, ctypes.byref(ids))
        count = check(status, "dflash2_session_seq_tokens")
        return list(ids[:count]) if count else []

    def logits(self, seq: int, tokens: Sequence[int]) -> list[float]:
        """Logits of ``tokens`` where the last step chose the last token of a sequence."""
        row = ctypes.POINTER(ctypes.c_float)()
        status = self._api.dflash2.dflash2_session_seq_logits(self._handle, seq, ctypes.byref(row))
        check(status, "dflash2_session_seq_logits")
        return [row[token] for token in tokens]

    def save(self, seq: int) -> bytes:
        """A sequence with its caches as bytes, see ``dflash2_session_seq_save``."""
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        status = self._api.dflash2.dflash2_session_seq_save(
            self._handle, seq, ctypes.byref(data), ctypes.byref(size)
        )
        check(status, "dflash2_session_seq_save")
        return ctypes.string_at(data.value or 0, size.value)

    def restore(self, seq: int, data: bytes) -> None:
        """Replace a sequence by a saved one; StateError for data that cannot be used."""
        status = self._api.dflash2.dflash2_session_seq_restore(self._handle, seq, data, len(data))
        check(status, "dflash2_session_seq_restore")

    def abort(self) -> None:
        """Make the step in progress, or the next one, raise AbortedError soon. Any thread."""
        self._api.dflash2.dflash2_session_abort(self._handle)

    def stats(self) -> Stats:
        """Counters since the session exists."""
        raw = StatsStruct()
        self._api.dflash2.dflash2_session_stats(self._handle, ctypes.byref(raw))
        return _stats_from(raw)

    def seq_stats(self, seq: int) -> Stats:
        """Counters of one sequence since its ``begin``."""
        raw = StatsStruct()
        status = self._api.dflash2.dflash2_session_seq_stats(self._handle, seq, ctypes.byref(raw))
        check(status, "dflash2_session_seq_stats")
        return _stats_from(raw)

    def importance(self) -> list[Importance]:
        """What was recorded for every weight of the drafter, by name; needs ``calibrate``."""
        call, raw = self._api.dflash2.dflash2_session_importance, ImportanceStruct()
        size = self._api.dflash2.dflash2_session_importance_size(self._handle)
        found = []
        for index in range(check(size, "dflash2_session_importance_size")):
            check(call(self._handle, index, ctypes.byref(raw)), "dflash2_session_importance")
            found.append(
                Importance(raw.name.decode(), array("d", raw.sums[: raw.n_cols]), raw.n_rows)
            )
        return found

    def memory(self) -> Memory:
        """Bytes in use, per part."""
        raw = MemoryStruct()
        self._api.dflash2.dflash2_session_memory(self._handle, ctypes.byref(raw))
        return memory_from(raw)

    def close(self) -> None:
        """Free session and models; again is harmless."""
        if self._handle is not None:
            self._api.dflash2.dflash2_session_free(self._handle)
            self._handle = None
        for model in (self._draft, self._target):
            if model is not None:
                model.close()

    def _init(self, params: SessionParams, options: EngineOptions) -> int:
        params.n_ctx = context_length(self._target, options)
        status = ctypes.c_int32(0)
        handle: int | None = self._api.dflash2.dflash2_session_init(
            self._target.handle,
            self._draft.handle if self._draft else None,
            ctypes.byref(params),
            ctypes.byref(status),
        )
        if not handle:
            raise failure(status.value, "dflash2_session_init")
        return handle


def echo_log() -> None:
    """Print llama.cpp's log to stderr from now on."""
    api().log.echo = True


def physical_cores() -> int:
    """Cores this process may use, hyper-threads counted once (as llama.cpp's own tools do)."""
    try:
        cpus = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    path = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings"
    try:
        return len({Path(path.format(cpu)).read_text(encoding="ascii") for cpu in cpus}) or 1
    except OSError:
        return len(cpus)


def trained_context(target: Model) -> int:
    """Tokens that the model was trained to see."""
    length: int = api().llama.llama_model_n_ctx_train(target.handle)
    return length


def context_length(target: Model, options: EngineOptions) -> int:
    """The context that ``options`` mean for ``target``, in tokens."""
    if options.n_ctx is None:
        return min(_DEFAULT_CTX, trained_context(target))
    return options.n_ctx or trained_context(target)


def session_params(options: EngineOptions) -> SessionParams:
    """The native parameters; ``n_ctx`` is preliminary until ``context_length`` can be known."""
    params: SessionParams = api().dflash2.dflash2_session_default_params()
    params.n_ctx = _DEFAULT_CTX if options.n_ctx is None else options.n_ctx
    params.n_batch = options.n_batch
    params.n_ubatch = min(options.n_ubatch, options.n_batch)
    params.n_seq_max = options.n_parallel
    params.exact = options.exact
    params.calibrate = options.calibrate
    params.n_draft_max = -1 if options.draft_max is None else options.draft_max
    params.n_threads = physical_cores() if options.n_threads is None else options.n_threads
    return params


def _step_from(result: StepResult) -> Step:
    return Step(
        tokens=tuple(result.tokens[: result.n_tokens]),
        n_accepted=result.n_accepted,
        n_prompt_left=result.n_prompt_left,
        finish=FINISH_REASONS[result.finish],
    )


def _seq_params(params: SeqParams, sampling: SamplingParams) -> SeqParams:
    params.verifier = VERIFIERS.index(sampling.verifier)
    params.seed = _RANDOM_SEED if sampling.seed is None else sampling.seed
    params.temp = sampling.temperature
    params.top_k = sampling.top_k
    params.top_p = sampling.top_p
    params.min_p = sampling.min_p
    params.penalty_last_n = sampling.penalty_last_n
    params.penalty_repeat = sampling.repeat_penalty
    params.penalty_freq = sampling.frequency_penalty
    params.penalty_present = sampling.presence_penalty
    for name in _SAME_NAME:
        setattr(params, name, getattr(sampling, name))
    bias = [LogitBias(token, value) for token, value in sampling.logit_bias.items()]
    params.n_logit_bias = len(bias)
    params.logit_bias = (LogitBias * len(bias))(*bias)
    schema = sampling.json_schema
    grammar = sampling.grammar if schema is None else to_gbnf(schema)
    params.grammar = None if grammar is None else grammar.encode()
    return params


def _stats_from(raw: StatsStruct) -> Stats:
    width = max((i + 1 for i, n in enumerate(raw.drafted_at) if n), default=0)
    counters = (
        "n_prompt",
        "n_prompt_reused",
        "n_injected",
        "n_generated",
        "n_steps",
        "n_draft_passes",
        "n_drafted",
        "n_accepted",
        "n_prompt_sampled",
        "n_doubts",
        "n_replayed",
        "noise",
    )
    times = ("prompt", "inject", "draft", "verify", "sample")
    return Stats(
        **{name: getattr(raw, name) for name in counters},
        **{f"{name}_seconds": getattr(raw, f"t_{name}_us") / 1e6 for name in times},
        accepted_at=tuple(raw.accepted_at[:width]),
        drafted_at=tuple(raw.drafted_at[:width]),
        verified_width=tuple(raw.verified_width[: width + 1]),
        draft_failures=dict(zip(DRAFT_FAILURES, raw.draft_failures, strict=True)),
        width_reasons=dict(zip(WIDTH_REASONS, raw.rounds_by_reason, strict=True)),
    )
