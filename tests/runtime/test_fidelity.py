"""``dflash2-convert fidelity``: what it measures is what decoding does; what it shows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash2_gguf import SamplingParams, Session, fidelity_report
from dflash2_gguf.agreement import Interval
from dflash2_gguf.convert_cli import main
from dflash2_gguf.fidelity import Acceptance, Drafter, FidelitySettings, Measured, measure
from dflash2_gguf.fidelity_report import Report, fidelity, page, plot, table
from dflash2_gguf.ui import Terminal
from tests.runtime.terminal import ENVIRONMENT

PROMPTS = ("Once upon a time there was", "List three colours and", "The capital of France is")


def measured(
    preset: str, *, imatrix: bool = False, nbytes: int = 20_000_000, n_tokens: int | None = None
) -> Measured:
    acceptance = tuple(
        Acceptance(
            temperature=temperature,
            length=Interval(2.1, 2.0, 2.25),
            relative=Interval(0.987, 0.98, 0.995),
            survival=(0.5, 0.25),
        )
        for temperature in (0.0, 1.0)
    )
    return Measured(
        drafter=Drafter(
            path=Path("x.gguf"),
            preset=preset,
            imatrix=imatrix,
            n_tokens=n_tokens,
            nbytes=nbytes,
            bits=8.5,
            types="Q8_0 31",
        ),
        n_blocks=120,
        acceptance=acceptance,
        top1=(0.99, 0.97),
        path=(0.99, 0.95),
        kl=(0.001, 0.002),
        overlap=(0.98, 0.97),
        draft_ms=4.5,
        time_ratio=0.75,
    )


def test_help_is_what_is_written_down() -> None:
    golden = Path(__file__).parents[1] / "convert" / "golden" / "help-fidelity.txt"
    command = [sys.executable, "-m", "dflash2_gguf.convert_cli", "fidelity", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert (done.stdout, done.stderr) == (golden.read_text(encoding="utf-8"), "")


@pytest.mark.native
def test_greedy_acceptance_is_that_of_decoding(
    target_gguf: Path, drafter: Path, drafter_gguf: Callable[[str], Path]
) -> None:
    """The same answers decoded for real: as many steps as the replay expects, for each drafter."""
    drafts = (drafter, drafter_gguf("q4_0"))
    settings = FidelitySettings(
        target=target_gguf,
        drafts=drafts,
        prompts=PROMPTS,
        max_tokens=24,
        n_ctx=256,
        n_threads=1,
        raw=True,
    )
    found = measure(settings, Terminal())
    for draft, one in zip(drafts, found, strict=True):
        with Session(target_gguf, draft, n_ctx=256, n_threads=1, draft_max=7) as session:
            for prompt in PROMPTS:
                session.reset()
                sampling = SamplingParams(temperature=0)
                for _ in session.generate(prompt, max_tokens=24, sampling=sampling):
                    pass
            real = session.stats.acceptance_length
        # rounding of rows evaluated together may turn a draft here and there
        assert one.acceptance[0].length.value == pytest.approx(real, rel=0.03)


@pytest.mark.native
def test_a_drafter_agrees_with_itself(
    target_gguf: Path, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("\n".join(PROMPTS[:2]))
    pair = ["-m", str(target_gguf), "--prompts", str(prompts), "-n", "8", "-c", "256", "-t", "1"]
    assert main(["fidelity", *pair, "--raw", "--json", str(drafter), str(drafter)]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["drafter"] == second["drafter"]
    assert second["top1"] == second["path"] == [1.0] * 7
    assert second["kl"] == pytest.approx([0.0] * 7, abs=1e-9)
    assert second["overlap"] == pytest.approx([1.0] * 7)
    for acceptance in second["acceptance"]:
        assert acceptance["relative"] == {"value": 1.0, "low": 1.0, "high": 1.0}
        assert acceptance["length"]["low"] >= 1.0


def test_a_table_in_a_pipe_has_aligned_columns(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().grid(("drafter", "MB"), [("bf16", "38.20"), ("q4_0 + imatrix", "9.10")])
    assert capsys.readouterr().out == (
        "drafter         MB\nbf16            38.20\nq4_0 + imatrix  9.10\n"
    )


def test_cells_of_the_table_are_whole_figures() -> None:
    (row,) = table([measured("q4_0", imatrix=True)])
    assert row == (
        "q4_0 + imatrix",
        "20.00",
        "8.50",
        "2.10 (2.00 to 2.25)",
        "0.987 (0.980 to 0.995)",
        "2.10 (2.00 to 2.25)",
        "0.987 (0.980 to 0.995)",
        "0.0015",
        "0.975",
        "0.980",
        "0.970",
        "4.5",
        "0.75",
    )


def test_a_line_below_the_table_says_what_its_columns_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [measured("bf16"), measured("q4_0")]
    monkeypatch.setattr(fidelity_report, "measure", lambda *_: found)
    settings = FidelitySettings(
        target=Path("t"), drafts=(Path("a"), Path("b")), prompts=(), max_tokens=8
    )
    assert fidelity(settings, Report(), Terminal()) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 3
    assert shown.err == (
        "MB: all tensors; bits: per weight; tokens/step: per verification step at temperature T "
        "(95 % interval); of the first, time: ratio to the first drafter; KL of q (0 is equal), "
        "overlap, top-1, path (1 is equal): agreement with its drafts; draft ms: per block\n"
    )
    assert fidelity(settings, Report(as_json=True), Terminal()) == 0
    assert capsys.readouterr().err == ""


def test_the_page_has_every_drafter_and_position() -> None:
    found = [measured("bf16"), measured("q4_0", imatrix=True), measured("q8_0", n_tokens=4096)]
    text = page(found, n_prompts=60, machine="a CPU", image="plot.svg")
    assert text.startswith(
        "# Quantization of drafters\n\nWritten by `dflash2-convert fidelity` on a"
    )
    assert "![acceptance against size](plot.svg)" in text
    assert "| q4_0 + imatrix | 0.0010 | 0.0020 |" in text
    assert "| q8_0, 4096 tokens | 0.0010 | 0.0020 |" in text
    assert "## At least so many drafts accepted, T 1" in text
    assert text.count("| bf16 |") == 7


@pytest.mark.parametrize("name", ["plot.png", "plot.svg"])
def test_the_plot_is_of_the_kind_its_name_says(name: str, tmp_path: Path) -> None:
    reduced = measured("q8_0", nbytes=30_000_000, n_tokens=4096)
    found = [measured("bf16"), measured("q4_0", imatrix=True, nbytes=9_000_000), reduced]
    plot(found, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert data.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    plot(found, tmp_path / f"again-{name}")
    assert (tmp_path / f"again-{name}").read_bytes() == data
    assert len(list(tmp_path.iterdir())) == 2


def test_a_plot_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("x\n")
    words = ["-m", "t.gguf", "--prompts", "p.txt", "--plot", "plot.png", "a.gguf", "b.gguf"]
    assert main(["fidelity", *words]) == 2
    assert capsys.readouterr().err == (
        "error: a plot needs matplotlib\n"
        "hint: pip install 'dflash2-gguf[plot]', or leave out --plot\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompts", "p.txt", "a", "b"], "there is no target"),
        (["-m", "t", "a", "b"], "there is no file of prompts"),
        (["-m", "t", "--prompts", "p.txt", "a"], "there is nothing to compare"),
        (["-m", "t", "--prompts", "p.txt", "-n", "2", "a", "b"], "answers of 2 tokens judge no"),
        (["-m", "t", "--prompts", "p.txt", "--plot", "x.pdf", "a", "b"], "the plot is x.pdf"),
        (["-m", "t", "--prompts", "p.txt", "--plot", "n/x.png", "a", "b"], "there is no folder n"),
        (["-m", "t", "--prompts", "p.txt", "--page", "n/x.md", "a", "b"], "there is no folder n"),
        (["-m", "t", "--prompts", "p.txt", "a", "b"], "a does not exist"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("x\n")
    assert main(["fidelity", *words]) != 0
    assert message in capsys.readouterr().err


def test_json_has_no_number_for_what_was_never_seen() -> None:
    values = fidelity_report._json({"a": (1.5, float("nan")), "b": Path("x"), "c": float("inf")})
    assert values == {"a": [1.5, None], "b": "x", "c": None}
