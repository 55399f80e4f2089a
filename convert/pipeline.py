"""A whole conversion: plan everything, then read the source once and write all outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dflash2_gguf.convert.gguf_values import Value, string
from dflash2_gguf.convert.imatrix import ImportanceMatrix, read_imatrix
from dflash2_gguf.convert.metadata import imatrix_metadata, size_label
from dflash2_gguf.convert.origin import Origin, count_parameters, open_source
from dflash2_gguf.convert.reduced_head import Reduction, map_bytes, plan_reduction, reduce_head
from dflash2_gguf.convert.source import Checkpoint, SourceTensor, read_pieces, read_source
from dflash2_gguf.convert.tensors import PlannedTensor
from dflash2_gguf.convert.transfer import piece_bytes, transfer
from dflash2_gguf.convert.writer import (
    GGUFWriter,
    OutputTensor,
    check_destination,
    check_space,
    file_bytes,
)
from dflash2_gguf.errors import UsageError
from dflash2_gguf.gguf_schema import Key, Role
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
    origin: Origin
    tensors: tuple[PlannedTensor, ...]
    outputs: tuple[OutputPlan, ...]
    warnings: tuple[str, ...]
    imatrix: ImportanceMatrix | None = None
    reduction: Reduction | None = None

    @property
    def n_params(self) -> int:
        """Parameters of the drafter."""
        return count_parameters(self.tensors)

    def metadata(
        self, output: OutputPlan, hashes: dict[str, str] | None = None
    ) -> dict[str, Value]:
        """Metadata of one output."""
        values = self.origin.describe(output.preset, hashes)
        if self.imatrix is not None and output.is_quantized:
            values |= imatrix_metadata(self.imatrix)
        if self.reduction is not None:
            values[Key.SIZE_LABEL] = string(size_label(self.n_params))
            values[Key.DRAFT_VOCAB_COUNTS] = string(str(self.reduction.counts))
        return values


def make_plan(
    source: Path,
    target_path: Path | None,
    outputs: Sequence[tuple[Preset, Path]],
    *,
    imatrix: Path | None = None,
    draft_vocab: int | None = None,
) -> Plan:
    """Check source and target, and decide the type of every tensor; writes nothing.

    ``source``: a checkpoint's folder, with its target, or a drafter's GGUF file, without.
    ``imatrix``: an importance matrix for the quantizers. ``draft_vocab``: how many rows of the head
    to keep, by the counts in that; rows of the target's where the drafter has no head, so a GGUF
    file comes with its target too then. Raises CheckpointError, PairError, or UsageError when an
    output is one of the inputs, or a target is missing or too much.
    """
    found = open_source(source, target_path)
    if source.suffix == ".gguf" and target_path is not None and draft_vocab is None:
        raise UsageError(
            f"{source.name} has its tokenizer already", "leave --target out for a GGUF file"
        )
    importance = None if imatrix is None else _open_imatrix(imatrix, found.tensors)
    tensors, reduction, warnings = found.tensors, None, found.warnings
    if draft_vocab is not None:
        metadata = found.origin.describe(outputs[0][0], None)
        reduction = plan_reduction(draft_vocab, importance, metadata, found.origin.n_vocab)
        tensors = reduce_head(
            tensors, reduction.kept, checkpoint=found.checkpoint, target=target_path
        )
    planned = tuple(
        _plan_output(preset, path, found.origin, tensors, with_imatrix=imatrix is not None)
        for preset, path in outputs
    )
    if importance is not None:
        warnings = (*warnings, *_unused(importance, tensors, planned, reduction))
    plan = Plan(
        checkpoint=found.checkpoint,
        origin=found.origin,
        tensors=tensors,
        outputs=planned,
        warnings=warnings,
        imatrix=importance,
        reduction=reduction,
    )
    _refuse_inputs_as_outputs(plan, target_path)
    return plan


def _open_imatrix(path: Path, tensors: Sequence[PlannedTensor]) -> ImportanceMatrix:
    imatrix = read_imatrix(path)
    matrices = [t for t in tensors if t.spec.role.fixed_type is None]
    imatrix.require_columns([(t.spec.name, t.n_cols) for t in matrices])
    return imatrix


def _unused(
    imatrix: ImportanceMatrix,
    tensors: Sequence[PlannedTensor],
    outputs: Sequence[OutputPlan],
    reduction: Reduction | None,
) -> list[str]:
    """Warnings: tensors that are quantized without importance, or a file that serves nothing.

    The head that drafts is not among those it knows: it is lent by the target while it is made.
    """
    names = [
        t.spec.name
        for t in tensors
        if t.kept is None
        and any(output.choices[t.spec.name].type.is_quantized for output in outputs)
    ]
    if outputs and not names and reduction is None:
        return [f"no tensor is quantized, {imatrix.path} is not used"]
    missing = imatrix.missing(names)
    return [missing] if missing else []


def _plan_output(
    preset: Preset,
    path: Path,
    origin: Origin,
    tensors: Sequence[PlannedTensor],
    *,
    with_imatrix: bool,
) -> OutputPlan:
    choices = {
        t.spec.name: choose_type(
            preset, t.spec, n_layer=origin.n_layer, gqa=origin.gqa, with_imatrix=with_imatrix
        )
        for t in tensors
    }
    nbytes = sum(t.n_rows * choices[t.spec.name].type.row_bytes(t.n_cols) for t in tensors)
    return OutputPlan(path=path, preset=preset, choices=choices, nbytes=nbytes)


def _refuse_inputs_as_outputs(plan: Plan, target_path: Path | None) -> None:
    inputs = [plan.checkpoint.directory / name for name in plan.checkpoint.files]
    inputs += [target_path] if target_path else []
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
    planned = {tensor.source.name: tensor for tensor in plan.tensors if tensor.lender is None}
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
            """Write a tensor to every output, or read it for the hash alone."""
            counted, tensor = _counted(pieces, progress), planned.get(source.name)
            if tensor is None:  # scales, leftovers: part of the file's hash only
                deque(counted, maxlen=0)
            else:
                _write(plan, writers, tensor, plan.checkpoint, counted)

        for tensor in plan.tensors:
            if tensor.spec.role is Role.VOCAB_MAP and tensor.kept is not None:
                for _, writer in writers:
                    writer.write_rows(tensor.spec.name, 0, map_bytes(tensor.kept))
            elif tensor.lender is not None:
                pieces = read_pieces(tensor.lender, tensor.source, piece_bytes(tensor))
                _write(plan, writers, tensor, tensor.lender, pieces)
        hashes = plan.origin.other_files | read_source(
            plan.checkpoint,
            piece_bytes=lambda source: piece_bytes(planned.get(source.name)),
            visit=visit,
        )
        for output, writer in writers:
            writer.finish(plan.metadata(output, hashes))
    return hashes


def _write(
    plan: Plan,
    writers: Sequence[tuple[OutputPlan, GGUFWriter]],
    tensor: PlannedTensor,
    checkpoint: Checkpoint,
    pieces: Iterator[memoryview],
) -> None:
    name = tensor.spec.name
    transfer(
        tensor,
        checkpoint,
        pieces,
        [
            (output.choices[name].type, partial(writer.write_rows, name))
            for output, writer in writers
        ],
        n_vocab=plan.origin.n_vocab,
        importance=plan.imatrix.weights.get(name) if plan.imatrix else None,
    )


def _counted(pieces: Iterator[memoryview], progress: Callable[[int], None]) -> Iterator[memoryview]:
    for piece in pieces:
        yield piece
        progress(len(piece))
