"""README and CONTRIBUTING say what the programs do: commands exist, with their options."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
MODULES = {
    "dflash2-run": "dflash2_gguf.cli",
    "dflash2-convert": "dflash2_gguf.convert_cli",
    "patchtool.py": "cpp_patches/patchtool.py",
}
SUBCOMMANDS = {
    "dflash2-run": {"generate", "plan", "prove"},
    "dflash2-convert": {
        "calibrate",
        "check",
        "convert",
        "fidelity",
        "inspect",
        "migrate",
        "pack",
        "presets",
    },
    "patchtool.py": {"apply", "bump"},
}


def lines() -> list[str]:
    """Indented lines and inline code of the documents, comments cut off."""
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS)
    code = re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    return [line.split("  #")[0].strip() for line in code]


def commands(program: str) -> list[str]:
    found = {line for line in lines() if re.match(rf"(\S*/)?{re.escape(program)} ", line)}
    return sorted(found)


@cache
def help_text(program: str, subcommand: str) -> str:
    module = MODULES[program]
    call = f"import sys; from {module} import main; sys.exit(main())"
    start = [str(ROOT / module)] if module.endswith(".py") else ["-c", call]
    command = [sys.executable, *start, *filter(None, [subcommand]), "--help"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.mark.parametrize(
    ("program", "line"), [(program, line) for program in MODULES for line in commands(program)]
)
def test_a_documented_command_has_its_options(program: str, line: str) -> None:
    words = line.split()[1:]
    named = words[0] if words and words[0] in SUBCOMMANDS[program] else ""
    subcommand = named or ("convert" if program == "dflash2-convert" else "")
    text = help_text(program, subcommand)
    options = [word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)]
    assert [option for option in options if not re.search(rf"{option}\b", text)] == []


@pytest.mark.parametrize("program", MODULES)
def test_every_program_is_documented(program: str) -> None:
    assert commands(program)


@pytest.mark.parametrize(
    "target", sorted({name for line in lines() for name in re.findall(r"^make ([a-z-]+)", line)})
)
def test_a_documented_make_target_exists(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^[a-z -]*\b{target}\b[a-z -]*:", makefile, re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / link).exists(), link


def test_documented_paths_exist() -> None:
    for path in lines():
        if re.fullmatch(r"(convert|dflash2_gguf|cpp_patches|quant_presets|tests)/[\w./-]*", path):
            assert (ROOT / path).exists(), path


def test_environment_variables_of_the_readme_are_read_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    places = [ROOT / "setup.py", *(ROOT / "cpp_patches").glob("*.py")]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in places)
    for variable in set(re.findall(r"\b(?:DFLASH2|LLAMA_CPP|CMAKE)_[A-Z]+\b", text)):
        assert variable in sources, variable
