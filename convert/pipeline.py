"""A whole conversion: plan everything, then read the source once and write all outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from dflash2_gguf.convert.gguf_values import Value
from dflash2_gguf.convert.hparams import DraftHparams, read_hparams
from dflash2_gguf.convert.metadata import (
    Provenance,
    build_metadata,
    licence_warning,
    read_provenance,
)
from dflash2_gguf.convert.quantize import DTYPE_SIZE, encode_rows, rope_halves, to_float32
from dflash2_gguf.convert.source import (
    Checkpoint,
    SourceTensor,
    open_checkpoint,
    read_json,
    read_source,
)
from dflash2_gguf.convert.target import Target, check_pair, open_target
from dflash2_gguf.convert.tensors import PlannedTensor, plan_tensors
from dflash2_gguf.convert.writer import (
    GGUFWriter,
    OutputTensor,
    check_destination,
    check_space,
    file_bytes,
)
from dflash2_gguf.errors import CheckpointError, UsageError
from dflash2_gguf.presets import Choice, Preset, choose_type

__all__ = ["OutputPlan", "Plan", "check_outputs", "make_plan", "run"]

# source bytes converted at a time; several times as much is alive as floats and temporaries
_PIECE_BYTES = 4 << 20

_PARTIAL = "the download probably stopped half-way: fetch the checkpoint again"


@dataclass(frozen=True, kw_only=True)
class OutputPlan:
    """One file to write: its place, recipe and the type of every tensor."""

    path: Path
    preset: Preset
    choices: dict[str, Choice]
    nbytes: int

    def fallbacks(self, tensors: Sequence[PlannedTensor]) -> list[str]:
        """One line per kind of tensor whose shape forbids the recipe's type."""
        seen: dict[tuple[str, str, int], int] = {}
        for tensor in tensors:
            choice = self.choices[tensor.spec.name]
            if choice.type is not choice.wanted:
                key = (choice.wanted.name, choice.type.name, tensor.n_cols)
                seen[key] = seen.get(key, 0) + 1
        return [
            f"{got} instead of {wanted} for {count} tensor{'s' * (count > 1)} with rows of {cols}"
            for (wanted, got, cols), count in seen.items()
        ]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is known before the first weight is read."""

    checkpoint: Checkpoint
    hparams: DraftHparams
    target: Target
    provenance: Provenance
    tensors: tuple[PlannedTensor, ...]
    outputs: tuple[OutputPlan, ...]
    warnings: tuple[str, ...]

    @property
    def n_params(self) -> int:
        """Parameters of the drafter."""
        return _count(self.tensors)

    def metadata(
        self, output: OutputPlan, hashes: dict[str, str] | None = None
    ) -> dict[str, Value]:
        """Metadata of one output."""
        return build_metadata(
            self.hparams,
            self.target,
            output.preset,
            self.provenance,
            n_params=self.n_params,
            files=self.checkpoint.files,
            hashes=hashes,
        )


def _count(tensors: Sequence[PlannedTensor]) -> int:
    return sum(prod(tensor.spec.shape) for tensor in tensors)


def make_plan(
    source: Path,
    target_path: Path,
    outputs: Sequence[tuple[Preset, Path]],
) -> Plan:
    """Check source and target, and decide the type of every tensor; writes nothing.

    Raises CheckpointError, PairError, or UsageError when an output is one of the inputs.
    """
    checkpoint = open_checkpoint(source)
    hparams = read_hparams(read_json(source / "config.json"))
    tensors = plan_tensors(hparams, checkpoint)
    target = open_target(target_path)
    check_pair(hparams, target)
    provenance = read_provenance(source, hparams)
    warning = licence_warning(provenance)
    plan = Plan(
        checkpoint=checkpoint,
        hparams=hparams,
        target=target,
        provenance=provenance,
        tensors=tensors,
        outputs=tuple(_plan_output(preset, path, hparams, tensors) for preset, path in outputs),
        warnings=(*hparams.warnings, *([warning] if warning else [])),
    )
    _refuse_inputs_as_outputs(plan, target_path)
    return plan


def _plan_output(
    preset: Preset, path: Path, hparams: DraftHparams, tensors: Sequence[PlannedTensor]
) -> OutputPlan:
    gqa = hparams.n_head // hparams.n_head_kv
    choices = {
        t.spec.name: choose_type(preset, t.spec, n_layer=hparams.n_layer, gqa=gqa) for t in tensors
    }
    nbytes = sum(t.n_rows * choices[t.spec.name].type.row_bytes(t.n_cols) for t in tensors)
    return OutputPlan(path=path, preset=preset, choices=choices, nbytes=nbytes)


def _refuse_inputs_as_outputs(plan: Plan, target_path: Path) -> None:
    inputs = [target_path, *(plan.checkpoint.directory / name for name in plan.checkpoint.files)]
    for output in plan.outputs:
        if output.path.exists() and any(output.path.samefile(path) for path in inputs):
            raise UsageError(f"{output.path} is an input of this conversion")


def check_outputs(plan: Plan, *, force: bool) -> None:
    """Raise OutputError for destinations that exist, lack a folder, or do not fit on the disk."""
    for output in plan.outputs:
        check_destination(output.path, force=force)
    sizes = {
        output.path: file_bytes(plan.metadata(output), _output_tensors(plan, output))
        for output in plan.outputs
    }
    check_space(sizes)


def _output_tensors(plan: Plan, output: OutputPlan) -> list[OutputTensor]:
    return [
        OutputTensor(
            name=tensor.spec.name,
            shape=tensor.spec.shape,
            type=output.choices[tensor.spec.name].type,
        )
        for tensor in plan.tensors
    ]


def run(plan: Plan, *, force: bool, progress: Callable[[int], None]) -> dict[str, str]:
    """Read the source once and write every output. ``progress`` gets the bytes of each piece read.

    Returns {source file: sha256}. On any exception no output and no temporary file is left.
    """
    planned = {tensor.source.name: tensor for tensor in plan.tensors}
    with ExitStack() as stack:
        writers = [
            (
                output,
                stack.enter_context(
                    GGUFWriter(
                        output.path,
                        values=plan.metadata(output),
                        tensors=_output_tensors(plan, output),
                        force=force,
                    )
                ),
            )
            for output in plan.outputs
        ]

        def visit(source: SourceTensor, pieces: Iterator[memoryview]) -> None:
            _transfer(planned[source.name], pieces, writers, progress)

        hashes = read_source(
            plan.checkpoint,
            piece_bytes=lambda source: _piece_bytes(planned[source.name]),
            visit=visit,
        )
        for output, writer in writers:
            writer.finish(plan.metadata(output, hashes))
    return hashes


def _piece_bytes(tensor: PlannedTensor) -> int:
    """Whole rows, and whole heads where rows of a head are reordered."""
    row = tensor.n_cols * DTYPE_SIZE[tensor.source.dtype]
    unit = row * (tensor.rope_dim if tensor.n_rows > 1 and tensor.rope_dim else 1)
    return max(1, _PIECE_BYTES // unit) * unit


def _transfer(
    tensor: PlannedTensor,
    pieces: Iterator[memoryview],
    writers: Sequence[tuple[OutputPlan, GGUFWriter]],
    progress: Callable[[int], None],
) -> None:
    name, row, any_value = tensor.source.stored_name, 0, False
    for piece in pieces:
        values = to_float32(piece, tensor.source.dtype).reshape(-1, tensor.n_cols)
        if not np.isfinite(values).all():
            raise CheckpointError(f"tensor {name} has NaN or infinite values", _PARTIAL)
        any_value = any_value or bool(values.any())
        if tensor.rope_dim:
            values = rope_halves(values, tensor.rope_dim)
        for output, writer in writers:
            kind = output.choices[tensor.spec.name].type
            if kind.name == tensor.source.dtype and not tensor.rope_dim:
                data = np.frombuffer(piece, dtype=np.uint8)
            else:
                data = encode_rows(values, kind, name)
            writer.write_rows(tensor.spec.name, row, data)
        row += len(values)
        progress(len(piece))
    if not any_value:
        raise CheckpointError(f"tensor {name} is all zeros", _PARTIAL)
