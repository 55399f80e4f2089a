"""Rotary embedding of a drafter: base, scaling and layout, always from the drafter's own config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash2_gguf.convert.config_values import Config
from dflash2_gguf.errors import CheckpointError

__all__ = ["Rope", "RopeScaling", "read_rope"]

_SCALING = ("linear", "yarn")
_YARN = ("extrapolation_factor", "attention_factor", "beta_fast", "beta_slow")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Context extension, kinds ``linear`` and ``yarn``."""

    kind: str
    factor: float
    original_context: int | None = None
    extrapolation_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rope:
    """``origin`` says where the base was found; ``dims`` < head_dim is partial rotation."""

    freq_base: float
    origin: str
    interleaved: bool
    dims: int
    partial: bool
    scaling: RopeScaling | None = None


def read_rope(config: Config, head_dim: int) -> Rope:
    """Read RoPE facts; CheckpointError when the base is missing or given twice and differently."""
    origin, parameters = _parameters(config)
    base, base_origin = _freq_base(config, origin, parameters)
    interleaved = not _neox(config)
    dims, partial = _dimensions(config, parameters, head_dim)
    if interleaved and dims != head_dim:
        raise CheckpointError(
            "config.json asks for interleaved and partial rotation, which cannot be converted"
        )
    return Rope(
        freq_base=base,
        origin=base_origin,
        interleaved=interleaved,
        dims=dims,
        partial=partial,
        scaling=_scaling(parameters),
    )


def _parameters(config: Config) -> tuple[str, dict[str, Any]]:
    """The rope dictionary; per-layer-type dictionaries must agree, a drafter has one rotation."""
    for key in ("rope_parameters", "rope_scaling"):
        value = config.top(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json: {key} is {value!r}, not an object")
        groups = [value[k] for k in ("full_attention", "sliding_attention") if k in value]
        if not all(isinstance(group, dict) for group in groups):
            raise CheckpointError(f"config.json: {key} is {value!r}, not an object of objects")
        if any(group != groups[0] for group in groups):
            raise CheckpointError(f"config.json: {key} differs between layer types")
        return key, groups[0] if groups else value
    return "rope_parameters", {}


def _freq_base(config: Config, origin: str, parameters: dict[str, Any]) -> tuple[float, str]:
    inner, outer = Config(parameters), config
    found = {
        f"{origin}.rope_theta": inner.number("rope_theta") if "rope_theta" in parameters else None,
        "rope_theta": outer.number("rope_theta") if "rope_theta" in config.data else None,
    }
    given = {name: value for name, value in found.items() if value is not None}
    if not given:
        raise CheckpointError(
            "config.json has no rope_theta",
            "add the value the drafter was trained with to rope_parameters; it cannot be guessed",
        )
    if len(set(given.values())) > 1:
        text = " and ".join(f"{name} = {value:g}" for name, value in given.items())
        raise CheckpointError(f"config.json contradicts itself: {text}")
    name, base = next(iter(given.items()))
    if base <= 0:
        raise CheckpointError(f"config.json: {name} is {base:g}")
    return base, name


def _neox(config: Config) -> bool:
    """True for rotation in halves; both spellings occur, see vLLM and SGLang."""
    given = {
        key: config.draft(key)
        for key in ("rope_is_neox_style", "is_neox_style")
        if config.draft(key) is not None
    }
    if any(not isinstance(value, bool) for value in given.values()) or len(set(given.values())) > 1:
        raise CheckpointError(f"config.json: cannot make sense of {given}")
    return next(iter(given.values()), True)


def _dimensions(config: Config, parameters: dict[str, Any], head_dim: int) -> tuple[int, bool]:
    """Rotated dimensions per head, and whether config.json limits them at all."""
    given: dict[str, int] = {}
    dims = config.draft("rope_dim")
    if dims is not None:
        given["rope_dim"] = Config({"rope_dim": dims}).positive("rope_dim")
    factor = parameters.get("partial_rotary_factor", config.draft("partial_rotary_factor"))
    if factor is not None:
        number = Config({"partial_rotary_factor": factor}).number("partial_rotary_factor")
        given["partial_rotary_factor"] = int(head_dim * number)
    if not given:
        return head_dim, False
    if len(set(given.values())) > 1:
        raise CheckpointError(
            f"config.json contradicts itself: rope_dim {dims}, partial_rotary_factor {factor}"
        )
    result = next(iter(given.values()))
    if not 0 < result <= head_dim or result % 2:
        raise CheckpointError(f"config.json: {result} rotated dimensions of {head_dim}")
    return result, True


def _scaling(parameters: dict[str, Any]) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind not in _SCALING:
        raise CheckpointError(
            f"config.json: rope_type {kind!r} is not supported",
            f"this version converts default, {', '.join(_SCALING)}",
        )
    values = Config(parameters)
    factor = values.number("factor")
    if factor <= 0:
        raise CheckpointError(f"config.json: factor of rope_type {kind!r} is {factor:g}")
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context=(
            values.positive("original_max_position_embeddings") if kind == "yarn" else None
        ),
        **{key: values.draft_float(key) for key in _YARN if kind == "yarn"},
    )
