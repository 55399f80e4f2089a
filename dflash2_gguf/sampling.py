"""How the next token is chosen, as one checked value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash2_gguf.errors import UsageError

__all__ = ["VERIFIERS", "SamplingParams"]

VERIFIERS = ("auto", "greedy", "match", "coupled", "reject", "block")

_MAX_SEED = 2**32 - 2  # llama.cpp reads 2**32 - 1 as "draw a random seed"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Samplers of one generation, with llama.cpp's defaults.

    Applied in this order, with and without a drafter: logit bias, grammar, penalties, DRY,
    top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature.

    temperature: 0 is greedy.
    top_k: keep the k likeliest tokens; 0 keeps all.
    top_p: keep the likeliest tokens that together have this probability; 1 keeps all.
    min_p: drop tokens below this fraction of the likeliest one's probability; 0 drops none.
    seed: None draws one. With a seed the same request gives the same text again.
    typical_p: locally typical sampling; 1 is off. top_n_sigma: keep logits within so many standard
        deviations of the largest; 0 is off. xtc_probability, xtc_threshold: exclude top choices.
    dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n: penalty on repeated sequences;
        multiplier 0 is off.
    logit_bias: token id to what is added to its logit; -inf forbids it.
    grammar: GBNF with a rule named root; None allows everything.
    json_schema: a JSON schema that the text follows, instead of a grammar. It is converted by
        llama.cpp's converter, which passes over some keywords (``json_schema.unenforced``).
    repeat_penalty, frequency_penalty, presence_penalty: over the last ``penalty_last_n`` tokens
        (-1 = the whole context); 1, 0 and 0 switch them off.
    verifier: how drafted tokens are accepted. All are lossless (``dflash2.h``, dflash2_verifier).

    Raises UsageError for a value out of range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str | None = None
    json_schema: Mapping[str, Any] | None = None
    verifier: str = "auto"

    def __post_init__(self) -> None:
        _require_range("temperature", self.temperature, 0.0, math.inf)
        _require_range("top_k", self.top_k, 0, 2**31 - 1)
        _require_range("top_p", self.top_p, 0.0, 1.0)
        _require_range("min_p", self.min_p, 0.0, 1.0)
        _require_range("seed", self.seed or 0, 0, _MAX_SEED)
        _require_range("repeat_penalty", self.repeat_penalty, 0.0, math.inf)
        _require_range("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        _require_range("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _require_range("penalty_last_n", self.penalty_last_n, -1, 2**31 - 1)
        _require_range("typical_p", self.typical_p, 0.0, 1.0)
        _require_range("top_n_sigma", self.top_n_sigma, 0.0, math.inf)
        _require_range("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _require_range("xtc_threshold", self.xtc_threshold, 0.0, 1.0)
        _require_range("dry_multiplier", self.dry_multiplier, 0.0, math.inf)
        _require_range("dry_base", self.dry_base, 1.0, math.inf)
        _require_range("dry_allowed_length", self.dry_allowed_length, 0, 2**31 - 1)
        _require_range("dry_penalty_last_n", self.dry_penalty_last_n, -1, 2**31 - 1)
        if self.verifier not in VERIFIERS:
            raise UsageError(
                f"verifier is {self.verifier!r}", f"it can be one of {', '.join(VERIFIERS)}"
            )
        _require_one_form(self.grammar, self.json_schema)
        if self.verifier == "greedy" and self.temperature > 0:
            raise UsageError(
                f"verifier 'greedy' does not sample at temperature {self.temperature:g}",
                "use another verifier or 'auto', or temperature 0",
            )


def _require_one_form(grammar: str | None, schema: object) -> None:
    if schema is not None and not isinstance(schema, Mapping):
        kind = type(schema).__name__
        raise UsageError(f"json_schema is of type {kind}", "it can be a mapping, as parsed JSON is")
    if schema is not None and grammar is not None:
        raise UsageError("both grammar and json_schema are given", "use one of them")


def _require_range(name: str, value: float, low: float, high: float) -> None:
    finite = not isinstance(value, float) or math.isfinite(value)
    if not (finite and low <= value <= high):
        limits = f"at least {low:g}" if high in (math.inf, 2**31 - 1) else f"{low:g} to {high:g}"
        hint = f"it can be {limits}" if low > -math.inf else "it can be any finite number"
        raise UsageError(f"{name} is {value}", hint)
