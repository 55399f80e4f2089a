"""The model card of a folder of converted drafters: what people and the hub read first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.convert.metadata import (
    NO_DERIVATIVES,
    NON_COMMERCIAL,
    Provenance,
    licence_limits,
)
from dflash2_gguf.convert.ui import human_bytes
from dflash2_gguf.errors import CheckpointError

__all__ = ["CardFile", "Measurement", "card", "read_measurements"]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Tokens per verification step at a temperature, with its confidence interval."""

    temperature: float
    length: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class CardFile:
    """One file of the folder. ``measured``: what ``fidelity`` found, nothing if it was not run."""

    name: str
    preset: str
    nbytes: int
    sha256: str
    types: Mapping[str, int]
    measured: tuple[Measurement, ...] = ()


def read_measurements(path: Path, *, imatrix: bool) -> dict[str, tuple[Measurement, ...]]:
    """What ``dflash2-convert fidelity --json`` wrote, by preset, with importance matrix or without.

    Raises CheckpointError when the file is not of that form.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {
            entry["drafter"]["preset"]: tuple(map(_measurement, entry["acceptance"]))
            for entry in entries
            if entry["drafter"]["imatrix"] is imatrix
        }
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} holds no measurements ({type(error).__name__})",
            "`dflash2-convert fidelity --json` writes them",
        ) from None


def _measurement(entry: Mapping[str, Any]) -> Measurement:
    length = entry["length"]
    return Measurement(
        temperature=float(entry["temperature"]),
        length=float(length["value"]),
        low=float(length["low"]),
        high=float(length["high"]),
    )


def card(provenance: Provenance, target: str, files: Sequence[CardFile]) -> str:
    """The whole README.md."""
    blocks = [
        "\n".join(["---", *_front_matter(provenance), "---\n"]),
        f"# {provenance.name} in GGUF\n",
        _what(provenance, target),
        _licence(provenance),
        "## Files\n",
        _table(files),
        "Checksums of the whole files are in SHA256SUMS.\n",
        "## How to run\n",
        _RUN.format(file=files[0].name),
    ]
    return "\n".join(block for block in blocks if block)


_RUN = """\
With dflash2-gguf, for a chat in the terminal:

    dflash2-run -m TARGET.gguf -d {file}

With llama.cpp, where it supports the target:

    llama-server -m TARGET.gguf -md {file} --spec-type draft-dflash

`dflash2-convert check TARGET.gguf {file}` says whether a target and this drafter belong together.
"""


def _front_matter(provenance: Provenance) -> Iterator[str]:
    if provenance.licence:
        yield f"license: {_yaml(provenance.licence)}"
    if provenance.licence_name:
        yield f"license_name: {_yaml(provenance.licence_name)}"
    if provenance.licence_link:
        yield f"license_link: {_yaml(provenance.licence_link)}"
    if provenance.repo:
        yield f"base_model: {_yaml(provenance.repo)}"
        yield "base_model_relation: quantized"
    yield "library_name: gguf"
    yield "pipeline_tag: text-generation"
    yield "tags:"
    yield from (f"- {tag}" for tag in ("gguf", "dflash", "speculative-decoding"))


def _yaml(text: str) -> str:
    """A quoted scalar, whatever the text holds: JSON strings are YAML."""
    return json.dumps(text, ensure_ascii=False)


def _what(provenance: Provenance, target: str) -> str:
    source = provenance.repo or provenance.name
    at = f" at revision {provenance.revision}" if provenance.revision else ""
    stored = (
        f", which stores its weights as {provenance.quantization}"
        if (provenance.quantization)
        else ""
    )
    return (
        f"A block-diffusion drafter for {target}: it proposes several tokens at once, and the "
        "target keeps those it would have\n"
        f"chosen itself. Converted by dflash2-gguf from {source}{at}{stored}.\n"
    )


def _licence(provenance: Provenance) -> str:
    limits = licence_limits(provenance)
    name = provenance.licence_name or provenance.licence
    if name is None:
        return ""
    lines = [f"Licence of the source: {name}."]
    if NON_COMMERCIAL in limits:
        lines.append("It allows non-commercial use only.")
    if NO_DERIVATIVES in limits:
        lines.append("It does not allow derivatives; who published this folder states a right to.")
    return " ".join(lines) + "\n"


def _table(files: Sequence[CardFile]) -> str:
    heats = [one.temperature for one in files[0].measured]
    head = ["file", "size", "tensor types", *(f"tokens per step, T {heat:g}" for heat in heats)]
    lines = [head, ["---"] * len(head), *(_row(one, len(heats)) for one in files)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(one: CardFile, n_measured: int) -> list[str]:
    types = ", ".join(f"{name} {count}" for name, count in one.types.items())
    found = [f"{m.length:.2f} ({m.low:.2f} to {m.high:.2f})" for m in one.measured]
    found += ["not measured"] * (n_measured - len(found))
    return [one.name, human_bytes(one.nbytes), types, *found]
