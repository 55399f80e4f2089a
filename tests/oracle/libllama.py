"""One libllama, driven through llama-cpp-python's ctypes layer.

Which library that is, LLAMA_CPP_LIB_PATH decides before the import, so this module runs in
processes of its own (see worker.py): one for the unpatched pin, one for ours, never both in one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np

__all__ = [
    "Options",
    "context",
    "end_tokens",
    "evaluate",
    "forget",
    "greedy",
    "layer_inputs",
    "model",
    "prefill",
    "rewind",
    "silence",
    "tokenize",
]

GGML_TYPE_F32, GGML_TYPE_F16 = 0, 1
FLASH_ATTN_AUTO, FLASH_ATTN_OFF = -1, 0

_SET_LAYER_INPUT = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
_GET_LAYER_INPUT = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"


@dataclass(frozen=True)
class Options:
    """What a context is made of; sizes in tokens."""

    n_ctx: int = 512
    n_batch: int = 512
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = 1  # waiting for a second thread costs more than it gives on a busy machine
    kv_type: int = GGML_TYPE_F16
    flash_attn: int = FLASH_ATTN_AUTO


@llama_cpp.llama_log_callback
def _drop(level: int, text: bytes, user_data: Any) -> None:
    """Loading 128 models prints more than anybody reads."""


def silence() -> None:
    """Send llama.cpp's log nowhere."""
    llama_cpp.llama_log_set(_drop, None)


@contextmanager
def model(path: str) -> Iterator[Any]:
    """A loaded model (CPU only)."""
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    loaded = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if not loaded:
        raise RuntimeError(f"cannot load {path}")
    try:
        yield loaded
    finally:
        llama_cpp.llama_model_free(loaded)


@contextmanager
def context(loaded: Any, options: Options, eval_callback: Any = None) -> Iterator[Any]:
    """A context of a loaded model; eval_callback sees every graph node."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = options.n_ctx, options.n_batch, options.n_ubatch
    params.n_seq_max = options.n_seq_max
    params.n_threads = params.n_threads_batch = options.n_threads
    params.type_k = params.type_v = options.kv_type
    params.flash_attn_type = options.flash_attn
    if eval_callback is not None:
        params.cb_eval = eval_callback
    created = llama_cpp.llama_init_from_model(loaded, params)
    if not created:
        raise RuntimeError("cannot create a context")
    try:
        yield created
    finally:
        llama_cpp.llama_free(created)


def evaluate(
    ctx: Any, rows: Sequence[tuple[int, int, int]], outputs: Sequence[int] | None = None
) -> np.ndarray:
    """Evaluate rows of (token, position, sequence) in one batch; logits of outputs, [n, V]."""
    wanted = range(len(rows)) if outputs is None else outputs
    batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
    try:
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i in wanted
        status = llama_cpp.llama_decode(ctx, batch)
    finally:
        llama_cpp.llama_batch_free(batch)
    if status != 0:
        raise RuntimeError(f"llama_decode failed with {status}")
    return np.stack([_logits(ctx, i) for i in wanted])


def _logits(ctx: Any, row: int) -> np.ndarray:
    vocab = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(ctx))
    size = llama_cpp.llama_vocab_n_tokens(vocab)
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx, row), (size,)).copy()


def tokenize(loaded: Any, text: str) -> np.ndarray:
    """Token ids of text; special tokens are read, none is added."""
    raw, vocab = text.encode(), llama_cpp.llama_model_get_vocab(loaded)
    ids = (llama_cpp.llama_token * (len(raw) + 1))()
    count = llama_cpp.llama_tokenize(vocab, raw, len(raw), ids, len(ids), False, True)
    return np.array(ids[:count])


def end_tokens(loaded: Any) -> list[int]:
    """Ids of the tokens that end a generation."""
    vocab = llama_cpp.llama_model_get_vocab(loaded)
    ids = range(llama_cpp.llama_vocab_n_tokens(vocab))
    return [token for token in ids if llama_cpp.llama_vocab_is_eog(vocab, token)]


def forget(ctx: Any) -> None:
    """Empty the caches."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)


def rewind(ctx: Any, length: int) -> bool:
    """Cut sequence 0 back to length tokens; False when that cannot be done."""
    memory = llama_cpp.llama_get_memory(ctx)
    if llama_cpp.llama_memory_seq_pos_max(memory, 0) < length - 1:
        return False
    return bool(llama_cpp.llama_memory_seq_rm(memory, 0, length, -1))


def prefill(ctx: Any, tokens: Sequence[int], n_batch: int) -> np.ndarray:
    """Forget everything, evaluate a prompt as sequence 0 and return the last row's logits [V]."""
    forget(ctx)
    for start in range(0, len(tokens), n_batch):
        chunk = tokens[start : start + n_batch]
        rows = [(token, start + i, 0) for i, token in enumerate(chunk)]
        logits = evaluate(ctx, rows, outputs=[len(rows) - 1])
    return logits[0]


def greedy(
    ctx: Any, prompt: Sequence[int], n_predict: int, n_batch: int
) -> tuple[list[int], list[float]]:
    """Plain greedy decoding: n_predict tokens and the top-2 margin of each in logits."""
    logits = prefill(ctx, prompt, n_batch)
    tokens: list[int] = []
    margins: list[float] = []
    for position in range(len(prompt), len(prompt) + n_predict):
        best = int(np.argmax(logits))
        second, first = np.partition(logits, -2)[-2:]
        tokens.append(best)
        margins.append(float(first - second))
        if len(tokens) < n_predict:
            logits = evaluate(ctx, [(best, position, 0)])[0]
    return tokens, margins


def layer_inputs(
    ctx: Any, rows: Sequence[tuple[int, int, int]], layers: Sequence[int]
) -> dict[int, np.ndarray]:
    """Published input of each layer, [n_rows, H], of rows evaluated in one llama_decode."""
    switch, read = getattr(llama_cpp.llama_cpp._lib, _SET_LAYER_INPUT), _reader()
    switch.argtypes, switch.restype = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool], None
    for layer in layers:
        switch(ctx, layer, True)
    evaluate(ctx, rows, outputs=[len(rows) - 1])
    width = llama_cpp.llama_model_n_embd(llama_cpp.llama_get_model(ctx))
    shape = (len(rows), width)
    return {layer: np.ctypeslib.as_array(read(ctx, layer), shape).copy() for layer in layers}


def _reader() -> Any:
    read = getattr(llama_cpp.llama_cpp._lib, _GET_LAYER_INPUT)
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_uint32], ctypes.POINTER(ctypes.c_float)
    return read
