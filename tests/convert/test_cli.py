"""The program as a user meets it: whole helps, whole transcripts, exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.convert import checkpoints
from tests.convert.conftest import Program

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("command", ["", "convert", "inspect", "check", "pack", "presets"])
def test_help_is_golden(program: Program, command: str) -> None:
    done = program(*command.split(), "--help")
    assert done.out == (GOLDEN / f"help-{command or 'program'}.txt").read_text()
    assert (done.code, done.err) == (0, "")


def test_no_arguments_show_the_help(program: Program) -> None:
    assert program().out == program("--help").out


def test_conversion_prints_the_path_and_nothing_else(
    checkpoint: Path, target: Path, program: Program, tmp_path: Path
) -> None:
    done = program("convert", "tiny", "--target", "target.gguf", "--preset", "bf16", "-o", "x.gguf")
    assert (done.code, done.out, done.err) == (0, "x.gguf\n", "")
    assert (tmp_path / "x.gguf").read_bytes() == (GOLDEN / "tiny-bf16.gguf").read_bytes()


def test_word_convert_may_be_left_out(checkpoint: Path, target: Path, program: Program) -> None:
    done = program("tiny", "--target", "target.gguf", "--preset", "bf16", "-o", "x.gguf")
    assert (done.code, done.out, done.err) == (0, "x.gguf\n", "")
    done = program("--preset", "bf16", "--target", "target.gguf", "tiny", "-o", "y.gguf")
    assert (done.code, done.out, done.err) == (0, "y.gguf\n", "")


def test_several_presets_read_the_source_once(
    checkpoint: Path, target: Path, program: Program, tmp_path: Path
) -> None:
    words = ["--preset", "bf16", "--preset", "F32", "--preset", "f16"]
    done = program("tiny", "--target", "target.gguf", *words, "-o", "out")
    assert done.out == "out/tiny-BF16.gguf\nout/tiny-F32.gguf\nout/tiny-F16.gguf\n"
    assert (done.code, done.err) == (0, "")
    for preset in ("f32", "f16"):
        single = f"{preset}.gguf"
        program("tiny", "--target", "target.gguf", "--preset", preset, "-o", single)
        many = tmp_path / "out" / f"tiny-{preset.upper()}.gguf"
        assert many.read_bytes() == (tmp_path / single).read_bytes()


def test_folder_as_output_names_the_file(checkpoint: Path, target: Path, program: Program) -> None:
    done = program("tiny", "--target", "target.gguf", "--preset", "bf16")
    assert (done.code, done.out) == (0, "tiny-BF16.gguf\n")


def test_dry_run_writes_nothing(
    checkpoint: Path, target: Path, program: Program, tmp_path: Path
) -> None:
    words = ["--preset", "q4_k_m", "--preset", "q8_0", "-o", "out", "--dry-run"]
    done = program("tiny", "--target", "target.gguf", *words)
    assert done.out == (
        "out/tiny-Q4_K_M.gguf: 21.2 kB of tensors (F32 14, Q5_0 20, Q8_0 2)\n"
        "out/tiny-Q8_0.gguf: 29.6 kB of tensors (F32 14, Q8_0 22)\n"
    )
    assert done.err == (
        "q4_k_m: Q5_0 instead of Q4_K for 2 tensors with rows of 64\n"
        "q4_k_m: Q5_0 instead of Q4_K for 18 tensors with rows of 32\n"
        "q4_k_m: Q8_0 instead of Q6_K for 1 tensor with rows of 32\n"
        "q4_k_m: Q8_0 instead of Q6_K for 1 tensor with rows of 64\n"
    )
    assert done.code == 0
    assert not (tmp_path / "out").exists()


def test_dry_run_finds_an_existing_file(
    checkpoint: Path, target: Path, program: Program, tmp_path: Path
) -> None:
    (tmp_path / "x.gguf").write_text("precious")
    words = ["--preset", "bf16", "-o", "x.gguf", "--dry-run"]
    done = program("tiny", "--target", "target.gguf", *words)
    assert done.err == "error: x.gguf exists\nhint: use --force to replace it\n"
    assert (done.code, done.out) == (1, "")


def test_json_result_is_complete(checkpoint: Path, target: Path, program: Program) -> None:
    import hashlib

    words = ["--preset", "bf16", "-o", "x.gguf", "--json"]
    done = program("tiny", "--target", "target.gguf", *words)
    files = ("model.safetensors", "config.json")
    hashes = {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in files}
    assert json.loads(done.out) == {
        "source": "tiny",
        "source_sha256": hashes,
        "target": "tiny target",
        "parameters": 25824,
        "draft_vocab": None,
        "dry_run": False,
        "outputs": [
            {
                "path": "x.gguf",
                "preset": "bf16",
                "bytes": (GOLDEN / "tiny-bf16.gguf").stat().st_size,
                "tensor_types": {"BF16": 22, "F32": 14},
                "fallbacks": [],
            }
        ],
        "warnings": [],
    }
    assert (done.code, done.err) == (0, "")


def test_verbose_names_every_tensor_and_reason(
    checkpoint: Path, target: Path, program: Program
) -> None:
    done = program("tiny", "--target", "target.gguf", "--preset", "bf16", "-o", "x.gguf", "-v")
    lines = done.err.splitlines()
    assert len(lines) == 36
    assert lines[0] == (
        "bf16: fc.weight: BF16, what drafters are trained and published in, so nothing is lost"
    )
    assert lines[1] == "bf16: enc.output_norm.weight: F32, norm is always F32"


@pytest.mark.parametrize(
    ("words", "code", "err"),
    [
        (
            ["tiny", "--preset", "bf16"],
            2,
            (
                "error: a checkpoint is converted for its target\n"
                "hint: name the target's file with --target\n"
            ),
        ),
        (
            ["tiny", "--target", "target.gguf"],
            2,
            "error: missing option '--preset'\nhint: --help lists the options\n",
        ),
        (
            ["tiny", "--target", "target.gguf", "--preset", "bf16", "--zzz"],
            2,
            "error: no such option: --zzz\nhint: --help lists the options\n",
        ),
        (
            ["tiny", "--target", "target.gguf", "--preset", "bf16", "--preset", "bf16"],
            2,
            "error: preset bf16 is given twice\n",
        ),
        (
            [
                *("tiny", "--target", "target.gguf", "--preset", "bf16"),
                *("--preset", "f32", "-o", "x.gguf"),
            ],
            2,
            "error: x.gguf is one file for 2 presets\nhint: give a folder with -o\n",
        ),
        (
            ["none", "--target", "target.gguf", "--preset", "bf16"],
            1,
            (
                "error: not a checkpoint directory: none\n"
                "hint: give the folder that holds config.json and model.safetensors\n"
            ),
        ),
        (
            ["tiny", "--target", "none.gguf", "--preset", "bf16"],
            1,
            (
                "error: there is no target at none.gguf\n"
                "hint: check the path; it can be a GGUF file or a Hugging Face folder\n"
            ),
        ),
        (
            ["tiny", "target.gguf", "--preset", "bf16"],
            2,
            (
                "error: got unexpected extra argument(s) (target.gguf)\n"
                "hint: name the target with --target, what is written with -o\n"
            ),
        ),
        (
            ["inspect", "tiny", "target.gguf"],
            2,
            (
                "error: got unexpected extra argument(s) (target.gguf)\n"
                "hint: --help lists the options\n"
            ),
        ),
        (
            ["inspect", "target.gguf"],
            1,
            (
                "error: target.gguf is a model of architecture 'llama', not a DFlash drafter\n"
                "hint: is it the target? a drafter is wanted here\n"
            ),
        ),
        (
            ["inspect", "tiny/model.safetensors"],
            1,
            (
                "error: tiny/model.safetensors is one file of a checkpoint\n"
                "hint: give its folder instead: tiny\n"
            ),
        ),
    ],
)
def test_mistake_is_one_line_and_a_hint(
    checkpoint: Path, target: Path, program: Program, words: list[str], code: int, err: str
) -> None:
    done = program(*words)
    assert (done.code, done.out, done.err) == (code, "", err)


def test_escape_sequences_of_a_file_never_reach_the_terminal(
    checkpoint: Path, target: Path, program: Program
) -> None:
    values = checkpoints.tensors(checkpoints.config())
    values["\x1b]0;owned\x07"] = values["norm.weight"]
    (checkpoint / "model.safetensors").write_bytes(checkpoints.safetensors_bytes(values))
    done = program("tiny", "--target", "target.gguf", "--preset", "bf16", "-o", "x.gguf")
    assert done.err == (
        "error: 1 tensor is unknown: \\x1b]0;owned\\x07\n"
        "hint: dropping them would change what the drafter computes\n"
    )


def test_traceback_appears_with_verbose_only(
    checkpoint: Path, target: Path, program: Program
) -> None:
    words = ["none", "--target", "target.gguf", "--preset", "bf16"]
    assert "Traceback" not in program(*words).err
    assert "Traceback" in program(*words, "-v").err


def test_missing_native_library_is_said_and_leaves_nothing(
    checkpoint: Path, target: Path, program: Program, tmp_path: Path
) -> None:
    words = ["tiny", "--target", "target.gguf", "--preset", "q8_0", "-o", "x.gguf"]
    done = program(*words, environment={"DFLASH2_LIB_DIR": "/nonexistent"})
    first = "error: the native libraries are not there: /nonexistent (from DFLASH2_LIB_DIR)"
    assert done.err.splitlines()[0] == first
    assert (done.code, done.out) == (1, "")
    assert not [path for path in tmp_path.iterdir() if "x.gguf" in path.name]


def test_float_presets_need_no_native_library(
    checkpoint: Path, target: Path, program: Program
) -> None:
    words = ["tiny", "--target", "target.gguf", "--preset", "f16", "-o", "x.gguf"]
    done = program(*words, environment={"DFLASH2_LIB_DIR": "/nonexistent"})
    assert (done.code, done.err) == (0, "")


def test_float_conversion_imports_neither_torch_nor_rich_nor_gguf(
    checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    script = (
        "import sys\n"
        "from dflash2_gguf.convert_cli import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'rich', 'gguf', 'llama_cpp', 'safetensors'}\n"
        "sys.exit(code or sorted(heavy & set(sys.modules)) or 0)\n"
    )
    words = ["tiny", "--target", "target.gguf", "--preset", "bf16"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_licence_is_copied_and_warned_about(
    checkpoint: Path, target: Path, program: Program
) -> None:
    card = "---\nlicense: other\nlicense_name: cc-by-nc-nd-4.0\nlicense_link: LICENSE\n---\n# x\n"
    (checkpoint / "README.md").write_text(card)
    done = program("tiny", "--target", "target.gguf", "--preset", "bf16", "-o", "x.gguf")
    assert done.err == (
        "warning: licence cc-by-nc-nd-4.0: non-commercial use only, "
        "a converted file must not be shared\n"
    )
    facts = json.loads(program("inspect", "x.gguf", "--json").out)
    assert {key: facts[key] for key in ("license", "license_name", "license_link")} == {
        "license": "other",
        "license_name": "cc-by-nc-nd-4.0",
        "license_link": "LICENSE",
    }


@pytest.mark.parametrize("licence", ["mit", "apache-2.0", "cc-by-4.0"])
def test_free_licence_is_copied_in_silence(
    checkpoint: Path, target: Path, program: Program, licence: str
) -> None:
    (checkpoint / "README.md").write_text(f"---\nlicense: {licence}\n---\n")
    done = program("tiny", "--target", "target.gguf", "--preset", "bf16", "-o", "x.gguf")
    assert done.err == ""
    assert json.loads(program("inspect", "x.gguf", "--json").out)["license"] == licence


def test_unknown_top_level_key_is_a_warning(tmp_path: Path, target: Path, program: Program) -> None:
    checkpoints.write_checkpoint(tmp_path / "c", data=checkpoints.config(surprise=1))
    done = program("c", "--target", "target.gguf", "--preset", "bf16", "-o", "x.gguf")
    assert done.err == "warning: config.json: unknown key surprise is ignored\n"
    assert done.code == 0


def test_sliding_layers_without_a_window_are_a_warning(
    tmp_path: Path, target: Path, program: Program
) -> None:
    data = checkpoints.config(use_sliding_window=False)
    checkpoints.write_checkpoint(tmp_path / "c", data=data)
    done = program("c", "--target", "target.gguf", "--preset", "bf16", "-o", "x.gguf")
    assert done.err == (
        "warning: config.json: layer_types has sliding layers, but use_sliding_window is off: "
        "full attention, as in the reference\n"
    )
    assert json.loads(program("inspect", "x.gguf", "--json").out)["sliding_window"] is None


@pytest.mark.parametrize("kind", ["checkpoint", "gguf"])
def test_inspection_is_golden(checkpoint: Path, target: Path, program: Program, kind: str) -> None:
    program("tiny", "--target", "target.gguf", "--preset", "bf16", "-o", "x.gguf")
    done = program("inspect", {"checkpoint": "tiny", "gguf": "x.gguf"}[kind])
    assert done.out == (GOLDEN / f"inspect-{kind}.txt").read_text()
    assert (done.code, done.err) == (0, "")


def test_verbose_inspection_lists_the_tensors(
    checkpoint: Path, target: Path, program: Program
) -> None:
    program("tiny", "--target", "target.gguf", "--preset", "bf16", "-o", "x.gguf")
    facts = len(program("inspect", "x.gguf").out.splitlines())
    lines = program("inspect", "x.gguf", "-v").out.splitlines()[facts:]
    assert len(lines) == 36
    assert lines[0] == "fc.weight: BF16 [32, 64]"
    assert lines[-2] == "blk.1.ffn_conv_base: F32 [2, 2, 32]"
    source = program("inspect", "tiny", "-v").out.splitlines()
    assert "fc.weight: BF16 [32, 64]" in source


def test_both_forms_of_a_drafter_give_the_same_facts(
    checkpoint: Path, target: Path, program: Program
) -> None:
    program("tiny", "--target", "target.gguf", "--preset", "bf16", "-o", "x.gguf")
    source = json.loads(program("inspect", "tiny", "--json").out)
    file = json.loads(program("inspect", "x.gguf", "--json").out)
    differing = {key for key in set(source) & set(file) if source[key] != file[key]}
    assert differing == {"kind", "bytes", "tensor_types", "norm_epsilon", "rope_dims"}
    assert abs(source["norm_epsilon"] - file["norm_epsilon"]) < 1e-11


def test_source_revision_of_a_hub_cache_is_kept(
    tmp_path: Path, target: Path, program: Program
) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "models--someone--Some-DFlash2" / "snapshots" / revision
    checkpoints.write_checkpoint(folder)
    program(folder, "--target", "target.gguf", "--preset", "bf16", "-o", "x.gguf")
    facts = json.loads(program("inspect", "x.gguf", "--json").out)
    assert {key: facts[key] for key in ("name", "source", "source_repo", "source_revision")} == {
        "name": "Some-DFlash2",
        "source": "someone/Some-DFlash2",
        "source_repo": "https://huggingface.co/someone/Some-DFlash2",
        "source_revision": revision,
    }


def test_inspection_finds_what_would_fail_later(
    checkpoint: Path, target: Path, program: Program, tmp_path: Path
) -> None:
    program("tiny", "--target", "target.gguf", "--preset", "bf16", "-o", "x.gguf")
    raw = (tmp_path / "x.gguf").read_bytes()
    changed = (
        raw.replace(b"dflash.attention.causal", b"dflash.attention.casual")
        .replace(
            b"dflash.attention.sliding_window_pattern", b"dflash.attention.sliding_window_pottern"
        )
        .replace(b"blk.1.ffn_conv_base", b"blk.1.ffn_conv_case")
    )
    (tmp_path / "x.gguf").write_bytes(changed)
    done = program("inspect", "x.gguf")
    assert done.err == (
        "warning: the file does not say whether attention is causal; convert it again\n"
        "warning: sliding window and per-layer pattern do not come together\n"
        "warning: unknown fields: dflash.attention.casual, "
        "dflash.attention.sliding_window_pottern\n"
        "warning: missing tensors: blk.1.ffn_conv_base\n"
        "warning: unknown tensors: blk.1.ffn_conv_case\n"
    )
    assert done.code == 0


def on_terminal(folder: Path, words: list[str], **environment: str) -> str:
    """What a run prints on a terminal of 100 columns."""
    parent, child = pty.openpty()
    env = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color", **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash2_gguf.convert_cli", *words],
        cwd=folder,
        env=env,
        stdin=child,
        stdout=child,
        stderr=child,
    )
    os.close(child)
    output = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:
            break
        if not piece:
            break
        output += piece
    os.close(parent)
    assert process.wait() == 0
    return output.decode()


def test_terminal_shows_a_bar_with_bytes_rate_and_time(
    checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    words = ["tiny", "--target", "target.gguf", "--preset", "bf16", "-o", "x.gguf"]
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_terminal(tmp_path, words))
    assert re.search(r"converting tiny .*51\.6/51\.6 kB .*/s \d:\d\d:\d\d", shown)


def test_terminal_table_has_colours_unless_no_color(
    checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    checkpoints.write_checkpoint(tmp_path / "c", data=checkpoints.config(surprise=1))
    coloured = on_terminal(tmp_path, ["inspect", "c"], NO_COLOR="")
    assert "\x1b[33m" in coloured
    plain = on_terminal(tmp_path, ["inspect", "c"], NO_COLOR="1")
    assert not re.search(r"\x1b\[(3|4|9)\d", plain)
    assert "unknown key surprise is ignored" in plain


def test_plain_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dflash2_gguf.convert import ui

    clock = iter([0.0, 2.0, 5.0, 6.0, 10.0])
    monkeypatch.setattr(ui.time, "monotonic", lambda: next(clock))
    with ui.Terminal().progress("converting x", 4_000_000) as advance:
        for _ in range(4):
            advance(1_000_000)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "converting x: 2.0 MB of 4.0 MB, 400.0 kB/s, 5 s left\n"
        "converting x: 4.0 MB of 4.0 MB, 400.0 kB/s, 0 s left\n"
    )


def test_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    command = f"{sys.executable} -m dflash2_gguf.convert_cli presets | true"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_misspelled_command_is_named(program: Program) -> None:
    done = program("calibrat", "-m", "t.gguf")
    assert done.code == 2
    assert done.err.startswith("error: there is no command calibrat\n")
    assert "calibrate is meant?" in done.err
