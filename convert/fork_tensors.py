"""The tensors of a drafter's file under upstream's names, and the numbers their shapes give."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dflash2_gguf.convert.fork_names import FOREIGN_TENSORS, LAYER_TENSORS, TENSORS
from dflash2_gguf.convert.gguf_reader import GGUFHeader, TensorEntry
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.ggml_types import GGMLType
from dflash2_gguf.gguf_schema import ARCHITECTURE, DraftShape, Key, Name, draft_tensors, tensor_name

__all__ = [
    "VOCABULARY",
    "ShapeNumber",
    "check_tensors",
    "is_dflash2",
    "rename_tensors",
    "shape_numbers",
    "span",
]

_SHOWN = 5
_BLOCK = re.compile(r"blk\.(\d{1,20})\.(.+)$")
_OLD_FFN_NORM = "post_attention_norm.weight"
_GROUPS = "groups"
_MAX_NUMBER = 2**31  # what a file holds is less
VOCABULARY = "vocabulary"  # rows of the selector's tables
_GROUPS = "groups"
VOCABULARY = "vocabulary"  # rows of the selector's tables


@dataclass(frozen=True, kw_only=True)
class ShapeNumber:
    """A number that a tensor's shape gives, and that tensor's name in the file."""

    number: int
    tensor: str


def rename_tensors(header: GGUFHeader, arch: str) -> dict[str, TensorEntry]:
    """The file's tensors by upstream's names, in the file's order.

    Raises CheckpointError for tensors of other drafter kinds and for two that get one name.
    """
    result: dict[str, TensorEntry] = {}
    for entry in header.tensors.values():
        kind = next((k for part, k in FOREIGN_TENSORS.items() if part in entry.name), None)
        if kind is not None:
            raise CheckpointError(
                f"tensor {entry.name} belongs to {kind}", "DFlash drafters can be migrated"
            )
        name = _renamed(entry.name, arch)
        if name in result:
            raise CheckpointError(
                f"tensors {result[name].name} and {entry.name} would both be {name}",
                "convert the original checkpoint instead",
            )
        result[name] = entry
    return result


def _renamed(name: str, arch: str) -> str:
    match = _BLOCK.match(name)
    # upstream has a norm of this name too, elsewhere in a layer
    if match is None or (match[2] == _OLD_FFN_NORM and arch == ARCHITECTURE):
        return TENSORS.get(name, name)
    return f"blk.{int(match[1])}.{LAYER_TENSORS.get(match[2], match[2])}"


def is_dflash2(tensors: Mapping[str, TensorEntry]) -> bool:
    """With a candidate selector."""
    return any(name.startswith(Name.SELECTOR_PREFIX) for name in tensors)


def shape_numbers(tensors: Mapping[str, TensorEntry]) -> dict[str, ShapeNumber]:
    """Fields that shapes give; those whose tensors are missing are left out."""
    field, found = Key.Arch, dict[str, ShapeNumber]()

    def note(name: str, hf_name: str, axis: int, rank: int, divisor: int = 1) -> None:
        """Take a dimension of a tensor of ``rank``, if ``divisor`` divides it."""
        entry = tensors.get(tensor_name(hf_name) or "")
        if entry is not None and len(entry.shape) == rank and divisor:
            number, rest = divmod(entry.shape[axis], divisor)
            if not rest and number < _MAX_NUMBER:
                found[name] = ShapeNumber(number=number, tensor=entry.name)

    def number(name: str) -> int:
        """What was found already, else 0."""
        return found[name].number if name in found else 0

    note(field.EMBEDDING_LENGTH, "norm.weight", 0, 1)
    note(field.KEY_LENGTH, "layers.0.self_attn.q_norm.weight", 0, 1)
    note(field.HEAD_COUNT, "layers.0.self_attn.q_proj.weight", 0, 2, number(field.KEY_LENGTH))
    note(field.HEAD_COUNT_KV, "layers.0.self_attn.k_proj.weight", 0, 2, number(field.KEY_LENGTH))
    note(field.FEED_FORWARD_LENGTH, "layers.0.mlp.gate_proj.weight", 0, 2)
    note(field.TARGET_LAYERS, "fc.weight", 1, 2, number(field.EMBEDDING_LENGTH))
    note(field.SELECTOR_RANK, f"{Name.HF_SELECTOR_PREFIX}hidden_projection.weight", 0, 2)
    note(VOCABULARY, f"{Name.HF_SELECTOR_PREFIX}predecessor_codebook", 0, 2)
    note(field.CONV_KERNEL_SIZE, "layers.0.attention_conv.base_kernel", 1, 3)
    # rows: two sides of each tap for every group of channels
    sides = 2 * number(field.CONV_KERNEL_SIZE)
    note(_GROUPS, "layers.0.attention_conv.kernel_projection.weight", 0, 2, sides)
    groups, hidden = found.pop(_GROUPS, None), number(field.EMBEDDING_LENGTH)
    if groups and groups.number and hidden and not hidden % groups.number:
        group = hidden // groups.number
        found[field.CONV_GROUP_SIZE] = ShapeNumber(number=group, tensor=groups.tensor)
    if field.KEY_LENGTH in found:
        found[field.VALUE_LENGTH] = found[field.KEY_LENGTH]
    layers = [(int(match[1]), name) for name in tensors if (match := _BLOCK.match(name))]
    if layers:
        last, name = max(layers)
        if last >= _MAX_NUMBER:
            raise CheckpointError(f"tensor {tensors[name].name} is of a layer that cannot exist")
        found[field.BLOCK_COUNT] = ShapeNumber(number=last + 1, tensor=tensors[name].name)
    return found


def check_tensors(path: object, tensors: Mapping[str, TensorEntry], shape: DraftShape) -> None:
    """Raise CheckpointError naming what is missing, unknown, misshapen or of a wrong type."""
    specs = {spec.name: spec for spec in draft_tensors(shape)}
    for what, names in (
        ("lacks", [name for name in specs if name not in tensors]),
        ("has the unknown", [tensors[name].name for name in tensors if name not in specs]),
        (
            "has wrong shapes of the",
            [entry.name for name, entry in tensors.items() if entry.shape != specs[name].shape]
            if tensors.keys() == specs.keys()
            else [],
        ),
        (
            "has other types than F32 for the",
            [
                entry.name
                for name, entry in tensors.items()
                if name in specs and specs[name].role.fixed_type not in (None, entry.type)
            ],
        ),
    ):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise CheckpointError(
                f"{path} {what} tensor{'s' * (len(names) > 1)} {', '.join(names[:_SHOWN])}{more}",
                "only names and metadata can be migrated; convert the original checkpoint instead",
            )


def span(header: GGUFHeader) -> dict[str, tuple[int, int]]:
    """First byte and length of each tensor's data in the file, by its name there.

    The length of a type nobody knows reaches to the next tensor. Raises CheckpointError for tensors
    that overlap or end after the file.
    """
    ordered = sorted(header.tensors.values(), key=lambda entry: entry.offset)
    ends = [header.data_offset + entry.offset for entry in ordered[1:]] + [header.size]
    result: dict[str, tuple[int, int]] = {}
    for entry, end in zip(ordered, ends, strict=True):
        begin = header.data_offset + entry.offset
        length = _nbytes(entry)
        result[entry.name] = (begin, end - begin if length is None else length)
        if begin + result[entry.name][1] > end or end < begin:
            raise CheckpointError(
                f"broken GGUF file {header.path}: tensor {entry.name!r} runs into another's data",
                "download or convert the file again",
            )
    return result


def _nbytes(entry: TensorEntry) -> int | None:
    if isinstance(entry.type, GGMLType):
        return entry.nbytes
    from gguf import GGML_QUANT_SIZES

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    if entry.type not in sizes:
        return None
    block, size = sizes[entry.type]
    if entry.shape and entry.shape[-1] % block:
        raise CheckpointError(
            f"tensor {entry.name!r} has rows of {entry.shape[-1]}, its type has blocks of {block}",
            "convert the original checkpoint instead",
        )
    count = 1
    for n in entry.shape:
        count *= n
    return int(-(-count // block) * size)
