"""The output appears complete or not at all, whatever happens to the disk or the process."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dflash2_gguf.convert import verify, writer
from dflash2_gguf.convert.gguf_values import u32
from dflash2_gguf.convert.pipeline import check_outputs, make_plan, run
from dflash2_gguf.convert.writer import GGUFWriter, OutputTensor
from dflash2_gguf.errors import DFlash2Error, OutputError, UsageError
from dflash2_gguf.ggml_types import GGMLType
from dflash2_gguf.presets import load_preset
from tests.convert import checkpoints
from tests.convert.conftest import Program

OTHER_FOLDER = "free some space or choose another folder"


def convert(source: Path, target: Path, path: Path, *, force: bool = False) -> None:
    plan = make_plan(source, target, [(load_preset("bf16"), path)])
    check_outputs(plan, force=force)
    run(plan, force=force, progress=lambda _count: None)


def test_existing_file_is_kept_without_force(
    checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out.gguf"
    path.write_text("precious")
    with pytest.raises(OutputError) as caught:
        convert(checkpoint, target, path)
    assert caught.value.message == f"{path} exists"
    assert caught.value.hint == "use --force to replace it"
    assert path.read_text() == "precious"
    convert(checkpoint, target, path, force=True)
    assert path.read_bytes()[:4] == b"GGUF"


def test_file_that_appears_meanwhile_is_kept(
    checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out" / "out.gguf"
    path.parent.mkdir()
    plan = make_plan(checkpoint, target, [(load_preset("bf16"), path)])
    with pytest.raises(OutputError) as caught:
        run(plan, force=False, progress=lambda _count: path.write_text("precious") and None)
    assert caught.value.message == f"{path} exists"
    assert [file.read_text() for file in path.parent.iterdir()] == ["precious"]


def test_inputs_are_never_outputs(checkpoint: Path, target: Path) -> None:
    for path in (target, checkpoint / "model.safetensors"):
        with pytest.raises(UsageError) as caught:
            convert(checkpoint, target, path, force=True)
        assert caught.value.message == f"{path} is an input of this conversion"


def test_missing_folder_is_named(checkpoint: Path, target: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        convert(checkpoint, target, tmp_path / "no" / "out.gguf")
    assert caught.value.message == f"there is no folder {tmp_path / 'no'}"


def test_folder_as_file_is_refused(checkpoint: Path, target: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        convert(checkpoint, target, tmp_path, force=True)
    assert caught.value.message == f"{tmp_path} is a folder"


@pytest.mark.skipif(sys.platform != "linux", reason="sysfs is Linux's")
def test_folder_that_takes_no_files_is_refused(checkpoint: Path, target: Path) -> None:
    # not even the superuser can create files in sysfs
    path = Path("/sys/kernel/out.gguf")
    plan = make_plan(checkpoint, target, [(load_preset("bf16"), path)])
    with pytest.raises(OutputError) as caught:
        run(plan, force=False, progress=lambda _count: None)
    assert caught.value.message.startswith(f"cannot write {path}: ")
    assert caught.value.message.endswith(("permission denied", "the disk is read-only"))
    assert caught.value.hint == "choose another folder"


def test_too_little_space_is_known_before_writing(
    checkpoint: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**6, 10**6 - 1000, 1000))
    path = tmp_path / "out" / "out.gguf"
    path.parent.mkdir()
    with pytest.raises(OutputError) as caught:
        convert(checkpoint, target, path)
    size = (Path(__file__).parent / "golden" / "tiny-bf16.gguf").stat().st_size
    assert caught.value.message == f"{path.parent} has 1,000 bytes free, {size:,} are needed"
    assert caught.value.hint == OTHER_FOLDER
    assert list(path.parent.iterdir()) == []


_LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
from dflash2_gguf.convert_cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_disk_that_fills_while_writing_leaves_nothing(
    checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    assert hasattr(resource, "RLIMIT_FSIZE")
    folder = tmp_path / "out"
    folder.mkdir()
    words = [str(checkpoint), "--target", str(target), "--preset", "bf16", "-o", "out/x.gguf"]
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == (
        "error: cannot write out/x.gguf: the file would be too large for this disk or limit\n"
    )
    assert (done.returncode, done.stdout, list(folder.iterdir())) == (1, "", [])


@pytest.mark.parametrize("failing", ["pwrite", "fsync"])
def test_full_disk_leaves_nothing(
    checkpoint: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(*_arguments: object) -> int:
        raise OSError(28, "No space left on device")

    path = tmp_path / "out" / "out.gguf"
    path.parent.mkdir()
    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OutputError) as caught:
        convert(checkpoint, target, path)
    assert caught.value.message == f"cannot write {path}: the disk is full"
    assert caught.value.hint == OTHER_FOLDER
    assert list(path.parent.iterdir()) == []


_KILLED = """
import os, signal, sys
from dflash2_gguf.convert import pipeline
transfer = pipeline.transfer
def kill_at_third(*arguments, count=[0], **options):
    count[0] += 1
    if count[0] == 3:
        assert len(os.listdir("out")) == 1, "the temporary file is there"
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    transfer(*arguments, **options)
pipeline.transfer = kill_at_third
from dflash2_gguf.convert_cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_signal_leaves_nothing(
    checkpoint: Path, target: Path, tmp_path: Path, name: str, code: int
) -> None:
    (tmp_path / "out").mkdir()
    words = [str(checkpoint), "--target", str(target), "--preset", "bf16", "-o", "out/x.gguf"]
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, name, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        # an ignored signal would be inherited from the shell that runs the tests
        preexec_fn=lambda: signal.signal(getattr(signal, name), signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    assert list((tmp_path / "out").iterdir()) == []


def test_failure_of_one_of_several_outputs_leaves_none(
    checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    values = checkpoints.tensors(checkpoints.config())
    values["layers.1.mlp.down_proj.weight"][:] = 1e30
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(checkpoints.safetensors_bytes(values))
    folder = tmp_path / "out"
    folder.mkdir()
    outputs = [(load_preset(p), folder / f"{p}.gguf") for p in ("f32", "f16")]
    plan = make_plan(checkpoint, target, outputs)
    with pytest.raises(DFlash2Error):
        run(plan, force=False, progress=lambda _count: None)
    assert list(folder.iterdir()) == []


def write_one(path: Path, data: bytes = bytes(8)) -> None:
    tensor = OutputTensor(name="t", shape=(1, 2), type=GGMLType.F32)
    with GGUFWriter(path, values={"a": u32(1)}, tensors=[tensor]) as out:
        out.write_rows("t", 0, np.frombuffer(data, dtype=np.uint8))
        out.finish({"a": u32(1)})


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, b"X", "the written file cannot be read back: not a GGUF file: "),
        (33, b"\x05", "the written file has other metadata than planned"),
        (70, b"\x01", "the written file differs from the plan at t"),
    ],
)
def test_file_that_reads_back_differently_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    position: int,
    value: bytes,
    message: str,
) -> None:
    def corrupt_then_verify(path: Path, **plan: object) -> None:
        raw = bytearray(path.read_bytes())
        raw[position : position + 1] = value
        path.write_bytes(raw)
        verify.verify_file(path, **plan)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "verify_file", corrupt_then_verify)
    with pytest.raises(OutputError) as caught:
        write_one(tmp_path / "x.gguf")
    assert caught.value.message.startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_file_mode_follows_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_one(tmp_path / "x.gguf")
    finally:
        os.umask(old)
    assert (tmp_path / "x.gguf").stat().st_mode & 0o777 == 0o640


def test_source_that_changes_while_it_is_read_is_refused(
    checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    weights = checkpoint / "model.safetensors"
    raw = weights.read_bytes()
    changes: dict[str, Callable[[], object]] = {
        "model.safetensors ended inside tensor 'fc.weight'": lambda: weights.write_bytes(
            raw[:4000]
        ),
        "model.safetensors grew while it was read": lambda: weights.write_bytes(raw + b"x"),
    }
    for message, change in changes.items():
        weights.write_bytes(raw)
        plan = make_plan(checkpoint, target, [(load_preset("bf16"), tmp_path / "x.gguf")])
        change()
        with pytest.raises(DFlash2Error) as caught:
            run(plan, force=False, progress=lambda _count: None)
        assert caught.value.message == message


def test_read_only_disk_is_one_line_for_a_user(
    checkpoint: Path, target: Path, program: Program
) -> None:
    done = program(checkpoint, "--target", target, "--preset", "bf16", "-o", "/sys/kernel/x.gguf")
    assert done.code == 1
    assert done.err.splitlines()[0].startswith("error: ")
    assert "Traceback" not in done.err
