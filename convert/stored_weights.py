"""How a checkpoint stores each weight: plain, or quantized with scales beside it.

Formats are told by the tensors that stand together, named as compressed-tensors, AutoAWQ, GPTQ,
ModelOpt and DeepSeek's FP8 releases name them. What belongs to no known format is left for the
caller to refuse: a scale that is dropped gives a drafter of which nothing is ever accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash2_gguf.convert.source import Checkpoint, SourceTensor
from dflash2_gguf.errors import CheckpointError

__all__ = ["Scheme", "StoredWeight", "Tables", "find_weights"]

_WEIGHT = ".weight"
_FLOATS = ("F32", "F16", "BF16")
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_GROUPED = "the weights of a group share one scale"

# of activations and caches, which a GGUF file does not quantize
_IGNORED = (
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What quantization_config says that tensors do not: bits, FP8 block size, GPTQ's zero rule.

    bits: of integers packed into 32-bit words. block: rows and columns that share an FP8 scale.
    """

    bits: int = 4
    block: tuple[int, int] | None = None
    zeros_minus_one: bool = True

    @classmethod
    def read(cls, config: object) -> Scheme:
        """From ``quantization_config``; CheckpointError names a value that cannot be."""
        data = config if isinstance(config, dict) else {}
        return cls(
            bits=_bits(data),
            block=_block(data),
            zeros_minus_one=data.get("checkpoint_format", "gptq") != "gptq_v2",
        )


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """A weight named as it would be unquantized. ``parts``: scales and the like, by their role.

    form: "plain", "scaled" (FP8 or INT8 with scales), "packed" (integers along the columns),
    "fp4" (with a scale per 16 or 32 weights), "awq" or "gptq" (integers, columns first), "ggml"
    (a type of ggml's, scales inside).
    """

    name: str
    main: SourceTensor
    form: str = "plain"
    scheme: Scheme = field(default_factory=Scheme)
    parts: Mapping[str, SourceTensor] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Stored as the floats they are."""
        return self.form == "plain"

    @property
    def by_columns(self) -> bool:
        """The checkpoint holds the transposed weight, so no row is known before the end."""
        return self.form in ("awq", "gptq")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight; packed columns may end in padding."""
        stored = self.main.shape
        if self.form in ("plain", "scaled", "ggml") or len(stored) != 2:
            return stored
        per_word = 32 // self.scheme.bits
        return {
            "packed": (stored[0], stored[1] * per_word),
            "fp4": (stored[0], stored[1] * 2),
            "awq": (stored[1] * per_word, stored[0]),
            "gptq": (stored[1], stored[0] * per_word),
        }[self.form]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Can this be a weight of ``shape``?"""
        if self.form != "packed":
            return self.shape == shape
        padding = self.shape[-1] - shape[-1]
        return self.shape[:-1] == shape[:-1] and 0 <= padding < 32 // self.scheme.bits


@dataclass(frozen=True, kw_only=True)
class Tables:
    """A target's embeddings and head, by the names that a drafter's own would have, and where."""

    checkpoints: Mapping[str, Checkpoint]
    weights: Mapping[str, StoredWeight]


def _bits(data: dict[str, Any]) -> int:
    """Of GPTQ and AWQ at the top, of compressed-tensors in its one kind of group."""
    found = {data[key] for key in ("bits", "w_bit") if isinstance(data.get(key), int)}
    groups = data.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("type", "int") == "int":
            bits = weights.get("num_bits")
            found.add(repr(bits) if isinstance(bits, (list, dict)) else bits)
    if not found:
        return 4
    if len(found) > 1 or not found <= {4, 8}:
        raise CheckpointError(
            f"config.json: quantization_config packs weights of {_listed(found)} bits",
            "checkpoints with 4 or 8 bits throughout are read; take the unquantized one",
        )
    return int(found.pop())


def _listed(values: set[Any]) -> str:
    return " and ".join(sorted(map(repr, values)))


def _block(data: dict[str, Any]) -> tuple[int, int] | None:
    value = data.get("weight_block_size")
    groups = data.get("config_groups")
    for group in groups.values() if value is None and isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        value = value or (weights.get("block_structure") if isinstance(weights, dict) else None)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(_is_size(n) for n in value):
        raise CheckpointError(f"config.json: weight_block_size is {value!r}")
    return value[0], value[1]


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


def find_weights(
    checkpoint: Checkpoint, scheme: Scheme
) -> tuple[dict[str, StoredWeight], dict[str, SourceTensor]]:
    """Weights by their unquantized names, and tensors that only concern activations.

    Raises CheckpointError for a quantized weight of which a part is missing.
    """
    left = dict(checkpoint.tensors)
    ignored = {name: left.pop(name) for name in list(left) if name.endswith(_IGNORED)}
    weights: dict[str, StoredWeight] = {}
    for name in list(left):
        found = _quantized(name, left, scheme) if name in left else None
        if found is not None:
            weights[found.name] = found
            for part in (found.main, *found.parts.values()):
                del left[part.name]
    for name, tensor in left.items():
        if name in weights:
            raise CheckpointError(f"the checkpoint holds {name} twice, quantized and not")
        weights[name] = StoredWeight(name=name, main=tensor)
    return weights, ignored


def _quantized(
    name: str, tensors: Mapping[str, SourceTensor], scheme: Scheme
) -> StoredWeight | None:
    """The weight whose main tensor is ``name``, None when that is a plain tensor or a part."""
    for suffix, form, roles in (
        (".weight_packed", "packed", _PACKED),
        (".qweight", "awq", _BY_COLUMNS),
        (_WEIGHT, "scaled", _SCALED),
    ):
        if not name.endswith(suffix):
            continue
        base = name.removesuffix(suffix)
        parts = {
            role: tensors[f"{base}.{part}"]
            for part, role in roles.items()
            if f"{base}.{part}" in tensors
        }
        main = tensors[name]
        if suffix == _WEIGHT and not parts and main.dtype not in (*_FLOAT8, "I8", "U8"):
            return None
        if suffix == _WEIGHT and main.dtype in _FLOATS:
            part = next(iter(parts.values()))
            raise CheckpointError(
                f"tensor {name} is stored as {main.dtype} and has {part.name} beside it",
                "whether that scale is in the weights already cannot be told",
            )
        form = _form(form, main, parts)
        _require_parts(name, form, parts)
        _require_words(form, [main, *(parts[role] for role in ("zeros",) if role in parts)])
        return StoredWeight(name=base + _WEIGHT, main=main, form=form, scheme=scheme, parts=parts)
    return None


# tensors beside a weight -> what they are
_SCALED = {
    "weight_scale": "scale",
    "weight_scale_inv": "scale",
    "weight_scale_2": "global_scale",
    "weight_zero_point": "zeros",
}
_PACKED = {
    "weight_scale": "scale",
    "weight_shape": "shape",
    "weight_zero_point": "zeros",
    "weight_g_idx": "groups",
    "weight_global_scale": "global_divisor",
}
_BY_COLUMNS = {"scales": "scale", "qzeros": "zeros", "g_idx": "groups"}


def _form(form: str, main: SourceTensor, parts: Mapping[str, SourceTensor]) -> str:
    if form == "awq":
        # AWQ packs along the outputs, GPTQ along the inputs: only one fits the scales
        scale = parts.get("scale")
        by_outputs = scale is None or len(scale.shape) != 2 or main.shape[-1:] != scale.shape[-1:]
        return "awq" if by_outputs else "gptq"
    return "fp4" if main.dtype == "U8" else form


def _require_words(form: str, tensors: Sequence[SourceTensor]) -> None:
    """Integers are packed into tables of 32-bit words; what has scales alone takes a byte."""
    main = tensors[0]
    if form == "scaled" and main.dtype not in (*_FLOAT8, "I8"):
        raise CheckpointError(
            f"tensor {main.stored_name} has scales and is stored as {main.dtype}",
            "take the unquantized checkpoint",
        )
    if form not in ("packed", "awq", "gptq"):
        return
    for tensor in tensors:
        if tensor.dtype != "I32" or len(tensor.shape) != 2:
            raise CheckpointError(
                f"tensor {tensor.stored_name} ({tensor.dtype} {list(tensor.shape)}) is no table of "
                "packed integers",
                "take the unquantized checkpoint",
            )


def _require_parts(name: str, form: str, parts: Mapping[str, SourceTensor]) -> None:
    needed = {"awq": ("scale", "zeros"), "gptq": ("scale", "zeros")}.get(form, ("scale",))
    missing = [part for part in needed if part not in parts]
    if missing:
        raise CheckpointError(
            f"tensor {name} is quantized and has no {missing[0]} beside it",
            f"{_GROUPED}; fetch the whole checkpoint, or take the unquantized one",
        )
