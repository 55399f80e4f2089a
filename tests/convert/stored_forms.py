"""Checkpoints with quantized weights, written with torch as the tools that make them store them.

Each form gives the tensors of a checkpoint, its quantization_config, and what the weights are when
they are read back, computed here in float64 from the integers and scales that were stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.convert import checkpoints

Array = np.ndarray[Any, Any]
Stored = dict[str, torch.Tensor]
# base name and weight [out, in] -> stored tensors, and the weight that they mean
Form = Callable[[str, Array], tuple[Stored, Array]]

GROUP = 16
BLOCK = 16
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ: nibble i of a word holds this output of eight
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _bf16(values: Array) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to(torch.bfloat16)


def _pack(values: Array, bits: int) -> torch.Tensor:
    """Unsigned integers [n, m] into 32-bit words along the last axis, lowest bits first."""
    per_word = 32 // bits
    words = values.astype(np.uint64).reshape(len(values), -1, per_word)
    shifted = words << (np.arange(per_word, dtype=np.uint64) * np.uint64(bits))
    return torch.tensor(shifted.sum(axis=2).astype(np.uint32).view(np.int32))


def fp8_channel(base: str, w: Array) -> tuple[Stored, Array]:
    """compressed-tensors float-quantized, a scale per row."""
    scale = _bf16(np.abs(w).max(axis=1, keepdims=True) / 400)
    stored = (torch.tensor(w) / scale.double()).to(torch.float8_e4m3fn)
    value = stored.double() * scale.double()
    return {f"{base}.weight": stored, f"{base}.weight_scale": scale}, value.numpy()


def fp8_block(base: str, w: Array) -> tuple[Stored, Array]:
    """DeepSeek's FP8: a scale per block of rows and columns, blocks at the edge cut off."""
    rows, cols = (-(-n // BLOCK) for n in w.shape)
    scale = torch.rand(rows, cols, dtype=torch.float64).float() / 100 + 0.001
    wide = scale.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    wide = wide[: w.shape[0], : w.shape[1]]
    stored = (torch.tensor(w) / wide).to(torch.float8_e4m3fn)
    return {f"{base}.weight": stored, f"{base}.weight_scale_inv": scale}, (
        stored.double() * wide
    ).numpy()


def int8_channel(base: str, w: Array) -> tuple[Stored, Array]:
    """compressed-tensors int-quantized."""
    scale = _bf16(np.abs(w).max(axis=1, keepdims=True) / 127)
    levels = np.clip(np.round(w / scale.double().numpy()), -128, 127)
    stored = torch.tensor(levels).to(torch.int8)
    value = levels * scale.double().numpy()
    return {f"{base}.weight": stored, f"{base}.weight_scale": scale}, value


def _grouped(w: Array, bits: int) -> tuple[Array, Array]:
    """Levels around 0 and scales [out, groups], bf16 values."""
    groups = w.reshape(len(w), -1, GROUP)
    most = 2 ** (bits - 1)
    scale = _bf16(np.abs(groups).max(axis=2) / (most - 1)).double().numpy()
    levels = np.clip(np.round(groups / scale[:, :, None]), -most, most - 1)
    return levels.reshape(w.shape), scale


def packed(bits: int, zero_points: bool) -> Form:
    """compressed-tensors pack-quantized; zero points are packed along the rows."""

    def form(base: str, w: Array) -> tuple[Stored, Array]:
        levels, scale = _grouped(w, bits)
        half = 2 ** (bits - 1)
        zeros = np.full(scale.shape, half)
        if zero_points:
            zeros = np.random.default_rng(len(base)).integers(half - 2, half + 3, scale.shape)
        codes = np.clip(levels + zeros.repeat(GROUP, axis=1), 0, 2 * half - 1)
        stored = {
            f"{base}.weight_packed": _pack(codes, bits),
            f"{base}.weight_scale": _bf16(scale),
            f"{base}.weight_shape": torch.tensor(w.shape),
        }
        if zero_points:
            stored[f"{base}.weight_zero_point"] = _pack(zeros.T, bits).T.contiguous()
        value = (codes - zeros.repeat(GROUP, axis=1)) * scale.repeat(GROUP, axis=1)
        return stored, value

    return form


def gptq(bits: int, v2: bool) -> Form:
    """GPTQ with an order of groups (desc_act); version 1 stores zero points less one."""

    def form(base: str, w: Array) -> tuple[Stored, Array]:
        rng = np.random.default_rng(len(base))
        out, inputs = w.shape
        half, n_groups = 2 ** (bits - 1), inputs // GROUP
        groups = rng.permutation(np.arange(inputs) // GROUP)
        scale = np.float16(np.abs(w).max() / half * rng.uniform(0.8, 1.2, (n_groups, out)))
        zeros = rng.integers(half - 2, half + 3, (n_groups, out))
        codes = np.clip(np.round(w.T / scale[groups]) + zeros[groups], 0, 2 * half - 1)
        stored = {
            f"{base}.qweight": _pack(codes.T, bits).T.contiguous(),
            f"{base}.qzeros": _pack(zeros - (0 if v2 else 1), bits),
            f"{base}.scales": torch.tensor(scale),
            f"{base}.g_idx": torch.tensor(groups, dtype=torch.int32),
        }
        return stored, ((codes - zeros[groups]) * scale[groups].astype(np.float64)).T

    return form


def awq(base: str, w: Array) -> tuple[Stored, Array]:
    """AutoAWQ's gemm format."""
    rng = np.random.default_rng(len(base))
    out, inputs = w.shape
    scale = np.float16(np.abs(w).max() / 8 * rng.uniform(0.8, 1.2, (inputs // GROUP, out)))
    zeros = rng.integers(6, 11, scale.shape)
    wide = scale.astype(np.float64).repeat(GROUP, axis=0)
    codes = np.clip(np.round(w.T / wide) + zeros.repeat(GROUP, axis=0), 0, 15)

    def order(values: Array) -> Array:
        return values.reshape(len(values), -1, 8)[:, :, _AWQ].reshape(values.shape)

    stored = {
        f"{base}.qweight": _pack(order(codes), 4),
        f"{base}.qzeros": _pack(order(zeros), 4),
        f"{base}.scales": torch.tensor(scale),
    }
    return stored, ((codes - zeros.repeat(GROUP, axis=0)) * wide).T


def _fp4(w: Array, scale: Array, group: int) -> tuple[torch.Tensor, Array]:
    """Nearest E2M1 codes, two a byte, and what they mean."""
    wide = scale.repeat(group, axis=1)
    magnitude = np.abs(np.abs(w / wide)[:, :, None] - _E2M1).argmin(axis=2)
    codes = magnitude + 8 * (w < 0)
    raw = codes[:, 0::2] + 16 * codes[:, 1::2]
    return torch.tensor(raw.astype(np.uint8)), np.where(w < 0, -1, 1) * _E2M1[magnitude] * wide


def nvfp4(modelopt: bool) -> Form:
    """NVFP4: E4M3 scales of 16, and one of the whole, which ModelOpt multiplies by."""

    def form(base: str, w: Array) -> tuple[Stored, Array]:
        factor = float(np.float32(np.abs(w).max() / 6 / 448))
        most = np.abs(w.reshape(len(w), -1, 16)).max(axis=2)
        local = torch.tensor(most / 6 / factor).to(torch.float8_e4m3fn)
        raw, value = _fp4(w, local.double().numpy() * factor, 16)
        if modelopt:
            whole = {f"{base}.weight_scale_2": torch.tensor(factor), f"{base}.weight": raw}
            whole[f"{base}.input_scale"] = torch.tensor(1.0)
        else:
            whole = {f"{base}.weight_global_scale": torch.tensor([1 / factor])}
            whole |= {f"{base}.weight_packed": raw}
        return {**whole, f"{base}.weight_scale": local}, value

    return form


def mxfp4(base: str, w: Array) -> tuple[Stored, Array]:
    """MXFP4: powers of two as scales of 32."""
    exponent = np.ceil(np.log2(np.abs(w.reshape(len(w), -1, 32)).max(axis=2) / 6))
    raw, value = _fp4(w, np.exp2(exponent), 32)
    codes = torch.tensor((exponent + 127).astype(np.uint8))
    return {f"{base}.weight_packed": raw, f"{base}.weight_scale": codes}, value


def _groups(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": layout, **_groups(**weights)}


_INT = {"type": "int", "strategy": "group", "group_size": GROUP}
FORMS: dict[str, tuple[Form, dict[str, Any]]] = {
    "fp8 by rows": (
        fp8_channel,
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "fp8 by blocks": (fp8_block, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "int8 by rows": (
        int8_channel,
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    ),
    "int4": (packed(4, False), _compressed("pack-quantized", num_bits=4, **_INT)),
    "int4 with zero points": (packed(4, True), _compressed("pack-quantized", num_bits=4, **_INT)),
    "int8 packed": (packed(8, False), _compressed("pack-quantized", num_bits=8, **_INT)),
    "gptq": (gptq(4, v2=False), {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "gptq of 8 bits, version 2": (
        gptq(8, v2=True),
        {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "nvfp4": (
        nvfp4(modelopt=False),
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"),
    ),
    "nvfp4 by modelopt": (
        nvfp4(modelopt=True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "mxfp4": (
        mxfp4,
        _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group"),
    ),
}


def write_quantized(folder: Path, name: str, **sizes: int) -> dict[str, Array]:
    """A checkpoint with its linear layers in form ``name``; returns all weights in float64."""
    form, config = FORMS[name]
    data = checkpoints.config(quantization_config=config, **sizes)
    values = checkpoints.tensors(data)
    stored: Stored = {}
    weights: dict[str, Array] = {}
    for tensor, array in values.items():
        weights[tensor] = array.astype(np.float64)
        if not tensor.endswith("_proj.weight"):
            stored[tensor] = _bf16(array)
            continue
        found, weights[tensor] = form(tensor.removesuffix(".weight"), weights[tensor])
        stored |= found
    folder.mkdir(parents=True)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(data))
    return weights
