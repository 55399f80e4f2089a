"""`check` says of every architecture what loading the pair finds in its graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash2_gguf.check import find_facts
from dflash2_gguf.check_fact import Verdict
from dflash2_gguf.convert.target import Target, open_target
from dflash2_gguf.errors import DFlash2Error
from dflash2_gguf.gguf_schema import DraftShape, draft_tensors
from dflash2_gguf.models import open_unloaded
from tests.convert.pairs import write_holes

pytestmark = [pytest.mark.native, pytest.mark.peer]


def write_drafter(target: Target, path: Path, layer: int) -> Path:
    """A drafter of one layer that reads the output of one layer of this target."""
    shape = DraftShape(
        n_layer=1,
        n_embd=target.n_embd,
        n_ff=64,
        n_head=4,
        n_head_kv=2,
        head_dim=16,
        n_vocab=target.n_vocab,
        n_tap=1,
        conv_kernel=2,
        conv_group=16,
        selector_rank=32,
    )
    fields = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": target.n_embd,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.causal": False,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e4,
        "block_size": 4,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 32,
        "selector_top_k": 4,
        "target_layers": [layer + 1],
    }
    if target.mrope:
        fields["rope.dimension_sections"] = [8, 0, 0, 0]
    values: dict[str, Any] = {
        "general.architecture": "dflash",
        **{f"dflash.{name}": value for name, value in fields.items()},
        **target.tokenizer,
        "tokenizer.ggml.mask_token_id": 3,
    }
    return write_holes(path, values, {spec.name: spec.shape for spec in draft_tensors(shape)})


def loads(target: Path, drafter: Path) -> bool:
    """Does the runtime take the pair? It reads no weights for that, but builds graphs."""
    try:
        with open_unloaded(target, drafter):
            return True
    except DFlash2Error:
        return False


@pytest.mark.parametrize("place", ["first", "last"])
def test_headers_tell_of_every_target_what_its_graph_does(
    place: str, tiny_models: Path, tmp_path: Path
) -> None:
    wrong, n_loading, n_refused = [], 0, 0
    for path in sorted(tiny_models.glob("*.gguf")):
        target = open_target(path)
        layer = 0 if place == "first" else target.n_layer - 1
        drafter = write_drafter(target, tmp_path / "drafter.gguf", layer)
        errors = [f.message for f in find_facts(path, drafter) if f.verdict is Verdict.ERROR]
        is_loading = loads(path, drafter)
        n_loading, n_refused = n_loading + is_loading, n_refused + (not is_loading)
        if bool(errors) is is_loading:
            wrong.append((path.stem, errors))
    assert wrong == []
    assert n_loading > 8
    assert n_refused > 8
