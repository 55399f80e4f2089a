"""``dflash2-convert migrate``: rewrite older and fork drafters so that llama.cpp reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.convert.gguf_facts import type_name
from dflash2_gguf.convert.migration import Migration, plan_migration, write_migrated
from dflash2_gguf.convert.ui import Terminal
from dflash2_gguf.convert.writer import check_destination
from dflash2_gguf.errors import UsageError

__all__ = ["MigrateRequest", "migrate"]


@dataclass(frozen=True, kw_only=True)
class MigrateRequest:
    """The arguments of ``migrate``. ``output`` None: next to the file."""

    file: Path
    output: Path | None = None
    target: Path | None = None
    config: Path | None = None
    layer_ids: str | None = None
    force: bool = False
    dry_run: bool = False
    as_json: bool = False
    verbose: bool = False

    @property
    def destination(self) -> Path:
        """The file to write."""
        return self.output or self.file.with_name(f"{self.file.stem}-migrated.gguf")


def migrate(request: MigrateRequest, terminal: Terminal) -> int:
    """Plan, report, and unless it is a dry run write the new file; returns the exit code."""
    migration = plan_migration(
        request.file, target=request.target, config=request.config, layer_ids=request.layer_ids
    )
    path = request.destination
    _refuse_inputs_as_output(request)
    for warning in migration.warnings:
        terminal.warning(warning)
    written = bool(migration.changes) and not request.dry_run
    say = terminal.line if request.dry_run else terminal.note
    for change in () if request.as_json else migration.changes:
        say(str(change))
    for tensor in migration.tensors if request.verbose else ():
        terminal.note(f"{tensor.name}: {type_name(tensor.type)}, {tensor.nbytes} bytes copied")
    if written:
        label = f"migrating {request.file.name}"
        with terminal.progress(label, migration.header.size) as advance:
            write_migrated(migration, path, force=request.force, progress=advance)
    elif migration.changes and path.parent.is_dir():
        check_destination(path, force=request.force)
    if request.as_json:
        terminal.json(_result(request, migration, written=written))
    elif written:
        terminal.line(str(path))
    elif not migration.changes:
        kept = "" if request.dry_run else f": {path} was not written, use the file as it is"
        terminal.note(f"{request.file} needs no migration{kept}")
    return 0


def _refuse_inputs_as_output(request: MigrateRequest) -> None:
    path = request.destination
    for given in (request.file, request.target, request.config):
        if given is not None and path.exists() and path.samefile(given):
            raise UsageError(f"{path} is an input of this migration", "give another file with -o")


def _result(request: MigrateRequest, migration: Migration, *, written: bool) -> dict[str, Any]:
    return {
        "file": str(request.file),
        "output": str(request.destination) if migration.changes else None,
        "written": written,
        "changes": [
            {
                "old_name": change.old_name,
                "old": change.old,
                "new_name": change.new_name,
                "new": change.new,
                "source": change.source,
            }
            for change in migration.changes
        ],
        "warnings": list(migration.warnings),
    }
