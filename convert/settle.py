"""Settle every field of an older or fork drafter's file from the file, its target and config.json.

What none of the three says is refused by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dflash2_gguf.convert.fork_fields import Field, FileFields, LayerIds, canonical, read_fields
from dflash2_gguf.convert.fork_tensors import (
    VOCABULARY,
    ShapeNumber,
    is_dflash2,
    shape_numbers,
)
from dflash2_gguf.convert.gguf_reader import GGUFHeader, TensorEntry
from dflash2_gguf.convert.gguf_values import Value, array, u32
from dflash2_gguf.convert.hparams import DraftHparams
from dflash2_gguf.convert.metadata import Provenance, build_metadata
from dflash2_gguf.convert.target import Target
from dflash2_gguf.errors import CheckpointError, PairError, UsageError
from dflash2_gguf.ggml_types import ValueType
from dflash2_gguf.gguf_schema import ARCHITECTURE, Key, arch_key
from dflash2_gguf.presets import load_preset

__all__ = ["LAYER_MEANINGS", "Settled", "Sources", "settle"]

_F = Key.Arch
_CONFIG = "config.json"
_OTHER_DRAFTER = "give the config.json of the checkpoint this file was made from"
LAYER_MEANINGS = ("inputs", "outputs")
_MAX_LAYERS = 512  # llama-hparams.h:LLAMA_MAX_LAYERS

# fixed by the tensors: a config.json that says otherwise is another drafter's
_SHAPES = {
    _F.BLOCK_COUNT: "layers",
    _F.EMBEDDING_LENGTH: "hidden size",
    _F.FEED_FORWARD_LENGTH: "feed-forward size",
    _F.HEAD_COUNT: "heads",
    _F.HEAD_COUNT_KV: "key-value heads",
    _F.KEY_LENGTH: "head size",
    _F.VALUE_LENGTH: "head size of values",
    _F.CONV_KERNEL_SIZE: "taps of the convolutions",
    _F.CONV_GROUP_SIZE: "group size of the convolutions",
    _F.SELECTOR_RANK: "rank of the selector",
}
_HEAD_SIZES = (_F.KEY_LENGTH, _F.VALUE_LENGTH)

# absent where a drafter does not have the thing: config.json's silence removes them
_OPTIONAL = (
    _F.SLIDING_WINDOW,
    _F.SLIDING_WINDOW_PATTERN,
    _F.VALUE_SCALE,
    _F.ROPE_DIMENSION_COUNT,
    _F.ROPE_SCALING_TYPE,
    _F.ROPE_SCALING_FACTOR,
    _F.ROPE_SCALING_ORIG_CTX,
    _F.YARN_EXT_FACTOR,
    _F.YARN_ATTN_FACTOR,
    _F.YARN_BETA_FAST,
    _F.YARN_BETA_SLOW,
    _F.LOGIT_SCALE,
    _F.FINAL_LOGIT_SOFTCAPPING,
    _F.EMBEDDING_SCALE,
    _F.HIDDEN_ACTIVATION,
)

_REQUIRED = {
    **{name: what for name, what in _SHAPES.items() if name not in _HEAD_SIZES},
    _F.CONTEXT_LENGTH: "context length",
    _F.RMS_EPS: "epsilon of the norms",
    _F.CAUSAL: "whether attention is causal",
    _F.ROPE_FREQ_BASE: "RoPE base",
    _F.BLOCK_SIZE: "block size",
    _F.SELECTOR_TOP_K: "candidates per position",
}
_DFLASH2_ONLY = (_F.CONV_KERNEL_SIZE, _F.CONV_GROUP_SIZE, _F.SELECTOR_RANK, _F.SELECTOR_TOP_K)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What a migration may learn from. ``tensors`` by upstream's names.

    ``layer_ids``: what the user says the file counts, ``inputs`` or ``outputs`` of target layers.
    """

    header: GGUFHeader
    arch: str
    tensors: dict[str, TensorEntry]
    target: Target | None = None
    hparams: DraftHparams | None = None
    layer_ids: str | None = None

    def __post_init__(self) -> None:
        if self.layer_ids not in (None, *LAYER_MEANINGS):
            raise UsageError(
                f"layer ids are {' or '.join(LAYER_MEANINGS)} of layers, not {self.layer_ids!r}"
            )
        if self.hparams and self.hparams.rope.interleaved and self.arch != ARCHITECTURE:
            raise CheckpointError(
                "config.json asks for interleaved rotation, and forks do not reorder such weights",
                "only names and metadata can be migrated; convert the original checkpoint instead",
            )

    @property
    def path(self) -> Path:
        """The file to migrate."""
        return self.header.path

    def config_fields(self) -> dict[str, Value] | None:
        """The fields that this project writes for config.json, None without one."""
        if self.hparams is None:
            return None
        nobody = Target(name="", arch="", n_embd=1, n_layer=1, n_vocab=1, mrope=False, tokenizer={})
        values = build_metadata(
            self.hparams, nobody, load_preset("f32"), Provenance(name=""), n_params=1, files=()
        )
        prefix = arch_key("")
        return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The fields by upstream's names, the mask token, and why keys are left out.

    ``tokenizer``: the target's, None to keep the file's own. ``n_vocab`` counts its tokens.
    """

    fields: dict[str, Field]
    mask: Field
    tokenizer: dict[str, Value] | None
    n_vocab: int
    n_target_layer: int | None
    removed: dict[str, str]


def settle(sources: Sources) -> Settled:
    """Decide every field.

    Raises CheckpointError for what nobody says or two say differently, PairError for a target that
    does not fit.
    """
    given = read_fields(sources.header, sources.arch)
    removed = dict(given.removed)
    numbers = shape_numbers(sources.tensors)
    fields = _with_shapes(given.fields, numbers)
    expected = sources.config_fields()
    if expected is not None:
        fields = _with_config(fields, removed, expected)
    _drop_empty_window(fields, removed)
    layers = _target_layers(sources, given.layers, removed, expected)
    mask = _mask(sources, given.masks, removed)
    tokenizer, n_vocab = _tokenizer(sources)
    _refuse_missing(sources, fields, layers=layers, mask=mask, n_vocab=n_vocab)
    assert layers is not None and mask is not None and n_vocab is not None
    _refuse_impossible(fields)
    fields[_F.TARGET_LAYERS] = layers
    _with_sections(sources, fields, removed)
    n_target = _check_numbers(sources, given, fields, n_vocab=n_vocab)
    for key, (what, _) in given.redundant.items():
        removed[key] = f"{what} follow from other fields" if what else "llama.cpp does not read it"
    if not 0 <= int(mask.value.scalar()) < n_vocab:
        raise CheckpointError(
            f"mask token {mask.value.scalar()} is outside the vocabulary of {n_vocab}"
        )
    return Settled(
        fields=fields,
        mask=mask,
        tokenizer=tokenizer,
        n_vocab=n_vocab,
        n_target_layer=n_target,
        removed=removed,
    )


def _with_shapes(
    given: Mapping[str, Field], numbers: Mapping[str, ShapeNumber]
) -> dict[str, Field]:
    """Add what the tensors' shapes say; refuse fields that say otherwise."""
    fields = dict(given)
    for name in _SHAPES:
        known = numbers.get(name)
        if known is None:
            continue
        if name in fields and fields[name].value.scalar() != known.number:
            raise CheckpointError(
                f"{fields[name].old_key} is {fields[name].value.scalar()}, but by the shape of "
                f"{known.tensor} it is {known.number}",
                "the file is damaged or was edited; convert the original checkpoint instead",
            )
        if name not in fields and (name not in _HEAD_SIZES or _needs_head_size(given, numbers)):
            fields[name] = Field(value=u32(known.number), source=f"shape of {known.tensor}")
    return fields


def _needs_head_size(given: Mapping[str, Field], numbers: Mapping[str, ShapeNumber]) -> bool:
    """Without the key, llama.cpp divides the hidden size by the heads."""
    known = [numbers.get(n) for n in (_F.EMBEDDING_LENGTH, _F.HEAD_COUNT, _F.KEY_LENGTH)]
    if any(name in given for name in _HEAD_SIZES) or None in known:
        return True
    hidden, heads, size = (number.number for number in known if number)
    return hidden != heads * size


def _with_config(
    given: Mapping[str, Field], removed: dict[str, str], expected: Mapping[str, Value]
) -> dict[str, Field]:
    """Let config.json correct and complete what the file says; it must be of the same shape."""
    fields = dict(given)
    for name, value in expected.items():
        have = fields.get(name)
        if name == _F.TARGET_LAYERS or (have is None and name in _HEAD_SIZES):
            continue
        if have is None:
            fields[name] = Field(value=value, source=_CONFIG)
        elif have.value.items() != value.items():
            if name in _SHAPES:
                raise CheckpointError(
                    f"config.json is another drafter's: {_SHAPES[name]} {value.scalar()}, "
                    f"the file has {have.value.scalar()}",
                    _OTHER_DRAFTER,
                )
            fields[name] = replace(have, value=value, source=_CONFIG)
    for name in _OPTIONAL:
        have = fields.get(name)
        if have is None or name in expected or _is_default(name, have, fields):
            continue
        del fields[name]
        removed[str(have.old_key)] = "config.json has no such thing"
    return fields


def _is_default(name: str, have: Field, fields: Mapping[str, Field]) -> bool:
    """Does this value say nothing, as its absence would?"""
    if name == _F.HIDDEN_ACTIVATION:
        return have.value.scalar() == "silu"
    size = fields.get(_F.KEY_LENGTH)
    if name != _F.ROPE_DIMENSION_COUNT or size is None:
        return False
    return have.value.scalar() == size.value.scalar()


def _drop_empty_window(fields: dict[str, Field], removed: dict[str, str]) -> None:
    """Window and pattern come together; half of a pair that says "no window" is left out."""
    window, pattern = fields.get(_F.SLIDING_WINDOW), fields.get(_F.SLIDING_WINDOW_PATTERN)
    if window and not pattern and window.value.scalar() == 0:
        removed[str(fields.pop(_F.SLIDING_WINDOW).old_key)] = "no layer slides"
    if pattern and not window and not any(pattern.value.items()):
        removed[str(fields.pop(_F.SLIDING_WINDOW_PATTERN).old_key)] = "no layer slides"


def _target_layers(
    sources: Sources,
    given: tuple[LayerIds, ...],
    removed: dict[str, str],
    expected: Mapping[str, Value] | None,
) -> Field | None:
    """The inputs of target layers that the drafter reads, as upstream counts them."""
    found = {layers.key: _inputs(layers, sources.layer_ids) for layers in given}
    source = f"the file, --layer-ids {sources.layer_ids}" if sources.layer_ids else "the file"
    wanted = next(iter(found.values()), None)
    if expected is not None:
        wanted = tuple(int(i) for i in expected[_F.TARGET_LAYERS].items())
        for layers in given:
            _check_same_drafter(sources, layers, wanted)
        if wanted not in found.values():
            source = _CONFIG
    elif len(set(found.values())) > 1:
        text = " and ".join(f"{layers.key} {list(layers.ids)}" for layers in given)
        raise CheckpointError(
            f"the file contradicts itself: {text}", f"--config {_CONFIG} tells which is right"
        )
    if not wanted:
        return None
    own = arch_key(_F.TARGET_LAYERS)
    keys = sorted(found, key=lambda key: key != own)
    if keys:
        removed.update(dict.fromkeys(keys[1:], f"repeats {keys[0]}"))
    kept = next((layers for layers in given if layers.key == own), None)
    if kept is not None and kept.ids == wanted:
        return Field(value=kept.value, old_key=own)
    value = array(ValueType.INT32, wanted)
    return Field(value=value, old_key=next(iter(keys), None), source=source)


def _inputs(layers: LayerIds, override: str | None) -> tuple[int, ...]:
    """The output of layer i is the input of layer i + 1."""
    shift = 1 if (override or layers.meaning) == "outputs" else 0
    return tuple(i + shift for i in layers.ids)


def _check_same_drafter(sources: Sources, layers: LayerIds, wanted: tuple[int, ...]) -> None:
    outputs = tuple(i - 1 for i in wanted)
    if layers.ids not in (wanted, outputs):
        raise CheckpointError(
            f"config.json is another drafter's: target layers {list(outputs)}, "
            f"{layers.key} is {list(layers.ids)}",
            _OTHER_DRAFTER,
        )
    if sources.layer_ids and _inputs(layers, sources.layer_ids) != wanted:
        raise UsageError(
            f"--layer-ids {sources.layer_ids} contradicts config.json: target layers "
            f"{list(outputs)}, {layers.key} is {list(layers.ids)}"
        )


def _mask(sources: Sources, masks: Mapping[str, int], removed: dict[str, str]) -> Field | None:
    """The mask token: config.json's word counts most, for a tokenizer may bring its own."""
    own = sources.header.values.get(Key.MASK_TOKEN_ID)
    found = dict(masks)
    if own is not None:
        own = canonical(Key.MASK_TOKEN_ID, own, ValueType.UINT32, is_array=False)
        found = {Key.MASK_TOKEN_ID: int(own.scalar()), **masks}
    wanted = sources.hparams.mask_token_id if sources.hparams else next(iter(found.values()), None)
    if sources.hparams is None and len(set(found.values())) > 1:
        text = " and ".join(f"{key} is {number}" for key, number in found.items())
        raise CheckpointError(
            f"the file contradicts itself: {text}", f"--config {_CONFIG} tells which is right"
        )
    if wanted is None:
        return None
    keys = sorted(found, key=lambda key: (found[key] != wanted, key != Key.MASK_TOKEN_ID))
    for key in keys[1:]:
        if key != Key.MASK_TOKEN_ID:
            removed[key] = f"repeats {keys[0]}" if found[key] == wanted else "config.json differs"
    source = "the file" if wanted in found.values() else _CONFIG
    first = Key.MASK_TOKEN_ID if own is not None else next(iter(keys), None)
    value = own if own is not None and own.scalar() == wanted else u32(wanted)
    return Field(value=value, old_key=first, source=source)


def _tokenizer(sources: Sources) -> tuple[dict[str, Value] | None, int | None]:
    """The target's tokenizer where the file has none or another, and the number of tokens."""
    own = sources.header.values.get(Key.TOKENS)
    if own is not None and (own.item is not ValueType.STRING or own.count == 0):
        own = None
    if sources.target is not None:
        if own is not None:
            _check_equal("vocabulary", own.count, sources.target.n_vocab, sources.target)
        theirs = sources.target.tokenizer
        keys = (Key.TOKENIZER_MODEL, Key.TOKENIZER_PRE, Key.TOKENS)
        if own is None or any(sources.header.values.get(k) != theirs.get(k) for k in keys):
            return theirs, sources.target.n_vocab
    return None, None if own is None else own.count


def _refuse_missing(
    sources: Sources,
    fields: Mapping[str, Field],
    *,
    layers: Field | None,
    mask: Field | None,
    n_vocab: int | None,
) -> None:
    missing = list(_missing_fields(sources, fields))
    missing += [what for what, x in (("target layers", layers), ("mask token", mask)) if x is None]
    hints = ["--config with the config.json of its checkpoint tells"] if missing else []
    if n_vocab is None:
        missing.append("tokenizer")
        hints.append("--target with the model it drafts for brings the tokenizer")
    if missing:
        raise CheckpointError(
            f"{sources.path} does not say: {', '.join(missing)}", "; ".join(hints)
        )


def _missing_fields(sources: Sources, fields: Mapping[str, Field]) -> Iterator[str]:
    second = is_dflash2(sources.tensors)
    for name, what in _REQUIRED.items():
        if name not in fields and (second or name not in _DFLASH2_ONLY):
            yield what
    if (_F.SLIDING_WINDOW in fields) != (_F.SLIDING_WINDOW_PATTERN in fields):
        yield "which layers slide" if _F.SLIDING_WINDOW in fields else "sliding window"
    if _F.ROPE_SCALING_FACTOR in fields and _F.ROPE_SCALING_TYPE not in fields:
        yield "kind of RoPE scaling"


def _refuse_impossible(fields: Mapping[str, Field]) -> None:
    """Numbers that no tensor confirmed may be anything."""
    for name, what in _SHAPES.items():
        number = int(fields[name].value.scalar()) if name in fields else 1
        if number < 1 or (name == _F.BLOCK_COUNT and number > _MAX_LAYERS):
            raise CheckpointError(
                f"the file has {number} {what}",
                "it is damaged or was edited; convert the original checkpoint instead",
            )


def _with_sections(sources: Sources, fields: dict[str, Field], removed: dict[str, str]) -> None:
    """A drafter of an M-RoPE target rotates by the first of its position numbers only."""
    have = fields.get(_F.ROPE_DIMENSION_SECTIONS)
    if sources.target is None:
        if have is not None and have.value.count != 4:
            raise CheckpointError(
                f"{have.old_key} has {_entries(have.value.count)}, not 4",
                "--target with the model it drafts for corrects it",
            )
        return
    if sources.target.mrope:
        size = fields.get(_F.ROPE_DIMENSION_COUNT) or fields.get(_F.KEY_LENGTH)
        hidden, heads = (
            int(fields[name].value.scalar()) for name in (_F.EMBEDDING_LENGTH, _F.HEAD_COUNT)
        )
        dims = int(size.value.scalar()) if size else hidden // heads
        sections = [dims // 2, 0, 0, 0]
        if have is None or have.value.items() != sections:
            fields[_F.ROPE_DIMENSION_SECTIONS] = Field(
                value=array(ValueType.INT32, sections),
                old_key=have.old_key if have else None,
                source="the target, which has M-RoPE",
            )
    elif have is not None:
        removed[str(fields.pop(_F.ROPE_DIMENSION_SECTIONS).old_key)] = "the target has no M-RoPE"


def _check_numbers(
    sources: Sources, given: FileFields, fields: Mapping[str, Field], *, n_vocab: int
) -> int | None:
    """Check everything that two sides state; returns the number of target layers if one says it."""
    inputs = [int(i) for i in fields[_F.TARGET_LAYERS].value.items()]
    hidden = int(fields[_F.EMBEDDING_LENGTH].value.scalar())
    pattern = fields.get(_F.SLIDING_WINDOW_PATTERN)
    n_layer = int(fields[_F.BLOCK_COUNT].value.scalar())
    if pattern is not None and pattern.value.count != n_layer:
        raise CheckpointError(
            f"{pattern.old_key} has {_entries(pattern.value.count)} for "
            f"{n_layer} layer{'s' * (n_layer != 1)}",
            f"--config with the {_CONFIG} of its checkpoint corrects it",
        )
    target, hparams = sources.target, sources.hparams
    stated = [n for what, n in given.redundant.values() if what == "target layers"]
    n_target = target.n_layer if target else hparams.n_target_layer if hparams else None
    n_target = next(iter(stated), None) if n_target is None else n_target
    known = {
        "taps": len(inputs),
        "features": len(inputs) * hidden,
        "hidden size": hidden,
        "vocabulary": n_vocab,
        "target layers": n_target,
    }
    for key, (what, number) in given.redundant.items():
        if what and number != known[what]:
            raise CheckpointError(f"{key} is {number}, but {what} are {known[what]}")
    if target is not None:
        rows = shape_numbers(sources.tensors).get(VOCABULARY)
        _check_equal("vocabulary", rows.number if rows else n_vocab, target.n_vocab, target)
        _check_equal("hidden size", hidden, target.n_embd, target)
    _check_layers(inputs, n_target, target)
    return n_target


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _check_equal(what: str, ours: int, theirs: int, target: Target) -> None:
    if ours != theirs:
        raise PairError(
            f"{what} differs: the drafter was made for {ours}, {target.name} has {theirs}",
            "give the target the drafter was trained for",
        )


def _check_layers(inputs: list[int], n_target: int | None, target: Target | None) -> None:
    outputs = [i - 1 for i in inputs]
    if len(set(inputs)) != len(inputs):
        raise CheckpointError(f"target layers {outputs} repeat")
    if min(inputs) < 1:
        raise CheckpointError(
            f"the drafter would read the input of layer {min(inputs)} of its target, which comes "
            "before any layer",
            "--layer-ids outputs if the file counts outputs of layers from 0",
        )
    if n_target is not None and max(inputs) > n_target:
        name = target.name if target else "the target"
        raise PairError(
            f"the drafter would read layer {max(outputs)} of its target, but {name} has layers "
            f"0 to {n_target - 1}",
            "--layer-ids inputs if the file counts inputs of layers, or another target",
        )
