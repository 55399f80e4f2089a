"""Rotary embedding of a drafter: base, scaling and layout, always from the drafter's own config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash2_gguf.convert.config_values import Config
from dflash2_gguf.errors import CheckpointError

__all__ = ["Rope", "RopeScaling", "read_rope"]

_SCALING = ("linear", "yarn")
_YARN = ("extrapolation_factor", "attention_factor", "beta_fast", "beta_slow")
_PLACES = ("rope_parameters", "rope_scaling")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# M-RoPE's keys say nothing of a drafter, which rotates by one position only
_KNOWN = {
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    *_YARN,
}


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
            "config.json asks for interleaved and partial rotation, which cannot be converted",
            "llama.cpp rotates halves; only heads that rotate as a whole are reordered for that",
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
    """The one rope dictionary, and the key it stands under."""
    given = {key: _group(key, config.top(key)) for key in _PLACES if config.top(key) is not None}
    if len(given) > 1 and given[_PLACES[0]] != given[_PLACES[1]]:
        raise CheckpointError(
            f"config.json contradicts itself: {' and '.join(_PLACES)} differ",
            "keep the one that the drafter was trained with",
        )
    return next(iter(given.items()), (_PLACES[0], {}))


def _group(key: str, value: Any) -> dict[str, Any]:
    """Dictionaries per layer type must agree, a drafter has one rotation."""
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {key} is {value!r}, not an object")
    groups = [value[kind] for kind in _LAYER_TYPES if kind in value]
    if not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(f"config.json: {key} is {value!r}, not an object of objects")
    if any(group != groups[0] for group in groups):
        raise CheckpointError(
            f"config.json: {key} differs between layer types",
            "llama.cpp rotates all layers of a drafter alike",
        )
    unknown = set(value) - (set(_LAYER_TYPES) if groups else _KNOWN)
    unknown |= set(groups[0] if groups else {}) - _KNOWN
    if unknown:
        raise CheckpointError(
            f"config.json: unknown in {key}: {', '.join(sorted(unknown))}",
            "it may change what the drafter computes",
        )
    return groups[0] if groups else value


def _freq_base(config: Config, origin: str, parameters: dict[str, Any]) -> tuple[float, str]:
    places = {f"{origin}.rope_theta": Config(parameters), "rope_theta": config}
    given = {
        name: place.number("rope_theta")
        for name, place in places.items()
        if place.top("rope_theta") is not None
    }
    if not given:
        raise CheckpointError(
            "config.json has no rope_theta",
            "add the value the drafter was trained with to rope_parameters; it cannot be guessed",
        )
    if len(set(given.values())) > 1:
        text = " and ".join(f"{name} = {value:g}" for name, value in given.items())
        raise CheckpointError(
            f"config.json contradicts itself: {text}",
            "keep the one that the drafter was trained with",
        )
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
