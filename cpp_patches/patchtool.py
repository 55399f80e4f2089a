#!/usr/bin/env python3
"""The patch stack on llama.cpp: fetch, apply, refresh, check, stats, bump, build, fork.

stdlib only, so that it runs before anything is installed. Data goes to stdout, the rest to stderr.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import upkeep

import native
import series as stack
import trees
from upstream import PatchError, Pin, fetch_archive, read_pin

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; 0 done, 1 a check failed or something is in the way."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except PatchError as error:
        _say("error", error.message)
        if error.hint:
            _say("hint", error.hint)
        return 1
    except KeyboardInterrupt:
        return 130


def _say(kind: str, text: str) -> None:
    print(f"{kind}: {text}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="patchtool.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("fetch", help="get the pinned archive").set_defaults(run=_fetch)
    apply = commands.add_parser("apply", help="bring build/llama.cpp/patched to pin plus series")
    apply.add_argument("--keep", action="store_true", help="keep the tree's own commits on top")
    apply.set_defaults(run=_apply)
    refresh = commands.add_parser(
        "refresh", help="write that tree's commits to patches/ and series"
    )
    refresh.add_argument(
        "--drop", action="append", default=[], metavar="NAME", help="patch that may go"
    )
    refresh.set_defaults(run=_refresh)
    commands.add_parser(
        "check", help="lint, budget, fresh apply, re-export, Drop-When"
    ).set_defaults(run=_check)
    commands.add_parser("stats", help="what the stack changes, per patch").set_defaults(run=_stats)
    build = commands.add_parser("build", help="build the native libraries into dflash2_gguf/lib")
    build.add_argument("--portable", action="store_true", help="for any CPU of this architecture")
    build.add_argument(
        "--tests", action="store_true", help="the C++ tests instead of the libraries"
    )
    build.add_argument("--peer", action="store_true", help="the unpatched pin's programs instead")
    build.set_defaults(run=_build)
    fork = commands.add_parser("fork", help="leave a full patched llama.cpp tree in DIR")
    fork.add_argument("dir", type=Path, metavar="DIR")
    fork.set_defaults(run=_fork)
    bump = commands.add_parser("bump", help="try the series on another version; move the pin to it")
    bump.add_argument("version", help="of llama-cpp-python")
    bump.add_argument("--commit", required=True, help="llama.cpp commit that the version vendors")
    bump.add_argument("--try", dest="dry", action="store_true", help="report only, change nothing")
    bump.set_defaults(run=_bump)
    commands.add_parser("clean", help="delete build/ and dflash2_gguf/lib").set_defaults(run=_clean)
    return parser


def _fork(arguments: argparse.Namespace) -> None:
    upkeep.fork(arguments.dir.resolve())
    _say("done", f"cmake -S {arguments.dir} -B {arguments.dir}/build, then build llama-server")


def _bump(arguments: argparse.Namespace) -> int:
    outcomes = upkeep.bump(arguments.version, arguments.commit, dry=arguments.dry)
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}")
    failed = [name for name, outcome in outcomes.items() if outcome not in upkeep.GOOD]
    if failed:
        _say(
            "error", f"{len(failed)} patches need work on {arguments.version}; nothing was changed"
        )
    elif not arguments.dry:
        _say("done", "the pin is moved; run `make patches-check test`, and commit it on its own")
    return 1 if failed else 0


def _clean(_: argparse.Namespace) -> None:
    upkeep.clean()


def _build(arguments: argparse.Namespace) -> None:
    if arguments.peer:
        print(native.build_peer())
    elif arguments.tests:
        print(native.build_tests())
    else:
        changed = native.build_libraries(native.Options(portable=arguments.portable))
        _say("done" if changed else "unchanged", f"{native.LIB_DIR} holds {native.build_info()}")


def _fetch(_: argparse.Namespace) -> None:
    print(fetch_archive(read_pin(), trees.DOWNLOADS))


def _apply(arguments: argparse.Namespace) -> None:
    series = stack.read_series()
    changed = trees.apply(trees.PATCHED, read_pin(), series, keep=arguments.keep)
    _say("done" if changed else "unchanged", f"{trees.PATCHED} at {trees.head(trees.PATCHED)[:12]}")


def _refresh(arguments: argparse.Namespace) -> None:
    tree = trees.PATCHED
    if not tree.exists():
        raise PatchError(f"{tree} does not exist", "make patches-apply")
    if trees.is_dirty(tree):
        raise PatchError(f"{tree} has uncommitted changes", "commit them there first")
    exported = trees.export(tree)
    lost = sorted(set(stack.read_series()) - set(exported) - set(arguments.drop))
    if lost:
        raise PatchError(
            f"refresh would remove {', '.join(lost)}, which the tree does not have",
            "run `make patches-apply` first, or allow it with --drop NAME",
        )
    for name in stack.write_series(exported):
        print(name)
    trees.remember(tree, exported)
    for line in _lint_all(exported):
        _say("warning", line)


def _lint_all(series: dict[str, str]) -> list[str]:
    patches = [stack.parse(name, text) for name, text in series.items()]
    return [line for patch in patches for line in stack.lint(patch)] + stack.budget_errors(patches)


def _check(_: argparse.Namespace) -> int:
    pin, series = read_pin(), stack.read_series()
    errors = _lint_all(series)
    with tempfile.TemporaryDirectory(prefix="patches-check-") as folder:
        errors += _check_fresh(Path(folder) / "llama.cpp", pin, series)
    for line in errors:
        _say("error", line)
    if not errors:
        _say("done", f"{len(series)} patches apply to {pin.commit[:12]}, re-export and are needed")
    return 1 if errors else 0


def _check_fresh(tree: Path, pin: Pin, series: dict[str, str]) -> list[str]:
    """Apply to a fresh copy of the pin; what does not apply, differs when exported, or could go."""
    trees.create(tree, pin)
    errors = [line for name, text in series.items() for line in stack.drop_errors(name, text, tree)]
    try:
        trees.apply(tree, pin, series)
    except PatchError as error:
        return [*errors, error.message]
    exported = trees.export(tree)
    differing = [name for name in series if exported.get(name) != series[name]]
    errors += [f"{name}: re-export differs; run `make patches-refresh`" for name in differing]
    if list(exported) != list(series) and not differing:
        errors.append("series: order or names differ from the re-export")
    return errors


def _stats(_: argparse.Namespace) -> None:
    patches = [stack.parse(name, text) for name, text in stack.read_series().items()]
    rows = [(p.name, str(len(p.files)), f"+{p.added}", f"-{p.deleted}", p.subject) for p in patches]
    budget = stack.BUDGET
    total = (
        f"{len(patches)} of {budget.patches}",
        str(len({file for p in patches for file in p.files})),
        f"+{sum(p.added for p in patches)}/{budget.added}",
        f"-{sum(p.deleted for p in patches)}/{budget.deleted}",
        "",
    )
    table = [("patch", "files", "added", "deleted", "subject"), *rows, total]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    for row in table:
        cells = (row[0].ljust(widths[0]), *(row[c].rjust(widths[c]) for c in (1, 2, 3)), row[4])
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    sys.exit(main())
