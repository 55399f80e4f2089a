"""Facts and problems of a drafter's GGUF file, whoever converted it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

from dflash2_gguf.convert.fork_fields import shown
from dflash2_gguf.convert.fork_names import ARRAYS, SCALARS
from dflash2_gguf.convert.gguf_reader import GGUFHeader, TensorEntry
from dflash2_gguf.convert.gguf_values import Scalar
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.ggml_types import FileType, GGMLType
from dflash2_gguf.gguf_schema import (
    ARCHITECTURE,
    IMATRIX_TYPE,
    DraftShape,
    Key,
    Name,
    TensorSpec,
    arch_key,
    draft_tensors,
    tensor_name,
)

__all__ = ["draft_shape", "gguf_facts", "tensor_problems", "type_name"]

_SHOWN = 5
_F = Key.Arch

# facts that a drafter's file must state, and their keys
_STATED = {
    "block_size": arch_key(_F.BLOCK_SIZE),
    "mask_token_id": Key.MASK_TOKEN_ID,
    "target_layers": arch_key(_F.TARGET_LAYERS),
    "rope_base": arch_key(_F.ROPE_FREQ_BASE),
    "vocabulary": Key.TOKENS,
    "layers": arch_key(_F.BLOCK_COUNT),
    "hidden_size": arch_key(_F.EMBEDDING_LENGTH),
    "feed_forward": arch_key(_F.FEED_FORWARD_LENGTH),
    "heads": arch_key(_F.HEAD_COUNT),
    "kv_heads": arch_key(_F.HEAD_COUNT_KV),
    "context": arch_key(_F.CONTEXT_LENGTH),
    "norm_epsilon": arch_key(_F.RMS_EPS),
}
_STATED_BY_DFLASH2 = {
    "conv_kernel": arch_key(_F.CONV_KERNEL_SIZE),
    "conv_group": arch_key(_F.CONV_GROUP_SIZE),
    "selector_rank": arch_key(_F.SELECTOR_RANK),
    "selector_top_k": arch_key(_F.SELECTOR_TOP_K),
}


def gguf_facts(header: GGUFHeader) -> tuple[dict[str, Any], list[str]]:
    """Facts by name and a list of problems; CheckpointError when it is not a DFlash drafter."""
    arch = header.text(Key.ARCHITECTURE)
    if header.text(Key.TYPE) == IMATRIX_TYPE:
        raise CheckpointError(
            f"{header.path} is an importance matrix, not a DFlash drafter", "it goes to --imatrix"
        )
    if arch != ARCHITECTURE:
        of_a_fork = ARCHITECTURE in str(arch)
        raise CheckpointError(
            f"{header.path} is a model of architecture {arch!r}, not a DFlash drafter",
            "`dflash2-convert migrate` rewrites files of older converters and forks"
            if of_a_fork
            else "is it the target? a drafter is wanted here",
        )
    layers = _integers(header, arch_key(Key.Arch.TARGET_LAYERS))
    facts = {
        **_identity(header),
        **_weights(header),
        **_shape(header),
        **_behaviour(header, layers),
        **_tokenizer(header),
        **_origin(header),
    }
    return facts, _problems(header, facts)


def type_name(kind: GGMLType | int) -> str:
    """Name of a tensor type, or its number where this project does not write it."""
    return kind.name if isinstance(kind, GGMLType) else f"type {kind}"


def _list(header: GGUFHeader, key: str) -> list[Scalar] | None:
    value = header.values.get(key)
    return None if value is None or value.item is None else value.items()


def _integers(header: GGUFHeader, key: str) -> list[int] | None:
    """A list of whole numbers; None when it is missing or something else."""
    items = _list(header, key) or []
    numbers = [i for i in items if isinstance(i, int) and not isinstance(i, bool)]
    return numbers if numbers and len(numbers) == len(items) else None


def _identity(header: GGUFHeader) -> dict[str, Any]:
    return {
        "kind": f"{_kind(header)} drafter (GGUF version {header.version})",
        "name": header.text(Key.NAME),
        "license": header.text(Key.LICENSE),
        "license_name": header.text(Key.LICENSE_NAME),
        "license_link": header.text(Key.LICENSE_LINK),
        "source_repo": header.text(Key.SOURCE_REPO_URL),
        "source_revision": header.text(Key.SOURCE_REVISION),
    }


def _kind(header: GGUFHeader) -> str:
    if any(name.startswith(Name.MARKOV_PREFIX) for name in header.tensors):
        return "DSpark"
    has_selector = any(name.startswith(Name.SELECTOR_PREFIX) for name in header.tensors)
    return "DFlash 2" if has_selector else "DFlash 1"


def _weights(header: GGUFHeader) -> dict[str, Any]:
    tensors = header.tensors.values()
    kinds = Counter(type_name(t.type) for t in tensors)
    file_type = header.integer(Key.FILE_TYPE)
    known = {int(item): item.name.removeprefix("MOSTLY_") for item in FileType}
    return {
        "parameters": sum(prod(t.shape) for t in tensors),
        "bytes": header.size,
        "file_type": None if file_type is None else known.get(file_type, str(file_type)),
        "tensors": len(header.tensors),
        "tensor_types": dict(sorted(kinds.items())),
        "own_embeddings": Name.TOKEN_EMBD in header.tensors,
        "own_head": Name.OUTPUT in header.tensors,
    }


def _head_dim(header: GGUFHeader) -> int | None:
    given = header.integer(arch_key(Key.Arch.KEY_LENGTH))
    hidden = header.integer(arch_key(Key.Arch.EMBEDDING_LENGTH))
    heads = header.integer(arch_key(Key.Arch.HEAD_COUNT))
    return given if given is not None or not hidden or not heads else hidden // heads


def _shape(header: GGUFHeader) -> dict[str, Any]:
    field = Key.Arch
    tokens = header.values.get(Key.TOKENS)
    return {
        "layers": header.integer(arch_key(field.BLOCK_COUNT)),
        "hidden_size": header.integer(arch_key(field.EMBEDDING_LENGTH)),
        "feed_forward": header.integer(arch_key(field.FEED_FORWARD_LENGTH)),
        "heads": header.integer(arch_key(field.HEAD_COUNT)),
        "kv_heads": header.integer(arch_key(field.HEAD_COUNT_KV)),
        "head_dim": _head_dim(header),
        "vocabulary": None if tokens is None else tokens.count,
        "context": header.integer(arch_key(field.CONTEXT_LENGTH)),
        "norm_epsilon": header.scalar(arch_key(field.RMS_EPS)),
    }


def _behaviour(header: GGUFHeader, layers: list[int] | None) -> dict[str, Any]:
    field = Key.Arch
    scaling = header.text(arch_key(field.ROPE_SCALING_TYPE))
    factor = header.scalar(arch_key(field.ROPE_SCALING_FACTOR))
    return {
        "block_size": header.integer(arch_key(field.BLOCK_SIZE)),
        "mask_token_id": header.integer(Key.MASK_TOKEN_ID),
        "mask_token": _mask_token(header),
        # the file counts layer inputs, people count layer outputs
        "target_layers": None if layers is None else [i - 1 for i in layers],
        "target_layer_count": header.integer(Key.TARGET_BLOCK_COUNT),
        "conv_kernel": header.integer(arch_key(field.CONV_KERNEL_SIZE)),
        "conv_group": header.integer(arch_key(field.CONV_GROUP_SIZE)),
        "selector_rank": header.integer(arch_key(field.SELECTOR_RANK)),
        "selector_top_k": header.integer(arch_key(field.SELECTOR_TOP_K)),
        "causal": header.scalar(arch_key(field.CAUSAL)),
        "sliding_window": header.integer(arch_key(field.SLIDING_WINDOW)),
        "sliding_layers": _list(header, arch_key(field.SLIDING_WINDOW_PATTERN)),
        "rope_base": header.scalar(arch_key(field.ROPE_FREQ_BASE)),
        "rope_base_from": header.text(Key.SOURCE_ROPE),
        "rope_dims": header.integer(arch_key(field.ROPE_DIMENSION_COUNT)),
        "rope_sections": _list(header, arch_key(field.ROPE_DIMENSION_SECTIONS)),
        "rope_scaling": f"{scaling} x{factor:g}" if scaling and factor else None,
        "output_multiplier": header.scalar(arch_key(field.LOGIT_SCALE)),
        "softcap": header.scalar(arch_key(field.FINAL_LOGIT_SOFTCAPPING)),
        "embedding_scale": header.scalar(arch_key(field.EMBEDDING_SCALE)),
        "value_scale": header.scalar(arch_key(field.VALUE_SCALE)),
    }


def _mask_token(header: GGUFHeader) -> str | None:
    index, tokens = header.integer(Key.MASK_TOKEN_ID), header.values.get(Key.TOKENS)
    if index is None or tokens is None or not 0 <= index < tokens.count:
        return None
    return str(tokens.items()[index])


def _tokenizer(header: GGUFHeader) -> dict[str, Any]:
    return {
        "tokenizer": header.text(Key.TOKENIZER_MODEL),
        "pre_tokenizer": header.text(Key.TOKENIZER_PRE),
    }


def _origin(header: GGUFHeader) -> dict[str, Any]:
    files, hashes = _list(header, Key.SOURCE_FILES), _list(header, Key.SOURCE_SHA256)
    name, digest = header.text(Key.SOURCE_GGUF), header.text(Key.SOURCE_GGUF_SHA256)
    return {
        "preset": header.text(Key.PRESET),
        "source": header.text(Key.SOURCE_NAME),
        "source_sha256": dict(zip(map(str, files or []), map(str, hashes or []), strict=False)),
        "source_gguf": {name: digest} if name and digest else None,
        "target": header.text(Key.TARGET_NAME),
        "target_architecture": header.text(Key.TARGET_ARCHITECTURE),
    }


def _problems(header: GGUFHeader, facts: dict[str, Any]) -> list[str]:
    """What makes llama.cpp refuse the file or draft badly without a word."""
    problems = [*_unstated(header, facts), *_outside(facts)]
    problems += [
        f"{key} is a list of lists, which llama.cpp refuses; `dflash2-convert migrate`"
        for key, value in header.values.items()
        if value.is_nested
    ]
    if facts["causal"] is None:
        problems.append("the file does not say whether attention is causal; convert it again")
    if (facts["sliding_window"] is None) != (facts["sliding_layers"] is None):
        problems.append("sliding window and per-layer pattern do not come together")
    return [*problems, *_unknown_fields(header, facts), *_tensor_lines(header, facts)]


def _unstated(header: GGUFHeader, facts: dict[str, Any]) -> Iterator[str]:
    """Keys that are missing, or hold what can be nothing of the kind."""
    stated = _STATED | (_STATED_BY_DFLASH2 if facts["kind"].startswith("DFlash 2") else {})
    for name, key in stated.items():
        fact, value = facts[name], header.values.get(key)
        is_positive = isinstance(fact, int | float) and fact > 0
        if not (is_positive or isinstance(fact, list) or (name == "mask_token_id" and fact == 0)):
            yield f"{key} is {'missing' if value is None else shown(value)}"


def _outside(facts: dict[str, Any]) -> Iterator[str]:
    """Numbers that count something and lie beyond it."""
    mask, n_vocab = facts["mask_token_id"], facts["vocabulary"]
    if None not in (mask, n_vocab) and not 0 <= mask < n_vocab:
        yield f"mask token {mask} is outside the vocabulary of {n_vocab}"
    layers, n_layer = facts["target_layers"] or [0], facts["target_layer_count"]
    if min(layers) < 0:
        yield (
            f"target layers {', '.join(map(str, layers))}: the file counts outputs where inputs "
            "are meant; `dflash2-convert migrate --layer-ids outputs`"
        )
    if n_layer is not None and max(layers) >= n_layer:
        yield f"target layer {max(layers)} of a target with layers 0 to {n_layer - 1}"


def _unknown_fields(header: GGUFHeader, facts: dict[str, Any]) -> Iterator[str]:
    """llama.cpp may read them, and what they change is not known here."""
    known = {arch_key(field) for field in (*SCALARS, *ARRAYS)}
    names = [key for key in header.values if key.startswith(arch_key("")) and key not in known]
    if names and not facts["kind"].startswith("DSpark"):
        yield f"unknown fields: {_names(names)}"


def _tensor_lines(header: GGUFHeader, facts: dict[str, Any]) -> Iterator[str]:
    """Those of ``tensor_problems``; the selector is missed where metadata speaks of one."""
    if facts["kind"].startswith("DFlash 1") and facts["selector_rank"]:
        facts = facts | {"kind": "DFlash 2"}
        yield "the metadata is that of a DFlash 2 drafter, the tensors are not"
    yield from tensor_problems(header, facts).values()


def tensor_problems(header: GGUFHeader, facts: dict[str, Any]) -> dict[str, str]:
    """What is wrong with the tensors of a drafter: a line for each kind of fault.

    Kinds: incomplete (no numbers to compare with), missing, unknown, misshapen, mistyped.
    ``facts`` are those of ``gguf_facts`` for this header.
    """
    if facts["kind"].startswith("DSpark"):
        return {}
    shape = draft_shape(header, facts)
    if shape is None:
        return {"incomplete": "the numbers that fix the tensor shapes are incomplete"}
    specs = {spec.name: spec for spec in draft_tensors(shape)}
    found = header.tensors
    faults = {
        "missing": [name for name in specs if name not in found],
        "unknown": [name for name in found if name not in specs],
        "misshapen": [n for n, s in specs.items() if n in found and found[n].shape != s.shape],
        "mistyped": [n for n, s in specs.items() if n in found and _is_mistyped(s, found[n])],
    }
    return {kind: f"{kind} tensors: {_names(names)}" for kind, names in faults.items() if names}


def _is_mistyped(spec: TensorSpec, tensor: TensorEntry) -> bool:
    """Norms and the like have one type, or llama.cpp's graph ends the process."""
    return spec.role.fixed_type not in (None, tensor.type)


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def draft_shape(header: GGUFHeader, facts: dict[str, Any]) -> DraftShape | None:
    """The shape that metadata and tensors tell together, None where metadata is incomplete."""
    names = {
        "n_layer": "layers",
        "n_embd": "hidden_size",
        "n_ff": "feed_forward",
        "n_head": "heads",
        "n_head_kv": "kv_heads",
        "head_dim": "head_dim",
        "n_vocab": "vocabulary",
    }
    if facts["kind"].startswith("DFlash 2"):
        names |= {name: name for name in ("conv_kernel", "conv_group", "selector_rank")}
    numbers = {name: facts[fact] for name, fact in names.items()}
    if any(type(n) is not int or not 0 < n < 2**31 for n in numbers.values()):
        return None
    if facts["target_layers"] is None or numbers["n_layer"] > 1000:
        return None
    rows = header.tensors.get(tensor_name(Name.HF_VOCAB_MAP) or "")
    return DraftShape(
        **numbers,
        n_tap=len(facts["target_layers"]),
        n_vocab_draft=rows.shape[0] if rows is not None and rows.shape else None,
        own_embeddings=facts["own_embeddings"],
        own_head=facts["own_head"],
        sinks=_in_a_layer(header, Name.HF_SINKS),
        shared_kv=not _in_a_layer(header, Name.HF_VALUES),
    )


def _in_a_layer(header: GGUFHeader, tail: str) -> bool:
    """One that only some layers have is missing in the others."""
    names = (tensor_name(f"layers.{layer}.{tail}") for layer in range(len(header.tensors)))
    return any(name in header.tensors for name in names)
