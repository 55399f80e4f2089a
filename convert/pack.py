"""``dflash2-convert pack``: the folder that people upload, complete or not there at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflash2_gguf.convert.card import CardFile, Measurement, card, read_measurements
from dflash2_gguf.convert.metadata import NO_DERIVATIVES, licence_limits
from dflash2_gguf.convert.pipeline import OutputPlan, Plan, check_outputs, make_plan, run
from dflash2_gguf.convert.source import file_sha256
from dflash2_gguf.convert.ui import Terminal
from dflash2_gguf.errors import CheckpointError, OutputError
from dflash2_gguf.presets import load_preset, require_distinct

__all__ = ["PackRequest", "pack"]

_SUMS, _CARD = "SHA256SUMS", "README.md"


@dataclass(frozen=True, kw_only=True)
class PackRequest:
    """The arguments of ``pack``. ``may_share``: the user has a right the licence does not give."""

    source: Path
    target: Path | None
    presets: tuple[str, ...]
    output: Path
    imatrix: Path | None = None
    measured: Path | None = None
    may_share: bool = False

    def __post_init__(self) -> None:
        require_distinct(self.presets)


def pack(request: PackRequest, terminal: Terminal) -> int:
    """Convert, sum and describe; 0. Raises what a conversion raises, and CheckpointError where the
    licence forbids sharing what is made.
    """
    if request.output.exists():
        raise OutputError(f"{request.output} exists", "name a folder that does not")
    with_imatrix = request.imatrix is not None
    measured = read_measurements(request.measured, imatrix=with_imatrix) if request.measured else {}
    with _appearing(request.output) as folder:
        stem = request.source.resolve().name.removesuffix(".gguf")
        outputs = [
            (load_preset(name), folder / f"{stem}-{name.upper()}.gguf") for name in request.presets
        ]
        plan = make_plan(request.source, request.target, outputs, imatrix=request.imatrix)
        _require_licence(plan, request)
        for warning in plan.warnings:
            terminal.warning(warning)
        check_outputs(plan, force=False)
        with terminal.progress(f"packing {plan.origin.name}", plan.checkpoint.nbytes) as advance:
            run(plan, force=False, progress=advance)
        files = [_card_file(output, measured) for output in plan.outputs]
        _write(folder / _SUMS, "".join(f"{one.sha256}  {one.name}\n" for one in files))
        text = card(plan.origin.provenance, plan.origin.target, files)
        _write(folder / _CARD, text)
    for name in (*(one.name for one in files), _SUMS, _CARD):
        terminal.line(str(request.output / name))
    return 0


def _require_licence(plan: Plan, request: PackRequest) -> None:
    provenance = plan.origin.provenance
    if provenance.licence is None and provenance.licence_name is None:
        raise CheckpointError(
            f"the licence of {plan.origin.name} is not known",
            "a folder with it in the front matter of its README.md can be packed",
        )
    if NO_DERIVATIVES in licence_limits(provenance) and not request.may_share:
        licence = provenance.licence_name or provenance.licence
        raise CheckpointError(
            f"licence {licence} of {plan.origin.name}: {NO_DERIVATIVES}",
            "--may-share states that its holder gave you the right to",
        )


@contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """A folder beside ``output`` that becomes it at the end, and is removed on any exception."""
    parent = output.absolute().parent
    if not parent.is_dir():
        raise OutputError(f"there is no folder {parent}")
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=parent))
    except OSError as error:
        raise OutputError(f"cannot write to {parent}: {error.strerror}") from error
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())
        folder.rename(output)
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _card_file(output: OutputPlan, measured: dict[str, tuple[Measurement, ...]]) -> CardFile:
    counts = Counter(choice.type.name for choice in output.choices.values())
    return CardFile(
        name=output.path.name,
        preset=output.preset.name,
        nbytes=output.path.stat().st_size,
        sha256=file_sha256(output.path),
        types=dict(sorted(counts.items())),
        measured=measured.get(output.preset.name, ()),
    )


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
