"""Which targets can feed a drafter: upstream's tiny models, on the unpatched pin and on ours.

``python -m tests.oracle.target_table`` writes docs/targets.md; it needs both builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.builds import OURS, PIN, ROOT, Build
from tests.provisions import tiny_models

__all__ = ["TABLE", "Target", "collect", "render"]

TABLE = ROOT / "docs" / "targets.md"

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Plan:
    """How a batch is laid out: tokens per sequence, and the size of a micro-batch."""

    words: str
    lengths: tuple[int, ...]
    n_ubatch: int

    def options(self) -> dict[str, Any]:
        """Arguments of the "layers" job; all token ids differ."""
        rows = [[p, s] for s, length in enumerate(self.lengths) for p in range(length)]
        return {
            "rows": [[3 + i, p, s] for i, (p, s) in enumerate(rows)],
            "n_ubatch": self.n_ubatch,
            "n_seq_max": len(self.lengths),
        }


# The first that the unpatched pin evaluates at all is used: some graphs cannot take every batch.
PLANS = (
    Plan("3 / 4", (9, 14, 6), 8),
    Plan("2 / 4", (14, 14), 8),
    Plan("2 / 1", (9, 14), 64),
)


@dataclass(frozen=True)
class Target:
    """One tiny model on both builds.

    inner: inputs of layers 1 to n - 1; last: output of the last layer.
    """

    name: str
    n_layer: int
    plan: str
    pin_inner: bool
    pin_last: bool
    our_inner: bool
    our_last: bool
    same_as_pin: bool | None  # published values bit for bit; None where the pin publishes none
    captured_error: float | None  # largest relative difference to captured layer outputs, if any
    reason: str  # why an inner layer is not published


def collect(models: Sequence[Path], pin: Build, ours: Build) -> list[Target]:
    """Probe, evaluate and compare every model on both builds."""
    shapes = [found["n_layer"] for found in _all(pin, [_job("shape", path) for path in models])]
    layers = [int(n) for n in shapes]
    plans, captured = _captures(models, layers, pin)
    numbers = range(len(models))
    answers = _all(
        ours, [_job("publishes", models[i], layers=[*range(1, layers[i] + 1)]) for i in numbers]
    )
    inner = [list(range(1, n)) for n in layers]
    last = [[n] for n in layers]
    pin_inner = _published(models, inner, plans, pin)
    pin_last = _published(models, last, plans, pin)
    our_inner = _published(models, inner, plans, ours)
    return [
        Target(
            name=models[i].stem,
            n_layer=layers[i],
            plan=plans[i].words,
            pin_inner=pin_inner[i] is not None,
            pin_last=pin_last[i] is not None,
            our_inner=bool((answers[i]["publishes"][:-1] == 1).all()),
            our_last=bool(answers[i]["publishes"][-1] == 1),
            same_as_pin=_same(pin_inner[i], our_inner[i]),
            captured_error=_error(captured[i], our_inner[i]),
            reason=str(answers[i]["reasons"][0]),
        )
        for i in numbers
    ]


def _job(name: str, path: Path, **arguments: Any) -> dict[str, Any]:
    return {"job": name, "path": str(path), **arguments}


def _all(build: Build, jobs: list[dict[str, Any]]) -> list[Arrays]:
    results = build.run(jobs)
    died = [job["path"] for job, result in zip(jobs, results, strict=True) if result is None]
    if died:
        raise RuntimeError(f"{jobs[0]['job']} died on {died}")
    return [result for result in results if result is not None]


def _captures(
    models: Sequence[Path], layers: Sequence[int], pin: Build
) -> tuple[list[Plan], list[Arrays]]:
    """Layer outputs as the unpatched pin computes them, without any layer input being requested."""
    plans: dict[int, Plan] = {}
    captured: dict[int, Arrays] = {}
    for plan in PLANS:
        left = [i for i in range(len(models)) if i not in captured]
        jobs = [
            _job("layers", models[i], captured=list(range(layers[i])), **plan.options())
            for i in left
        ]
        for i, result in zip(left, pin.run(jobs), strict=True):
            if result is not None:
                plans[i], captured[i] = plan, result
    numbers = range(len(models))
    return [plans[i] for i in numbers], [captured[i] for i in numbers]


def _published(
    models: Sequence[Path], layers: Sequence[list[int]], plans: Sequence[Plan], build: Build
) -> list[Arrays | None]:
    jobs = [
        _job("layers", path, layers=wanted, **plan.options())
        for path, wanted, plan in zip(models, layers, plans, strict=True)
    ]
    return build.run(jobs)


def _same(pin: Arrays | None, ours: Arrays | None) -> bool | None:
    if pin is None:
        return None
    return ours is not None and all(np.array_equal(pin[name], ours[name]) for name in pin)


def _error(captured: Arrays, published: Arrays | None) -> float | None:
    """The input of layer n against the captured output of layer n - 1, worst over layers."""
    errors = []
    for name, value in (published or {}).items():
        output = captured.get(f"output-{int(name.removeprefix('input-')) - 1}")
        if output is not None:
            errors.append(float(np.abs(output - value).max() / np.abs(output).max()))
    return max(errors, default=None)


def render(targets: Sequence[Target]) -> str:
    """The table as a Markdown document."""
    counts = {
        "pin": sum(target.pin_inner for target in targets),
        "ours": sum(target.our_inner for target in targets),
        "captured": sum(target.captured_error is not None for target in targets),
    }
    head = _HEAD.format(total=len(targets), **counts)
    return head + "\n".join(_row(target) for target in targets) + "\n"


_HEAD = """# Targets

What upstream's tiny random models ({total}, one or two per architecture) publish for a DFlash
drafter: the input of every inner layer, and the output of the last one. A test runs the comparison
and fails when this file is not what it finds; `python -m tests.oracle.target_table` writes it.

- Unpatched pin: {pin} of {total} publish inner layers, the others abort. Here: {ours} of {total},
  and the others are refused by name.
- "same": values equal the unpatched pin's bit for bit, where it publishes any.
- "captured": largest relative difference to the layer outputs that an eval callback saw in the
  unpatched pin, at nodes named `l_out` ({captured} models; mean over the streams of
  hyper-connections). 0 is bit-equal.
- "batch": sequences and micro-batches evaluated; some graphs of the pin cannot take every batch.

| target | layers | pin: inner | last | here: inner | last | same | captured | batch | refused |
|---|---|---|---|---|---|---|---|---|---|
"""


def _row(target: Target) -> str:
    same = "" if target.same_as_pin is None else _word(target.same_as_pin)
    error = "" if target.captured_error is None else f"{target.captured_error:.0e}"
    cells = [
        target.name,
        str(target.n_layer),
        _word(target.pin_inner),
        _word(target.pin_last),
        _word(target.our_inner),
        _word(target.our_last),
        same,
        "0" if target.captured_error == 0 else error,
        target.plan,
        target.reason,
    ]
    return "| " + " | ".join(cells) + " |"


def _word(value: bool) -> str:
    return "yes" if value else "no"


def main() -> None:
    """Write docs/targets.md."""
    models = sorted(tiny_models(PIN.libraries / "test-llama-archs").glob("*.gguf"))
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(render(collect(models, PIN, OURS)), encoding="utf-8")


if __name__ == "__main__":
    main()
