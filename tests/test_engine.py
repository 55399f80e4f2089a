"""Programs in cpp_patches/tests that look inside libdflash2; each prints its evidence."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import native
from tests.oracle.tiny_pairs import TargetShape, write_target

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def programs() -> Path:
    return native.build_tests()


def run(program: Path, *arguments: str) -> str:
    done = subprocess.run([str(program), *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.reference  # writes the tiny vocabulary
def test_every_verifier_has_the_law_of_plain_decoding_and_mistakes_are_caught(
    programs: Path, tmp_path: Path
) -> None:
    vocabulary = tmp_path / "tiny.gguf"
    write_target(vocabulary, TargetShape(hidden=64, layers=1, heads=1, vocab=128))
    report = run(programs / "test-verifier-law", str(vocabulary))
    assert report.count("mistake: ") == 15
    assert report.endswith("all laws hold\n")


def test_automatic_width_is_never_slower_on_simulated_machines(programs: Path) -> None:
    report = run(programs / "test-width")
    assert report.count(" ok\n") == 90
    assert report.endswith("never slower\n")


def test_a_grammar_shown_the_likeliest_tokens_first_gives_the_same_distribution(
    programs: Path, target_gguf: Path
) -> None:
    report = run(programs / "test-lazy-grammar", str(target_gguf))
    assert report == "48 distributions, 0 wrong\n"


def test_remembered_masks_are_those_of_the_grammar_sampler(
    programs: Path, target_gguf: Path
) -> None:
    report = run(programs / "test-grammar-masks", str(target_gguf))
    assert report.endswith("0 wrong, a broken grammar is refused\n")


def test_a_row_has_the_same_bits_in_products_of_1_to_16_rows(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # threads that spin starve each other
    report = run(programs / "test-narrow-products")
    packed_for_amx = report.count("packed for AMX")
    assert packed_for_amx in (0, 7)  # 0: a CPU without
    assert report.count("ok ") == 9 + packed_for_amx


def test_a_row_has_the_same_bits_in_attention_of_1_to_16_rows(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # threads that spin starve each other
    report = run(programs / "test-narrow-attention")
    assert report.count("ok ") == 56
