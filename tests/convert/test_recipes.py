"""Recipes: every tensor gets a type, a reason, and one that fits its rows."""

from __future__ import annotations

import pytest

from dflash2_gguf.errors import UsageError
from dflash2_gguf.ggml_types import GGMLType
from dflash2_gguf.gguf_schema import DraftShape, Role, draft_tensors
from dflash2_gguf.presets import choose_type, load_preset, preset_names

FLOATS = ["bf16", "f16", "f32"]
BLOCKS_OF_32 = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]
K_QUANTS = ["q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k"]
FOR_DRAFTERS = ["d4"]  # not recipes of llama-quantize
ALL = sorted([*FLOATS, *BLOCKS_OF_32, *K_QUANTS, *FOR_DRAFTERS, "iq4_nl", "iq4_xs"])


def shape(n_embd: int, **changes: int) -> DraftShape:
    numbers = {
        "n_layer": 8,
        "n_embd": n_embd,
        "n_ff": 2 * n_embd,
        "n_head": 8,
        "n_head_kv": 2,
        "head_dim": n_embd // 8,
        "n_vocab": 1000,
        "n_tap": 5,
        "conv_kernel": 2,
        "conv_group": 16,
        "selector_rank": 256,
        **changes,
    }
    return DraftShape(**numbers, own_embeddings=True, own_head=True)


def types(preset: str, dims: DraftShape) -> dict[str, GGMLType]:
    recipe = load_preset(preset)
    gqa = dims.n_head // dims.n_head_kv
    return {
        spec.name: choose_type(recipe, spec, n_layer=dims.n_layer, gqa=gqa).type
        for spec in draft_tensors(dims)
    }


def test_these_recipes_exist() -> None:
    assert preset_names() == ALL


@pytest.mark.parametrize("name", ALL)
def test_recipe_says_why(name: str) -> None:
    preset = load_preset(name)
    assert preset.summary
    assert preset.reason
    assert all(rule.reason and rule.roles for rule in preset.rules)
    assert name in FOR_DRAFTERS or name.upper() in preset.file_type.name


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n_embd", [256, 576, 1024, 80])
def test_every_type_fits_its_rows(name: str, n_embd: int) -> None:
    dims = shape(n_embd, head_dim=n_embd // 8, selector_rank=48)
    recipe = load_preset(name)
    for spec in draft_tensors(dims):
        choice = choose_type(recipe, spec, n_layer=8, gqa=4)
        assert spec.shape[-1] % choice.type.block_size == 0, spec.name
        assert choice.reason
        if spec.role in (Role.NORM, Role.CONV_BASE):
            assert choice.type is GGMLType.F32


@pytest.mark.parametrize(
    ("preset", "fallback"),
    [
        ("q2_k", GGMLType.Q4_0),
        ("q3_k_m", GGMLType.Q4_0),
        ("q4_k_m", GGMLType.Q5_0),
        ("q5_k_m", GGMLType.Q5_1),
        ("q6_k", GGMLType.Q8_0),
        ("iq4_xs", GGMLType.IQ4_NL),
    ],
)
def test_rows_that_are_no_multiple_of_256_fall_back(preset: str, fallback: GGMLType) -> None:
    recipe = load_preset(preset)
    (spec,) = [s for s in draft_tensors(shape(576)) if s.role is Role.FC]
    choice = choose_type(recipe, spec, n_layer=8, gqa=4)
    assert (choice.type, choice.wanted) == (fallback, recipe.type)
    assert choice.reason == "rows of 2880 do not divide into blocks of 256"


def test_rows_that_are_no_multiple_of_32_become_f16() -> None:
    found = types("q4_k_m", shape(80, selector_rank=48))
    assert found["selector_predecessor.weight"] is GGMLType.F16
    assert types("q8_0", shape(80))["blk.0.attn_q.weight"] is GGMLType.F16


def test_mixed_recipe_spends_bits_in_outer_layers() -> None:
    found = types("q4_k_m", shape(1024))
    six = [i for i in range(8) if found[f"blk.{i}.ffn_down.weight"] is GGMLType.Q6_K]
    assert six == [0, 3, 6, 7]
    assert found["blk.1.ffn_down.weight"] is GGMLType.Q4_K
    assert found["output.weight"] is GGMLType.Q6_K
    assert found["token_embd.weight"] is GGMLType.Q4_K


def test_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        load_preset("q9")
    assert caught.value.message == "there is no preset 'q9'"
    assert caught.value.hint == f"known presets: {', '.join(ALL)}"
