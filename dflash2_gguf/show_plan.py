"""``dflash2-run plan``: the memory of a session as a table or as JSON."""

from __future__ import annotations

import json

from dflash2_gguf.launch import Launch, chosen, plan_session, unmet
from dflash2_gguf.plan import Plan
from dflash2_gguf.stats import Memory
from dflash2_gguf.ui import Terminal

__all__ = ["show_plan"]


def show_plan(launch: Launch, terminal: Terminal, *, n_parallel: int, as_json: bool) -> int:
    """Print the plan; the exit code is 0, whether it fits or not."""
    plan = plan_session(launch, n_parallel=n_parallel)
    terminal.write(json.dumps(plan.as_dict()) + "\n" if as_json else _table(plan))
    if launch.fit:
        terminal.note(chosen(plan))
    for line in unmet(launch, plan):
        terminal.warning(line)
    if (lack := plan.shortage()) is not None:
        terminal.warning(f"it does not fit: {lack}")
    return 0


def _table(plan: Plan) -> str:
    rows = [("", "target", "drafter"), *_parts(plan.memory)]
    columns = 3 if plan.draft_max else 2
    lines = [f"{row[0]:<10}" + "".join(f"{cell:>12}" for cell in row[1:columns]) for row in rows]
    return "\n".join([*lines, "", *_sums(plan)]) + "\n"


def _parts(memory: Memory) -> list[tuple[str, str, str]]:
    """Name, target's part, drafter's part; a drafter has no states to take back."""
    return [
        ("weights", _size(memory.target_weights), _size(memory.draft_weights)),
        ("cache", _size(memory.target_cache), _size(memory.draft_cache)),
        ("snapshots", _size(memory.target_snapshots), "-"),
        ("compute", _size(memory.target_compute), _size(memory.draft_compute)),
        ("sum", _size(memory.target), _size(memory.draft)),
    ]


def _sums(plan: Plan) -> list[str]:
    memory, free = plan.memory, plan.free
    sequences = "1 sequence" if plan.n_parallel == 1 else f"{plan.n_parallel} sequences"
    drafts = f"up to {plan.draft_max} drafted at once" if plan.draft_max else "no drafter"
    lines = [f"for {sequences} of {plan.n_ctx} tokens, {drafts}"]
    host_free = "" if free.host is None else f", {_size(free.host)} free"
    lines.append(f"memory: {_size(memory.host)} needed{host_free}")
    if free.device is not None:
        lines.append(f"GPU: {_size(memory.device)} needed, {_size(free.device)} free")
    return lines


def _size(size: int) -> str:
    """Three digits or more, in the unit that suits."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.1f} MiB" if size else "0"
