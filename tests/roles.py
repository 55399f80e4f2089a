"""Drafters in which one role alone is quantized, for ``dflash2-convert fidelity`` to compare.

``python -m tests.roles TYPE FOLDER`` converts the bundled drafter once per role, everything else in
bf16, and prints the files, the untouched one first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dflash2_gguf.convert.pipeline import make_plan, run
from dflash2_gguf.ggml_types import FileType, GGMLType
from dflash2_gguf.gguf_schema import Role
from dflash2_gguf.presets import Preset, Rule
from tests.provisions import DRAFTER, target_gguf

__all__ = ["write_drafters"]

ROLES = (
    Role.FC,
    Role.SELECTOR_HIDDEN,
    Role.SELECTOR_PREDECESSOR,
    Role.SELECTOR_SUCCESSOR,
    Role.ATTN_Q,
    Role.ATTN_K,
    Role.ATTN_V,
    Role.ATTN_OUTPUT,
    Role.FFN_GATE,
    Role.FFN_UP,
    Role.FFN_DOWN,
    Role.ATTN_CONV_PROJ,
    Role.FFN_CONV_PROJ,
)


def write_drafters(kind: GGMLType, folder: Path) -> list[Path]:
    """Convert; the paths, the untouched drafter first."""
    presets = [_recipe("bf16", ()), *(_only(role, kind) for role in ROLES)]
    outputs = [(preset, folder / f"{preset.name}.gguf") for preset in presets]
    folder.mkdir(parents=True, exist_ok=True)
    plan = make_plan(DRAFTER, target_gguf(), outputs)
    run(plan, force=True, progress=lambda _bytes: None)
    return [path for _, path in outputs]


def _only(role: Role, kind: GGMLType) -> Preset:
    rule = Rule(roles=frozenset([role]), type=kind, reason="the role in question")
    return _recipe(f"{role.value}-{kind.name.lower()}", (rule,))


def _recipe(name: str, rules: Sequence[Rule]) -> Preset:
    return Preset(
        name=name,
        summary="one role quantized",
        file_type=FileType.MOSTLY_BF16,
        type=GGMLType.BF16,
        reason="as published",
        rules=tuple(rules),
    )


if __name__ == "__main__":
    print(*write_drafters(GGMLType[sys.argv[1].upper()], Path(sys.argv[2])), sep="\n")
