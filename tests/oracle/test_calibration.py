"""What a calibrating session records, against the authors' torch model with hooks on its layers.

The reference sees whole texts again in every round, so rows of its context are counted in the last
round of a text only; libdflash2 writes each of them into its cache once.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dflash2_gguf.gguf_schema import tensor_name
from tests.oracle.builds import Build
from tests.oracle.comparison import Round, rounds_of
from tests.oracle.reference import Reference, load_draft
from tests.oracle.tiny_pairs import DraftShape, TargetShape, write_draft, write_target

pytestmark = [pytest.mark.native, pytest.mark.reference]

# of rows in float32, summed over hundreds of them
RELATIVE = 2e-4

SHAPES = [
    DraftShape(name="sliding window"),
    DraftShape(name="full attention", window=None),
    DraftShape(name="block of 3", block_size=3),
    DraftShape(name="three layers, group 32", layers=3, group_size=32, rank=16, top_k=8),
]


class Recorder:
    """Squared sums of the columns of rows, and their number, in float64."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}
        self.rows: dict[str, int] = defaultdict(int)

    def add(self, name: str, rows: Any) -> None:
        flat = np.asarray(rows, dtype=np.float64).reshape(-1, rows.shape[-1])
        self.sums[name] = self.sums.get(name, 0.0) + (flat**2).sum(axis=0)
        self.rows[name] += len(flat)


class Hooks:
    """Rows that the reference multiplies in a round; of the context only when it is wanted."""

    def __init__(self, draft: Any, recorder: Recorder) -> None:
        import torch

        self.recorder, self.with_context, self._seen = recorder, False, defaultdict(int)
        self.hidden: Any = None
        for name, module in draft.named_modules():
            known = tensor_name(f"{name}.weight")
            if isinstance(module, torch.nn.Linear) and known and "selector" not in known:
                module.register_forward_hook(self._linear(known))
        draft.norm.register_forward_hook(self._last_norm)

    def begin(self, with_context: bool) -> None:
        self.with_context = with_context
        self._seen.clear()

    def _linear(self, name: str) -> Any:
        def see(_module: Any, inputs: Any, _output: Any) -> None:
            self._seen[name] += 1
            # k and v are projected twice, first from the context
            two = name.endswith(("attn_k.weight", "attn_v.weight"))
            is_context = name == "fc.weight" or (two and self._seen[name] == 1)
            if self.with_context or not is_context:
                self.recorder.add(name, inputs[0].detach().numpy())

        return see

    def _last_norm(self, _module: Any, _inputs: Any, output: Any) -> None:
        self.hidden = output[0].detach().numpy().astype(np.float64)


def add_selector(recorder: Recorder, draft: Any, hidden: Any, played: Round) -> None:
    """The gate's rows, and for each codebook the gate times the rows of the other one."""
    selector = draft.candidate_selector
    gate_weight, before, after = (
        module.weight.detach().numpy().astype(np.float64)
        for module in (
            selector.hidden_projection,
            selector.predecessor_codebook,
            selector.successor_codebook,
        )
    )
    recorder.add("selector_hidden.weight", hidden)
    gates = hidden[1:] @ gate_weight.T
    previous = np.array([played.anchor])
    for gate, candidates in zip(gates, played.candidates, strict=True):
        recorder.add("selector_successor.weight", before[previous] * gate)
        recorder.add("selector_predecessor.weight", after[candidates] * gate)
        previous = candidates


def expected(reference: Reference, played: list[Round]) -> Recorder:
    recorder = Recorder()
    hooks = Hooks(reference.draft, recorder)
    for number, one in enumerate(played):
        is_last = number + 1 == len(played) or played[number + 1].prompt != one.prompt
        hooks.begin(with_context=is_last)
        features = reference.features(one.context)
        reference.lattice_from(features, one.anchor, len(one.path))
        add_selector(recorder, reference.draft, hooks.hidden, one)
    return recorder


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_recorded_sums_are_those_of_the_reference(
    shape: DraftShape, ours: Build, convert: Any, tmp_path: Path
) -> None:
    target = tmp_path / "target.gguf"
    module = write_target(target, TargetShape())
    source = write_draft(tmp_path / "draft", shape)
    draft = convert(source, target, "f32", tmp_path / "draft.gguf")
    prompts = [np.random.default_rng(n).integers(8, 512, size=n).tolist() for n in (1, 5, 9)]
    result = ours.run_one(
        job="session",
        path=str(target),
        draft=str(draft),
        prompts=prompts,
        lattices=True,
        calibrate=1,
        n_predict=14,
        n_ctx=256,
        n_threads=1,
        type_k=0,
        type_v=0,
        flash_attn=0,
    )
    assert not result["failures"].any()
    played = rounds_of(prompts, result)
    found = expected(Reference(module, load_draft(source)), played)

    matrices = {t.name for t in gguf.GGUFReader(draft).tensors if len(t.shape) == 2}
    recorded = {name.removeprefix("sums-") for name in result if name.startswith("sums-")}
    assert recorded == matrices == set(found.sums)
    for name in sorted(recorded):
        assert int(result[f"rows-{name}"]) == found.rows[name], name
        np.testing.assert_allclose(
            result[f"sums-{name}"], found.sums[name], rtol=RELATIVE, err_msg=name
        )
    last = {one.prompt: len(one.context) for one in played}
    n_context, n_block = sum(last.values()), sum(len(one.path) + 1 for one in played)
    rows = {name: int(result[f"rows-{name}"]) for name in recorded}
    assert rows["fc.weight"] == n_context
    assert rows["blk.0.attn_q.weight"] == rows["blk.1.ffn_down.weight"] == n_block
    assert rows["blk.0.attn_k.weight"] == rows["blk.1.attn_v.weight"] == n_context + n_block
