"""The memory of a session before anything of it is allocated, and choices that make it fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.engine import EngineOptions, context_length, session_params, trained_context
from dflash2_gguf.errors import NativeError
from dflash2_gguf.gguf_header import read_header
from dflash2_gguf.gguf_schema import Key
from dflash2_gguf.machine import Free, free_memory
from dflash2_gguf.models import Model, measure, open_unloaded
from dflash2_gguf.native import api
from dflash2_gguf.stats import Memory

__all__ = ["Choices", "Measure", "Plan", "find_fit", "make_plan"]

_STEP = 256  # llama.cpp rounds contexts up to multiples of it
_SMALLEST = 512  # a chat of a few turns
_USUAL = (
    4096  # llama.cpp's --fit-ctx: below it layers leave the GPU rather than the context shrinks
)
# what else runs will need more later: llama.cpp's --fit-target, less where memory is little
_MARGIN = 2**30

# memory of a session with this context and this many layers on the GPU (None: all there can be)
Measure = Callable[[int, int | None], Memory]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a session takes; sizes in tokens, memory in bytes.

    n_ctx: context of each of the n_parallel sequences; n_ctx_trained: the longest text that the
    target was trained to see. draft_max: most drafted tokens per round,
    0 without a drafter. n_gpu_layers: layers of the target on the GPU, None for all there can be.
    memory: per part. Weights count in full although they stay in the file until they are read;
    what llama.cpp keeps besides (vocabulary, graphs) is some tens of MB. free: what the machine
    has now.
    """

    n_ctx: int
    n_ctx_trained: int
    n_parallel: int
    draft_max: int
    n_gpu_layers: int | None
    memory: Memory
    free: Free

    @property
    def fits(self) -> bool:
        """Whether it fits into what is free; True where the system does not tell."""
        return _fits(self.memory, self.free)

    def shortage(self) -> str | None:
        """What does not fit, with both numbers; None if everything does."""
        return _shortage(self.memory, self.free)

    def as_dict(self) -> dict[str, Any]:
        """All numbers, ready for JSON."""
        sums = {name: getattr(self.memory, name) for name in ("target", "draft", "total", "host")}
        return asdict(self) | {"memory": asdict(self.memory) | sums, "fits": self.fits}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What may be chosen from: contexts smallest..largest, GPU layers 0..n_layers.

    n_layers None leaves the layers as they are.
    """

    smallest: int
    largest: int
    n_layers: int | None = None


def make_plan(
    target: Path,
    draft: Path | None,
    options: EngineOptions,
    *,
    fit: bool = False,
) -> Plan:
    """Count what a session of these options takes. Weights are not read, nothing is allocated.

    With ``fit``, what ``options`` leave open (context, GPU layers) is chosen so that everything
    fits into what is free, less a tenth of it, at most 1 GiB. Raises what ``Session`` raises for
    these models and options, and NativeError when even the smallest choice does not fit.
    """
    draft = None if options.draft_max == 0 else draft
    free = free_memory()
    with closing(_Scale(target, draft, options)) as scale:
        n_ctx, layers = scale.n_ctx(), options.n_gpu_layers
        if fit:
            choices = scale.choices(offload=free.device is not None)
            n_ctx, layers = find_fit(scale.memory, _less_margin(free), choices)
        return Plan(
            n_ctx=n_ctx,
            n_ctx_trained=scale.n_ctx_trained(),
            n_parallel=options.n_parallel,
            draft_max=_draft_max(draft, options),
            n_gpu_layers=layers,
            memory=scale.memory(n_ctx, layers),
            free=free,
        )


def find_fit(measure: Measure, free: Free, choices: Choices) -> tuple[int, int | None]:
    """The most GPU layers that leave room for 4096 tokens, then the largest context.

    Raises NativeError with both numbers when not even the smallest context fits.
    """
    layers = choices.n_layers
    if layers is not None:
        usual = max(choices.smallest, min(_USUAL, choices.largest))
        layers = _largest(range(layers + 1), lambda n: _fits_device(measure(usual, n), free))
    lack = _shortage(measure(choices.smallest, layers), free)
    if lack is not None:
        raise NativeError(
            f"a context of {choices.smallest} tokens does not fit: {lack}",
            "use a smaller quantization, fewer sequences, or a machine with more memory",
        )
    if _fits(measure(choices.largest, layers), free):
        return choices.largest, layers
    contexts = range(choices.smallest, choices.largest, _STEP)
    return _largest(contexts, lambda n: _fits(measure(n, layers), free)), layers


class _Scale:
    """Weighs sessions; the models are kept open, anew only for another number of GPU layers."""

    def __init__(self, target: Path, draft: Path | None, options: EngineOptions) -> None:
        self._paths = target, draft
        self._options = options
        self._params = session_params(options)
        self._opened = ExitStack()
        self._layers: int | None = options.n_gpu_layers
        self._target, self._draft = self._open()

    def close(self) -> None:
        """Free the models."""
        self._opened.close()

    def memory(self, n_ctx: int, n_gpu_layers: int | None) -> Memory:
        """A ``Measure``."""
        if n_gpu_layers != self._layers:
            self.close()
            self._layers = n_gpu_layers
            self._target, self._draft = self._open()
        self._params.n_ctx = n_ctx
        return measure(self._target, self._draft, self._params)

    def n_ctx(self) -> int:
        """The context when nothing is fitted."""
        return context_length(self._target, self._options)

    def n_ctx_trained(self) -> int:
        """Tokens that the target was trained to see."""
        return trained_context(self._target)

    def choices(self, *, offload: bool) -> Choices:
        """What the options leave open; layers only where there is a GPU."""
        layers = None
        if offload and self._options.n_gpu_layers is None:
            layers = api().llama.llama_model_n_layer(self._target.handle) + 1  # and the head
        if self._options.n_ctx is not None:
            return Choices(smallest=self.n_ctx(), largest=self.n_ctx(), n_layers=layers)
        trained = self.n_ctx_trained()
        return Choices(smallest=min(_SMALLEST, trained), largest=trained, n_layers=layers)

    def _open(self) -> tuple[Model, Model | None]:
        pair = open_unloaded(*self._paths, n_gpu_layers=self._layers)
        return self._opened.enter_context(pair)


def _largest(numbers: range, is_good: Callable[[int], bool]) -> int:
    """The last good one, where all before it are; the first is not asked."""
    if is_good(numbers[-1]):
        return numbers[-1]
    low, high = 0, len(numbers) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_good(numbers[middle]) else (low, middle)
    return numbers[low]


def _less_margin(free: Free) -> Free:
    return Free(host=_reduced(free.host), device=_reduced(free.device))


def _reduced(size: int | None) -> int | None:
    return None if size is None else size - min(_MARGIN, size // 10)


def _fits_device(memory: Memory, free: Free) -> bool:
    return free.device is None or memory.device <= free.device


def _fits(memory: Memory, free: Free) -> bool:
    return _shortage(memory, free) is None


def _shortage(memory: Memory, free: Free) -> str | None:
    if not _fits_device(memory, free):
        return f"{_size(memory.device)} of GPU memory are needed, {_size(free.device)} are free"
    if free.host is not None and memory.host > free.host:
        return f"{_size(memory.host)} of memory are needed, {_size(free.host)} are free"
    return None


def _size(size: int | None) -> str:
    return f"{(size or 0) / 2**30:.2f} GiB"


def _draft_max(draft: Path | None, options: EngineOptions) -> int:
    if draft is None:
        return 0
    block = read_header(draft).arch(Key.Arch.BLOCK_SIZE, int) or 1
    return block - 1 if options.draft_max is None else min(block - 1, options.draft_max)
