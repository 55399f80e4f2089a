"""Quantization recipes: which type every tensor of a drafter gets, and why.

A recipe is a TOML file in ``quant_presets/``. Rules name roles (see ``gguf_schema.Role``), never
tensors, so one recipe fits every drafter. Some roles have one type whatever the recipe says.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from dflash2_gguf.errors import UsageError
from dflash2_gguf.ggml_types import FileType, GGMLType
from dflash2_gguf.gguf_schema import Role, TensorSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "Choice",
    "Preset",
    "Rule",
    "choose_type",
    "load_preset",
    "preset_names",
    "require_distinct",
]

_PACKAGE = "dflash2_gguf.quant_presets"
_LAYERS = ("all", "more_bits", "first_sixteenth", "first_eighth", "first_two")

# llama-quantize's replacements for rows that are not a multiple of 256 (src/llama-quant.cpp)
_FALLBACK = {
    GGMLType.Q2_K: GGMLType.Q4_0,
    GGMLType.Q3_K: GGMLType.Q4_0,
    GGMLType.Q4_K: GGMLType.Q5_0,
    GGMLType.Q5_K: GGMLType.Q5_1,
    GGMLType.Q6_K: GGMLType.Q8_0,
    GGMLType.IQ4_XS: GGMLType.IQ4_NL,
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Tensors of these roles in these layers get ``type``, in models of at least ``min_gqa``.

    ``imatrix``: only with (True) or only without (False) an importance matrix; None is always.
    """

    roles: frozenset[Role]
    type: GGMLType
    reason: str
    layers: str = "all"
    min_gqa: int = 1
    imatrix: bool | None = None

    def applies(self, spec: TensorSpec, *, n_layer: int, gqa: int, with_imatrix: bool) -> bool:
        """Does this rule choose the type of ``spec``?"""
        if spec.role not in self.roles or gqa < self.min_gqa:
            return False
        if self.imatrix is not None and self.imatrix is not with_imatrix:
            return False
        return spec.layer is None or _in_layers(self.layers, spec.layer, n_layer)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A recipe; the first rule that applies wins, else ``type``."""

    name: str
    summary: str
    file_type: FileType
    type: GGMLType
    reason: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The type of one tensor; ``wanted`` is the recipe's, which the shape may forbid."""

    type: GGMLType
    wanted: GGMLType
    reason: str


def _in_layers(which: str, layer: int, n_layer: int) -> bool:
    """Layer sets of llama-quantize (``llama_tensor_get_type_impl`` and its ``use_more_bits``)."""
    eighth = n_layer // 8
    if which == "more_bits":
        return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2
    limits = {"all": n_layer, "first_sixteenth": n_layer // 16, "first_eighth": eighth}
    return layer < limits.get(which, 2)


def preset_names() -> list[str]:
    """Names of the recipes that come with this package, in alphabetical order."""
    files = resources.files(_PACKAGE).iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def load_preset(name: str) -> Preset:
    """Load a recipe by name; UsageError when there is none of that name."""
    known = preset_names()
    if name.lower() not in known:
        raise UsageError(f"there is no preset {name!r}", f"known presets: {', '.join(known)}")
    text = (resources.files(_PACKAGE) / f"{name.lower()}.toml").read_text(encoding="utf-8")
    return _parse(name.lower(), tomllib.loads(text))


def require_distinct(names: Sequence[str]) -> None:
    """Raise UsageError for no preset, or one that is named twice."""
    lower = [name.lower() for name in names]
    if not lower:
        raise UsageError("no preset given", f"known presets: {', '.join(preset_names())}")
    if len(set(lower)) != len(lower):
        raise UsageError(f"preset {max(lower, key=lower.count)} is given twice")


def _parse(name: str, data: dict[str, Any]) -> Preset:
    return Preset(
        name=name,
        summary=data["summary"],
        file_type=FileType[data["file_type"]],
        type=GGMLType[data["type"]],
        reason=data["reason"],
        rules=tuple(_rule(item) for item in data.get("rule", [])),
    )


def _rule(item: dict[str, Any]) -> Rule:
    layers = item.get("layers", "all")
    if layers not in _LAYERS:
        raise ValueError(f"layers {layers!r} is not one of {_LAYERS}")
    return Rule(
        roles=frozenset(Role(role) for role in item["roles"]),
        type=GGMLType[item["type"]],
        reason=item["reason"],
        layers=layers,
        min_gqa=item.get("min_gqa", 1),
        imatrix=item.get("imatrix"),
    )


def choose_type(
    preset: Preset, spec: TensorSpec, *, n_layer: int, gqa: int, with_imatrix: bool = False
) -> Choice:
    """Type of one tensor under a recipe. ``gqa`` is query heads per key-value head."""
    fixed = spec.role.fixed_type
    if fixed is not None:
        return Choice(type=fixed, wanted=fixed, reason=f"{spec.role.value} is always {fixed.name}")
    for rule in preset.rules:
        if rule.applies(spec, n_layer=n_layer, gqa=gqa, with_imatrix=with_imatrix):
            return _fit(rule.type, spec.shape[-1], rule.reason)
    return _fit(preset.type, spec.shape[-1], preset.reason)


def _fit(wanted: GGMLType, n_cols: int, reason: str) -> Choice:
    """Replace a type whose blocks do not divide the rows, first by one of 32, then by F16."""
    if n_cols % wanted.block_size == 0:
        return Choice(type=wanted, wanted=wanted, reason=reason)
    fallback = _FALLBACK.get(wanted, wanted)
    if n_cols % fallback.block_size:
        fallback = GGMLType.F16
    why = f"rows of {n_cols} do not divide into blocks of {wanted.block_size}"
    return Choice(type=fallback, wanted=wanted, reason=why)
