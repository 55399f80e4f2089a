"""A whole conversion: plan everything, then read the source once and write all outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

from dflash2_gguf.convert.gguf_values import Value
from dflash2_gguf.convert.hparams import DraftHparams, read_hparams
from dflash2_gguf.convert.imatrix import ImportanceMatrix, read_imatrix
from dflash2_gguf.convert.metadata import (
    Provenance,
    build_metadata,
    imatrix_metadata,
    licence_warning,
    read_provenance,
)
from dflash2_gguf.convert.source import (
    Checkpoint,
    SourceTensor,
    open_checkpoint,
    read_json,
    read_source,
)
from dflash2_gguf.convert.target import Target, check_pair, open_target
from dflash2_gguf.convert.tensors import PlannedTensor, plan_tensors
from dflash2_gguf.convert.transfer import piece_bytes, transfer
from dflash2_gguf.convert.writer import (
    GGUFWriter,
    OutputTensor,
    check_destination,
    check_space,
    file_bytes,
)
from dflash2_gguf.errors import UsageError
from dflash2_gguf.gguf_schema import Role
from dflash2_gguf.presets import Choice, Preset, choose_type

__all__ = ["OutputPlan", "Plan", "check_outputs", "make_plan", "run"]


@dataclass(frozen=True, kw_only=True)
class OutputPlan:
    """One file to write: its place, recipe and the type of every tensor."""

    path: Path
    preset: Preset
    choices: dict[str, Choice]
    nbytes: int

    @property
    def is_quantized(self) -> bool:
        """Is any of its tensors?"""
        return any(choice.type.is_quantized for choice in self.choices.values())

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
    imatrix: ImportanceMatrix | None = None

    @property
    def n_params(self) -> int:
        """Parameters of the drafter."""
        return _count(self.tensors)

    def metadata(
        self, output: OutputPlan, hashes: dict[str, str] | None = None
    ) -> dict[str, Value]:
        """Metadata of one output."""
        values = build_metadata(
            self.hparams,
            self.target,
            output.preset,
            self.provenance,
            n_params=self.n_params,
            files=self.checkpoint.files,
            hashes=hashes,
        )
        if self.imatrix is not None and output.is_quantized:
            values |= imatrix_metadata(self.imatrix)
        return values


def _count(tensors: Sequence[PlannedTensor]) -> int:
    return sum(prod(t.spec.shape) for t in tensors if t.spec.role is not Role.VOCAB_MAP)


def make_plan(
    source: Path,
    target_path: Path,
    outputs: Sequence[tuple[Preset, Path]],
    imatrix: Path | None = None,
) -> Plan:
    """Check source and target, and decide the type of every tensor; writes nothing.

    ``imatrix``: an importance matrix for the quantizers. Raises CheckpointError, PairError, or
    UsageError when an output is one of the inputs.
    """
    checkpoint = open_checkpoint(source)
    hparams = read_hparams(read_json(source / "config.json"))
    matched = plan_tensors(hparams, checkpoint)
    tensors = matched.tensors
    target = open_target(target_path)
    check_pair(hparams, target)
    provenance = replace(read_provenance(source, hparams), quantization=matched.quantization)
    warning = licence_warning(provenance)
    importance = None if imatrix is None else _open_imatrix(imatrix, tensors)
    planned = tuple(
        _plan_output(preset, path, hparams, tensors, with_imatrix=imatrix is not None)
        for preset, path in outputs
    )
    plan = Plan(
        checkpoint=checkpoint,
        hparams=hparams,
        target=target,
        provenance=provenance,
        tensors=tensors,
        outputs=planned,
        warnings=(
            *hparams.warnings,
            *matched.warnings,
            *([warning] if warning else []),
            *([] if importance is None else _unused(importance, tensors, planned)),
        ),
        imatrix=importance,
    )
    _refuse_inputs_as_outputs(plan, target_path)
    return plan


def _open_imatrix(path: Path, tensors: Sequence[PlannedTensor]) -> ImportanceMatrix:
    imatrix = read_imatrix(path)
    matrices = [t for t in tensors if t.spec.role.fixed_type is None]
    imatrix.require_columns([(t.spec.name, t.n_cols) for t in matrices])
    return imatrix


def _unused(
    imatrix: ImportanceMatrix, tensors: Sequence[PlannedTensor], outputs: Sequence[OutputPlan]
) -> list[str]:
    """Warnings: tensors that are quantized without importance, or none that are quantized."""
    names = [
        t.spec.name
        for t in tensors
        if any(output.choices[t.spec.name].type.is_quantized for output in outputs)
    ]
    if outputs and not names:
        return [f"no tensor is quantized, {imatrix.path} is not used"]
    missing = imatrix.missing(names)
    return [missing] if missing else []


def _plan_output(
    preset: Preset,
    path: Path,
    hparams: DraftHparams,
    tensors: Sequence[PlannedTensor],
    *,
    with_imatrix: bool,
) -> OutputPlan:
    gqa = hparams.n_head // hparams.n_head_kv
    choices = {
        t.spec.name: choose_type(
            preset, t.spec, n_layer=hparams.n_layer, gqa=gqa, with_imatrix=with_imatrix
        )
        for t in tensors
    }
    nbytes = sum(t.n_rows * choices[t.spec.name].type.row_bytes(t.n_cols) for t in tensors)
    return OutputPlan(path=path, preset=preset, choices=choices, nbytes=nbytes)


def _refuse_inputs_as_outputs(plan: Plan, target_path: Path) -> None:
    inputs = [target_path, *(plan.checkpoint.directory / name for name in plan.checkpoint.files)]
    inputs += [plan.imatrix.path] if plan.imatrix else []
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
            counted = _counted(pieces, progress)
            tensor = planned.get(source.name)
            if tensor is None:  # scales, leftovers: part of the file's hash only
                deque(counted, maxlen=0)
                return
            name = tensor.spec.name
            outputs = [
                (output.choices[name].type, partial(writer.write_rows, name))
                for output, writer in writers
            ]
            transfer(
                tensor,
                plan.checkpoint,
                counted,
                outputs,
                n_vocab=plan.hparams.n_vocab,
                importance=plan.imatrix.weights.get(name) if plan.imatrix else None,
            )

        hashes = read_source(
            plan.checkpoint,
            piece_bytes=lambda source: piece_bytes(planned.get(source.name)),
            visit=visit,
        )
        for output, writer in writers:
            writer.finish(plan.metadata(output, hashes))
    return hashes


def _counted(pieces: Iterator[memoryview], progress: Callable[[int], None]) -> Iterator[memoryview]:
    for piece in pieces:
        yield piece
        progress(len(piece))
