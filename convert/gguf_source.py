"""A drafter's GGUF file as the source of a conversion: other types, the same drafter.

Tensors are decoded by the ``gguf`` package; metadata is kept but for what the new types change.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from dflash2_gguf.convert.gguf_facts import draft_shape, gguf_facts, tensor_problems
from dflash2_gguf.convert.gguf_reader import GGUFHeader, TensorEntry, read_gguf
from dflash2_gguf.convert.gguf_values import Value, string, u32
from dflash2_gguf.convert.source import Checkpoint, SourceTensor
from dflash2_gguf.convert.stored_weights import StoredWeight
from dflash2_gguf.convert.tensors import PlannedTensor
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.ggml_types import GGMLType
from dflash2_gguf.gguf_schema import QUANTIZATION_VERSION, Key, TensorSpec, draft_tensors
from dflash2_gguf.presets import Preset

__all__ = [
    "open_gguf_source",
    "plan_gguf_tensors",
    "requantized_metadata",
    "requantizing_warning",
    "stored_checkpoint",
    "stored_weight",
]

_UNKNOWN_HASH = "0" * 64
_OF_THE_OLD_TYPES = (
    Key.ALIGNMENT,
    Key.QUANTIZE_IMATRIX_FILE,
    Key.QUANTIZE_IMATRIX_DATASET,
    Key.QUANTIZE_IMATRIX_ENTRIES,
    Key.QUANTIZE_IMATRIX_CHUNKS,
)
_PLAIN = {GGMLType.F32.name, GGMLType.F16.name, GGMLType.BF16.name, GGMLType.I64.name}


def open_gguf_source(path: Path) -> tuple[GGUFHeader, Checkpoint]:
    """Header and tensors of a drafter's file; CheckpointError when it is none or has faults."""
    header = read_gguf(path)
    facts, problems = gguf_facts(header)
    if problems:
        raise CheckpointError(
            f"{path}: {problems[0]}", "`dflash2-convert migrate` brings older files up to date"
        )
    if facts["kind"].startswith("DSpark"):
        raise CheckpointError(f"{path} is a DSpark drafter", "DFlash drafters are converted")
    return header, stored_checkpoint(header, set(header.tensors))


def stored_checkpoint(header: GGUFHeader, names: Set[str]) -> Checkpoint:
    """The tensors ``names`` of any model's file; CheckpointError for a type that is not read."""
    path = header.path
    return Checkpoint(
        directory=path.parent,
        files=(path.name,),
        tensors={name: _source_tensor(path, header.tensors[name]) for name in names},
        data_starts={path.name: header.data_offset},
        kind="gguf",
    )


def _source_tensor(path: Path, tensor: TensorEntry) -> SourceTensor:
    if not isinstance(tensor.type, GGMLType):
        raise CheckpointError(
            f"{path}: tensor {tensor.name} has type {tensor.type}, which is not read"
        )
    return SourceTensor(
        name=tensor.name,
        stored_name=tensor.name,
        dtype=tensor.type.name,
        shape=tensor.shape,
        file=path.name,
        begin=tensor.offset,
        nbytes=tensor.nbytes,
    )


def plan_gguf_tensors(header: GGUFHeader, checkpoint: Checkpoint) -> tuple[PlannedTensor, ...]:
    """Every tensor of the file with its place in the drafter, in the file's order."""
    specs = {spec.name: spec for spec in _specs(header)}
    return tuple(
        PlannedTensor(spec=specs[name], weight=stored_weight(checkpoint.tensors[name]))
        for name in header.tensors
    )


def _specs(header: GGUFHeader) -> tuple[TensorSpec, ...]:
    facts, _ = gguf_facts(header)
    problems = tensor_problems(header, facts)
    shape = draft_shape(header, facts)
    if problems or shape is None:
        raise CheckpointError(f"{header.path}: {next(iter(problems.values()), 'no shape')}")
    return draft_tensors(shape)


def stored_weight(source: SourceTensor) -> StoredWeight:
    """A tensor of a GGUF file as a weight."""
    return StoredWeight(
        name=source.name, main=source, form="plain" if source.dtype in _PLAIN else "ggml"
    )


def requantizing_warning(tensors: tuple[PlannedTensor, ...]) -> str | None:
    """One line when the source has lost precision already."""
    lossy = sorted({t.source.dtype for t in tensors if t.weight.form == "ggml"})
    if not lossy:
        return None
    return (
        f"the source is quantized ({', '.join(lossy)}): errors add up, "
        "convert the checkpoint if there is one"
    )


def requantized_metadata(
    header: GGUFHeader, preset: Preset, hashes: dict[str, str] | None = None
) -> dict[str, Value]:
    """All values of the source, with the new file type and where the weights came from."""
    digest = (hashes or {}).get(header.path.name, _UNKNOWN_HASH)
    return {
        **{key: value for key, value in header.values.items() if key not in _OF_THE_OLD_TYPES},
        Key.FILE_TYPE: u32(preset.file_type),
        Key.QUANTIZATION_VERSION: u32(QUANTIZATION_VERSION),
        Key.PRESET: string(preset.name),
        Key.SOURCE_GGUF: string(header.path.name),
        Key.SOURCE_GGUF_SHA256: string(digest),
    }
