"""``dflash2-run prove``: the tokens with a drafter are those without, and what that costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from dflash2_gguf.errors import UsageError
from dflash2_gguf.launch import Launch, open_session
from dflash2_gguf.measure import first_difference
from dflash2_gguf.prompts import Prompt, prompt_tokens
from dflash2_gguf.sampling import SamplingParams
from dflash2_gguf.session import Session
from dflash2_gguf.ui import Terminal
from dflash2_gguf.words import counted

__all__ = ["Difference", "Proof", "ProofSettings", "prove"]

_HARDLY_DRAFTED = 0.1  # part of the steps that verified a draft


@dataclass(frozen=True, kw_only=True)
class ProofSettings:
    """What to compare: ``max_tokens`` of every answer, sampled as ``sampling`` says.

    raw: texts are taken as they are, not as messages through the target's chat template.
    """

    prompts: tuple[Prompt, ...]
    max_tokens: int
    sampling: SamplingParams
    raw: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.sampling.temperature > 0 and self.sampling.seed is None:
            raise UsageError(
                "sampled answers can only be compared with a seed", "name one with --seed"
            )


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves the plain one.

    plain, drafted: token ids there, None where the answer has ended. margin: by how much the
    plain session's logit of its own token exceeds that of the other; None where one has ended.
    """

    prompt: int
    position: int
    plain: int | None
    drafted: int | None
    margin: float | None


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The outcome. ``n_tokens`` were compared; the rest as in ``Stats``, for the drafted side.

    ``n_verified`` of its ``n_steps`` had a draft to verify.
    """

    n_prompts: int
    n_tokens: int
    n_different: int
    first: Difference | None
    exact: bool
    n_steps: int
    n_verified: int
    n_doubts: int
    n_replayed: int
    noise: float
    acceptance_length: float


def prove(launch: Launch, settings: ProofSettings, terminal: Terminal) -> int:
    """Answer every prompt with and without the drafter; 0 when all tokens are the same, else 1."""
    if launch.draft is None:
        raise UsageError("there is no drafter", "name its GGUF file with -d")
    proof = _compare(launch, settings, terminal)
    terminal.write(json.dumps(asdict(proof)) + "\n" if settings.as_json else _describe(proof))
    if proof.n_verified <= _HARDLY_DRAFTED * proof.n_steps:
        terminal.warning(
            f"{proof.n_verified} of {proof.n_steps} steps verified a draft, "
            "so little was compared; --draft-max 7 drafts at every step"
        )
    return 1 if proof.n_different else 0


def _compare(launch: Launch, settings: ProofSettings, terminal: Terminal) -> Proof:
    # one after the other: two of a large target may not fit into memory
    with open_session(launch, terminal) as session:
        drafted = list(_answers(session, settings, terminal, "with the drafter"))
        stats = session.stats
    found: list[Difference] = []
    n_tokens = 0
    with open_session(replace(launch, draft=None, exact=False), terminal) as session:
        plain = _answers(session, settings, terminal, "without")
        for number, (tokens, other) in enumerate(zip(plain, drafted, strict=True)):
            n_tokens += len(tokens)
            at = first_difference(tokens, other)
            if at is not None:
                prompt = prompt_tokens(session, settings.prompts[number], raw=settings.raw)
                found.append(_difference(session, number, prompt, at, tokens, other))
    return Proof(
        n_prompts=len(settings.prompts),
        n_tokens=n_tokens,
        n_different=len(found),
        first=found[0] if found else None,
        exact=launch.exact,
        n_steps=stats.n_steps,
        n_verified=sum(stats.verified_width[1:]),
        n_doubts=stats.n_doubts,
        n_replayed=stats.n_replayed,
        noise=stats.noise,
        acceptance_length=stats.acceptance_length,
    )


def _answers(
    session: Session, settings: ProofSettings, terminal: Terminal, how: str
) -> Iterator[tuple[int, ...]]:
    """Tokens of every answer, each from empty caches."""
    with terminal.progress(how) as on_progress:
        for number, prompt in enumerate(settings.prompts):
            session.reset()
            pieces = session.generate(
                prompt_tokens(session, prompt, raw=settings.raw),
                max_tokens=settings.max_tokens,
                sampling=settings.sampling,
            )
            yield tuple(token for piece in pieces for token in piece.tokens)
            on_progress((number + 1) / len(settings.prompts))


def _difference(
    session: Session,
    number: int,
    prompt: list[int],
    at: int,
    plain: Sequence[int],
    drafted: Sequence[int],
) -> Difference:
    own = plain[at] if at < len(plain) else None
    other = drafted[at] if at < len(drafted) else None
    margin = None
    if own is not None and other is not None:
        greedy = SamplingParams(temperature=0)
        list(session.generate([*prompt, *plain[:at]], max_tokens=1, sampling=greedy))
        a, b = session.logits([own, other])
        margin = a - b
    return Difference(number, at, own, other, margin)


def _describe(proof: Proof) -> str:
    lines = [
        f"{counted(proof.n_prompts, 'answer')}, {proof.acceptance_length:.2f} tokens per step",
        f"{counted(proof.n_tokens, 'token')} compared, answers that differ: {proof.n_different}",
    ]
    if proof.first is not None:
        lines.append(_where(proof.first))
    if proof.exact:
        lines.append(
            f"exact mode: decisions taken again {proof.n_doubts}, tokens evaluated for that "
            f"{proof.n_replayed}, largest rounding seen in a logit {proof.noise:.2g}"
        )
    return "\n".join(lines) + "\n"


def _where(first: Difference) -> str:
    plain, drafted = (
        "the end" if t is None else f"token {t}" for t in (first.plain, first.drafted)
    )
    margin = "" if first.margin is None else f", {first.margin:.3g} apart in logits"
    return (
        f"first in answer {first.prompt + 1} at token {first.position + 1}: "
        f"{plain} without the drafter, {drafted} with it{margin}"
    )
