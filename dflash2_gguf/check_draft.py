"""What the headers of a drafter alone tell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from dflash2_gguf.check_fact import Fact, error, from_error, note, ok, warning
from dflash2_gguf.check_files import DraftFile, tensor_bytes
from dflash2_gguf.convert.metadata import Provenance, licence_warning
from dflash2_gguf.gguf_schema import Key, arch_key, tensor_name
from dflash2_gguf.known_models import Release, find_release
from dflash2_gguf.words import counted

__all__ = ["CONVERT", "MIGRATE", "draft_facts"]

CONVERT = "convert the drafter's checkpoint again with `dflash2-convert`"
MIGRATE = "`dflash2-convert migrate --config config.json` adds it without touching the tensors"
_CORRECT = "`dflash2-convert migrate --config config.json` corrects it"

_MAX_BLOCK = 32  # DFLASH2_MAX_DRAFT
# what converters write who did not find a base: llama.cpp's own default, and that of others
_DEFAULT_BASES = (1e4, 1e6)
_FEW_BITS = 4.0

_COMPARED = (
    "target_layers",
    "mask_token_id",
    "rope_base",
    "block_size",
    "sliding_window",
    "causal",
    "norm_epsilon",
    "conv_kernel",
    "conv_group",
    "selector_rank",
    "selector_top_k",
    "output_multiplier",
    "softcap",
)


def draft_facts(draft: DraftFile) -> Iterator[Fact]:
    """A fact for everything a drafter must have, whatever its target."""
    facts = draft.facts
    yield _identity(draft)
    yield from _tensors(draft)
    yield _block(facts)
    if facts["kind"].startswith("DFlash 2"):
        yield _selector(facts)
        yield _selector_types(draft)
    yield _causality(facts)
    yield _window(draft)
    yield _rope_base(draft)
    yield _rope_layout(draft)
    yield _release(facts)
    yield _licence(facts)
    yield _origin(draft)


def _identity(draft: DraftFile) -> Fact:
    facts = draft.facts
    kind = facts["kind"].partition(" (")[0]
    types = ", ".join(f"{name} {count}" for name, count in facts["tensor_types"].items())
    what = f"{facts['name'] or draft.path.name}, {kind}, {facts['parameters']:,} parameters"
    if not kind.startswith("DFlash 2"):
        return error(
            "drafter",
            f"{what}: it has no candidate selector",
            "the programs of llama.cpp run it, `dflash2-run` runs DFlash 2 drafters",
        )
    return ok("drafter", f"{what} ({types})")


def _tensors(draft: DraftFile) -> Iterator[Fact]:
    if not draft.tensor_faults:
        yield ok("tensors", f"all {draft.facts['tensors']} there, each of the right shape")
    for kind, fault in draft.tensor_faults.items():
        if kind == "incomplete":
            yield note("tensors", f"not compared: {fault.message}", "see what is missing below")
        else:
            yield from_error("tensors", fault)


def _block(facts: Mapping[str, Any]) -> Fact:
    size = facts["block_size"]
    if size is None:
        return error("block size", f"the file has no {arch_key(Key.Arch.BLOCK_SIZE)}", MIGRATE)
    if not 2 <= size <= _MAX_BLOCK:
        tokens = counted(size, "token")
        return error("block size", f"{tokens}, it can be 2 to {_MAX_BLOCK}", CONVERT)
    return ok("block size", f"{size}: a token and {size - 1} drafted after it")


def _selector(facts: Mapping[str, Any]) -> Fact:
    names = ("conv_kernel", "conv_group", "selector_rank", "selector_top_k")
    numbers = {name: facts[name] for name in names}
    name = "selector and convolutions"
    for key, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            return error(name, f"{key.replace('_', ' ')} is {value or 'missing'}", CONVERT)
    kernel, group, rank, top_k = numbers.values()
    hidden = facts["hidden_size"] or 0
    if hidden % group:
        return error(name, f"groups of {group} do not divide the hidden size {hidden}", CONVERT)
    lattice = top_k * (top_k + 1)
    if hidden < lattice:
        return error(
            name,
            f"{top_k} candidates need rows of {lattice}, the hidden size is {hidden}",
            CONVERT,
        )
    return ok(
        name, f"{top_k} candidates of rank {rank}, kernel of {kernel} taps in groups of {group}"
    )


def _selector_types(draft: DraftFile) -> Fact:
    """Few of its bits are spent there, and what it loses cannot be seen in perplexity."""
    name = "selector precision"
    if draft.header is None:
        return ok(name, "as the checkpoint stores it")
    names = [
        tensor_name(f"candidate_selector.{part}") or ""
        for part in (
            "hidden_projection.weight",
            "predecessor_codebook",
            "successor_codebook",
        )
    ]
    found = [draft.header.tensors[n] for n in names if n in draft.header.tensors]
    kinds = {t.name: getattr(t.type, "name", f"type {int(t.type)}") for t in found}
    few = [t.name for t in found if 1 < 8 * tensor_bytes(t) < _FEW_BITS * math.prod(t.shape)]
    if few:
        return warning(
            name,
            f"less than {_FEW_BITS:g} bits per weight: "
            + ", ".join(f"{n} {kinds[n]}" for n in few),
            "measure it with --run, or take a quantization that spares the selector",
        )
    return ok(name, ", ".join(sorted(set(kinds.values()))) or "no selector tensors")


def _causality(facts: Mapping[str, Any]) -> Fact:
    causal = facts["causal"]
    if causal is None:
        return warning(
            "causality",
            "not stated: libraries then take causal, programs bidirectional attention",
            MIGRATE,
        )
    if causal:
        return note(
            "causality",
            "causal within the block; published DFlash 2 drafters are bidirectional",
            "compare with is_causal in the checkpoint's config.json",
        )
    return ok("causality", "bidirectional within the block")


def _window(draft: DraftFile) -> Fact:
    facts = draft.facts
    size, flags, layers = facts["sliding_window"], facts["sliding_layers"], facts["layers"]
    if size is None and flags and any(flags):
        return error("window", "layers are marked as windowed and no window is given", MIGRATE)
    if not size:
        return _no_window(draft)
    if not flags:
        return error("window", f"a window of {size} and no list of the layers it is for", MIGRATE)
    if len(flags) != layers:
        marks = f"{counted(len(flags), 'mark')} of windowed layers"
        return error("window", f"{marks}, {counted(layers, 'layer')}", CONVERT)
    block, tokens = facts["block_size"] or 0, counted(size, "token")
    if size < block:
        return warning("window", f"{tokens}, less than the block of {block} tokens", CONVERT)
    where = "all layers" if all(flags) else f"{sum(map(bool, flags))} of {layers} layers"
    return ok("window", f"{tokens} in {where}")


def _no_window(draft: DraftFile) -> Fact:
    """Converters that wrote no window keys left files that look like full attention."""
    if draft.header is None or draft.header.integer(Key.FORMAT) is not None:
        return ok("window", "none: every layer sees the whole context")
    return warning(
        "window",
        "none given, so every layer sees the whole context; all releases have a window, and "
        "converters that forget it cost acceptance as the context grows",
        "compare with layer_types in the checkpoint's config.json; " + MIGRATE,
    )


def _rope_base(draft: DraftFile) -> Fact:
    facts = draft.facts
    base, origin = facts["rope_base"], facts.get("rope_base_from")
    if base is None:
        return error(
            "rope base",
            "not given: llama.cpp then takes 10000, whatever the drafter was trained with",
            MIGRATE,
        )
    if not isinstance(base, int | float) or not (math.isfinite(base) and base > 0):
        return error("rope base", f"{base}, it must be a positive number", CONVERT)
    if origin:
        return ok("rope base", f"{base:g}, from {origin} of config.json")
    release = find_release(dict(facts))
    if release is not None and release.rope_base == base:
        return ok("rope base", f"{base:g}, as in {release.name}")
    if base in _DEFAULT_BASES:
        return warning(
            "rope base",
            f"{base:g}, which is also what converters write that find none; "
            "the file does not say where it is from",
            "compare with rope_theta in the checkpoint's config.json; " + _CORRECT,
        )
    return note(
        "rope base",
        f"{base:g}; the file does not say where it is from",
        "compare with rope_theta in the checkpoint's config.json",
    )


def _rope_layout(draft: DraftFile) -> Fact:
    layout = draft.facts.get("rope_layout")
    if layout is not None:
        reordered = "; reordered when it is converted" if layout == "interleaved" else ""
        return ok("rope layout", f"{layout}, whatever the target uses{reordered}")
    if draft.header is not None and draft.header.integer(Key.FORMAT) is not None:
        return ok("rope layout", "halves, by the drafter's own config.json")
    return note(
        "rope layout",
        "halves, as every file of this architecture; whether interleaved rows were reordered for "
        "that cannot be seen",
        "--run tells: rows in the wrong order draft next to nothing",
    )


def _release(facts: Mapping[str, Any]) -> Fact:
    release = find_release(dict(facts))
    if release is None:
        return ok("release", "of no published shape, so nothing to compare with")
    differing = [name for name in _COMPARED if not _same(facts[name], getattr(release, name))]
    if not differing:
        return ok("release", f"every number is that of {release.name}")
    message = ", ".join(_difference(name, facts, release) for name in differing)
    if _is_named(release, facts):
        return error("release", f"differs from {release.name}: {message}", CONVERT)
    return warning(
        "release",
        f"has the shape of {release.name} and differs from it: {message}",
        "right if it is another drafter of that shape; else " + CONVERT,
    )


def _is_named(release: Release, facts: Mapping[str, Any]) -> bool:
    """Does the file say that it is this release?"""
    names = (facts["name"], facts.get("source"))
    return any(_plain(release.name) in _plain(str(name)) for name in names)


def _plain(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


def _same(a: Any, b: Any) -> bool:
    if isinstance(b, tuple):
        return a is not None and tuple(a) == b
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)  # files hold 32 bits
    return bool(a == b)


def _difference(name: str, facts: Mapping[str, Any], release: Release) -> str:
    found, expected = facts[name], getattr(release, name)
    return f"{name.replace('_', ' ')} {_shown(found)} instead of {_shown(expected)}"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return "/".join(str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _licence(facts: Mapping[str, Any]) -> Fact:
    terms = Provenance(
        name=facts["name"] or "",
        licence=facts["license"],
        licence_name=facts["license_name"],
        licence_link=facts["license_link"],
    )
    problem = licence_warning(terms)
    if problem is not None:
        link = facts["license_link"] or "the licence of the checkpoint"
        return warning("licence", problem.removeprefix("licence "), f"read {link} first")
    if terms.licence is None and terms.licence_name is None:
        return note(
            "licence", "not stated", "look at the drafter's source before you share the file"
        )
    return ok("licence", terms.licence_name or terms.licence or "")


def _origin(draft: DraftFile) -> Fact:
    facts = draft.facts
    if draft.header is None:
        repo, revision = facts.get("source_repo"), facts.get("source_revision")
        known = f"{repo} at {revision}" if repo and revision else "a checkpoint folder"
        return ok("origin", known)
    if not facts["source_sha256"]:
        return note(
            "origin",
            "the file does not say which checkpoint it was made from",
            "two uploads of one name may differ; " + CONVERT,
        )
    revision = f" at {facts['source_revision']}" if facts["source_revision"] else ""
    hashes = ", ".join(f"{n} {str(h)[:12]}" for n, h in facts["source_sha256"].items())
    return ok("origin", f"{facts['source']}{revision}, sha256 of {hashes}")
