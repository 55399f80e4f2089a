"""Drafters as older converters and forks wrote them, written with the ``gguf`` package.

Each kind is a file of this project's converter with other names and fewer keys, as public loaders
and converters spell them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf

from dflash2_gguf.convert.migration import Migration, plan_migration, write_migrated
from dflash2_gguf.convert.pipeline import make_plan, run
from dflash2_gguf.presets import load_preset

U32, F32, I32 = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.INT32
ARRAY = gguf.GGUFValueType.ARRAY
# the number of the tiny drafter; see checkpoints.config
OUTPUTS = [1, 3]

_NOTES = "dflash2."
_CAUSAL = "dflash.attention.causal"
_WINDOW = ("dflash.attention.sliding_window", "dflash.attention.sliding_window_pattern")
_SELECTOR = ("selector_rank", "selector_top_k")
_CONV = ("conv_kernel_size", "conv_group_size")


@dataclass(frozen=True)
class Kind:
    """How a kind of file differs: architecture, keys (None: left out), tensors, and keys it adds.

    ``keys`` and ``tensors`` map names of ours; ``needs`` are the options a migration needs.
    """

    arch: str = "dflash"
    keys: Mapping[str, str | None] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    adds: Mapping[str, tuple[Any, Any, Any]] = field(default_factory=dict)
    tokenizer: bool = True
    needs: tuple[str, ...] = ()


def dropped(*names: str) -> dict[str, str | None]:
    return dict.fromkeys(names)


def layers(tails: Mapping[str, str]) -> dict[str, str]:
    return {
        f"blk.{i}.{ours}": f"blk.{i}.{theirs}" for i in range(2) for ours, theirs in tails.items()
    }


_DOTTED_CONV = layers(
    {
        "attn_conv_base": "attn_conv.base",
        "attn_conv_proj.weight": "attn_conv.proj.weight",
        "ffn_conv_base": "ffn_conv.base",
        "ffn_conv_proj.weight": "ffn_conv.proj.weight",
    }
)


def nested(arch: str) -> dict[str, str | None]:
    """Keys that forks put one level down."""
    return {
        "dflash.block_size": f"{arch}.dflash.block_size",
        "dflash.target_layers": None,
        "tokenizer.ggml.mask_token_id": f"{arch}.dflash.mask_token_id",
    }


def ids(arch: str) -> dict[str, tuple[Any, Any, Any]]:
    return {f"{arch}.dflash.target_layer_ids": (OUTPUTS, ARRAY, I32)}


KINDS: dict[str, Kind] = {
    # buun-llama-cpp and BeeLlama before the merge
    "dflash-draft": Kind(
        arch="dflash-draft",
        keys={**nested("dflash-draft"), **dropped(_CAUSAL)},
        tensors={
            "fc.weight": "dflash_fc.weight",
            "enc.output_norm.weight": "dflash_hidden_norm.weight",
            **layers({"ffn_norm.weight": "post_attention_norm.weight"}),
        },
        adds={**ids("dflash-draft"), "dflash-draft.dflash.n_target_features": (64, U32, None)},
        needs=("config",),
    ),
    # Lucebox
    "qwen35-dflash-draft": Kind(
        arch="qwen35-dflash-draft",
        keys={
            **nested("qwen35-dflash-draft"),
            **{
                f"dflash.{name}": f"qwen35-dflash-draft.dflash.dflash2.{name}"
                for name in (*_CONV, *_SELECTOR)
            },
            **dropped(_CAUSAL, *_WINDOW, "dflash.attention.value_length"),
        },
        tensors={
            "fc.weight": "dflash.fc.weight",
            "enc.output_norm.weight": "dflash.hidden_norm.weight",
            "selector_hidden.weight": "dflash.selector.hproj.weight",
            "selector_predecessor.weight": "dflash.selector.pred_cb",
            "selector_successor.weight": "dflash.selector.succ_cb",
            **_DOTTED_CONV,
        },
        adds={
            **ids("qwen35-dflash-draft"),
            "qwen35-dflash-draft.dflash.n_target_layers": (2, U32, None),
            "qwen35-dflash-draft.vocab_size": (24, U32, None),
        },
        tokenizer=False,
        needs=("config", "target"),
    ),
    # a relative of it with a DFlash 2 level of its own and few keys
    "dflash-draft, dflash2 keys": Kind(
        arch="dflash-draft",
        keys={
            **nested("dflash-draft"),
            **{f"dflash.{name}": f"dflash-draft.dflash2.{name}" for name in _SELECTOR},
            "dflash.conv_kernel_size": "dflash-draft.dflash2.conv_taps",
            "dflash.conv_group_size": "dflash-draft.dflash2.conv_group_size",
            **dropped(
                _CAUSAL,
                *_WINDOW,
                "dflash.context_length",
                "dflash.attention.layer_norm_rms_epsilon",
                "dflash.attention.value_length",
            ),
        },
        tensors={
            "fc.weight": "dflash_fc.weight",
            "enc.output_norm.weight": "dflash_hidden_norm.weight",
            "selector_hidden.weight": "selector_hproj.weight",
            "selector_predecessor.weight": "selector_pred",
            "selector_successor.weight": "selector_succ",
            **layers({"ffn_norm.weight": "post_attention_norm.weight"}),
        },
        adds=ids("dflash-draft"),
        tokenizer=False,
        needs=("config", "target"),
    ),
    # an exporter that writes both vocabularies of names
    "names of config.json": Kind(
        arch="dflash-draft",
        keys={**nested("dflash-draft"), **dropped(_CAUSAL, *_WINDOW)},
        tensors={
            "fc.weight": "dflash_fc.weight",
            "enc.output_norm.weight": "dflash_hidden_norm.weight",
            **layers({"ffn_norm.weight": "post_attention_norm.weight"}),
        },
        adds={
            **ids("dflash-draft"),
            "dflash-draft.target_layer_ids": (OUTPUTS, ARRAY, I32),
            "dflash-draft.block_size": (4, U32, None),
            "dflash-draft.mask_token_id": (3, U32, None),
            "dflash-draft.hidden_size": (32, U32, None),
            "dflash-draft.intermediate_size": (64, U32, None),
            "dflash-draft.num_attention_heads": (4, U32, None),
            "dflash-draft.num_hidden_layers": (2, U32, None),
            "dflash-draft.num_key_value_heads": (2, U32, None),
            "dflash-draft.num_target_layers": (6, U32, None),
            "dflash-draft.rms_norm_eps": (1e-5, F32, None),
            "dflash-draft.rope_theta": (1e4, F32, None),
        },
        needs=("config",),
    ),
    # BeeLlama after the merge: the key names of upstream, tensor names of its own
    "dflash, dotted names": Kind(
        keys={"tokenizer.ggml.mask_token_id": "dflash.dflash.mask_token_id"},
        tensors={
            "selector_hidden.weight": "selector.hidden_proj.weight",
            "selector_predecessor.weight": "selector.pred_codebook",
            "selector_successor.weight": "selector.succ_codebook",
            **_DOTTED_CONV,
        },
    ),
    # upstream before its merge
    "dflash, ids of outputs": Kind(
        keys={
            "dflash.target_layers": None,
            "tokenizer.ggml.mask_token_id": "dflash.mask_token_id",
        },
        adds={"dflash.target_layer_ids": (OUTPUTS, ARRAY, I32)},
    ),
    "no target layers": Kind(keys=dropped("dflash.target_layers"), needs=("config",)),
    "no mask token": Kind(keys=dropped("tokenizer.ggml.mask_token_id"), needs=("config",)),
    "no window": Kind(keys=dropped(*_WINDOW), needs=("config",)),
    "no causality": Kind(keys=dropped(_CAUSAL), needs=("config",)),
    "no RoPE base": Kind(keys=dropped("dflash.rope.freq_base"), needs=("config",)),
    "no RoPE sections": Kind(
        keys=dropped("dflash.rope.dimension_sections"), needs=("target with M-RoPE",)
    ),
    "wide integers": Kind(
        keys=dropped("dflash.block_size", "dflash.target_layers"),
        adds={
            "dflash.block_size": (4, gguf.GGUFValueType.UINT64, None),
            "dflash.target_layers": ([2, 4], ARRAY, gguf.GGUFValueType.INT64),
        },
    ),
    "ids one too low": Kind(
        keys=dropped("dflash.target_layers"),
        adds={"dflash.target_layers": (OUTPUTS, ARRAY, I32)},
        needs=("config",),
    ),
    "nested tags": Kind(adds={"general.tags": ([["a"], ["b", "c"]], ARRAY, ARRAY)}),
}


def write_old(good: Path, path: Path, kind: Kind, *, alignment: int | None = None) -> Path:
    """Write ``good`` as a file of that kind, tensor for tensor."""
    reader = gguf.GGUFReader(good)
    writer = gguf.GGUFWriter(path, kind.arch)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, entry in reader.fields.items():
        name = kind.keys.get(key, re.sub(r"^dflash\.", f"{kind.arch}.", key))
        foreign = key.startswith(("GGUF.", _NOTES)) or key == "general.architecture"
        without = key.startswith("tokenizer.") and not kind.tokenizer and key not in kind.keys
        if foreign or without or name is None:
            continue
        writer.add_key_value(name, entry.contents(), entry.types[0], _item(entry))
    for key, (value, kind_of, item) in kind.adds.items():
        writer.add_key_value(key, value, kind_of, item)
    for tensor in reader.tensors:
        name = kind.tensors.get(tensor.name, tensor.name)
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _item(entry: gguf.ReaderField) -> Any:
    return entry.types[-1] if entry.types[0] is ARRAY else None


def converted(source: Path, target: Path, path: Path, preset: str = "bf16") -> Path:
    """What the converter writes for this drafter."""
    run(make_plan(source, target, [(load_preset(preset), path)]), force=False, progress=ignore)
    return path


def ignore(_count: int) -> None:
    """Nobody watches the progress."""


def migrated(path: Path, out: Path, **options: Any) -> Migration:
    """Migrate ``path`` to ``out``."""
    migration = plan_migration(path, **options)
    write_migrated(migration, out, force=False, progress=ignore)
    return migration
