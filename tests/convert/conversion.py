"""One conversion, as most tests of the converter want it."""

from __future__ import annotations

from pathlib import Path

from dflash2_gguf.convert.pipeline import make_plan, run
from dflash2_gguf.presets import load_preset

__all__ = ["convert"]


def convert(source: Path, target: Path | None, path: Path, preset: str = "f32") -> tuple[str, ...]:
    """Convert to one file; returns the plan's warnings."""
    plan = make_plan(source, target, [(load_preset(preset), path)])
    run(plan, force=False, progress=lambda _count: None)
    return plan.warnings
