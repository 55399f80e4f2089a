"""The metadata of a drafter's GGUF file, in the order upstream's converter writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.convert.gguf_values import Value, array, boolean, f32, string, u32
from dflash2_gguf.convert.hparams import DraftHparams
from dflash2_gguf.convert.imatrix import ImportanceMatrix
from dflash2_gguf.convert.rope import RopeScaling
from dflash2_gguf.convert.target import Target
from dflash2_gguf.ggml_types import ValueType
from dflash2_gguf.gguf_schema import (
    ARCHITECTURE,
    FORMAT_REVISION,
    QUANTIZATION_VERSION,
    Key,
    arch_key,
)
from dflash2_gguf.presets import Preset

__all__ = [
    "NON_COMMERCIAL",
    "NO_DERIVATIVES",
    "Provenance",
    "build_metadata",
    "imatrix_metadata",
    "licence_limits",
    "licence_warning",
    "provenance_of",
    "read_provenance",
    "size_label",
]

_MODEL_TYPE = "model"
NON_COMMERCIAL = "non-commercial use only"
NO_DERIVATIVES = "a converted file must not be shared"
_UNKNOWN_HASH = "0" * 64


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a checkpoint comes from and under which licence, as far as its folder says.

    quantization: how its weights are stored, None where they are plain floats.
    """

    name: str
    repo: str | None = None
    revision: str | None = None
    licence: str | None = None
    licence_name: str | None = None
    licence_link: str | None = None
    quantization: str | None = None


def read_provenance(directory: Path, hparams: DraftHparams) -> Provenance:
    """Read the model card's front matter and the folder's place in a Hugging Face cache."""
    card = _front_matter(directory / "README.md")
    path = directory.resolve()
    match = re.search(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})$", path.as_posix())
    return Provenance(
        name=match[2] if match else path.name,
        repo=f"{match[1]}/{match[2]}" if match else None,
        revision=match[3] if match else None,
        licence=card.get("license") or hparams.licence,
        licence_name=card.get("license_name"),
        licence_link=card.get("license_link"),
    )


def _front_matter(path: Path) -> dict[str, str]:
    """Plain ``key: value`` lines of a model card's YAML header; nested ones are not needed."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    if not lines or lines[0].strip() != "---":
        return {}
    result: dict[str, str] = {}
    for line in lines[1:]:
        if line.strip() == "---":
            return result
        key, colon, value = line.partition(":")
        if colon and value.strip() and not line.startswith((" ", "-", "#")):
            result[key.strip()] = value.strip().strip("'\"")
    return {}


def provenance_of(facts: Mapping[str, Any]) -> Provenance:
    """Origin and licence of a drafter's file, from its facts (``gguf_facts``)."""
    return Provenance(
        name=str(facts["name"]),
        repo=facts["source_repo"],
        revision=facts["source_revision"],
        licence=facts["license"],
        licence_name=facts["license_name"],
        licence_link=facts["license_link"],
    )


def licence_limits(provenance: Provenance) -> tuple[str, ...]:
    """What a licence forbids of what people do with converted files, as far as its name says."""
    named = (provenance.licence, provenance.licence_name)
    words = re.split(r"[^a-z]+", " ".join(text for text in named if text).lower())
    limits = []
    if "nc" in words or "noncommercial" in words:
        limits.append(NON_COMMERCIAL)
    if "nd" in words or "noderivatives" in words:
        limits.append(NO_DERIVATIVES)
    return tuple(limits)


def licence_warning(provenance: Provenance) -> str | None:
    """One line for a licence with limits, None for others."""
    limits = licence_limits(provenance)
    if not limits:
        return None
    licence = provenance.licence_name or provenance.licence
    return f"licence {licence}: {', '.join(limits)}"


def size_label(n_params: int) -> str:
    """Parameter count in upstream's words, such as 19M or 1.9B (``gguf/utility.py:size_label``)."""
    units = ((1e12, 1e-12, "T"), (1e9, 1e-9, "B"), (1e6, 1e-6, "M"), (-1, 1e-3, "K"))
    scale, suffix = next((scale, suffix) for limit, scale, suffix in units if n_params > limit)
    scaled = n_params * scale
    digits = max(2 - len(str(round(scaled)).lstrip("0")), 0)
    return f"{scaled:.{digits}f}{suffix}"


def build_metadata(
    hparams: DraftHparams,
    target: Target,
    preset: Preset,
    provenance: Provenance,
    *,
    n_params: int,
    files: Sequence[str],
    hashes: dict[str, str] | None = None,
) -> dict[str, Value]:
    """All key-value pairs. Without ``hashes``, zeros hold the place of the source's sha256."""
    return {
        **dict(_general(provenance, n_params)),
        **dict(_architecture(hparams, preset)),
        **dict(_draft(hparams, target)),
        Key.QUANTIZATION_VERSION: u32(QUANTIZATION_VERSION),
        **target.tokenizer,
        Key.MASK_TOKEN_ID: u32(hparams.mask_token_id),
        **dict(_origin(hparams, target, preset, provenance, files, hashes)),
    }


def imatrix_metadata(imatrix: ImportanceMatrix) -> dict[str, Value]:
    """What ``llama-quantize --imatrix`` adds, of several datasets the first as it does."""
    values = {Key.QUANTIZE_IMATRIX_FILE: string(str(imatrix.path))}
    if imatrix.datasets:
        values[Key.QUANTIZE_IMATRIX_DATASET] = string(imatrix.datasets[0])
    values[Key.QUANTIZE_IMATRIX_ENTRIES] = u32(len(imatrix.weights))
    if imatrix.n_chunks > 0:
        values[Key.QUANTIZE_IMATRIX_CHUNKS] = u32(imatrix.n_chunks)
    return values


def _general(provenance: Provenance, n_params: int) -> Iterator[tuple[str, Value]]:
    yield Key.ARCHITECTURE, string(ARCHITECTURE)
    yield Key.TYPE, string(_MODEL_TYPE)
    yield Key.NAME, string(provenance.name)
    yield Key.SIZE_LABEL, string(size_label(n_params))
    for key, text in (
        (Key.LICENSE, provenance.licence),
        (Key.LICENSE_NAME, provenance.licence_name),
        (Key.LICENSE_LINK, provenance.licence_link),
    ):
        if text:
            yield key, string(text)
    if provenance.repo:
        yield Key.SOURCE_REPO_URL, string(f"https://huggingface.co/{provenance.repo}")


def _architecture(h: DraftHparams, preset: Preset) -> Iterator[tuple[str, Value]]:
    """What upstream's ``TextModel.set_gguf_parameters`` writes for every model."""
    field = Key.Arch
    yield arch_key(field.BLOCK_COUNT), u32(h.n_layer)
    yield arch_key(field.CONTEXT_LENGTH), u32(h.context_length)
    yield arch_key(field.EMBEDDING_LENGTH), u32(h.n_embd)
    yield arch_key(field.FEED_FORWARD_LENGTH), u32(h.n_ff)
    yield arch_key(field.HEAD_COUNT), u32(h.n_head)
    yield arch_key(field.HEAD_COUNT_KV), u32(h.n_head_kv)
    # always written: without it the library runs the drafter causal and upstream's tools do not
    yield arch_key(field.CAUSAL), boolean(h.causal)
    if h.rope.scaling is not None:
        yield from _scaling(h.rope.scaling)
    if h.activation is not None:
        yield arch_key(field.HIDDEN_ACTIVATION), string(h.activation)
    yield arch_key(field.ROPE_FREQ_BASE), f32(h.rope.freq_base)
    yield arch_key(field.RMS_EPS), f32(h.rms_eps)
    if h.head_dim_given or h.head_dim * h.n_head != h.n_embd:
        yield arch_key(field.KEY_LENGTH), u32(h.head_dim)
        yield arch_key(field.VALUE_LENGTH), u32(h.head_dim)
    yield Key.FILE_TYPE, u32(preset.file_type)


def _scaling(scaling: RopeScaling) -> Iterator[tuple[str, Value]]:
    field = Key.Arch
    yield arch_key(field.ROPE_SCALING_TYPE), string(scaling.kind)
    yield arch_key(field.ROPE_SCALING_FACTOR), f32(scaling.factor)
    if scaling.original_context is not None:
        yield arch_key(field.ROPE_SCALING_ORIG_CTX), u32(scaling.original_context)
    for name, value in (
        (field.YARN_EXT_FACTOR, scaling.extrapolation_factor),
        (field.YARN_ATTN_FACTOR, scaling.attention_factor),
        (field.YARN_BETA_FAST, scaling.beta_fast),
        (field.YARN_BETA_SLOW, scaling.beta_slow),
    ):
        if value is not None:
            yield arch_key(name), f32(value)


def _draft(h: DraftHparams, target: Target) -> Iterator[tuple[str, Value]]:
    """What upstream's ``DFlashModel.set_gguf_parameters`` adds."""
    field = Key.Arch
    if h.rope.partial:
        yield arch_key(field.ROPE_DIMENSION_COUNT), u32(h.rope.dims)
    if h.value_scale is not None:
        yield arch_key(field.VALUE_SCALE), f32(h.value_scale)
    yield arch_key(field.BLOCK_SIZE), u32(h.block_size)
    if h.parts is not None:
        yield arch_key(field.CONV_KERNEL_SIZE), u32(h.parts.conv_kernel)
        yield arch_key(field.CONV_GROUP_SIZE), u32(h.parts.conv_group)
        yield arch_key(field.SELECTOR_RANK), u32(h.parts.selector_rank)
        yield arch_key(field.SELECTOR_TOP_K), u32(h.parts.selector_top_k)
    for name, value in (
        (field.LOGIT_SCALE, h.output_multiplier),
        (field.FINAL_LOGIT_SOFTCAPPING, h.softcap),
        (field.EMBEDDING_SCALE, h.embedding_scale),
    ):
        if value is not None:
            yield arch_key(name), f32(value)
    # the file counts layer inputs: the output of layer i is the input of layer i + 1
    layers = [i + 1 for i in h.target_layer_ids]
    yield arch_key(field.TARGET_LAYERS), array(ValueType.INT32, layers)
    if h.sliding_window is not None:
        yield arch_key(field.SLIDING_WINDOW), u32(h.sliding_window)
        pattern = array(ValueType.BOOL, h.sliding_layers)
        yield arch_key(field.SLIDING_WINDOW_PATTERN), pattern
    if target.mrope:
        # the drafter rotates by the temporal position only
        sections = [h.rope.dims // 2, 0, 0, 0]
        yield arch_key(field.ROPE_DIMENSION_SECTIONS), array(ValueType.INT32, sections)


def _origin(
    h: DraftHparams,
    target: Target,
    preset: Preset,
    provenance: Provenance,
    files: Sequence[str],
    hashes: dict[str, str] | None,
) -> Iterator[tuple[str, Value]]:
    digests = [(hashes or {}).get(name, _UNKNOWN_HASH) for name in files]
    yield Key.FORMAT, u32(FORMAT_REVISION)
    yield Key.PRESET, string(preset.name)
    yield Key.SOURCE_NAME, string(provenance.repo or provenance.name)
    if provenance.revision:
        yield Key.SOURCE_REVISION, string(provenance.revision)
    yield Key.SOURCE_FILES, array(ValueType.STRING, files)
    yield Key.SOURCE_SHA256, array(ValueType.STRING, digests)
    yield Key.SOURCE_ROPE, string(h.rope.origin)
    if provenance.quantization is not None:
        yield Key.SOURCE_QUANTIZATION, string(provenance.quantization)
    yield Key.TARGET_NAME, string(target.name)
    yield Key.TARGET_ARCHITECTURE, string(target.arch)
    yield Key.TARGET_BLOCK_COUNT, u32(target.n_layer)
