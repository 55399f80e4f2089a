"""The command line: help, usage errors, output of generate, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from dflash2_gguf import SamplingParams, Session
from dflash2_gguf.generate import collect
from tests.runtime.gguf_files import SELECTOR, drafter_fields, target_fields, write_gguf
from tests.runtime.terminal import ENVIRONMENT, PROGRAM

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPT = "The capital of France is"


def _run(arguments: Sequence[str], *, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "dflash2-run"),
        (["generate"], "dflash2-run-generate"),
        (["plan"], "dflash2-run-plan"),
        (["prove"], "dflash2-run-prove"),
    ],
)
def test_help_is_what_is_written_down(arguments: list[str], name: str) -> None:
    done = _run([*arguments, "--help"])
    assert done.stdout == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no target"),
        (["generate", "-p", "x"], "there is no target"),
        (["--bogus"], "no such option: --bogus"),
        (["unknown"], "no such command 'unknown'"),
        (["-m", "x", "generate", "-p", "x"], "an option (model) stands before generate"),
        (["-m", "x", "--draft-max", "many"], "--draft-max is 'many'"),
        (["-m", "x", "--draft-max", "-1"], "--draft-max is '-1'"),
        (["-m", "x", "--gpu-layers", "all"], "--gpu-layers is 'all'"),
        (["plan"], "there is no target"),
        (["plan", "-m", "x", "--parallel", "65"], "invalid value for '--parallel'"),
        (["generate", "-m", "x", "--json-schema", "{"], "--json-schema is not JSON"),
        (["generate", "-m", "x", "--json-schema", "{}", "--grammar", __file__], "both grammar and"),
        (["-m", "x", "--top-p", "2"], "invalid value for '--top-p'"),
        (["-m", "x", "-t", "0"], "invalid value for '-t' / '--threads'"),
        (["-m", "x", "--seed", "4294967295"], "seed is 4294967295"),
        (["generate", "-m", "x", "-n", "0"], "invalid value for '-n' / '--max-tokens'"),
    ],
)
def test_wrong_usage_is_one_line_with_a_hint_and_exit_code_2(
    arguments: list[str], message: str
) -> None:
    done = _run(arguments, stdin="")
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: {message}")
    assert hint.startswith("hint: ")
    assert not error.endswith(".")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_missing_file_is_one_line_and_exit_code_1() -> None:
    done = _run(["-m", "nothing.gguf"], stdin="")
    assert done.stderr == "error: nothing.gguf does not exist\n"
    assert (done.returncode, done.stdout) == (1, "")


def test_a_wrong_pair_is_told_by_name(tmp_path: Path) -> None:
    target = write_gguf(tmp_path / "target.gguf", target_fields())
    fields = drafter_fields(dflash_embedding_length=16)
    drafter = write_gguf(tmp_path / "drafter.gguf", fields, {SELECTOR: (16, 4)})
    done = _run(["generate", "-m", str(target), "-d", str(drafter), "-p", "x"])
    assert done.stderr == (
        "error: hidden size differs: target 8, drafter 16\n"
        "hint: convert the drafter that was trained for this target\n"
    )
    assert done.returncode == 1


def test_a_traceback_is_shown_only_on_demand() -> None:
    assert "Traceback" in _run(["-m", "nothing.gguf", "-v"], stdin="").stderr


def _pair(target: Path, drafter: Path) -> list[str]:
    return ["generate", "-m", str(target), "-d", str(drafter), "-t", "1", "--temp", "0"]


@pytest.mark.native
@pytest.mark.parametrize("plain", [["--no-draft"], ["--draft-max", "off"]])
def test_generate_prints_the_same_text_with_and_without_drafter(
    target_gguf: Path, drafter: Path, plain: list[str]
) -> None:
    arguments = [*_pair(target_gguf, drafter), "-p", PROMPT, "-n", "32"]
    drafted = _run(arguments)
    assert drafted.stdout.startswith(" Paris.")
    assert drafted.stdout.endswith("\n")
    assert (drafted.returncode, drafted.stderr) == (0, "")
    assert _run([*arguments, *plain]).stdout == drafted.stdout


@pytest.mark.native
def test_generate_prints_json_with_text_tokens_and_stats(
    session: Session, target_gguf: Path, drafter: Path
) -> None:
    arguments = [*_pair(target_gguf, drafter), "-p", PROMPT, "-n", "32", "--draft-max", "7"]
    shown = json.loads(_run([*arguments, "--json"]).stdout)
    greedy = SamplingParams(temperature=0)
    answer = collect(list(session.generate(PROMPT, max_tokens=32, sampling=greedy)))
    assert shown["text"] == answer.text
    assert tuple(shown["tokens"]) == answer.tokens
    assert tuple(shown["from_draft"]) == answer.from_draft
    assert shown["finish_reason"] == "length"
    assert shown["draft_max"] == 7
    assert shown["stats"]["n_accepted"] == sum(answer.from_draft)


@pytest.mark.native
def test_generate_without_drafter_drafts_nothing(target_gguf: Path, drafter: Path) -> None:
    arguments = [*_pair(target_gguf, drafter), "-p", PROMPT, "-n", "4", "--no-draft", "--json"]
    shown = json.loads(_run(arguments).stdout)
    assert shown["draft_max"] == 0
    assert shown["stats"]["n_drafted"] == 0


@pytest.mark.native
def test_generate_reads_its_prompt_from_a_pipe(target_gguf: Path, drafter: Path) -> None:
    arguments = [*_pair(target_gguf, drafter), "-n", "8"]
    assert _run(arguments, stdin=PROMPT).stdout == _run([*arguments, "-p", PROMPT]).stdout


@pytest.mark.native
def test_generate_stops_before_a_stop_text(target_gguf: Path, drafter: Path) -> None:
    arguments = [*_pair(target_gguf, drafter), "-p", PROMPT, "-n", "32"]
    done = _run([*arguments, "--stop", "nowhere", "--stop", "The United"])
    assert done.stdout == " Paris.\n\n\n"


@pytest.mark.native
def test_a_seed_makes_sampling_repeatable(target_gguf: Path, drafter: Path) -> None:
    arguments = [*_pair(target_gguf, drafter), "-p", PROMPT, "-n", "16", "--temp", "1.5"]
    first = _run([*arguments, "--seed", "5"]).stdout
    assert _run([*arguments, "--seed", "5"]).stdout == first
    assert _run([*arguments, "--seed", "6"]).stdout != first


@pytest.mark.native
def test_asking_for_more_than_the_drafter_can_is_told(target_gguf: Path, drafter: Path) -> None:
    arguments = [*_pair(target_gguf, drafter), "-p", PROMPT, "-n", "2", "--draft-max", "20"]
    done = _run(arguments)
    assert done.stderr == "warning: this drafter drafts 7 tokens at once, not 20\n"
    assert done.returncode == 0


@pytest.mark.native
def test_a_plan_tells_what_cannot_be_had_and_what_was_not_trained(
    target_gguf: Path, drafter: Path
) -> None:
    pair = ["-m", str(target_gguf), "-d", str(drafter)]
    done = _run(["plan", *pair, "--draft-max", "20", "-c", "16384"])
    assert done.stderr.startswith(
        "warning: this drafter drafts 7 tokens at once, not 20\n"
        "warning: the context of 16384 tokens is longer than the 8192 that the target was trained "
        "for\n"
    )


def test_the_version_is_that_of_the_package() -> None:
    for module in ("dflash2_gguf", "dflash2_gguf.convert_cli"):
        command = [sys.executable, "-m", module, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
        assert done.stdout == f"dflash2-gguf {metadata.version('dflash2-gguf')}\n"


@pytest.mark.native
def test_a_reader_that_leaves_ends_the_program_quietly(target_gguf: Path, drafter: Path) -> None:
    arguments = [*_pair(target_gguf, drafter), "-p", PROMPT, "-n", "200"]
    process = subprocess.Popen(
        [*PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(3) == b" Pa"
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0
    process.stderr.close()


@pytest.mark.native
def test_an_interrupt_ends_generate_with_130_and_no_traceback(
    target_gguf: Path, drafter: Path
) -> None:
    arguments = [*_pair(target_gguf, drafter), "-p", PROMPT, "-n", "500"]
    process = subprocess.Popen(
        [*PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    assert process.stdout is not None
    assert process.stdout.read(3) == b" Pa"
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in errors
