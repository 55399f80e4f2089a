"""The patch tool on a made-up upstream: what it does, and what it refuses."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import patchtool
import pytest
import upkeep

import native
import series as stack
import trees
from upstream import PatchError, Pin, fetch_archive, git, read_pin, sha256

SHA = "0" * 64
COMMIT = "1" * 40
MESSAGE = """ggml: say three

Why: two is too few.
Why-Patch: it is in the middle of a file.
Upstream-Status: not reported
Drop-When: grep -q three ggml/numbers.txt
Test: tests/test_patchtool.py
"""


@dataclass(frozen=True)
class Upstream:
    """A made-up pin, and the folder its source was made of."""

    pin: Pin
    source: Path


def write_source(folder: Path, second: str = "two") -> Path:
    (folder / "ggml").mkdir(parents=True)
    (folder / "ggml" / "CMakeLists.txt").write_text("project(ggml)\n")
    (folder / "CMakeLists.txt").write_text("project(llama.cpp)\n")
    lines = ["zero", "one", second, "four", "five", "six"]
    (folder / "ggml" / "numbers.txt").write_text("".join(f"{line}\n" for line in lines))
    return folder


def write_archive(source: Path, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        tar.add(source, "package-1.0/vendor/llama.cpp")
    return sha256(path)


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upstream:
    """Everything the tool touches, redirected into a scratch folder."""
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    monkeypatch.setattr(trees, "DOWNLOADS", tmp_path / "downloads")
    monkeypatch.setattr(trees, "BUILD", tmp_path / "build")
    monkeypatch.setattr(trees, "PATCHED", tmp_path / "build" / "patched")
    source = write_source(tmp_path / "source")
    digest = write_archive(source, tmp_path / "downloads" / "package-1.0.tar.gz")
    pin = Pin("package", "1.0", "package-1.0.tar.gz", digest, "vendor/llama.cpp", COMMIT, "0" * 40)
    tree = trees.create(tmp_path / "probe", pin, is_known=False)
    return Upstream(replace(pin, tree=tree), source)


@pytest.fixture
def tree(upstream: Upstream) -> Path:
    trees.apply(trees.PATCHED, upstream.pin, {})
    return trees.PATCHED


def commit(tree: Path, message: str = MESSAGE, old: str = "two", new: str = "three") -> None:
    path = tree / "ggml" / "numbers.txt"
    path.write_text(path.read_text().replace(f"{old}\n", f"{old}\n{new}\n"))
    git(tree, "commit", "--quiet", "--all", "-m", message)


@pytest.fixture
def series(tree: Path, upstream: Upstream) -> dict[str, str]:
    """One good patch, exported; the tree is back at the pin."""
    commit(tree)
    exported = trees.export(tree)
    git(tree, "reset", "--quiet", "--hard", trees.pin_commit(tree))
    return exported


# fetching


def test_an_archive_of_another_sha256_is_refused(upstream: Upstream) -> None:
    with pytest.raises(PatchError, match=f"has sha256 {upstream.pin.sha256}") as error:
        fetch_archive(replace(upstream.pin, sha256=SHA), trees.DOWNLOADS)
    assert error.value.hint and "delete" in error.value.hint


def test_source_of_another_content_is_refused(upstream: Upstream, tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="source has git tree") as error:
        trees.create(tmp_path / "new", replace(upstream.pin, tree="2" * 40))
    assert upstream.pin.tree in error.value.message
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["parent", "link"])
def test_an_archive_that_reaches_outside_is_refused(
    upstream: Upstream, tmp_path: Path, kind: str
) -> None:
    path = trees.DOWNLOADS / upstream.pin.archive
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("package-1.0/vendor/llama.cpp/../../../evil")
        if kind == "link":
            member = tarfile.TarInfo("package-1.0/vendor/llama.cpp/evil")
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member, io.BytesIO())
    with pytest.raises(PatchError, match="refusing to unpack"):
        trees.create(tmp_path / "new", replace(upstream.pin, sha256=sha256(path)))


def test_a_missing_key_of_the_pin_is_named(tmp_path: Path) -> None:
    path = tmp_path / "UPSTREAM.toml"
    path.write_text('[package]\nname = "x"\n[llama_cpp]\n')
    with pytest.raises(PatchError, match="'version' is missing"):
        read_pin(path)


def test_a_malformed_sha256_is_refused(upstream: Upstream) -> None:
    with pytest.raises(PatchError, match="sha256 is 'beef'"):
        replace(upstream.pin, sha256="beef")


# LLAMA_CPP_DIR


@pytest.fixture
def checkout(upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git checkout of the pin's content, named by LLAMA_CPP_DIR."""
    folder = tmp_path / "checkout"
    trees.create(folder, upstream.pin)
    monkeypatch.setenv("LLAMA_CPP_DIR", str(folder))
    return folder


def test_llama_cpp_dir_is_used_when_it_stands_at_the_pin(
    upstream: Upstream, checkout: Path, tmp_path: Path
) -> None:
    (trees.DOWNLOADS / upstream.pin.archive).unlink()
    assert trees.create(tmp_path / "new", upstream.pin) == upstream.pin.tree


def test_llama_cpp_dir_without_git_is_used_when_its_content_is_the_pins(
    upstream: Upstream, checkout: Path, tmp_path: Path
) -> None:
    shutil.rmtree(checkout / ".git")
    (checkout / ".git").write_text("gitdir: ../gone\n")
    assert trees.create(tmp_path / "new", upstream.pin) == upstream.pin.tree


def test_llama_cpp_dir_without_git_is_refused_when_its_content_is_not(
    upstream: Upstream, checkout: Path, tmp_path: Path
) -> None:
    shutil.rmtree(checkout / ".git")
    (checkout / "ggml" / "numbers.txt").write_text("other\n")
    with pytest.raises(PatchError, match="git tree"):
        trees.create(tmp_path / "new", upstream.pin)


def test_llama_cpp_dir_that_is_no_llama_cpp_is_refused(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CPP_DIR", str(tmp_path))
    with pytest.raises(PatchError, match=r"is no llama\.cpp source tree"):
        trees.create(tmp_path / "new", upstream.pin)


def test_llama_cpp_dir_at_another_commit_is_refused(
    upstream: Upstream, checkout: Path, tmp_path: Path
) -> None:
    commit(checkout)
    with pytest.raises(PatchError, match="the pin is 111111111111") as error:
        trees.create(tmp_path / "new", upstream.pin)
    assert error.value.hint == f"git -C {checkout} checkout {COMMIT}"


def test_llama_cpp_dir_with_changes_is_refused(
    upstream: Upstream, checkout: Path, tmp_path: Path
) -> None:
    (checkout / "ggml" / "numbers.txt").write_text("other\n")
    with pytest.raises(PatchError, match="uncommitted changes"):
        trees.create(tmp_path / "new", upstream.pin)


# applying and exporting


def test_export_of_an_applied_series_is_the_same_bytes(
    tree: Path, upstream: Upstream, series: dict[str, str]
) -> None:
    trees.apply(tree, upstream.pin, series)
    assert "three" in (tree / "ggml" / "numbers.txt").read_text()
    assert trees.export(tree) == series


def test_two_applications_give_the_same_commit(
    tree: Path, upstream: Upstream, series: dict[str, str], tmp_path: Path
) -> None:
    trees.apply(tree, upstream.pin, series)
    trees.apply(tmp_path / "other", upstream.pin, series)
    assert trees.head(tree) == trees.head(tmp_path / "other")


def test_export_does_not_depend_on_the_users_git_configuration(
    tree: Path, upstream: Upstream, series: dict[str, str]
) -> None:
    trees.apply(tree, upstream.pin, series)
    for key, value in (("format.signature", "me"), ("format.numbered", "true")):
        git(tree, "config", key, value)
    git(tree, "config", "diff.noprefix", "true")
    assert trees.export(tree) == series


def test_applying_twice_changes_nothing(
    tree: Path, upstream: Upstream, series: dict[str, str]
) -> None:
    assert trees.apply(tree, upstream.pin, series)
    assert not trees.apply(tree, upstream.pin, series)


def test_applying_leaves_other_files_untouched(
    tree: Path, upstream: Upstream, series: dict[str, str]
) -> None:
    before = (tree / "CMakeLists.txt").stat().st_mtime_ns
    trees.apply(tree, upstream.pin, series)
    assert (tree / "CMakeLists.txt").stat().st_mtime_ns == before


def test_a_tree_inside_an_ignored_folder_is_really_patched(
    tree: Path, upstream: Upstream, series: dict[str, str], tmp_path: Path
) -> None:
    outer = tmp_path / "outer"
    (outer / "build").mkdir(parents=True)
    git(outer, "init", "--quiet")
    (outer / ".gitignore").write_text("/build/\n")
    trees.apply(outer / "build" / "tree", upstream.pin, series)
    assert "three" in (outer / "build" / "tree" / "ggml" / "numbers.txt").read_text()


def test_a_patch_that_needs_fuzz_is_refused_and_the_tree_stays(
    tree: Path, upstream: Upstream, series: dict[str, str]
) -> None:
    (name,) = series
    before = trees.head(tree)
    with pytest.raises(PatchError, match=f"{name} does not apply"):
        trees.apply(tree, upstream.pin, {name: series[name].replace(" four\n", " fore\n")})
    assert trees.head(tree) == before
    assert not trees.is_dirty(tree)


def test_a_dirty_tree_is_refused(tree: Path, upstream: Upstream, series: dict[str, str]) -> None:
    (tree / "ggml" / "numbers.txt").write_text("work\n")
    with pytest.raises(trees.UnexportedError, match="uncommitted changes"):
        trees.apply(tree, upstream.pin, series)
    assert (tree / "ggml" / "numbers.txt").read_text() == "work\n"


def test_unexported_commits_are_refused(
    tree: Path, upstream: Upstream, series: dict[str, str]
) -> None:
    commit(tree, "ggml: say seven", "six", "seven")
    before = trees.head(tree)
    with pytest.raises(trees.UnexportedError, match=r"ggml-say-seven\.patch"):
        trees.apply(tree, upstream.pin, series)
    assert trees.head(tree) == before


def test_keep_puts_own_commits_on_top_of_the_series(
    tree: Path, upstream: Upstream, series: dict[str, str]
) -> None:
    commit(tree, "ggml: say seven", "six", "seven")
    trees.apply(tree, upstream.pin, series, keep=True)
    assert list(trees.export(tree)) == ["ggml-say-three.patch", "ggml-say-seven.patch"]


def test_commits_that_were_applied_from_an_older_series_may_go(
    tree: Path, upstream: Upstream, series: dict[str, str]
) -> None:
    trees.apply(tree, upstream.pin, series)
    trees.apply(tree, upstream.pin, {})
    assert trees.head(tree) == trees.pin_commit(tree)


def test_a_tree_of_another_pin_is_replaced(tree: Path, upstream: Upstream, tmp_path: Path) -> None:
    other = write_source(tmp_path / "other-source", "zwei")
    digest = write_archive(other, trees.DOWNLOADS / "package-2.0.tar.gz")
    pin = replace(upstream.pin, archive="package-2.0.tar.gz", sha256=digest, commit="3" * 40)
    pin = replace(pin, tree=trees.create(tmp_path / "probe-2", pin, is_known=False))
    trees.apply(tree, pin, {})
    assert "zwei" in (tree / "ggml" / "numbers.txt").read_text()


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("ggml: say three", "ggml-say-three.patch"),
        ("ggml: Say `three`!\n\nPatch-Name: three\n", "three.patch"),
    ],
)
def test_patches_are_named_by_subject_or_patch_name(message: str, name: str) -> None:
    assert trees.patch_name(message) == name


# headers and budget


@pytest.fixture
def patch(series: dict[str, str]) -> stack.Patch:
    ((name, text),) = series.items()
    return stack.parse(name, text)


def test_a_good_patch_has_no_lint(patch: stack.Patch) -> None:
    assert stack.lint(patch) == []
    assert (patch.added, patch.deleted, patch.files) == (1, 0, ("ggml/numbers.txt",))


@pytest.mark.parametrize("header", stack.HEADERS)
def test_a_missing_header_is_named(patch: stack.Patch, header: str) -> None:
    headers = {key: value for key, value in patch.headers.items() if key != header}
    assert stack.lint(replace(patch, headers=headers)) == [
        f"{patch.name}: header {header} is missing"
    ]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"subject": "Say three"}, "is not 'area: imperative'"),
        ({"new_files": ("ggml/new.cpp",)}, "adds ggml/new.cpp; own code belongs in"),
    ],
)
def test_lint_names_what_is_wrong(
    patch: stack.Patch, change: dict[str, object], complaint: str
) -> None:
    (error,) = stack.lint(replace(patch, **change))  # type: ignore[arg-type]
    assert complaint in error


def test_a_test_that_does_not_exist_is_named(patch: stack.Patch) -> None:
    headers = {**patch.headers, "Test": "tests/test_gone.py::test_it"}
    (error,) = stack.lint(replace(patch, headers=headers))
    assert "tests/test_gone.py::test_it, which does not exist" in error


def test_headers_go_on_in_indented_lines(series: dict[str, str]) -> None:
    ((name, text),) = series.items()
    text = text.replace("Why: two is too few.", "Why: two\n is too\n few.")
    assert stack.parse(name, text).headers["Why"] == "two is too few."


def test_a_new_file_is_seen(tree: Path) -> None:
    (tree / "new.txt").write_text("new\n")
    git(tree, "add", "new.txt")
    commit(tree)
    ((name, text),) = trees.export(tree).items()
    assert stack.parse(name, text).new_files == ("new.txt",)


@pytest.mark.parametrize(
    ("patches", "added", "deleted", "error"),
    [
        (9, 1, 1, "budget: 9 patches, 8 allowed"),
        (2, 126, 0, "budget: 252 lines added, 250 allowed"),
        (2, 0, 6, "budget: 12 lines deleted, 10 allowed"),
    ],
)
def test_over_budget_is_named(
    patch: stack.Patch, patches: int, added: int, deleted: int, error: str
) -> None:
    over = [replace(patch, added=added, deleted=deleted)] * patches
    assert stack.budget_errors(over) == [error]


def test_a_full_budget_is_allowed(patch: stack.Patch) -> None:
    full = [replace(patch, added=31, deleted=1)] * 7 + [replace(patch, added=33, deleted=3)]
    assert stack.budget_errors(full) == []


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("grep -q three ggml/numbers.txt", None),
        ("grep -q two ggml/numbers.txt", "Drop-When is true"),
        ("grep -q two gone.txt", "Drop-When exits 2"),
    ],
)
def test_drop_when_is_run_in_the_unpatched_tree(
    tree: Path, series: dict[str, str], command: str, error: str | None
) -> None:
    ((name, text),) = series.items()
    found = stack.drop_errors(name, text.replace("grep -q three ggml/numbers.txt", command), tree)
    assert len(found) == (1 if error else 0)
    assert error is None or error in found[0]


@pytest.mark.parametrize(
    ("listing", "complaint"),
    [
        ("a.patch\nb.patch\n", "lacks: b.patch"),
        ("", "what is in patches/: a.patch"),
        ("a.patch\na.patch\n", "names twice: a.patch"),
    ],
)
def test_series_and_folder_must_agree(tmp_path: Path, listing: str, complaint: str) -> None:
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "a.patch").write_text("a")
    (tmp_path / "series").write_text(f"# comment\n{listing}")
    with pytest.raises(PatchError, match=complaint):
        stack.read_series(folder)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "patches"
    written = {"b.patch": "b\r\n", "a.patch": "ä\n"}
    assert stack.write_series(written, folder) == ["a.patch", "b.patch"]
    assert list(stack.read_series(folder).items()) == list(written.items())
    assert stack.write_series({"a.patch": "ä\n"}, folder) == ["b.patch"]


# the command line


@pytest.fixture
def command(
    tree: Path, upstream: Upstream, series: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """The program on the made-up upstream."""
    for module in (patchtool, upkeep, native):
        monkeypatch.setattr(module, "read_pin", lambda: upstream.pin)
    monkeypatch.setattr(stack, "read_series", lambda: dict(series))
    return lambda *arguments: patchtool.main(list(arguments))


def test_a_refusal_is_one_error_and_one_hint(
    command: Callable[..., int], tree: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tree / "ggml" / "numbers.txt").write_text("work\n")
    assert command("apply") == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == ["error", "hint"]


def test_check_passes_on_a_good_series(command: Callable[..., int]) -> None:
    assert command("check") == 0


def test_check_finds_a_patch_that_exports_differently(
    command: Callable[..., int], series: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    (name,) = series
    series[name] = series[name].replace("\n\ndiff", "\n\n\ndiff")
    assert command("check") == 1
    assert "re-export differs" in capfd.readouterr().err


def test_check_finds_a_patch_that_does_not_apply(
    command: Callable[..., int], series: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    (name,) = series
    series[name] = series[name].replace(" four\n", " fore\n")
    assert command("check") == 1
    assert "does not apply" in capfd.readouterr().err


def test_refresh_refuses_to_lose_a_patch(
    command: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("refresh") == 1
    assert "refresh would remove ggml-say-three.patch" in capfd.readouterr().err


def test_stats_are_a_table_on_stdout(
    command: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("stats") == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert rows[1] == ["ggml-say-three.patch", "1", "+1", "-0", "ggml:", "say", "three"]
    assert rows[2] == ["1", "of", "8", "1", "+1/250", "-0/10"]


def test_fork_is_a_clean_repository_with_patch_and_overlay(
    command: Callable[..., int], tmp_path: Path
) -> None:
    folder = tmp_path / "fork"
    assert command("fork", str(folder)) == 0
    assert "three" in (folder / "ggml" / "numbers.txt").read_text()
    assert (folder / "dflash2" / "src" / "dflash2.h").is_file()
    assert "include(dflash2/cmake/dflash2.cmake)" in (folder / "CMakeLists.txt").read_text()
    assert not trees.is_dirty(folder)


def test_fork_refuses_a_folder_with_content(
    command: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("fork", str(tmp_path)) == 1
    assert "is not empty" in capfd.readouterr().err


def test_clean_refuses_while_there_is_work(
    command: Callable[..., int], tree: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(upkeep, "REPO", tmp_path)
    monkeypatch.setattr(native, "LIB_DIR", tmp_path / "lib")
    commit(tree, "ggml: say seven", "six", "seven")
    assert command("clean") == 1
    assert tree.exists()
    git(tree, "reset", "--quiet", "--hard", "HEAD^")
    assert command("clean") == 0
    assert not tree.exists()


@pytest.fixture
def project(tmp_path: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder with a pin, for bump to write to."""
    folder = tmp_path / "project"
    folder.mkdir()
    pin = upstream.pin
    (folder / "pyproject.toml").write_text('dependencies = ["llama-cpp-python==1.0"]\n')
    (folder / "UPSTREAM.toml").write_text(
        f'version = "{pin.version}"\narchive = "{pin.archive}"\nsha256 = "{pin.sha256}"\n'
        f'commit = "{pin.commit}"\ntree = "{pin.tree}"\n'
    )
    monkeypatch.setattr(upkeep, "REPO", folder)
    monkeypatch.setattr(upkeep, "PIN_FILE", folder / "UPSTREAM.toml")
    monkeypatch.setattr(stack, "write_series", lambda series: None)
    return folder


def release(tmp_path: Path, second: str) -> None:
    source = write_source(tmp_path / f"source-{second}", second)
    (source / "news.txt").write_text("news\n")
    write_archive(source, trees.DOWNLOADS / "package-2.0.tar.gz")


def test_bump_moves_the_pin_when_all_patches_apply(
    command: Callable[..., int], project: Path, tmp_path: Path
) -> None:
    release(tmp_path, "two")
    assert command("bump", "2.0", "--commit", "3" * 40) == 0
    text = (project / "UPSTREAM.toml").read_text()
    assert 'version = "2.0"' in text
    assert f'commit = "{"3" * 40}"' in text
    assert "llama-cpp-python==2.0" in (project / "pyproject.toml").read_text()


@pytest.mark.parametrize(("second", "reason"), [("zwei", "conflict"), ("three", "Drop-When")])
def test_bump_reports_and_changes_nothing_otherwise(
    command: Callable[..., int],
    project: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    second: str,
    reason: str,
) -> None:
    release(tmp_path, second)
    before = (project / "UPSTREAM.toml").read_text()
    assert command("bump", "2.0", "--commit", "3" * 40) == 1
    assert reason in capfd.readouterr().out
    assert (project / "UPSTREAM.toml").read_text() == before


# building


def test_flags_for_llama_cpp_python_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMAKE_ARGS", "-DLLAMA_BUILD=OFF -DLLAVA_BUILD:BOOL=OFF -DGGML_CUDA=ON")
    assert native._user_flags() == ["-DGGML_CUDA=ON"]


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_program", lambda name: None)
    with pytest.raises(PatchError, match=r"no C\+\+ compiler found"):
        native._find_tools()


def test_a_missing_cmake_is_named_with_the_wheel_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "_program", lambda name: None if name == "cmake" else name)
    with pytest.raises(PatchError, match="cmake is not installed") as error:
        native._find_tools()
    assert error.value.hint and "pip install cmake" in error.value.hint


def test_the_stamp_changes_with_what_goes_into_a_build(
    command: Callable[..., int], tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    stamps = [native._stamp(native.Options()), native._stamp(native.Options(portable=True))]
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=ON")
    stamps.append(native._stamp(native.Options()))
    (tree / "ggml" / "numbers.txt").write_text("work\n")
    stamps.append(native._stamp(native.Options()))
    assert len(set(stamps)) == 4


def test_a_build_of_work_in_progress_says_so(command: Callable[..., int], tree: Path) -> None:
    assert not native.build_info().endswith("-dev")
    commit(tree, "ggml: say seven", "six", "seven")
    assert native.build_info().endswith("-dev")


# the real stack


def test_the_stack_of_this_repository_is_well_formed() -> None:
    patches = [stack.parse(name, text) for name, text in stack.read_series().items()]
    assert [line for patch in patches for line in stack.lint(patch)] == []
    assert stack.budget_errors(patches) == []


def test_the_tool_needs_the_standard_library_only() -> None:
    program = Path(patchtool.__file__)
    done = subprocess.run(
        [sys.executable, "-S", str(program), "stats"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
