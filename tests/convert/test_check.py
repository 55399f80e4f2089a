"""`check`: right pairs pass, and each wrong one is flagged by its own cause, word for word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest

from dflash2_gguf.check import find_facts
from dflash2_gguf.check_fact import Fact, Verdict
from tests.convert.pairs import Edit, edit, write_right_drafter, write_right_target

CONVERT = "convert the drafter's checkpoint again with `dflash2-convert`"
MIGRATE = "`dflash2-convert migrate --config config.json` adds it without touching the tensors"
SECTIONS = "`dflash2-convert migrate --target TARGET` corrects them without touching the tensors"
OTHER = "give the target the drafter was trained for, or convert the drafter of this target"
ANOTHER_TARGET = "take another target"
OF_TWO = "metadata and tensors are of two drafters; convert the checkpoint again"
CONFIG = "compare with {} in the checkpoint's config.json"

# (fact, verdict, message, hint); in paths the folder is left out
Found = tuple[str, str, str, str | None]

OURS = (
    "dflash2.format",
    "dflash2.preset",
    "dflash2.source.name",
    "dflash2.source.files",
    "dflash2.source.sha256",
    "dflash2.source.rope_freq_base",
    "dflash2.target.name",
    "dflash2.target.architecture",
    "dflash2.target.block_count",
)
FOREIGN: dict[str, Any] = dict.fromkeys(OURS)
UNKNOWN_ORIGIN: tuple[Found, ...] = (
    (
        "rope layout",
        "note",
        (
            "halves, as every file of this architecture; whether interleaved rows were reordered "
            "for that cannot be seen"
        ),
        "--run tells: rows in the wrong order draft next to nothing",
    ),
    (
        "origin",
        "note",
        "the file does not say which checkpoint it was made from",
        f"two uploads of one name may differ; {CONVERT}",
    ),
    (
        "made for",
        "note",
        "the file does not say",
        "widths and tokens below are all there is to go by",
    ),
)
GUESSED_BASE: Found = (
    "rope base",
    "warning",
    (
        "10000, which is also what converters write that find none; "
        "the file does not say where it is from"
    ),
    f"{CONFIG.format('rope_theta')}; `dflash2-convert migrate --config config.json` corrects it",
)


def error(name: str, message: str, hint: str) -> Found:
    return name, "error", message, hint


def warning(name: str, message: str, hint: str) -> Found:
    return name, "warning", message, hint


def note(name: str, message: str, hint: str) -> Found:
    return name, "note", message, hint


def of_arch(arch: str, **more: Any) -> dict[str, Any]:
    return {"dflash2.target.architecture": arch, **more}


def found(facts: tuple[Fact, ...], folder: Path) -> list[Found]:
    """What is not ok, in order."""
    return [
        (f.name, f.verdict.value, f.message.replace(f"{folder}/", ""), f.hint)
        for f in facts
        if f.verdict is not Verdict.OK
    ]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_right_target(tmp_path / "target.gguf")


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_right_drafter(tmp_path / "drafter.gguf")


# name -> (options of the target, edit of the drafter, what is found)
WRONG: dict[str, tuple[Mapping[str, Any], Edit, list[Found]]] = {
    "architecture of a fork": (
        {},
        Edit(set={"general.architecture": "dflash-draft"}),
        [
            error(
                "drafter",
                "wrong.gguf was made for a fork of llama.cpp: its architecture is 'dflash-draft'",
                "`dflash2-convert migrate` makes it a file that llama.cpp loads, and check that "
                "one",
            )
        ],
    ),
    "DSpark drafter of a fork": (
        {},
        Edit(set={"general.architecture": "dspark"}),
        [
            error(
                "drafter",
                "wrong.gguf has architecture 'dspark': a fork's DSpark drafter",
                "convert the checkpoint of a DFlash 2 drafter",
            )
        ],
    ),
    "a model instead of a drafter": (
        {},
        Edit(set={"general.architecture": "llama"}),
        [
            error(
                "drafter",
                "wrong.gguf is not a drafter: its architecture is 'llama'",
                "are target and drafter swapped?",
            )
        ],
    ),
    "DFlash 1": (
        {},
        Edit(
            drop=(
                "selector_hidden.weight",
                "selector_predecessor.weight",
                "selector_successor.weight",
                *(
                    f"blk.{layer}.{part}"
                    for layer in range(2)
                    for part in (
                        "attn_conv_base",
                        "attn_conv_proj.weight",
                        "ffn_conv_base",
                        "ffn_conv_proj.weight",
                    )
                ),
            )
        ),
        [
            error(
                "drafter",
                "tiny, DFlash 1 drafter, 20,704 parameters: it has no candidate selector",
                "the programs of llama.cpp run it, `dflash2-run` runs DFlash 2 drafters",
            )
        ],
    ),
    "missing convolutions": (
        {},
        Edit(drop=("blk.0.attn_conv_base", "blk.1.ffn_conv_proj.weight")),
        [
            error(
                "tensors",
                "missing tensors: blk.0.attn_conv_base, blk.1.ffn_conv_proj.weight",
                "llama.cpp refuses the file; convert the whole checkpoint again",
            )
        ],
    ),
    "missing part of the selector": (
        {},
        Edit(drop=("selector_successor.weight",)),
        [
            error(
                "tensors",
                "missing tensors: selector_successor.weight",
                "llama.cpp refuses the file; convert the whole checkpoint again",
            )
        ],
    ),
    "unknown tensors": (
        {},
        Edit(add={"blk.0.attn_q_a.weight": (4, 32)}),
        [
            error(
                "tensors",
                "unknown tensors: blk.0.attn_q_a.weight",
                "llama.cpp's DFlash graph has no place for them; take a DFlash 2 drafter",
            )
        ],
    ),
    "tensors of another kind of drafter": (
        {},
        Edit(add={"blk.0.attn_gate.weight": (4, 32)}),
        [
            error(
                "drafter",
                "wrong.gguf: tensor blk.0.attn_gate.weight belongs to a Laguna drafter (attention "
                "gates)",
                "llama.cpp's DFlash graph has no place for them; take a DFlash 2 drafter",
            )
        ],
    ),
    "tensor names of a fork": (
        {},
        Edit(
            rename={
                "fc.weight": "dflash_fc.weight",
                "selector_hidden.weight": "selector_hproj.weight",
            }
        ),
        [
            error(
                "drafter",
                "wrong.gguf has tensor names of a fork, such as dflash_fc.weight",
                "`dflash2-convert migrate` makes it a file that llama.cpp loads, and check that "
                "one",
            )
        ],
    ),
    "convolutions of another group": (
        {},
        Edit(set={"dflash.conv_group_size": 16}),
        [
            error(
                "tensors",
                "misshapen tensors: blk.0.attn_conv_proj.weight, blk.0.ffn_conv_proj.weight, "
                "blk.1.attn_conv_proj.weight, blk.1.ffn_conv_proj.weight",
                OF_TWO,
            )
        ],
    ),
    "selector of another rank": (
        {},
        Edit(set={"dflash.selector_rank": 16}),
        [
            error(
                "tensors",
                "misshapen tensors: selector_hidden.weight, selector_predecessor.weight, "
                "selector_successor.weight",
                OF_TWO,
            )
        ],
    ),
    "features of another number of layers": (
        {},
        Edit(set={"dflash.target_layers": [2, 4, 5]}),
        [error("tensors", "misshapen tensors: fc.weight", OF_TWO)],
    ),
    "norms and bases that are not F32": (
        {},
        Edit(
            cast={
                "blk.0.attn_conv_base": gguf.GGMLQuantizationType.F16,
                "output_norm.weight": gguf.GGMLQuantizationType.F16,
            }
        ),
        [
            error(
                "tensors",
                "mistyped tensors: output_norm.weight, blk.0.attn_conv_base",
                "llama.cpp runs norms and convolution bases in F32 only; convert again",
            )
        ],
    ),
    "no block size": (
        {},
        Edit(set={"dflash.block_size": None}),
        [error("block size", "the file has no dflash.block_size", MIGRATE)],
    ),
    "a block of one": (
        {},
        Edit(set={"dflash.block_size": 1}),
        [error("block size", "1 token, it can be 2 to 32", CONVERT)],
    ),
    "no number of candidates": (
        {},
        Edit(set={"dflash.selector_top_k": None}),
        [error("selector and convolutions", "selector top k is missing", CONVERT)],
    ),
    "too many candidates": (
        {},
        Edit(set={"dflash.selector_top_k": 16}),
        [
            error(
                "selector and convolutions",
                "16 candidates need rows of 272, the hidden size is 32",
                CONVERT,
            )
        ],
    ),
    "causality not stated": (
        {},
        Edit(set={"dflash.attention.causal": None}),
        [
            warning(
                "causality",
                "not stated: libraries then take causal, programs bidirectional attention",
                MIGRATE,
            )
        ],
    ),
    "causal": (
        {},
        Edit(set={"dflash.attention.causal": True}),
        [
            note(
                "causality",
                "causal within the block; published DFlash 2 drafters are bidirectional",
                CONFIG.format("is_causal"),
            )
        ],
    ),
    "window without its layers": (
        {},
        Edit(set={"dflash.attention.sliding_window_pattern": None}),
        [error("window", "a window of 16 and no list of the layers it is for", MIGRATE)],
    ),
    "layers without their window": (
        {},
        Edit(set={"dflash.attention.sliding_window": None}),
        [error("window", "layers are marked as windowed and no window is given", MIGRATE)],
    ),
    "window of other layers": (
        {},
        Edit(set={"dflash.attention.sliding_window_pattern": [True] * 3}),
        [error("window", "3 marks of windowed layers, 2 layers", CONVERT)],
    ),
    "window smaller than the block": (
        {},
        Edit(set={"dflash.attention.sliding_window": 2}),
        [warning("window", "2 tokens, less than the block of 4 tokens", CONVERT)],
    ),
    "window forgotten by another converter": (
        {},
        Edit(
            set={
                **FOREIGN,
                "dflash.attention.sliding_window": None,
                "dflash.attention.sliding_window_pattern": None,
            }
        ),
        [
            warning(
                "window",
                "none given, so every layer sees the whole context; all releases have a window, "
                "and converters that forget it cost acceptance as the context grows",
                f"{CONFIG.format('layer_types')}; {MIGRATE}",
            ),
            GUESSED_BASE,
            *UNKNOWN_ORIGIN,
        ],
    ),
    "rope base left at a default": ({}, Edit(set=FOREIGN), [GUESSED_BASE, *UNKNOWN_ORIGIN]),
    "rope base of unknown origin": (
        {},
        Edit(set={**FOREIGN, "dflash.rope.freq_base": 50000.0}),
        [
            note(
                "rope base",
                "50000; the file does not say where it is from",
                CONFIG.format("rope_theta"),
            ),
            *UNKNOWN_ORIGIN,
        ],
    ),
    "no rope base": (
        {},
        Edit(set={"dflash.rope.freq_base": None}),
        [
            error(
                "rope base",
                "not given: llama.cpp then takes 10000, whatever the drafter was trained with",
                MIGRATE,
            )
        ],
    ),
    "impossible rope base": (
        {},
        Edit(set={"dflash.rope.freq_base": float("nan")}),
        [error("rope base", "nan, it must be a positive number", CONVERT)],
    ),
    "licence that forbids": (
        {},
        Edit(set={"general.license": "cc-by-nc-nd-4.0"}),
        [
            warning(
                "licence",
                "cc-by-nc-nd-4.0: non-commercial use only, a converted file must not be shared",
                "read the licence of the checkpoint first",
            )
        ],
    ),
    "no licence": (
        {},
        Edit(set={"general.license": None}),
        [
            note(
                "licence",
                "not stated",
                "look at the drafter's source before you share the file",
            )
        ],
    ),
    "target of another depth": (
        {"n_layer": 8},
        Edit(),
        [error("made for", "a target of 6 layers, tiny target has 8", OTHER)],
    ),
    "target of another architecture": (
        {"arch": "qwen3"},
        Edit(),
        [
            warning(
                "made for",
                "tiny target, llama; the target given is tiny target, qwen3",
                OTHER,
            )
        ],
    ),
    "target of another width": (
        {"n_embd": 64},
        Edit(),
        [error("hidden size", "target 64, drafter 32", OTHER)],
    ),
    "target of another vocabulary": (
        {"n_vocab": 28},
        Edit(),
        [error("vocabulary", "target 28 tokens, drafter 24", OTHER)],
    ),
    "target of other tokens": (
        {},
        Edit(set={"tokenizer.ggml.tokens": [*(f"t{i}" for i in range(20)), *"abcd"]}),
        [
            error(
                "tokens",
                "4 of 24 differ, the first is 20: 't20' in the target, 'a' in the drafter",
                OTHER,
            )
        ],
    ),
    "no vocabulary": (
        {},
        Edit(set={"tokenizer.ggml.tokens": None}),
        [
            note(
                "tensors",
                "not compared: the numbers that fix the tensor shapes are incomplete",
                "see what is missing below",
            ),
            error("vocabulary", "the drafter has no tokenizer.ggml.tokens", CONVERT),
        ],
    ),
    "no mask token": (
        {},
        Edit(set={"tokenizer.ggml.mask_token_id": None}),
        [error("mask token", "the drafter has no tokenizer.ggml.mask_token_id", MIGRATE)],
    ),
    "mask token without a row": (
        {},
        Edit(set={"tokenizer.ggml.mask_token_id": 24}),
        [
            error(
                "mask token",
                "id 24 is drafted from, the target has embeddings for 0 to 23",
                OTHER,
            )
        ],
    ),
    "no layers": (
        {},
        Edit(set={"dflash.target_layers": None}),
        [
            note(
                "tensors",
                "not compared: the numbers that fix the tensor shapes are incomplete",
                "see what is missing below",
            ),
            error("target layers", "the drafter names none", MIGRATE),
        ],
    ),
    "layers counted as outputs": (
        {},
        Edit(set={"dflash.target_layers": [0, 2]}),
        [
            error(
                "target layers",
                "outputs of -1, 1 are read, and there is none before 0: the file counts layer "
                "outputs where inputs are meant, so all are one too low",
                "`dflash2-convert migrate --layer-ids outputs` corrects them",
            )
        ],
    ),
    "layers that may be counted as outputs": (
        {"n_layer": 10},
        Edit(set={"dflash.target_layers": [1, 7], "dflash2.target.block_count": 10}),
        [
            warning(
                "target layers",
                "outputs of 0, 6 are read, drafters are trained on 1, 7: all may be one too low",
                f"{CONFIG.format('target_layer_ids')}; --run tells which is right",
            )
        ],
    ),
    "layers with 1 added twice": (
        {"n_layer": 10},
        Edit(set={"dflash.target_layers": [3, 9], "dflash2.target.block_count": 10}),
        [
            warning(
                "target layers",
                "outputs of 2, 8 are read, drafters are trained on 1, 7: all may be one too high",
                f"{CONFIG.format('target_layer_ids')}; --run tells which is right",
            )
        ],
    ),
    "layers beyond the last": (
        {},
        Edit(set={"dflash.target_layers": [2, 7]}),
        [error("target layers", "outputs of 1, 6 are read, the target has 0 to 5", OTHER)],
    ),
    "last layer of a target that narrows it": (
        {},
        Edit(set={"dflash.target_layers": [2, 6]}),
        [
            error(
                "target graph",
                "architecture 'llama' computes the output of its last layer (5) only for sampled "
                "tokens",
                "no drafter that reads it runs with this target",
            )
        ],
    ),
    "target that publishes nothing": (
        {"arch": "hy_v4"},
        Edit(set=of_arch("hy_v4")),
        [
            error(
                "target graph",
                "architecture 'hy_v4' does not publish the output of its layers",
                ANOTHER_TARGET,
            )
        ],
    ),
    "target that does not decode token by token": (
        {"arch": "dream"},
        Edit(set=of_arch("dream")),
        [
            error(
                "target graph",
                "architecture 'dream' is a diffusion model and does not decode token by token",
                ANOTHER_TARGET,
            )
        ],
    ),
    "target that cannot be taken back": (
        {"arch": "jamba"},
        Edit(set=of_arch("jamba")),
        [
            error(
                "target graph",
                "architecture 'jamba' has a recurrent state that cannot be taken back after a "
                "rejected draft",
                ANOTHER_TARGET,
            )
        ],
    ),
    "target nobody has tried": (
        {"arch": "gemma4"},
        Edit(set=of_arch("gemma4")),
        [
            note(
                "target graph",
                "architecture 'gemma4' is not among those that were tried",
                "only its graph can tell: --run asks it, and so does loading the pair",
            )
        ],
    ),
    "rope sections missing": (
        {"arch": "qwen35", "sections": [2, 1, 1, 0]},
        Edit(set=of_arch("qwen35")),
        [
            error(
                "rope sections",
                "the target rotates by sections (M-RoPE), the drafter states none: an image in "
                "the prompt ends drafting",
                SECTIONS,
            )
        ],
    ),
    "rope sections for a target without": (
        {},
        Edit(set={"dflash.rope.dimension_sections": [4, 0, 0, 0]}),
        [
            warning(
                "rope sections",
                "the drafter states sections, the target has no M-RoPE: is it the right target?",
                SECTIONS,
            )
        ],
    ),
    "rope sections of the target": (
        {"arch": "qwen35", "sections": [2, 1, 1, 0]},
        Edit(set=of_arch("qwen35", **{"dflash.rope.dimension_sections": [2, 1, 1, 0]})),
        [
            warning(
                "rope sections",
                "2/1/1/0: only the first may be there, drafters rotate by time",
                SECTIONS,
            )
        ],
    ),
    "head made of the embeddings": (
        {},
        Edit(add={"token_embd.weight": (24, 32)}),
        [
            note(
                "embeddings and head",
                "the drafter's own embeddings serve as head",
                "right where the checkpoint has tie_word_embeddings; else its head was lost",
            )
        ],
    ),
    "cut off": (
        {},
        Edit(cut=1000),
        [
            error(
                "drafter",
                "broken GGUF file wrong.gguf: it ends inside the data of tensor "
                "'blk.1.ffn_conv_proj.weight'",
                "download or convert the file again",
            )
        ],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pair_is_flagged_by_its_cause(name: str, tmp_path: Path, drafter: Path) -> None:
    options, changes, expected = WRONG[name]
    target = write_right_target(tmp_path / "target.gguf", **options)
    wrong = edit(drafter, tmp_path / "wrong.gguf", changes)
    assert found(find_facts(target, wrong), tmp_path) == expected


def test_the_right_pair_has_nothing_to_be_said(tmp_path: Path, target: Path, drafter: Path) -> None:
    assert found(find_facts(target, drafter), tmp_path) == []


ANYTHING = ("x", 2**31, -1.0, float("nan"), True, [1, 2], [-1], ["a"], [True])


@pytest.mark.parametrize("value", ANYTHING, ids=repr)
def test_whatever_a_value_is_facts_come_of_it(
    value: Any, tmp_path: Path, target: Path, drafter: Path
) -> None:
    keys = [key for key in gguf.GGUFReader(drafter).fields if not key.startswith("GGUF.")]
    for key in {*keys, "dflash.rope.dimension_sections"} - {"general.architecture"}:
        wrong = edit(drafter, tmp_path / "wrong.gguf", Edit(set={key: value}, as_given=True))
        assert find_facts(target, wrong)
