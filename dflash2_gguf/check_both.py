"""What the headers of a target and a drafter tell about the two together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dflash2_gguf.check_draft import CONVERT, MIGRATE
from dflash2_gguf.check_fact import Fact, error, from_error, note, ok, warning
from dflash2_gguf.check_files import DraftFile, TargetFile
from dflash2_gguf.convert.pipeline import make_plan
from dflash2_gguf.errors import DFlash2Error
from dflash2_gguf.gguf_schema import Key, Name, tensor_name
from dflash2_gguf.known_models import (
    NO_ROLLBACK,
    PUBLISHES_INNER,
    PUBLISHES_LAST,
    UNUSABLE,
    usual_layers,
)
from dflash2_gguf.pair import check_headers
from dflash2_gguf.words import counted

__all__ = ["last_fact", "pair_facts", "target_fact"]

_OTHER = "give the target the drafter was trained for, or convert the drafter of this target"
_ASK_GRAPH = "only its graph can tell: --run asks it, and so does loading the pair"
_OUTPUTS = "`dflash2-convert migrate --layer-ids outputs` corrects them"
_SECTIONS = "`dflash2-convert migrate --target TARGET` corrects them without touching the tensors"
_MAX_RENAMED = 0.01  # as in pair.py: converters name unused tokens differently


def target_fact(target: TargetFile) -> Fact:
    """What the target is."""
    model = target.model
    streams = target.integer(Key.Arch.HYPER_CONNECTIONS) or 0
    wide = f" in {streams} streams" if streams > 1 else ""
    where = f"{len(target.parts)} files" if len(target.parts) > 1 else "one file"
    return ok(
        "target",
        f"{model.name}, {model.arch}, {counted(model.n_layer, 'layer')}, "
        f"hidden size {model.n_embd}{wide}, "
        + (where if target.parts else "a Hugging Face folder"),
    )


def pair_facts(target: TargetFile, draft: DraftFile) -> Iterator[Fact]:
    """A fact for everything that must fit."""
    yield _made_for(target, draft)
    yield _width(target, draft)
    yield _vocabulary(target, draft)
    if draft.facts["vocabulary"] is not None:
        yield _tokens(target, draft)
    yield _mask(target, draft)
    yield _layers(target, draft)
    yield _published(target, draft)
    yield _sections(target, draft)
    yield _ownership(target, draft)


def last_fact(target: TargetFile, draft: DraftFile) -> Fact:
    """Whatever else the programs refuse before they load or convert the pair."""
    try:
        if draft.header is None:
            make_plan(draft.path, target.path, ())
            return ok("converting", "nothing that `dflash2-convert` would refuse")
        if target.first is not None and draft.first is not None:
            check_headers(target.first, draft.first)
    except DFlash2Error as problem:
        return from_error("converting" if draft.header is None else "loading", problem)
    return ok("loading", "nothing in the headers that `dflash2-run` would refuse")


def _made_for(target: TargetFile, draft: DraftFile) -> Fact:
    facts, model = draft.facts, target.model
    count, name, arch = (
        facts.get(key) for key in ("target_layer_count", "target", "target_architecture")
    )
    if count is not None and count != model.n_layer:
        return error(
            "made for",
            f"a target of {counted(count, 'layer')}, {model.name} has {model.n_layer}",
            _OTHER,
        )
    if arch and target.parts and arch in PUBLISHES_INNER and arch != model.arch:
        return warning(
            "made for", f"{name}, {arch}; the target given is {model.name}, {model.arch}", _OTHER
        )
    if name is None and count is None:
        return note(
            "made for", "the file does not say", "widths and tokens below are all there is to go by"
        )
    of_layers = f"a target of {counted(count, 'layer')}" if count else "a target"
    return ok("made for", f"{name or of_layers}" + (f", {arch}" if arch else ""))


def _width(target: TargetFile, draft: DraftFile) -> Fact:
    ours, theirs = draft.facts["hidden_size"], target.model.n_embd
    streams = target.integer(Key.Arch.HYPER_CONNECTIONS) or 1
    if ours == theirs:
        how = f"; the mean of {streams} streams is read" if streams > 1 else ""
        return ok("hidden size", f"{theirs} in both{how}")
    if streams > 1 and ours == theirs * streams:
        return error(
            "hidden size",
            f"the drafter's {ours} are all {streams} residual streams of the target side by side, "
            f"the features are their mean of {theirs}",
            "the checkpoint was exported with the wrong feature width; take another one",
        )
    return error("hidden size", f"target {theirs}, drafter {ours}", _OTHER)


def _vocabulary(target: TargetFile, draft: DraftFile) -> Fact:
    rows, ours = target.model.n_vocab, draft.facts["vocabulary"]
    stored = target.tensor_shape(Name.TOKEN_EMBD)
    if stored is not None and stored[0] != rows:
        return error(
            "vocabulary",
            f"the target names {rows} tokens and has embeddings for {stored[0]}",
            "llama.cpp refuses the target; convert it again",
        )
    if ours is None:
        return error("vocabulary", f"the drafter has no {Key.TOKENS}", CONVERT)
    if ours == rows:
        padding = target.n_padding
        text = f", the last {padding} of them without text" if padding else ""
        return ok("vocabulary", f"{rows} tokens in both{text}")
    if ours < rows and rows - ours <= target.n_padding:
        spare = counted(target.n_padding, "row")
        return error(
            "vocabulary",
            f"target {rows} tokens with {spare} of padding, drafter {ours} without",
            "the drafter was converted for a target without its padding; convert it for this one",
        )
    return error("vocabulary", f"target {rows} tokens, drafter {ours}", _OTHER)


def _tokens(target: TargetFile, draft: DraftFile) -> Fact:
    if draft.header is None:
        return ok("tokens", "taken from the target when the checkpoint is converted")
    theirs, ours = target.tokens, draft.header.values[Key.TOKENS]
    if ours.raw == theirs.raw and ours.count == theirs.count:
        return ok("tokens", "the same text for every id")
    a, b = theirs.items(), ours.items()
    differing = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    if not differing:
        return ok("tokens", f"the same text for the first {min(len(a), len(b))} ids")
    first = differing[0]
    message = (
        f"{len(differing)} of {len(a)} differ, the first is {first}: "
        f"{a[first]!r} in the target, {b[first]!r} in the drafter"
    )
    if len(differing) > _MAX_RENAMED * len(a):
        return error("tokens", message, _OTHER)
    return note(
        "tokens", message, "harmless where they are unused; else convert the drafter for this file"
    )


def _mask(target: TargetFile, draft: DraftFile) -> Fact:
    mask, rows = draft.facts["mask_token_id"], target.model.n_vocab
    if mask is None:
        return error("mask token", f"the drafter has no {Key.MASK_TOKEN_ID}", MIGRATE)
    if not 0 <= mask < rows:
        return error(
            "mask token",
            f"id {mask} is drafted from, the target has embeddings for 0 to {rows - 1}",
            _OTHER,
        )
    text = target.token(mask)
    what = ", one of the rows without text" if mask >= rows - target.n_padding else ""
    return ok("mask token", f"{mask}, {text!r}{what}")


def _layers(target: TargetFile, draft: DraftFile) -> Fact:
    name, n_layer = "target layers", target.model.n_layer
    ids: Sequence[int] | None = draft.facts["target_layers"]
    if not ids:
        return error(name, "the drafter names none", MIGRATE)
    shown = ", ".join(map(str, ids))
    usual = usual_layers(n_layer, len(ids))
    shift = next((s for s in (1, -1) if tuple(i + s for i in ids) in usual), 0)
    if min(ids) < 0:
        return error(
            name,
            f"outputs of {shown} are read, and there is none before 0: the file counts layer "
            "outputs where inputs are meant, so all are one too low",
            _OUTPUTS,
        )
    if max(ids) >= n_layer:
        again = ": 1 was added once more than it should be" if shift else ""
        return error(
            name, f"outputs of {shown} are read, the target has 0 to {n_layer - 1}{again}", _OTHER
        )
    if shift:
        there = ", ".join(str(i + shift) for i in ids)
        return warning(
            name,
            f"outputs of {shown} are read, drafters are trained on {there}: all may be one too "
            + ("low" if shift > 0 else "high"),
            "compare with target_layer_ids in the checkpoint's config.json; --run tells which is "
            "right",
        )
    return ok(name, f"outputs of {shown}, of 0 to {n_layer - 1}")


def _published(target: TargetFile, draft: DraftFile) -> Fact:
    name, arch = "target graph", target.arch
    ids, n_layer = draft.facts["target_layers"] or (), target.model.n_layer
    if arch is None:
        return note(
            name,
            f"which architecture {target.model.arch} becomes is told when the target is converted",
            "check the target's GGUF file",
        )
    if arch in UNUSABLE:
        return error(name, f"architecture {arch!r} {UNUSABLE[arch]}", "take another target")
    if arch in NO_ROLLBACK:
        return error(
            name,
            f"architecture {arch!r} has a recurrent state that cannot be taken back after a "
            "rejected draft",
            "take another target",
        )
    if arch not in PUBLISHES_INNER:
        return note(name, f"architecture {arch!r} is not among those that were tried", _ASK_GRAPH)
    if n_layer - 1 in ids and arch not in PUBLISHES_LAST:
        return error(
            name,
            f"architecture {arch!r} computes the output of its last layer ({n_layer - 1}) only "
            "for sampled tokens",
            "no drafter that reads it runs with this target",
        )
    return ok(name, f"architecture {arch!r} publishes them")


def _sections(target: TargetFile, draft: DraftFile) -> Fact:
    name, needed = "rope sections", target.model.mrope
    found: list[Any] | None = draft.facts.get("rope_sections")
    if draft.header is None:
        return ok(name, "written when it is converted" if needed else "none, as in the target")
    if needed and not found:
        return error(
            name,
            "the target rotates by sections (M-RoPE), the drafter states none: an image in the "
            "prompt ends drafting",
            _SECTIONS,
        )
    if not needed:
        if found and any(found):
            return warning(
                name,
                "the drafter states sections, the target has no M-RoPE: is it the right target?",
                _SECTIONS,
            )
        return ok(name, "none, as in the target")
    if found and any(found[1:]):
        return warning(
            name,
            f"{_listed(found)}: only the first may be there, drafters rotate by time",
            _SECTIONS,
        )
    return ok(name, f"{_listed(found or [])}, by time only")


def _listed(values: Sequence[Any]) -> str:
    return "/".join(str(v) for v in values)


def _ownership(target: TargetFile, draft: DraftFile) -> Fact:
    name = "embeddings and head"
    embeddings, head = draft.facts["own_embeddings"], draft.facts["own_head"]
    rows = _reduced_rows(draft)
    if rows and not head:
        return error(
            name,
            f"the drafter has a vocabulary of {rows} tokens and lost its head; the target's has "
            "other rows",
            CONVERT,
        )
    reduced = f", with a head of {rows} tokens" if rows else ""
    if embeddings and head:
        return ok(name, f"the drafter's own{reduced}")
    if embeddings:
        return _tied(draft)
    borrowed = "head and embeddings" if not head else "embeddings"
    if not target.parts:
        return note(
            name,
            f"{borrowed} are the target's; its weights are not in this folder's config",
            "check the target's GGUF file",
        )
    if target.tensor_shape(Name.TOKEN_EMBD) is None:
        return error(
            name,
            f"the drafter uses the target's {borrowed}, and {target.path.name} has none",
            "give the file that holds the target's weights",
        )
    if head:
        return ok(name, f"the drafter's own head, the target's embeddings{reduced}")
    own = target.tensor_shape(Name.OUTPUT) is not None
    return ok(name, "the target's" if own else "the target's, whose head is its embeddings")


def _reduced_rows(draft: DraftFile) -> int:
    """Rows of a reduced head, 0 where there is none; they have a map to token ids."""
    rows = draft.header.tensors.get(tensor_name(Name.HF_VOCAB_MAP) or "") if draft.header else None
    return rows.shape[0] if rows is not None and rows.shape else 0


def _tied(draft: DraftFile) -> Fact:
    if draft.header is None:
        return ok("embeddings and head", "the drafter's own embeddings serve as head")
    return note(
        "embeddings and head",
        "the drafter's own embeddings serve as head",
        "right where the checkpoint has tie_word_embeddings; else its head was lost",
    )
