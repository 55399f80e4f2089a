"""What a drafter needs to know of its target: tokenizer metadata, sizes, M-RoPE.

Taken from the target's GGUF file (tokenizer keys are copied byte for byte) or from its Hugging Face
directory. Tensor data of the target is never read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.convert.gguf_reader import GGUFHeader, read_gguf
from dflash2_gguf.convert.gguf_values import Value
from dflash2_gguf.convert.hparams import DraftHparams
from dflash2_gguf.convert.source import read_json
from dflash2_gguf.convert.tokenizer_json import read_tokenizer
from dflash2_gguf.errors import CheckpointError, PairError
from dflash2_gguf.gguf_schema import ARCHITECTURE, Key, arch_key

__all__ = ["Target", "all_parts", "check_pair", "first_part", "open_target"]

# every row gets a name in memory; the largest vocabularies in use have 262144
_MAX_VOCAB = 2**22

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target model. ``n_layer`` counts trunk layers, without NextN (MTP) blocks."""

    name: str
    arch: str
    n_embd: int
    n_layer: int
    n_vocab: int
    mrope: bool
    tokenizer: dict[str, Value]


def open_target(path: Path) -> Target:
    """Read a target from a ``.gguf`` file (any part of a split one) or a Hugging Face directory.

    Raises CheckpointError when it cannot be read or lacks what a drafter needs.
    """
    if path.is_dir():
        return _from_directory(path)
    if not path.exists():
        raise CheckpointError(
            f"there is no target at {path}",
            "check the path; it can be a GGUF file or a Hugging Face folder",
        )
    return _from_gguf(read_gguf(first_part(path)))


def first_part(path: Path) -> Path:
    """The file of a split model that has all its metadata; ``path`` where it is not split."""
    match = _SPLIT.search(path.name)
    if match is None or int(match[1]) == 1:
        return path
    first = path.with_name(f"{path.name[: match.start()]}-00001-of-{match[2]}.gguf")
    if not first.is_file():
        raise CheckpointError(
            f"{path.name} is part {int(match[1])} of a split model and {first.name} is missing",
            "the first part holds the tokenizer",
        )
    return first


def all_parts(path: Path) -> list[Path]:
    """The files of a split model, ``path`` alone where it is not split.

    Raises CheckpointError when one is missing.
    """
    match = _SPLIT.search(path.name)
    if match is None:
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    parts = [
        path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(
            f"{path.name} is part of a split model and {missing[0]} is missing",
            "download all of its files",
        )
    return parts


def _from_gguf(header: GGUFHeader) -> Target:
    arch = header.text(Key.ARCHITECTURE)
    if arch is None:
        raise CheckpointError(f"{header.path} has no {Key.ARCHITECTURE}")
    if arch == ARCHITECTURE:
        raise PairError(
            f"{header.path} is a drafter, not a target",
            "name the model that it drafts for",
        )
    tokenizer = {
        key: value
        for key, value in header.values.items()
        if key.startswith(Key.TOKENIZER_PREFIX) and key != Key.MASK_TOKEN_ID
    }
    tokens = tokenizer.get(Key.TOKENS)
    if tokens is None:
        raise CheckpointError(
            f"{header.path} has no tokenizer",
            "give the target model's main GGUF file or its Hugging Face directory",
        )
    n_layer = _required(header, arch, Key.Arch.BLOCK_COUNT)
    nextn = header.integer(arch_key(Key.Arch.NEXTN_LAYERS, arch=arch)) or 0
    sections = header.values.get(arch_key(Key.Arch.ROPE_DIMENSION_SECTIONS, arch=arch))
    return Target(
        name=header.text(Key.NAME) or header.path.stem,
        arch=arch,
        n_embd=_required(header, arch, Key.Arch.EMBEDDING_LENGTH),
        n_layer=n_layer - nextn,
        n_vocab=tokens.count,
        mrope=sections is not None and any(sections.items()),
        tokenizer=tokenizer,
    )


def _required(header: GGUFHeader, arch: str, field: str) -> int:
    value = header.integer(arch_key(field, arch=arch))
    if value is None:
        raise CheckpointError(f"{header.path} has no {arch_key(field, arch=arch)}")
    return value


def _from_directory(path: Path) -> Target:
    config = read_json(path / "config.json")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise CheckpointError(f"{path / 'config.json'}: text_config is not an object")
    n_vocab = _config_int(path, text, "vocab_size")
    if n_vocab > _MAX_VOCAB:
        raise CheckpointError(
            f"{path / 'config.json'}: vocab_size is {n_vocab}, at most {_MAX_VOCAB} are supported"
        )
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    return Target(
        name=path.resolve().name,
        arch=_architecture(config),
        n_embd=_config_int(path, text, "hidden_size"),
        n_layer=_config_int(path, text, "num_hidden_layers"),
        n_vocab=n_vocab,
        mrope=isinstance(rope, dict) and "mrope_section" in rope,
        tokenizer=read_tokenizer(path, n_vocab=n_vocab, model_type=str(text.get("model_type"))),
    )


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    return str(
        named[0] if isinstance(named, list) and named else config.get("model_type", "unknown")
    )


def _config_int(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{path / 'config.json'}: {key} is {value!r}")
    return value


def check_pair(hparams: DraftHparams, target: Target) -> None:
    """Raise PairError when this drafter was not made for this target, naming both numbers."""
    _check_equal("vocabulary", hparams.n_vocab, target.n_vocab, target)
    _check_equal("hidden size", hparams.n_embd, target.n_embd, target)
    if hparams.n_target_layer is not None:
        _check_equal("number of target layers", hparams.n_target_layer, target.n_layer, target)
    last = max(hparams.target_layer_ids)
    if last >= target.n_layer:
        raise PairError(
            f"the drafter reads layer {last} of its target, but {target.name} has layers "
            f"0 to {target.n_layer - 1}",
            "give the target the drafter was trained for",
        )


def _check_equal(what: str, drafter: int, target_value: int, target: Target) -> None:
    if drafter != target_value:
        raise PairError(
            f"{what} differs: the drafter was made for {drafter}, {target.name} has {target_value}",
            "give the target the drafter was trained for",
        )
