"""The migration of one file: what changes, planned, then written to a new file.

Names and metadata change, the bytes of the tensors never do; the file itself is only read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash2_gguf.convert.fork_fields import shown
from dflash2_gguf.convert.fork_names import (
    ARRAYS,
    DRAFT_ARCHITECTURES,
    OTHER_ARCHITECTURES,
    SCALARS,
)
from dflash2_gguf.convert.fork_tensors import check_tensors, is_dflash2, rename_tensors, span
from dflash2_gguf.convert.gguf_facts import gguf_facts
from dflash2_gguf.convert.gguf_reader import GGUFHeader, TensorEntry, read_gguf
from dflash2_gguf.convert.gguf_values import Value, array, string, u32
from dflash2_gguf.convert.hparams import read_hparams
from dflash2_gguf.convert.metadata import Provenance, licence_warning
from dflash2_gguf.convert.settle import Settled, Sources, settle
from dflash2_gguf.convert.source import read_json
from dflash2_gguf.convert.target import open_target
from dflash2_gguf.convert.writer import (
    CopiedTensor,
    GGUFWriter,
    check_destination,
    check_space,
    file_bytes,
)
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.ggml_types import GGMLType, ValueType
from dflash2_gguf.gguf_schema import (
    ARCHITECTURE,
    FORMAT_REVISION,
    VERSION,
    DraftShape,
    Key,
    Name,
    arch_key,
    tensor_name,
)

__all__ = ["Change", "Migration", "plan_migration", "write_migrated"]

_PIECE_BYTES = 4 << 20
_UNKNOWN_HASH = "0" * 64
_F = Key.Arch


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that becomes another; None is nothing. ``source``: where the new one is from."""

    old_name: str | None
    old: str | None
    new_name: str | None
    new: str | None
    source: str

    def __str__(self) -> str:
        before = "nothing" if self.old_name is None else _equation(self.old_name, self.old)
        after = "nothing" if self.new_name is None else _equation(self.new_name, self.new)
        return f"{before} -> {after} ({self.source})"


def _equation(name: str, value: str | None) -> str:
    return name if value is None else f"{name} = {value}"


@dataclass(frozen=True, kw_only=True)
class Migration:
    """A planned migration; without ``changes`` the file needs none.

    ``spans``: first byte and length of each tensor's data in the file, in the order of ``tensors``.
    """

    header: GGUFHeader
    values: dict[str, Value]
    tensors: tuple[CopiedTensor, ...]
    spans: tuple[tuple[int, int], ...]
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Item:
    value: Value
    old_key: str | None = None
    source: str = "the file"

    @property
    def text(self) -> str:
        """The value for people; a hash that is not known yet is said in words."""
        unknown = self.value == array(ValueType.STRING, [_UNKNOWN_HASH])
        return "that of the file" if unknown else shown(self.value)


def plan_migration(
    path: Path,
    *,
    target: Path | None = None,
    config: Path | None = None,
    layer_ids: str | None = None,
) -> Migration:
    """Find what must change in ``path``; writes nothing.

    Raises CheckpointError for files that are no DFlash drafter, are damaged, or lack what neither
    they nor ``target`` nor ``config`` say; PairError for another drafter's target.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder", "a checkpoint is converted, not migrated")
    header = read_gguf(path)
    arch = _architecture(header)
    sources = Sources(
        header=header,
        arch=arch,
        tensors=rename_tensors(header, arch),
        target=open_target(target) if target else None,
        hparams=read_hparams(read_json(_config_file(config))) if config else None,
        layer_ids=layer_ids,
    )
    settled = settle(sources)
    check_tensors(path, sources.tensors, _shape(sources, settled))
    _check_head(sources)
    items = _items(sources, settled)
    changes = (*_renamed_tensors(sources), *_changes(header, items, settled.removed))
    if changes:
        added = dict(_provenance(sources, settled, items))
        changes = (*changes, *_changes(header, added, {}, added_only=True))
        items |= added
    migration = Migration(
        header=header,
        values={key: item.value for key, item in items.items()},
        **_data(sources),
        changes=changes,
        warnings=tuple(_warnings(sources, settled)),
    )
    _inspect_result(migration)
    return migration


def _config_file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def _architecture(header: GGUFHeader) -> str:
    arch = header.text(Key.ARCHITECTURE)
    if arch is None:
        raise CheckpointError(f"{header.path} has no {Key.ARCHITECTURE}")
    if arch not in DRAFT_ARCHITECTURES:
        kind = OTHER_ARCHITECTURES.get(arch, "not a DFlash drafter")
        raise CheckpointError(
            f"{header.path} is {kind} (architecture {arch!r})",
            f"known drafters are {', '.join(DRAFT_ARCHITECTURES)}",
        )
    if (header.integer(Key.SPLIT_COUNT) or 1) > 1:
        raise CheckpointError(
            f"{header.path} is one part of a split file", "merge the parts with llama-gguf-split"
        )
    alignment = header.values.get(Key.ALIGNMENT)
    if alignment is not None and alignment.type is not ValueType.UINT32:
        raise CheckpointError(f"{Key.ALIGNMENT} of {header.path} is {shown(alignment)}")
    if not header.tensors:
        raise CheckpointError(f"{header.path} holds no tensors", "fetch the whole file")
    return arch


def _shape(sources: Sources, settled: Settled) -> DraftShape:
    def number(name: str) -> int:
        """A settled field, 0 where there is none."""
        return int(settled.fields[name].value.scalar()) if name in settled.fields else 0

    tensors = sources.tensors
    heads, hidden = number(_F.HEAD_COUNT), number(_F.EMBEDDING_LENGTH)
    second = is_dflash2(tensors)
    map_entry = tensors.get(tensor_name(Name.HF_VOCAB_MAP) or "")
    return DraftShape(
        n_layer=number(_F.BLOCK_COUNT),
        n_embd=hidden,
        n_ff=number(_F.FEED_FORWARD_LENGTH),
        n_head=heads,
        n_head_kv=number(_F.HEAD_COUNT_KV),
        head_dim=number(_F.KEY_LENGTH) or hidden // max(heads, 1),
        n_vocab=settled.n_vocab,
        n_tap=settled.fields[_F.TARGET_LAYERS].value.count,
        conv_kernel=number(_F.CONV_KERNEL_SIZE) if second else 0,
        conv_group=number(_F.CONV_GROUP_SIZE) if second else 0,
        selector_rank=number(_F.SELECTOR_RANK) if second else 0,
        n_vocab_draft=map_entry.shape[0] if map_entry and map_entry.shape else None,
        own_embeddings=Name.TOKEN_EMBD in tensors,
        own_head=Name.OUTPUT in tensors,
        sinks=any(name.endswith(".attn_sinks.weight") for name in tensors),
        shared_kv=not any(name.endswith(".attn_v.weight") for name in tensors),
    )


def _check_head(sources: Sources) -> None:
    """Forks take the target's head where a file has embeddings alone, llama.cpp the embeddings."""
    alone = Name.TOKEN_EMBD in sources.tensors and Name.OUTPUT not in sources.tensors
    tied = sources.hparams is not None and sources.hparams.tie_embeddings
    if alone and sources.arch != ARCHITECTURE and not tied:
        raise CheckpointError(
            f"{sources.path} has {Name.TOKEN_EMBD} but no {Name.OUTPUT}, and nothing ties them",
            "llama.cpp would use the embeddings as head; a --config that ties them allows it",
        )


def _items(sources: Sources, settled: Settled) -> dict[str, _Item]:
    """Every key of the new file."""
    items: dict[str, _Item] = {}
    prefixes = (arch_key(""), arch_key("", arch=sources.arch))
    for key, value in sources.header.values.items():
        if key == Key.ARCHITECTURE:
            items[key] = _Item(value=string(ARCHITECTURE), old_key=key)
        elif not key.startswith((Key.TOKENIZER_PREFIX, *prefixes)):
            items[key] = _plain(key, value)
    for name in (*SCALARS, *ARRAYS):
        if name in settled.fields:
            field = settled.fields[name]
            items[arch_key(name)] = _Item(
                value=field.value, old_key=field.old_key, source=field.source
            )
    if settled.tokenizer is None:
        own = {k: v for k, v in sources.header.values.items() if k.startswith(Key.TOKENIZER_PREFIX)}
        items |= {key: _plain(key, value) for key, value in own.items()}
    else:
        items |= {
            key: _Item(value=value, old_key=key, source="the target")
            for key, value in settled.tokenizer.items()
        }
    mask = settled.mask
    items[Key.MASK_TOKEN_ID] = _Item(value=mask.value, old_key=mask.old_key, source=mask.source)
    return items


def _plain(key: str, value: Value) -> _Item:
    if not value.is_nested:
        return _Item(value=value, old_key=key)
    return _Item(value=value.flat(), old_key=key, source="llama.cpp reads no lists of lists")


def _provenance(
    sources: Sources, settled: Settled, items: dict[str, _Item]
) -> Iterator[tuple[str, _Item]]:
    """What this project notes in a file that it writes, as far as it is known."""
    header, target = sources.header, sources.target
    notes: dict[str, Value] = {Key.FORMAT: u32(FORMAT_REVISION)}
    if Key.SOURCE_FILES not in items:
        name = header.text(Key.NAME) or header.path.stem
        notes[Key.SOURCE_NAME] = string(name)
        notes[Key.SOURCE_FILES] = array(ValueType.STRING, [header.path.name])
        notes[Key.SOURCE_SHA256] = array(ValueType.STRING, [_UNKNOWN_HASH])
    base = settled.fields[_F.ROPE_FREQ_BASE]
    if sources.hparams is not None and base.source == "config.json":
        notes[Key.SOURCE_ROPE] = string(sources.hparams.rope.origin)
    if target is not None:
        notes[Key.TARGET_NAME] = string(target.name)
        notes[Key.TARGET_ARCHITECTURE] = string(target.arch)
    if settled.n_target_layer is not None:
        notes[Key.TARGET_BLOCK_COUNT] = u32(settled.n_target_layer)
    for key, value in notes.items():
        if key not in items or items[key].value != value:
            old_key = key if key in items else None
            yield key, _Item(value=value, old_key=old_key, source="note of this migration")


def _renamed_tensors(sources: Sources) -> Iterator[Change]:
    for name, entry in sources.tensors.items():
        if name != entry.name:
            yield Change(
                old_name=f"tensor {entry.name}",
                old=None,
                new_name=f"tensor {name}",
                new=None,
                source="the same bytes",
            )


def _changes(
    header: GGUFHeader,
    items: dict[str, _Item],
    removed: dict[str, str],
    *,
    added_only: bool = False,
) -> Iterator[Change]:
    for key, item in items.items():
        old = header.values.get(item.old_key) if item.old_key else None
        if old == item.value and item.old_key == key:
            continue
        yield Change(
            old_name=item.old_key if old is not None else None,
            old=None if old is None else shown(old),
            new_name=key,
            new=item.text,
            source=item.source,
        )
    kept = {item.old_key for item in items.values()}
    for key, value in header.values.items():
        if key not in kept and not added_only:
            reason = removed.get(key, "the target's tokenizer replaces it")
            yield Change(old_name=key, old=shown(value), new_name=None, new=None, source=reason)


def _data(sources: Sources) -> dict[str, Any]:
    spans = span(sources.header)
    tensors = tuple(
        CopiedTensor(name=name, shape=entry.shape, type=entry.type, nbytes=spans[entry.name][1])
        for name, entry in sources.tensors.items()
    )
    return {
        "tensors": tensors,
        "spans": tuple(spans[entry.name] for entry in sources.tensors.values()),
    }


def _warnings(sources: Sources, settled: Settled) -> Iterator[str]:
    header, fields = sources.header, settled.fields
    warning = licence_warning(
        Provenance(
            name="",
            licence=header.text(Key.LICENSE),
            licence_name=header.text(Key.LICENSE_NAME),
        )
    )
    if warning:
        yield warning
    if _F.SLIDING_WINDOW not in fields and sources.hparams is None:
        yield (
            "no layer has a sliding window; converters of old left windows out, "
            "--config with the config.json of the checkpoint tells"
        )
    if _F.ROPE_DIMENSION_SECTIONS not in fields and sources.target is None:
        yield "no RoPE sections; a target with M-RoPE needs them, --target tells"
    strange = [e.name for e in header.tensors.values() if not _is_known(e)]
    if strange:
        yield f"tensor {strange[0]} has a type that llama.cpp may not know ({len(strange)} in all)"


def _is_known(entry: TensorEntry) -> bool:
    if isinstance(entry.type, GGMLType):
        return True
    from gguf import GGMLQuantizationType

    return entry.type in {int(kind) for kind in GGMLQuantizationType}


def _inspect_result(migration: Migration) -> None:
    """The new file must be one that ``inspect`` finds nothing to say against."""
    tensors = {
        t.name: TensorEntry(name=t.name, shape=t.shape, type=t.type, offset=0, nbytes=t.nbytes)
        for t in migration.tensors
    }
    header = replace(migration.header, version=VERSION, values=migration.values, tensors=tensors)
    _, problems = gguf_facts(header)
    if problems:
        raise CheckpointError(
            f"{header.path} cannot be migrated: {problems[0]}",
            "convert the original checkpoint instead",
        )


def write_migrated(
    migration: Migration, path: Path, *, force: bool, progress: Callable[[int], None]
) -> None:
    """Write the migrated file; ``progress`` gets the bytes of each piece read.

    On any exception nothing is left at ``path``, and the file that is migrated is only read.
    """
    check_destination(path, force=force)
    check_space({path: file_bytes(migration.values, migration.tensors)})
    with GGUFWriter(
        path, values=migration.values, tensors=migration.tensors, force=force
    ) as writer:
        digest = _copy(migration, writer, progress)
        values = dict(migration.values)
        hashes = values.get(Key.SOURCE_SHA256)
        if hashes is not None and hashes.items() == [_UNKNOWN_HASH]:
            values[Key.SOURCE_SHA256] = array(ValueType.STRING, [digest])
        writer.finish(values)


def _copy(migration: Migration, writer: GGUFWriter, progress: Callable[[int], None]) -> str:
    """Read the file once from start to end; its sha256."""
    header, digest, at = migration.header, hashlib.sha256(), 0
    parts = sorted(zip(migration.spans, migration.tensors, strict=True), key=lambda part: part[0])
    try:
        with header.path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                while parts and parts[0][0][0] < at + len(piece):
                    (begin, length), tensor = parts[0]
                    first, last = max(begin, at), min(begin + length, at + len(piece))
                    view = memoryview(piece)[first - at : last - at]
                    writer.write_bytes(tensor.name, first - begin, view)
                    if begin + length > at + len(piece):
                        break
                    parts.pop(0)
                at += len(piece)
                progress(len(piece))
    except OSError as error:
        raise CheckpointError(f"cannot read {header.path}: {error.strerror}") from error
    if at != header.size:
        raise CheckpointError(
            f"{header.path} changed while it was read: {at} bytes, {header.size} before"
        )
    return digest.hexdigest()
