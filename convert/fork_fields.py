"""The fields of a drafter's file under any known name, with upstream's names and types."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dflash2_gguf.convert.fork_names import (
    ALIASES,
    ARRAYS,
    FOREIGN_FIELDS,
    LAYER_IDS,
    MASK_FIELDS,
    REDUNDANT,
    SCALARS,
)
from dflash2_gguf.convert.gguf_reader import GGUFHeader
from dflash2_gguf.convert.gguf_values import Scalar, Value, array, boolean, f32, string, u32
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.ggml_types import ValueType
from dflash2_gguf.gguf_schema import ARCHITECTURE, Key, arch_key

__all__ = ["Field", "FileFields", "LayerIds", "read_fields", "shown"]

_CHECKPOINT = "convert the original checkpoint instead"
_F32_MAX = 3.4e38
_MAX_ITEMS = 4096  # of a list of layers; upstream reads 512
_SHOWN = 8

# types llama.cpp reads a list as, besides the one that is written
_READABLE = {
    ValueType.INT32: (ValueType.INT32, ValueType.UINT32),
    ValueType.BOOL: (ValueType.BOOL, ValueType.INT32, ValueType.UINT32),
}


@dataclass(frozen=True, kw_only=True)
class Field:
    """A value, the key it had in the file (None: it had none), and who says so."""

    value: Value
    old_key: str | None = None
    source: str = "the file"


@dataclass(frozen=True, kw_only=True)
class LayerIds:
    """The target's layers as one key of the file counts them: ``inputs`` or ``outputs``."""

    key: str
    value: Value
    ids: tuple[int, ...]
    meaning: str


@dataclass(frozen=True, kw_only=True)
class FileFields:
    """Everything a file says under its architecture's name.

    ``fields`` by upstream's name. ``redundant`` are (what, number) by key. ``removed`` gives the
    reason by key.
    """

    fields: dict[str, Field]
    layers: tuple[LayerIds, ...]
    masks: dict[str, int]
    redundant: dict[str, tuple[str, int | None]]
    removed: dict[str, str]


def shown(value: Value) -> str:
    """A value for people, short whatever its size."""
    if value.type is ValueType.ARRAY and value.count > _SHOWN:
        return f"{value.count} values"
    if value.type is ValueType.ARRAY:
        return f"[{', '.join(_text(item) for item in value.items())}]"
    return _text(value.scalar())


def _text(item: Scalar) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, float):
        return f"{item:g}"
    text = str(item) if str(item).isprintable() else repr(item)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_fields(header: GGUFHeader, arch: str) -> FileFields:
    """Read the fields of architecture ``arch``; those of ``dflash`` count in every file.

    Raises CheckpointError for fields this version does not know, values of a wrong kind, and keys
    that contradict each other.
    """
    result = FileFields(fields={}, layers=(), masks={}, redundant={}, removed={})
    layers = []
    for key, value in header.values.items():
        field = _field(key, arch)
        if field is None:
            continue
        if field in LAYER_IDS:
            layers.append(_layer_ids(key, value, LAYER_IDS[field]))
        elif field in MASK_FIELDS:
            result.masks[key] = _number(key, value)
        elif field in REDUNDANT and (field not in SCALARS or arch != ARCHITECTURE):
            what = REDUNDANT[field]
            result.redundant[key] = (what, _number(key, value) if what else None)
        else:
            _collect(result, field, key, value)
    return FileFields(
        fields=result.fields,
        layers=tuple(layers),
        masks=result.masks,
        redundant=result.redundant,
        removed=result.removed,
    )


def _layer_ids(key: str, value: Value, meaning: str) -> LayerIds:
    new = canonical(key, value, ARRAYS[Key.Arch.TARGET_LAYERS], is_array=True)
    ids = tuple(int(i) for i in new.items())
    return LayerIds(key=key, value=new, ids=ids, meaning=meaning)


def _field(key: str, arch: str) -> str | None:
    for prefix in (arch_key("", arch=arch), arch_key("")):
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return None


def _collect(result: FileFields, field: str, key: str, value: Value) -> None:
    name = ALIASES.get(field, field)
    if name not in SCALARS and name not in ARRAYS:
        raise _unknown(field, key)
    kind = SCALARS.get(name) or ARRAYS[name]
    new = canonical(key, value, kind, is_array=name in ARRAYS)
    other = result.fields.get(name)
    if other is None:
        result.fields[name] = Field(value=new, old_key=key)
    elif other.value.items() != new.items():
        raise CheckpointError(
            f"the file contradicts itself: {other.old_key} is {shown(other.value)}, "
            f"{key} is {shown(new)}",
            _CHECKPOINT,
        )
    else:
        result.removed[key] = f"repeats {other.old_key}"


def _unknown(field: str, key: str) -> CheckpointError:
    for start, kind in FOREIGN_FIELDS.items():
        if field.startswith(start):
            return CheckpointError(f"{key} belongs to {kind}, not to a DFlash drafter")
    return CheckpointError(
        f"the file has the field {key}, which this version does not know",
        f"what it changes would be lost; {_CHECKPOINT}",
    )


def _number(key: str, value: Value) -> int:
    number = canonical(key, value, ValueType.UINT32, is_array=False).scalar()
    return int(number)


def canonical(key: str, value: Value, kind: ValueType, *, is_array: bool) -> Value:
    """``value`` with the type upstream reads; itself where it has it. CheckpointError otherwise."""
    given = value.item if value.type is ValueType.ARRAY else value.type
    if (value.type is ValueType.ARRAY) != is_array or value.is_nested:
        raise CheckpointError(f"{key} is {'not ' if is_array else ''}a list", _CHECKPOINT)
    if is_array and value.count > _MAX_ITEMS:
        raise CheckpointError(f"{key} has {value.count} entries", _CHECKPOINT)
    items = [_converted(key, item, kind) for item in value.items()]
    if given in (_READABLE.get(kind, ()) if is_array else (kind,)):
        return value
    return array(kind, items) if is_array else _scalar(kind, items[0])


def _scalar(kind: ValueType, item: Scalar) -> Value:
    if kind is ValueType.STRING:
        return string(str(item))
    if kind is ValueType.FLOAT32:
        return f32(float(item))
    return boolean(bool(item)) if kind is ValueType.BOOL else u32(int(item))


def _converted(key: str, item: Scalar, kind: ValueType) -> Scalar:
    if not _fits(item, kind):
        raise CheckpointError(f"{key} is {_text(item)}, which makes no sense there", _CHECKPOINT)
    if kind is ValueType.FLOAT32:
        return float(item)
    return bool(item) if kind is ValueType.BOOL else item


def _fits(item: Scalar, kind: ValueType) -> bool:
    if isinstance(item, str) or kind is ValueType.STRING:
        return isinstance(item, str) and kind is ValueType.STRING
    if kind is ValueType.BOOL:
        return item in (0, 1)
    if isinstance(item, bool):
        return False
    if kind is ValueType.FLOAT32:
        return math.isfinite(item) and abs(item) < _F32_MAX
    low, high = (0, 2**32) if kind is ValueType.UINT32 else (-(2**31), 2**31)
    return isinstance(item, int) and low <= item < high
