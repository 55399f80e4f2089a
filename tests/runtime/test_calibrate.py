"""``dflash2-convert calibrate``: a file that quantizers read, made while really drafting."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash2_gguf import Session
from dflash2_gguf.calibrate import write_imatrix
from dflash2_gguf.convert_cli import main
from dflash2_gguf.engine import Importance
from dflash2_gguf.errors import OutputError
from tests.runtime.terminal import ENVIRONMENT

PROMPTS = "Once upon a time\nWhat is two and two?\n"
ROOT = Path(__file__).resolve().parents[2]


def test_help_is_what_is_written_down() -> None:
    golden = ROOT / "tests" / "convert" / "golden" / "help-calibrate.txt"
    command = [sys.executable, "-m", "dflash2_gguf.convert_cli", "calibrate", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert (done.stdout, done.stderr) == (golden.read_text(encoding="utf-8"), "")


@pytest.fixture
def words(target_gguf: Path, drafter: Path, tmp_path: Path) -> list[str]:
    """A calibration of a few seconds."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPTS)
    pair = ["-m", str(target_gguf), "-d", str(drafter), "--prompts", str(prompts)]
    return ["calibrate", *pair, "-n", "12", "-c", "256", "-t", "1", "-o", str(tmp_path / "m.gguf")]


def contents(path: Path) -> dict[str, np.ndarray]:
    return {t.name: np.array(t.data).reshape(-1) for t in gguf.GGUFReader(path).tensors}


@pytest.mark.native
def test_the_file_counts_context_and_block_rows(
    words: list[str], drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = contents(tmp_path / "m.gguf")
    matrices = {t.name for t in gguf.GGUFReader(drafter).tensors if len(t.shape) == 2}
    assert set(found) == {f"{m}.{kind}" for m in matrices for kind in ("in_sum2", "counts")}
    context, block = told["context_rows"], told["block_rows"]
    assert context > told["tokens"]
    assert 2 * told["blocks"] <= block < 8 * told["blocks"]  # the last ones are shorter
    assert found["fc.weight.counts"] == context
    assert found["blk.0.attn_q.weight.counts"] == block
    assert found["blk.2.attn_k.weight.counts"] == context + block
    assert all((values >= 0).all() and values.any() for values in found.values())


@pytest.mark.native
def test_tokens_of_prompts_and_answers_are_counted(
    words: list[str], target_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--json", "--raw"]) == 0
    told = json.loads(capsys.readouterr().out)
    field = gguf.GGUFReader(tmp_path / "m.gguf").fields["dflash2.token_counts"]
    counts = np.array(field.contents())
    with Session(target_gguf, n_ctx=64, n_threads=1) as session:
        prompts = [session.tokenize(line) for line in PROMPTS.splitlines()]
        assert len(counts) == session.n_vocab
    assert counts.sum() == told["tokens"] + sum(map(len, prompts))
    assert all(counts[token] > 0 for prompt in prompts for token in prompt)


@pytest.mark.native
def test_calibrating_again_records_the_same(words: list[str], tmp_path: Path) -> None:
    assert main(words) == 0
    first = (tmp_path / "m.gguf").read_bytes()
    assert main([*words, "--force"]) == 0
    assert (tmp_path / "m.gguf").read_bytes() == first


@pytest.mark.native
@pytest.mark.peer
def test_unpatched_llama_quantize_reads_it_and_makes_our_tensors(
    words: list[str],
    target_gguf: Path,
    drafter_dir: Path,
    drafter_gguf: Callable[[str], Path],
    peer_bin: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    assert main(words) == 0
    imatrix = str(tmp_path / "m.gguf")
    theirs, ours = tmp_path / "theirs.gguf", tmp_path / "ours.gguf"
    command = [str(peer_bin("llama-quantize")), "--imatrix", imatrix]
    command += [str(drafter_gguf("f32")), str(theirs), "Q4_K_M", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "loaded 31 importance matrix entries" in done.stdout
    convert = [sys.executable, "-m", "dflash2_gguf.convert_cli", "convert", str(drafter_dir)]
    options = ["--target", str(target_gguf), "--preset", "q4_k_m", "--imatrix", imatrix]
    subprocess.run([*convert, *options, "-o", str(ours)], check=True, cwd=ROOT)
    left, right = contents(theirs), contents(ours)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name].tobytes() != right[name].tobytes()] == []


def test_the_format_is_that_of_upstream(tmp_path: Path) -> None:
    entries = [Importance("a.weight", array("d", [1.0, 4.0]), 3)]
    path = tmp_path / "m.gguf"
    counts = np.array([0, 3, 1])
    write_imatrix(
        path,
        entries,
        token_counts=counts,
        dataset="some/prompts.txt",
        n_blocks=5,
        block_rows=8,
    )
    reader = gguf.GGUFReader(path)
    known = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    assert known == {
        "general.architecture": "dflash",
        "general.type": "imatrix",
        "imatrix.datasets": ["some/prompts.txt"],
        "imatrix.chunk_count": 5,
        "imatrix.chunk_size": 8,
        "dflash2.token_counts": [0, 3, 1],
    }
    shapes = {t.name: (t.shape.tolist(), t.data.ravel().tolist()) for t in reader.tensors}
    assert shapes == {
        "a.weight.in_sum2": ([2, 1], [1.0, 4.0]),
        "a.weight.counts": ([1, 1], [3.0]),
    }


def test_nothing_is_left_where_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_writer: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", fail)
    entries = [Importance("a.weight", array("d", [1.0]), 3)]
    with pytest.raises(OutputError, match="No space left"):
        write_imatrix(
            tmp_path / "m.gguf",
            entries,
            token_counts=np.zeros(4, dtype=np.int64),
            dataset="x",
            n_blocks=1,
            block_rows=8,
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["-d", "d.gguf", "--prompts", "p.txt", "-o", "m.gguf"], 2, "there is no target"),
        (["-m", "t.gguf", "--prompts", "p.txt", "-o", "m.gguf"], 2, "there is no drafter"),
        (["-m", "t.gguf", "-d", "d.gguf", "-o", "m.gguf"], 2, "there is no file of prompts"),
        (["-m", "t.gguf", "-d", "d.gguf", "--prompts", "p.txt", "-o", "there"], 1, "there exists"),
        (
            ["-m", "t.gguf", "-d", "d.gguf", "--prompts", "p.txt", "-o", "no/m.gguf"],
            1,
            "there is no folder no",
        ),
        (
            ["-m", "t.gguf", "-d", "d.gguf", "--prompts", "p.txt", "-o", "m.gguf", "-n", "1"],
            2,
            "answers of 1 token draft nothing",
        ),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text(PROMPTS)
    (tmp_path / "there").write_text("precious")
    assert main(["calibrate", *words]) == code
    assert message in capsys.readouterr().err
    assert (tmp_path / "there").read_text() == "precious"
