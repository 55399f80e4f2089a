"""A few hundred mutated inputs, always the same; what the fuzzer is there to see, it sees."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from dflash2_gguf.errors import CheckpointError
from tests.convert import fuzz as runner
from tests.convert.fuzz_kinds import KINDS, OUTPUT, Case, Kind, Step

RUNS = 260


def test_mutated_inputs_end_in_a_file_or_one_error(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    reports = runner.fuzz(tmp_path, KINDS, runs=RUNS, seed=0)
    findings = [finding for report in reports.values() for finding in report.findings]
    assert not findings, "\n".join(runner.describe(findings))
    assert sum(report.runs for report in reports.values()) == RUNS
    # mutations that are all refused at the first byte, or none, would test little
    assert all(report.refused for name, report in reports.items() if name != "check")
    assert sum(report.accepted for report in reports.values()) > RUNS // 20


def test_a_seed_repeats_the_same_bytes(tmp_path: Path) -> None:
    def last(folder: str) -> dict[str, bytes]:
        fuzzer = runner.Fuzzer(tmp_path / folder, {"migrate": KINDS["migrate"]})
        fuzzer.run("migrate", 7)
        return fuzzer.written

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert last("a") == last("b")


def crash(_inputs: Path, _outputs: Path) -> None:
    raise KeyError("x")


def silent(_inputs: Path, _outputs: Path) -> None:
    raise CheckpointError("")


def leave(_inputs: Path, outputs: Path) -> None:
    (outputs / f".{OUTPUT}.part").write_bytes(b"half")
    raise CheckpointError("it broke half-way")


def lose(_inputs: Path, outputs: Path) -> Path:
    return outputs / OUTPUT


def escape(inputs: Path, _outputs: Path) -> None:
    (inputs / ".." / "outside" / "secret.safetensors").read_bytes()


def stray(_inputs: Path, outputs: Path) -> None:
    (outputs.parent / "outside" / "new").write_bytes(b"")


def damage(inputs: Path, _outputs: Path) -> None:
    (inputs / "target.gguf").unlink()


def allocate(_inputs: Path, _outputs: Path) -> None:
    bytearray(runner.MEMORY + (1 << 30))


def grow(_inputs: Path, _outputs: Path) -> None:
    # written to, so that it counts
    bytearray(b"x") * (512 << 20)


def hang(_inputs: Path, _outputs: Path) -> None:
    while True:
        time.sleep(0.01)


def inflate(_inputs: Path, outputs: Path) -> Path:
    with (outputs / OUTPUT).open("wb") as file:
        file.truncate(1 << 30)
    return outputs / OUTPUT


@pytest.mark.parametrize(
    ("step", "place"),
    [
        (crash, "KeyError at test_fuzz.py"),
        (silent, "empty message or hint"),
        (leave, "left"),
        (lose, "left"),
        (escape, "outside"),
        (stray, "outside"),
        (damage, "outside"),
        (allocate, "MemoryError at test_fuzz.py"),
        (grow, "memory"),
        (hang, "Hang at test_fuzz.py"),
        (inflate, "size"),
    ],
)
def test_what_a_converter_must_not_do_is_noticed(
    step: Callable[[Path, Path], Path | None],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if step is hang:
        monkeypatch.setattr(runner, "SECONDS", 0.5)

    def steps(_rng: Random, _case: Case) -> list[Step]:
        return [step]

    kinds = {"target": Kind(cases=KINDS["target"].cases, steps=steps)}
    found = runner.fuzz(tmp_path, kinds, runs=1, seed=3)["target"].findings
    assert [finding.place.partition(":")[0].partition(".py")[0] for finding in found] == [
        place.partition(".py")[0]
    ]
    assert found[0].command == "python -m tests.convert.fuzz --seed 3 --runs 1 --kinds target"
