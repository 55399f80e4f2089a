"""What is taken from a target, from its GGUF file and from its Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from dflash2_gguf.convert.pipeline import make_plan, run
from dflash2_gguf.convert.target import open_target
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.gguf_schema import Key
from dflash2_gguf.presets import load_preset
from tests.convert import checkpoints
from tests.convert.hf_targets import write_hf_target
from tests.convert.pairs import Edit, edit

HINT = "give the target's GGUF file with --target instead, its tokenizer is copied as it is"

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_folder(
    path: Path, *, model_type: str = "llama", pre: Any = None, model: Any = None, **config: Any
) -> Path:
    """A Hugging Face folder with a tokenizer of seven tokens for a vocabulary of 24."""
    path.mkdir()
    data = {
        "architectures": ["SomeForCausalLM"],
        "model_type": model_type,
        "vocab_size": checkpoints.N_VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 6,
        **config,
    }
    (path / "config.json").write_text(json.dumps(data))
    tokenizer = {
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "b": 1, "ab": 2, "abab": 3},
            "merges": [["a", "b"], ["ab", "ab"]],
            **(model or {}),
        },
        "added_tokens": [
            {"id": 4, "content": "<s>", "special": True},
            {"id": 5, "content": "<|plain|>", "special": False},
            {"id": 6, "content": "\u2581user", "special": False},
        ],
        "pre_tokenizer": pre or {"type": "ByteLevel", "add_prefix_space": False},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"bos_token": "<s>", "eos_token": {"content": "<|plain|>"}, "add_bos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    (path / "chat_template.jinja").write_text("{{ x }}")
    return path


def split(pattern: str) -> dict[str, Any]:
    """The usual pre-tokenizer: split by an expression, then map bytes."""
    return {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ],
    }


def test_folder_gives_the_keys_upstream_writes(tmp_path: Path) -> None:
    target = open_target(write_folder(tmp_path / "t", model_type="gpt2"))
    values = {
        key: value.items() if value.item is not None else value.scalar()
        for key, value in target.tokenizer.items()
    }
    assert values == {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [
            *("a", "b", "ab", "abab", "<s>", "<|plain|>", " user"),
            *(f"[PAD{i}]" for i in range(7, 24)),
        ],
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 3, 3, 4, *[5] * 17],
        "tokenizer.ggml.merges": ["a b", "ab ab"],
        "tokenizer.ggml.bos_token_id": 4,
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ x }}",
    }
    assert (target.n_embd, target.n_layer, target.n_vocab, target.mrope) == (32, 6, 24, False)


@pytest.mark.parametrize(
    ("pattern", "model_type", "ignore_merges", "expected"),
    [
        (QWEN2, "qwen3", False, "qwen2"),
        (QWEN35, "qwen3_5_text", False, "qwen35"),
        (LLAMA3, "llama", True, "llama-bpe"),
        (LLAMA3, "glm4_moe", True, "glm4"),
        (GPT4O, "gpt_oss", False, "gpt-4o"),
    ],
)
def test_known_pre_tokenizers_are_recognised(
    tmp_path: Path, pattern: str, model_type: str, ignore_merges: bool, expected: str
) -> None:
    folder = write_folder(
        tmp_path / "t",
        model_type=model_type,
        pre=split(pattern),
        model={"ignore_merges": ignore_merges},
    )
    assert open_target(folder).tokenizer[Key.TOKENIZER_PRE].scalar() == expected


@pytest.mark.parametrize(
    ("pattern", "model_type", "ignore_merges"),
    [
        (r"\p{L}+", "qwen3", False),
        (LLAMA3, "llama", False),
        (LLAMA3, "unheard_of", True),
        (QWEN2, "stablelm", False),
    ],
)
def test_unknown_pre_tokenizer_is_refused(
    tmp_path: Path, pattern: str, model_type: str, ignore_merges: bool
) -> None:
    folder = write_folder(
        tmp_path / "t",
        model_type=model_type,
        pre=split(pattern),
        model={"ignore_merges": ignore_merges},
    )
    with pytest.raises(CheckpointError) as caught:
        open_target(folder)
    path = folder / "tokenizer.json"
    assert caught.value.message == f"the pre-tokenizer of {path} is unknown"
    assert caught.value.hint == HINT


@pytest.mark.parametrize("change", [{"type": "Unigram"}, {"byte_fallback": True}])
def test_other_tokenizers_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write_folder(tmp_path / "t", model=change)
    with pytest.raises(CheckpointError) as caught:
        open_target(folder)
    path = folder / "tokenizer.json"
    assert caught.value.message == f"{path} is not a byte-level BPE tokenizer"
    assert caught.value.hint == HINT


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "t")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_target(folder)
    assert caught.value.message == f"there is no tokenizer.json in {folder}"
    assert caught.value.hint == HINT


def test_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "t", model_type="gpt2", vocab_size=6)
    with pytest.raises(CheckpointError) as caught:
        open_target(folder)
    assert (caught.value.message, caught.value.hint) == (
        "token ' user' has id 6, outside the vocabulary of 6",
        HINT,
    )


def test_folder_and_file_of_one_target_agree(tmp_path: Path, target_gguf: Path) -> None:
    folder = open_target(write_hf_target(tmp_path / "hf", target_gguf))
    file = open_target(target_gguf)
    assert (folder.n_embd, folder.n_layer, folder.n_vocab) == (576, 30, 49152)
    assert (file.n_embd, file.n_layer, file.n_vocab) == (576, 30, 49152)
    for key in ("model", "pre", "tokens", "token_type", "merges"):
        name = f"tokenizer.ggml.{key}"
        assert folder.tokenizer[name] == file.tokenizer[name], name


def test_text_config_of_a_multimodal_target_counts(tmp_path: Path) -> None:
    text = {"vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 6, "model_type": "gpt2"}
    folder = write_folder(
        tmp_path / "t",
        hidden_size=1,
        text_config={**text, "rope_parameters": {"mrope_section": [1, 1, 2]}},
    )
    target = open_target(folder)
    assert (target.n_embd, target.mrope) == (32, True)


def test_next_token_layers_are_not_counted(tmp_path: Path) -> None:
    path = checkpoints.write_target(tmp_path / "t.gguf", arch="glm5-next", nextn=1)
    assert open_target(path).n_layer == 6


@pytest.mark.parametrize("sections", [None, [0, 0, 0, 0], [2, 1, 1, 0]])
def test_m_rope_target_gives_the_drafter_sections(
    tmp_path: Path, checkpoint: Path, sections: list[int] | None
) -> None:
    path = checkpoints.write_target(tmp_path / "t.gguf", sections=sections)
    plan = make_plan(checkpoint, path, [(load_preset("bf16"), tmp_path / "out.gguf")])
    run(plan, force=False, progress=lambda _count: None)
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    key = "dflash.rope.dimension_sections"
    if sections is None or not any(sections):
        assert key not in fields
    else:
        assert fields[key].contents() == [4, 0, 0, 0]


def test_mask_token_is_the_drafters(tmp_path: Path, checkpoint: Path) -> None:
    path = checkpoints.write_target(tmp_path / "t.gguf", mask=9)
    plan = make_plan(checkpoint, path, [(load_preset("bf16"), tmp_path / "out.gguf")])
    run(plan, force=False, progress=lambda _count: None)
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["tokenizer.ggml.mask_token_id"].contents() == 3


def test_a_mask_token_of_the_targets_folder_is_not_taken(tmp_path: Path, checkpoint: Path) -> None:
    folder = write_folder(tmp_path / "t", model_type="gpt2", mask_token_id=5)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "mask_token": "<|plain|>"}))
    plan = make_plan(checkpoint, folder, [(load_preset("bf16"), tmp_path / "out.gguf")])
    run(plan, force=False, progress=lambda _count: None)
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert fields["tokenizer.ggml.mask_token_id"].contents() == 3


def test_a_tokenizer_of_any_family_is_copied_from_the_targets_file(
    tmp_path: Path, checkpoint: Path
) -> None:
    """Gemma's is no byte-level BPE, and its file says everything that llama.cpp needs."""
    family = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.pre": "gemma4",
        "tokenizer.ggml.scores": [-float(i) for i in range(24)],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.unknown_token_id": 1,
    }
    bare = checkpoints.write_target(tmp_path / "bare.gguf", arch="gemma4")
    target = edit(bare, tmp_path / "t.gguf", Edit(set=family))
    plan = make_plan(checkpoint, target, [(load_preset("bf16"), tmp_path / "out.gguf")])
    run(plan, force=False, progress=lambda _count: None)
    theirs, ours = (
        {
            key: (field.types, field.contents())
            for key, field in gguf.GGUFReader(path).fields.items()
            if key.startswith("tokenizer.")
        }
        for path in (target, tmp_path / "out.gguf")
    )
    assert ours.pop("tokenizer.ggml.mask_token_id")[1] == 3
    assert ours == theirs


def test_any_part_of_a_split_target_will_do(tmp_path: Path) -> None:
    first = checkpoints.write_target(tmp_path / "m-00001-of-00003.gguf")
    third = tmp_path / "m-00003-of-00003.gguf"
    third.write_bytes(b"GGUF of tensors only")
    assert open_target(third).name == "tiny target"
    first.unlink()
    with pytest.raises(CheckpointError) as caught:
        open_target(third)
    assert caught.value.message == (
        "m-00003-of-00003.gguf is part 3 of a split model and m-00001-of-00003.gguf is missing"
    )
    assert caught.value.hint == "the first part holds the tokenizer"


def test_target_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_target(tmp_path / "none.gguf")
    assert caught.value.message == f"there is no target at {tmp_path / 'none.gguf'}"


def test_file_without_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    out = gguf.GGUFWriter(path, "clip")
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    with pytest.raises(CheckpointError) as caught:
        open_target(path)
    assert caught.value.message == f"{path} has no tokenizer"
    assert caught.value.hint == (
        "give the target model's main GGUF file or its Hugging Face directory"
    )


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"PK\x03\x04" + bytes(40))
    with pytest.raises(CheckpointError) as caught:
        open_target(path)
    assert caught.value.message == f"not a GGUF file: {path}"


@pytest.mark.parametrize("strange", [5, True, {"a": 1}])
def test_folder_with_fields_of_another_type_is_read(tmp_path: Path, strange: Any) -> None:
    folder = write_folder(
        tmp_path / "t", model_type="gpt2", architectures=strange, rope_scaling=strange
    )
    target = open_target(folder)
    assert (target.arch, target.mrope) == ("gpt2", False)
