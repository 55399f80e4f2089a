"""Are these two files a target and its drafter? Told from their headers, before anything is loaded.

Whatever llama.cpp would abort on is found here; what only a graph can tell (does the target publish
these layers) is asked of ``dflash2_check_pair`` afterwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

from dflash2_gguf.errors import CheckpointError, PairError
from dflash2_gguf.gguf_header import Header, StringArray, read_header
from dflash2_gguf.gguf_schema import ARCHITECTURE, Key, arch_key, tensor_name

__all__ = ["check_complete", "check_drafter", "check_headers", "check_target", "split_parts"]

_CONVERT_HINT = "convert the drafter's checkpoint with `dflash2-convert`"
_OTHER_HINT = "convert the drafter that was trained for this target"
_BROKEN_HINT = "the file is broken; download or convert it again"
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")

# a drafter and a target converted by different tools may name unused tokens differently
_MAX_RENAMED = 0.01

_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS

_SELECTOR_KEYS = (
    Key.Arch.BLOCK_SIZE,
    Key.Arch.SELECTOR_RANK,
    Key.Arch.SELECTOR_TOP_K,
    Key.Arch.CONV_KERNEL_SIZE,
    Key.Arch.CONV_GROUP_SIZE,
)


def check_headers(target: Header, draft: Header) -> None:
    """Both files are what they are given for, and the numbers of both agree.

    Raises CheckpointError for a file that is wrong by itself, PairError for two that do not match.
    """
    check_target(target)
    check_drafter(draft)
    _require_equal_width(target, draft)
    _require_layers(target, draft)
    _require_equal_vocabulary(target, draft)


def check_target(header: Header) -> None:
    """A language model with a vocabulary, not a drafter; all files of a split are there."""
    if not header.architecture:
        raise CheckpointError(f"{header.path} has no {Key.ARCHITECTURE}", "is it a language model?")
    if header.architecture == ARCHITECTURE:
        raise PairError(
            f"{header.path} is a drafter, not a target",
            "are target (-m) and drafter (-d) swapped?",
        )
    _vocabulary(header)
    _require_sane_graph(header)
    _require_splits(header)


def check_drafter(header: Header) -> None:
    """A DFlash 2 drafter whose metadata is complete; raises PairError or CheckpointError."""
    path = header.path
    if header.architecture != ARCHITECTURE:
        raise PairError(
            f"{path} is not a drafter: its architecture is {header.architecture!r}, "
            f"expected {ARCHITECTURE!r}",
            _drafter_hint(header.architecture),
        )
    if tensor_name("candidate_selector.hidden_projection.weight") not in header.tensors:
        raise PairError(
            f"{path} has no candidate selector: it is a DFlash 1 or DSpark drafter",
            "only DFlash 2 drafters are supported",
        )
    for field in _SELECTOR_KEYS:
        if not header.arch(field, int):
            raise CheckpointError(f"{path} has no {arch_key(field)}", _CONVERT_HINT)
    if not _layers(header):
        raise CheckpointError(f"{path} has no {arch_key(Key.Arch.TARGET_LAYERS)}", _CONVERT_HINT)
    _require_sane_graph(header)
    _require_own_width(header)
    _require_mask_token(header)


def check_complete(header: Header, row_bytes: Callable[[int, int], int]) -> None:
    """All tensor data is in the file; ``row_bytes`` as in Header.missing_bytes."""
    missing = header.missing_bytes(row_bytes)
    if missing:
        raise CheckpointError(
            f"{header.path} is truncated: {missing} bytes are missing at its end",
            "download or convert it again",
        )


def _drafter_hint(architecture: str) -> str:
    if architecture.startswith(ARCHITECTURE):
        return f"files of other projects use {architecture!r}; {_CONVERT_HINT}"
    return "are target (-m) and drafter (-d) swapped?"


def _vocabulary(header: Header) -> StringArray:
    tokens = header.get(Key.TOKENS, StringArray)
    if not tokens:
        hint = _CONVERT_HINT if header.architecture == ARCHITECTURE else "is it a language model?"
        raise CheckpointError(f"{header.path} has no vocabulary ({Key.TOKENS})", hint)
    return tokens


def _layers(header: Header) -> tuple[int, ...]:
    ids = header.arch(Key.Arch.TARGET_LAYERS, tuple) or ()
    return tuple(int(index) for index in ids)


def _require_sane_graph(header: Header) -> None:
    """Values on which llama.cpp ends the process (``llama-model.cpp``, ``ggml-cpu/ops.cpp``)."""
    n_layer = header.arch(Key.Arch.BLOCK_COUNT, int)
    if n_layer is None or not 1 <= n_layer <= _MAX_LAYERS:
        key = arch_key(Key.Arch.BLOCK_COUNT, arch=header.architecture)
        found = "no" if n_layer is None else f"{n_layer} as"
        raise CheckpointError(f"{header.path} has {found} {key}", _BROKEN_HINT)
    epsilon = header.arch(Key.Arch.RMS_EPS, float)
    if epsilon is not None and not 0 <= epsilon < math.inf:
        key = arch_key(Key.Arch.RMS_EPS, arch=header.architecture)
        raise CheckpointError(f"{header.path} has {epsilon} as {key}", _BROKEN_HINT)


def _require_own_width(header: Header) -> None:
    """llama.cpp takes features of the width of the output, and ends the process at another one."""
    width = header.arch(Key.Arch.EMBEDDING_LENGTH, int)
    out = header.arch(Key.Arch.EMBEDDING_LENGTH_OUT, int)
    if out and out != width:
        raise CheckpointError(
            f"{header.path}: {arch_key(Key.Arch.EMBEDDING_LENGTH_OUT)} is {out}, "
            f"{arch_key(Key.Arch.EMBEDDING_LENGTH)} is {width}",
            f"the features of a drafter have its own width; {_CONVERT_HINT}",
        )


def _require_mask_token(header: Header) -> None:
    mask, n_vocab = header.get(Key.MASK_TOKEN_ID, int), len(_vocabulary(header))
    if mask is None:
        raise CheckpointError(f"{header.path} has no {Key.MASK_TOKEN_ID}", _CONVERT_HINT)
    if not 0 <= mask < n_vocab:
        raise CheckpointError(
            f"{header.path}: {Key.MASK_TOKEN_ID} is {mask}, the vocabulary has {n_vocab} tokens",
            _CONVERT_HINT,
        )


def _require_equal_width(target: Header, draft: Header) -> None:
    widths = [header.arch(Key.Arch.EMBEDDING_LENGTH, int) for header in (target, draft)]
    for header, width in zip((target, draft), widths, strict=True):
        if not width:
            key = arch_key(Key.Arch.EMBEDDING_LENGTH, arch=header.architecture)
            raise CheckpointError(f"{header.path} has no {key}", "is it a language model?")
    if widths[0] != widths[1]:
        raise PairError(
            f"hidden size differs: target {widths[0]}, drafter {widths[1]}", _OTHER_HINT
        )


def _require_layers(target: Header, draft: Header) -> None:
    """GGUF stores "input of layer i", i = 1..n_layer, which is the output of layer i - 1."""
    blocks = target.arch(Key.Arch.BLOCK_COUNT, int) or 0
    n_layer = blocks - (target.arch(Key.Arch.NEXTN_LAYERS, int) or 0)
    for index in _layers(draft):
        if not 1 <= index <= n_layer:
            raise PairError(
                f"the drafter reads layer {index - 1}, the target has layers 0 to {n_layer - 1}",
                _OTHER_HINT,
            )


def _require_equal_vocabulary(target: Header, draft: Header) -> None:
    theirs, ours = _vocabulary(target), _vocabulary(draft)
    if len(theirs) != len(ours):
        raise PairError(
            f"vocabulary differs: target {len(theirs)} tokens, drafter {len(ours)}", _OTHER_HINT
        )
    if theirs.raw == ours.raw:
        return
    pairs = zip(theirs.items(), ours.items(), strict=True)
    renamed = [index for index, (a, b) in enumerate(pairs) if a != b]
    if len(renamed) > _MAX_RENAMED * len(theirs):
        raise PairError(
            f"vocabulary differs in {len(renamed)} of {len(theirs)} tokens, first in {renamed[0]}",
            _OTHER_HINT,
        )


def split_parts(header: Header) -> tuple[Path, ...]:
    """All files of a model, its first one's ``header`` given; just that one where it is not split.

    Raises CheckpointError for a later part, or when a part is missing.
    """
    count = header.get(Key.SPLIT_COUNT, int) or 1
    if count == 1:
        return (header.path,)
    match = _SPLIT_NAME.search(header.path.name)
    if match is None or int(match[1]) != 1:
        raise CheckpointError(
            f"{header.path} is not the first of {count} files",
            f"name the file that ends in -00001-of-{count:05d}.gguf",
        )
    parts = tuple(_split_path(header.path, number, count) for number in range(1, count + 1))
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{part} does not exist: the target has {count} files")
    return parts


def _require_splits(header: Header) -> None:
    for part in split_parts(header)[1:]:
        read_header(part)


def _split_path(first: Path, number: int, count: int) -> Path:
    return first.with_name(_SPLIT_NAME.sub(f"-{number:05d}-of-{count:05d}.gguf", first.name))
