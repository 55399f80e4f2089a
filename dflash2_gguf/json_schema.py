"""JSON schemas as grammars, by llama.cpp's converter in the form that llama-cpp-python ships."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dflash2_gguf.errors import UsageError
from dflash2_gguf.native import api

__all__ = ["to_gbnf", "unenforced"]

# what the converter passes over: text may break these rules and still match the grammar
_PASSED_OVER = frozenset(
    {
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "if",
        "maxProperties",
        "maximum",
        "minProperties",
        "minimum",
        "multipleOf",
        "not",
        "patternProperties",
        "propertyNames",
        "then",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_QUANTIFIER = re.compile(r"\{[\d, ]+\}")
_MOST_REPETITIONS = 1000

_HINT = "use a simpler schema, or write a grammar"

# keywords whose keys are names of the user's, not keywords; and those that hold plain data
_NAMED = ("properties", "$defs", "definitions")
_DATA = ("const", "enum", "default", "examples")

# JSON allows no raw control characters in strings. The C++ twin of the converter says so too
# (llama.cpp ``common/json-schema-to-grammar.cpp``: PRIMITIVE_RULES, "char").
_LAX_CHARACTER = r'char ::= [^"\\] |'
_STRICT_CHARACTER = r'char ::= [^"\\\x7F\x00-\x1F] |'


def to_gbnf(schema: Mapping[str, Any]) -> str:
    """GBNF with a rule named root that allows the JSON texts of ``schema``.

    Source: llama-cpp-python ``llama_grammar.py:json_schema_to_gbnf``. Nothing is ever fetched.
    Raises UsageError for a schema that is not JSON, refers to another document or cannot be
    converted; NativeError when the libraries cannot be loaded.
    """
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from error
    _refuse_other_documents(schema)
    _refuse_long_repetitions(schema)
    api()  # makes llama_cpp load our libraries, whoever imports it first
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        grammar: str = json_schema_to_gbnf(text)
    except Exception as error:  # assertions, missing keys, wrong types: whatever it stumbles over
        message = f"the JSON schema cannot be converted: {_reason(error)}"
        raise UsageError(message, _HINT) from error
    for line in grammar.splitlines():
        rule, _, body = line.partition("::=")
        if not body.strip():
            raise UsageError(f"the JSON schema allows no value for {rule.strip()!r}", _HINT)
    return grammar.replace(_LAX_CHARACTER, _STRICT_CHARACTER)


def unenforced(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Keywords in ``schema`` that the converter passes over, sorted."""
    return tuple(sorted({keyword for keyword, _ in _keywords(schema)} & _PASSED_OVER))


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, list):
        for item in schema:
            yield from _keywords(item)
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            yield from _keywords(list(value.values()))
        elif key not in _DATA:
            yield key, value
            yield from _keywords(value)


def _refuse_other_documents(schema: Mapping[str, Any]) -> None:
    """The converter would fetch them, were it not for an assertion."""
    for ref in _references(schema):
        if isinstance(ref, str) and not ref.startswith("#"):
            raise UsageError(
                f"the JSON schema refers to another document: {ref}",
                'copy that part into "$defs" and refer to it as "#/$defs/NAME"',
            )


def _refuse_long_repetitions(schema: Mapping[str, Any]) -> None:
    """Each makes the grammar deeper by one, and llama.cpp's parser recurses that deep."""
    for keyword, value in _keywords(schema):
        counts = [value] if keyword in _COUNTS and isinstance(value, int | float) else []
        if keyword == "pattern" and isinstance(value, str):
            counts = [
                int(digits) for digits in re.findall(r"\d+", " ".join(_QUANTIFIER.findall(value)))
            ]
        if counts and max(counts) > _MOST_REPETITIONS:
            raise UsageError(
                f"the JSON schema has {max(counts)} repetitions in {keyword!r}",
                f"it can be {_MOST_REPETITIONS} at most; without a limit it can be any number",
            )


def _references(value: Any) -> Iterator[Any]:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, Mapping):
            yield from (item[key] for key in item if key == "$ref")
            todo.extend(item.values())
        elif isinstance(item, list | tuple):
            todo.extend(item)


def _reason(error: Exception) -> str:
    """One line, whatever the converter raised."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError):
        return f"there is no {text}"
    return text[:200] or type(error).__name__
