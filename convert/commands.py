"""What the commands of ``dflash2-convert`` do, from checked arguments to printed results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.convert.inspection import inspect, render
from dflash2_gguf.convert.pipeline import OutputPlan, Plan, check_outputs, make_plan, run
from dflash2_gguf.convert.reduced_head import Reduction
from dflash2_gguf.convert.ui import Terminal, human_bytes
from dflash2_gguf.errors import OutputError, UsageError
from dflash2_gguf.presets import Preset, load_preset, preset_names, require_distinct

__all__ = ["ConvertRequest", "convert", "list_presets", "show"]


@dataclass(frozen=True, kw_only=True)
class ConvertRequest:
    """The arguments of ``convert``."""

    source: Path
    target: Path | None
    presets: tuple[str, ...]
    output: Path
    imatrix: Path | None = None
    draft_vocab: int | None = None
    force: bool = False
    dry_run: bool = False
    as_json: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        require_distinct(self.presets)
        if len(self.presets) > 1 and self.output.suffix == ".gguf":
            raise UsageError(
                f"{self.output} is one file for {len(self.presets)} presets",
                "give a folder with -o",
            )


def convert(request: ConvertRequest, terminal: Terminal) -> int:
    """Plan, report, and unless it is a dry run write the files; returns the exit code."""
    presets = [load_preset(name) for name in request.presets]
    outputs = list(zip(presets, _destinations(request, presets), strict=True))
    plan = make_plan(
        request.source,
        request.target,
        outputs,
        imatrix=request.imatrix,
        draft_vocab=request.draft_vocab,
    )
    _report_plan(plan, request, terminal)
    hashes: dict[str, str] = {}
    if not request.dry_run:
        if len(presets) > 1:
            _make_folder(request.output)
        check_outputs(plan, force=request.force)
        label = f"converting {plan.origin.name}"
        with terminal.progress(label, plan.checkpoint.nbytes) as advance:
            hashes = run(plan, force=request.force, progress=advance)
    elif outputs[0][1].parent.is_dir():
        check_outputs(plan, force=request.force)
    _report_result(plan, request, terminal, hashes)
    return 0


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create folder {folder}: {error.strerror}") from error


def _destinations(request: ConvertRequest, presets: Sequence[Preset]) -> list[Path]:
    """A file as given, or one per preset in the given folder, named after both."""
    if len(presets) == 1 and not request.output.is_dir():
        return [request.output]
    stem = request.source.resolve().name.removesuffix(".gguf")
    return [request.output / f"{stem}-{preset.name.upper()}.gguf" for preset in presets]


def _report_plan(plan: Plan, request: ConvertRequest, terminal: Terminal) -> None:
    for warning in plan.warnings:
        terminal.warning(warning)
    if plan.reduction is not None:
        terminal.note(plan.reduction.summary(plan.origin.n_vocab))
    for output in plan.outputs:
        for line in output.fallbacks(plan.tensors):
            terminal.note(f"{output.preset.name}: {line}")
        if request.verbose:
            for name, choice in output.choices.items():
                terminal.note(f"{output.preset.name}: {name}: {choice.type.name}, {choice.reason}")


def _report_result(
    plan: Plan, request: ConvertRequest, terminal: Terminal, hashes: dict[str, str]
) -> None:
    if request.as_json:
        terminal.json(_result(plan, request, hashes))
        return
    for output in plan.outputs:
        if request.dry_run:
            kinds = ", ".join(f"{name} {n}" for name, n in _types(output).items())
            terminal.line(f"{output.path}: {human_bytes(output.nbytes)} of tensors ({kinds})")
        else:
            terminal.line(str(output.path))


def _types(output: OutputPlan) -> dict[str, int]:
    counts = Counter(choice.type.name for choice in output.choices.values())
    return dict(sorted(counts.items()))


def _result(plan: Plan, request: ConvertRequest, hashes: dict[str, str]) -> dict[str, Any]:
    return {
        "source": str(plan.checkpoint.directory),
        "source_sha256": hashes,
        "target": plan.origin.target,
        "parameters": plan.n_params,
        "draft_vocab": _reduction(plan.reduction),
        "dry_run": request.dry_run,
        "outputs": [
            {
                "path": str(output.path),
                "preset": output.preset.name,
                "bytes": output.nbytes if request.dry_run else output.path.stat().st_size,
                "tensor_types": _types(output),
                "fallbacks": output.fallbacks(plan.tensors),
            }
            for output in plan.outputs
        ],
        "warnings": list(plan.warnings),
    }


def _reduction(found: Reduction | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "rows": len(found.kept),
        "counts": str(found.counts),
        "coverage": found.coverage,
        "never_seen": found.n_unseen,
    }


def show(path: Path, terminal: Terminal, *, as_json: bool, verbose: bool) -> int:
    """Print the facts of a drafter; problems are warnings."""
    inspection = inspect(path)
    if as_json:
        terminal.json({**inspection.facts, "problems": list(inspection.problems)})
        return 0
    terminal.facts(str(path), render(inspection.facts))
    if verbose:
        terminal.facts("tensors", inspection.tensors)
    for problem in inspection.problems:
        terminal.warning(problem)
    return 0


def list_presets(terminal: Terminal, *, as_json: bool) -> int:
    """Print every recipe with its summary."""
    presets = [load_preset(name) for name in preset_names()]
    if as_json:
        terminal.json([{"name": p.name, "summary": p.summary} for p in presets])
    else:
        terminal.facts("presets", {p.name: p.summary for p in presets})
    return 0
