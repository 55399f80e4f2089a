"""JSON schemas: what gets converted, what is refused, and that generated text follows them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash2_gguf import SamplingParams, Session
from dflash2_gguf.errors import UsageError
from dflash2_gguf.generate import collect
from tests.runtime.terminal import ENVIRONMENT, PROGRAM

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer"},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "pets", "home"],
    "additionalProperties": False,
    # of limited length, so that every answer ends
    "$defs": {"place": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]}},
}
PROMPT = "Anna is 7 and has a cat. As JSON: "


def _require_person(text: str) -> None:
    """Asserts what PERSON demands."""
    person = json.loads(text)
    assert set(person) == {"name", "age", "pets", "home"}
    assert isinstance(person["name"], str)
    assert 1 <= len(person["name"]) <= 12
    assert type(person["age"]) is int
    assert len(person["pets"]) <= 3
    assert set(person["pets"]) <= {"cat", "dog"}
    assert person["home"] is None or isinstance(person["home"], str)


def _answer(session: Session, sampling: SamplingParams, *, draft: bool) -> str:
    pieces = session.generate(PROMPT, max_tokens=200, sampling=sampling, draft=draft)
    answer = collect(list(pieces))
    assert answer.finish_reason == "stop"
    assert answer.stats is not None
    assert (answer.stats.n_drafted > 0) is draft
    return answer.text


@pytest.mark.native
@pytest.mark.parametrize(
    "choice",
    [{"temperature": 0.0}, *({"temperature": 1.0, "seed": seed} for seed in range(3))],
    ids=str,
)
def test_text_follows_the_schema_and_is_the_same_with_and_without_drafter(
    session: Session, choice: dict[str, Any]
) -> None:
    sampling = SamplingParams(json_schema=PERSON, **choice)
    drafted = _answer(session, sampling, draft=True)
    _require_person(drafted)
    assert _answer(session, sampling, draft=False) == drafted


@pytest.mark.native
def test_strings_hold_no_raw_line_ends_however_likely(session: Session) -> None:
    (line_end,) = session.tokenize("\n", add_special=False)
    sampling = SamplingParams(
        json_schema={"type": "string", "minLength": 20, "maxLength": 30},
        temperature=0.0,
        logit_bias={line_end: 100.0},
    )
    assert 20 <= len(json.loads(_answer(session, sampling, draft=True))) <= 30


@pytest.mark.native
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "quaternion"}, "cannot be converted: Unrecognized schema"),
        ({"type": "string", "pattern": "abc"}, "cannot be converted: Pattern must start"),
        ({"$ref": "#/$defs/lost"}, "cannot be converted: Error resolving ref"),
        ({"$ref": "#"}, "cannot be converted: Unsupported ref #"),
        ({"properties": {"a": True}}, "cannot be converted: 'bool' object"),
        ({"properties": []}, "cannot be converted: 'list' object"),
        ({"enum": []}, "allows no value for 'root'"),
        ({"properties": {"a": {"anyOf": []}}, "required": ["a"]}, "allows no value for 'a'"),
        ({"default": {1, 2}}, "is not JSON: Object of type set"),
        ({"minimum": float("nan")}, "is not JSON: Out of range"),
        ({"type": "string", "maxLength": 1001}, "1001 repetitions in 'maxLength'"),
        ({"type": "string", "pattern": "^a{1,9999}$"}, "9999 repetitions in 'pattern'"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 10**9}, "1000000000 repetitions"),
        ({"$ref": "https://example.com/a.json"}, "another document: https://example.com/a.json"),
        ({"allOf": [{"$ref": "http://x/a"}]}, "another document: http://x/a"),
        ({"properties": {"a": {"$ref": "other.json#/a"}}}, "another document: other.json#/a"),
    ],
    ids=str,
)
def test_what_cannot_be_converted_is_a_usage_error(schema: dict[str, Any], message: str) -> None:
    from dflash2_gguf.json_schema import to_gbnf

    with pytest.raises(UsageError) as caught:
        to_gbnf(schema)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.native
def test_a_schema_that_nests_too_deep_is_a_usage_error() -> None:
    from dflash2_gguf.json_schema import to_gbnf

    with pytest.raises(UsageError, match="recursion"):
        to_gbnf(_deep(5000))


@pytest.mark.native
def test_a_remote_reference_never_causes_network_access(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash2_gguf.json_schema import to_gbnf

    def refuse(*_arguments: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(UsageError):
        to_gbnf({"const": {"$ref": "https://example.com/a.json"}})


@pytest.mark.native
def test_remote_references_are_refused_where_assertions_are_off() -> None:
    code = (
        "from dflash2_gguf.errors import UsageError\n"
        "from dflash2_gguf.json_schema import to_gbnf\n"
        "try:\n    to_gbnf({'$ref': 'https://example.com/a.json'})\n"
        "except UsageError as error:\n    print(error.message)"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("the JSON schema refers to another document")


@pytest.mark.native
def test_keywords_that_are_not_enforced_are_named() -> None:
    from dflash2_gguf.json_schema import unenforced

    schema = {
        "properties": {"not": {"type": "integer", "minimum": 1}, "b": {"const": {"maximum": 2}}},
        "anyOf": [{"uniqueItems": True}],
    }
    assert unenforced(schema) == ("minimum", "uniqueItems")
    assert unenforced(PERSON) == ()


@pytest.mark.native
def test_a_session_goes_on_after_a_schema_that_cannot_be_converted(session: Session) -> None:
    with pytest.raises(UsageError, match="cannot be converted"):
        list(session.generate("x", sampling=SamplingParams(json_schema={"type": "quaternion"})))
    assert list(session.generate("x", max_tokens=2))


def _generate(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, "generate", "-t", "1", "--temp", "0", "-p", PROMPT, *options],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )


@pytest.mark.native
def test_the_program_takes_a_schema_as_text_or_file(
    target_gguf: Path, drafter: Path, tmp_path: Path
) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}}
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema | {"required": ["age"]}))
    pair = ["-m", str(target_gguf), "-d", str(drafter), "-n", "64"]
    from_file = _generate(*pair, "--json-schema", str(path))
    assert set(json.loads(from_file.stdout)) == {"age"}
    assert from_file.stderr == "warning: the JSON schema's minimum will not be enforced\n"
    assert _generate(*pair, "--json-schema", path.read_text()).stdout == from_file.stdout


@pytest.mark.native
def test_the_program_takes_a_grammar_file(target_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "answer.gbnf"
    path.write_text('root ::= "yes" | "no"')
    done = _generate("-m", str(target_gguf), "--grammar", str(path))
    assert done.stdout in ("yes\n", "no\n")


@pytest.mark.native
def test_a_bad_schema_is_told_before_anything_is_loaded() -> None:
    done = _generate("-m", "nothing.gguf", "--json-schema", '{"type": "quaternion"}')
    assert done.stderr.startswith("error: the JSON schema cannot be converted")
    assert done.returncode == 2
