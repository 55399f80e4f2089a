"""Sampling parameters are checked when they are made."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dflash2_gguf import SamplingParams
from dflash2_gguf.errors import UsageError


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 1.01},
        {"top_p": -0.01},
        {"min_p": 2.0},
        {"seed": -1},
        {"seed": 2**32 - 1},
        {"repeat_penalty": -1.0},
        {"frequency_penalty": math.nan},
        {"presence_penalty": -math.inf},
        {"penalty_last_n": -2},
        {"json_schema": "{}"},
        {"json_schema": True},
        {"grammar": 'root ::= "a"', "json_schema": {}},
        {"verifier": "always"},
        {"verifier": "greedy", "temperature": 0.5},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))) as caught:
        SamplingParams(**values)
    assert caught.value.hint


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.0, "verifier": "greedy"},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"seed": 2**32 - 2},
        {"frequency_penalty": -2.0},
        {"penalty_last_n": -1},
        {"json_schema": {}},
    ],
)
def test_the_limits_themselves_are_allowed(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values
