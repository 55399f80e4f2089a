"""What a generation did and took, as plain numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dflash2_gguf.words import counted

__all__ = ["DRAFT_FAILURES", "WIDTH_REASONS", "Memory", "Stats"]

# order of enum dflash2_draft_failure in dflash2.h
DRAFT_FAILURES = ("cache", "compute", "values")
# order of enum dflash2_width_reason
WIDTH_REASONS = ("drafts", "explores", "probes", "plain", "refreshes")

_FAILURE_TEXT = {
    "cache": "the draft cache was full",
    "compute": "the draft pass failed",
    "values": "the drafter returned unusable values",
}
# a matching drafter, however bad, is right now and then; one of another model is not
_ENOUGH_DRAFTED = 128
_HARDLY_ACCEPTED = 0.01


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Counters of a session or of one generation (``struct dflash2_stats`` in ``dflash2.h``).

    Tokens and rounds are counts, times are seconds. ``accepted_at[i]`` of ``drafted_at[i]`` rounds
    accepted their draft at position i. ``draft_failures`` counts, by reason, the steps that had to
    be decoded without a draft: no room in the draft cache, a failed draft pass, unusable values.
    ``verified_width[n]`` steps verified n drafted tokens; ``width_reasons`` counts, where the width
    is automatic, why rounds drafted or did not: drafting pays, nothing is known yet, a probe
    whether it pays again, it does not pay, a plain step to measure again what that costs.
    In exact mode ``n_doubts`` decisions that rounding could have turned were taken again, from
    ``n_replayed`` tokens evaluated once more, alone; ``noise`` is the largest difference of a logit
    that evaluating rows together was seen to make.
    """

    n_prompt: int = 0
    n_prompt_reused: int = 0
    n_injected: int = 0
    n_generated: int = 0
    n_steps: int = 0
    n_draft_passes: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    drafted_at: tuple[int, ...] = ()
    verified_width: tuple[int, ...] = ()
    draft_failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DRAFT_FAILURES, 0))
    width_reasons: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WIDTH_REASONS, 0))
    prompt_seconds: float = 0.0
    inject_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    sample_seconds: float = 0.0
    n_prompt_sampled: int = 0
    n_doubts: int = 0
    n_replayed: int = 0
    noise: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification step; 0 when there was none.

        The token that the evaluation of a prompt yields took no such step and does not count.
        """
        return (self.n_generated - self.n_prompt_sampled) / self.n_steps if self.n_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted part of the drafted tokens, 0..1."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0

    @property
    def position_acceptance(self) -> tuple[float, ...]:
        """For each drafted position, the part of its rounds that accepted it."""
        pairs = zip(self.accepted_at, self.drafted_at, strict=True)
        return tuple(accepted / drafted for accepted, drafted in pairs if drafted)

    @property
    def decode_seconds(self) -> float:
        """Time after the prompt: injecting, drafting, verifying and sampling."""
        return self.inject_seconds + self.draft_seconds + self.verify_seconds + self.sample_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of verification steps per second of ``decode_seconds``."""
        tokens = self.n_generated - self.n_prompt_sampled
        return tokens / self.decode_seconds if self.decode_seconds else 0.0

    def warnings(self) -> tuple[str, ...]:
        """What a user should know: drafts that failed, drafts that are never accepted."""
        found = [
            f"{counted(count, 'step')} had no draft ({_FAILURE_TEXT[reason]})"
            for reason, count in self.draft_failures.items()
            if count
        ]
        if self.n_drafted >= _ENOUGH_DRAFTED and self.acceptance_rate < _HARDLY_ACCEPTED:
            found.append(
                f"{self.n_accepted} of {self.n_drafted} drafted tokens were accepted; "
                "is it the drafter of this target?"
            )
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """Counters, times and the derived figures, ready for JSON."""
        return asdict(self) | {
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "position_acceptance": list(self.position_acceptance),
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a session takes, per part (``struct dflash2_memory`` in ``dflash2.h``).

    device: what of all parts lies in the memory of GPUs; the rest is the host's.
    """

    target_weights: int = 0
    target_cache: int = 0
    target_snapshots: int = 0
    target_compute: int = 0
    draft_weights: int = 0
    draft_cache: int = 0
    draft_compute: int = 0
    device: int = 0

    @property
    def target(self) -> int:
        """Sum of the target's parts."""
        return self.target_weights + self.target_cache + self.target_snapshots + self.target_compute

    @property
    def draft(self) -> int:
        """Sum of the drafter's parts."""
        return self.draft_weights + self.draft_cache + self.draft_compute

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.target + self.draft

    @property
    def host(self) -> int:
        """What lies in the host's memory, weights in mapped files included."""
        return self.total - self.device
