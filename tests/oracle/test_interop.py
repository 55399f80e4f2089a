"""Our files on the unpatched pin's server, and a file of the pin's converter here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dflash2_gguf.convert.pipeline import make_plan, run
from dflash2_gguf.measure import Run
from dflash2_gguf.peer import PeerOptions, peer_server
from dflash2_gguf.presets import load_preset
from tests.convert.hf_targets import write_hf_target
from tests.convert.test_imatrix import write_imatrix
from tests.oracle.builds import Build, tokenized
from tests.oracle.prompts import load_prompts

pytestmark = [pytest.mark.native, pytest.mark.peer, pytest.mark.slow]

N_PREDICT, N_CTX = 64, 1024
N_VOCAB = 49152
END_OF_TEXT = (0, 2)  # the server stops there, and so must not reach one within N_PREDICT


@dataclass(frozen=True)
class Answer:
    """A greedy answer and its acceptance length (tokens per verification)."""

    tokens: list[int]
    length: float


@pytest.fixture(scope="module")
def prompts(target_gguf: Path, ours: Build) -> list[list[int]]:
    """Four prompts whose plain answers go on for N_PREDICT tokens."""
    every = tokenized(ours, target_gguf, load_prompts(8))
    plain = ours.run_parallel(
        "greedy", every, path=str(target_gguf), n_predict=N_PREDICT, n_ctx=N_CTX
    )["tokens"]
    ended = np.isin(plain, END_OF_TEXT).any(axis=1)
    return [prompt for prompt, short in zip(every, ended, strict=True) if not short][:4]


@pytest.fixture(scope="module")
def our_answers(
    target_gguf: Path, prompts: list[list[int]], ours: Build
) -> Callable[[Path], list[Answer]]:
    def answers(draft: Path) -> list[Answer]:
        pair = {"path": str(target_gguf), "draft": str(draft), "n_threads": 1}
        found = ours.run_parallel("session", prompts, n_predict=N_PREDICT, n_ctx=N_CTX, **pair)
        rounds = np.bincount(found["prompt"], minlength=len(prompts))
        lengths = (N_PREDICT - 1) / rounds
        pairs = zip(found["tokens"], lengths, strict=True)
        return [Answer(tokens.tolist(), float(length)) for tokens, length in pairs]

    return answers


def reduced(target: Path, drafter: Path, folder: Path) -> Path:
    """The drafter in q8_0 with a head of the tokens of the smallest ids."""
    counts = np.arange(N_VOCAB)[::-1].tolist()
    columns = ("fc.weight", np.ones(5 * 576, dtype=np.float32), 1.0)
    imatrix = write_imatrix(folder / "counts.gguf", columns, token_counts=counts)
    path = folder / "reduced.gguf"
    plan = make_plan(
        drafter, target, [(load_preset("q8_0"), path)], imatrix=imatrix, draft_vocab=N_VOCAB // 6
    )
    run(plan, force=False, progress=lambda _count: None)
    return path


def differing_rounds(mine: Sequence[Answer], served: Sequence[Run]) -> int:
    """Verifications by which the answers differ, together.

    The server's batches are other ones. On CPUs whose kernels round a row by its company (AVX-512
    with VNNI) a draft between two tokens of nearly equal score may come out otherwise; a wrong
    layer or window costs several verifications of each answer.
    """
    pairs = zip(mine, served, strict=True)
    rounds = ((N_PREDICT - 1) / np.array([one.length, run.acceptance_length]) for one, run in pairs)
    return sum(abs(round(ours) - round(theirs)) for ours, theirs in rounds)


@pytest.mark.parametrize("kind", ["bf16", "q8_0", "reduced"])
def test_our_file_drafts_in_the_unpatched_server_as_it_does_here(
    kind: str,
    target_gguf: Path,
    drafter_dir: Path,
    drafter_gguf: Callable[[str], Path],
    prompts: list[list[int]],
    peer_bin: Callable[[str], Path],
    our_answers: Callable[[Path], list[Answer]],
    tmp_path: Path,
) -> None:
    is_reduced = kind == "reduced"
    draft = reduced(target_gguf, drafter_dir, tmp_path) if is_reduced else drafter_gguf(kind)
    options = PeerOptions(
        program=peer_bin("llama-server"),
        target=target_gguf,
        draft=draft,
        draft_max=7,
        n_ctx=N_CTX,
    )
    with peer_server(options) as server:
        served = [server.run(prompt, N_PREDICT) for prompt in prompts]
    mine = our_answers(draft)
    assert [answer.tokens for answer in mine] == [list(one.tokens) for one in served]
    assert differing_rounds(mine, served) <= 1
    assert min(answer.length for answer in mine) > 1


def test_a_file_of_the_pin_s_converter_gives_the_same_answers_here(
    target_gguf: Path,
    drafter_dir: Path,
    drafter_gguf: Callable[[str], Path],
    peer_dir: Path,
    our_answers: Callable[[Path], list[Answer]],
    tmp_path: Path,
) -> None:
    theirs = tmp_path / "upstream.gguf"
    script = peer_dir.parents[1] / "convert_hf_to_gguf.py"
    target = write_hf_target(tmp_path / "target", target_gguf)
    options = ["--target-model-dir", str(target), "--outtype", "bf16", "--outfile", str(theirs)]
    subprocess.run(
        [sys.executable, str(script), str(drafter_dir), *options],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        check=True,
    )
    assert our_answers(theirs) == our_answers(drafter_gguf("bf16"))
