"""The folder to upload: files with checksums and a card, or nothing."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import gguf
import pytest

from dflash2_gguf.convert.card import read_measurements
from dflash2_gguf.convert.pack import PackRequest, pack
from dflash2_gguf.convert.ui import Terminal
from dflash2_gguf.errors import CheckpointError, DFlash2Error, OutputError, UsageError
from tests.convert.conftest import Program

GOLDEN = Path(__file__).parent / "golden"


def licensed(checkpoint: Path, **front: str) -> Path:
    """The checkpoint with a model card that has this front matter."""
    lines = "".join(f"{key}: {value}\n" for key, value in front.items())
    (checkpoint / "README.md").write_text(f"---\n{lines}---\n")
    return checkpoint


def measurements(path: Path) -> Path:
    def entry(preset: str, imatrix: bool, length: float) -> dict[str, Any]:
        at = {"value": length, "low": length - 0.1, "high": length + 0.1}
        return {
            "drafter": {"preset": preset, "imatrix": imatrix},
            "acceptance": [{"temperature": heat, "length": at} for heat in (0.0, 1.0)],
        }

    entries = [entry("bf16", False, 1.75), entry("f16", False, 1.7), entry("f16", True, 9.0)]
    path.write_text(json.dumps(entries))
    return path


def test_the_folder_holds_files_checksums_and_a_card(
    checkpoint: Path, target: Path, program: Program, tmp_path: Path
) -> None:
    licensed(checkpoint, license="apache-2.0")
    measurements(tmp_path / "m.json")
    words = ["--target", "target.gguf", "--preset", "bf16", "--preset", "f16"]
    done = program("pack", "tiny", *words, "-o", "out", "--measured", "m.json")
    names = ["tiny-BF16.gguf", "tiny-F16.gguf", "SHA256SUMS", "README.md"]
    assert (done.code, done.err) == (0, "")
    assert done.out == "".join(f"out/{name}\n" for name in names)
    folder = tmp_path / "out"
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    sums = dict(
        reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines()
    )
    for name in names[:2]:
        assert sums[name] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert len(gguf.GGUFReader(folder / name).tensors) == 36
    assert (folder / "README.md").read_text() == (GOLDEN / "card.md").read_text()
    assert folder.stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def request(source: Path, target: Path | None, output: Path, **options: Any) -> PackRequest:
    return PackRequest(source=source, target=target, presets=("bf16",), output=output, **options)


def refusal(one: PackRequest) -> tuple[type, str, str | None]:
    with pytest.raises(DFlash2Error) as caught:
        pack(one, Terminal())
    return type(caught.value), caught.value.message, caught.value.hint


ND = {"license": "other", "license_name": "cc-by-nc-nd-4.0"}


def test_a_licence_without_derivatives_stops_until_the_user_states_a_right(
    checkpoint: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    licensed(checkpoint, **ND)
    before = sorted(tmp_path.iterdir())
    assert refusal(request(checkpoint, target, tmp_path / "out")) == (
        CheckpointError,
        "licence cc-by-nc-nd-4.0 of tiny: a converted file must not be shared",
        "--may-share states that its holder gave you the right to",
    )
    assert sorted(tmp_path.iterdir()) == before
    assert pack(request(checkpoint, target, tmp_path / "out", may_share=True), Terminal()) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'license_name: "cc-by-nc-nd-4.0"\n' in card
    assert (
        "Licence of the source: cc-by-nc-nd-4.0. It allows non-commercial use only. "
        "It does not allow derivatives; who published this folder states a right to.\n"
    ) in card
    assert "warning: licence cc-by-nc-nd-4.0" in capsys.readouterr().err


def test_an_unknown_licence_is_no_licence(checkpoint: Path, target: Path, tmp_path: Path) -> None:
    assert refusal(request(checkpoint, target, tmp_path / "out")) == (
        CheckpointError,
        "the licence of tiny is not known",
        "a folder with it in the front matter of its README.md can be packed",
    )


def test_what_is_there_is_not_touched(checkpoint: Path, target: Path, tmp_path: Path) -> None:
    licensed(checkpoint, license="mit")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert refusal(request(checkpoint, target, tmp_path / "out")) == (
        OutputError,
        f"{tmp_path / 'out'} exists",
        "name a folder that does not",
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    kind, message, _ = refusal(request(checkpoint, target, tmp_path / "no" / "out"))
    assert (kind, message) == (OutputError, f"there is no folder {tmp_path / 'no'}")


def test_a_failure_leaves_nothing(
    checkpoint: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    licensed(checkpoint, license="mit")
    before = sorted(tmp_path.iterdir())

    def full(*_arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    kind, message, _ = refusal(request(checkpoint, target, tmp_path / "out"))
    assert kind is OutputError
    assert message.endswith("the disk is full")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"drafter": {}}]', '{"a": 1}', "[" * 100_000])
def test_measurements_of_another_form_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(CheckpointError, match="holds no measurements"):
        read_measurements(tmp_path / "m.json", imatrix=False)
    with pytest.raises(CheckpointError, match="cannot read"):
        read_measurements(tmp_path / "none.json", imatrix=False)


def test_presets_are_named_once() -> None:
    for presets in ((), ("bf16", "BF16")):
        with pytest.raises(UsageError):
            PackRequest(source=Path(), target=None, presets=presets, output=Path())
