"""A vector for the mask token: the file gets tables of its own, with that row replaced."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dflash2_gguf.errors import CheckpointError
from tests.convert import checkpoints
from tests.convert.conversion import convert
from tests.convert.hf_targets import write_hf_target
from tests.convert.stored_forms import FORMS
from tests.convert.test_peer import differing, upstream_convert
from tests.convert.test_target import write_folder
from tests.convert.test_variants import KNOWN_VOCAB, rows, with_tables

MASK = 3
AGAIN = "fetch the checkpoint again"
TABLES = ("token_embd.weight", "output.weight")


def converted(source: Path, target: Path, path: Path, preset: str = "f32") -> dict[str, Any]:
    convert(source, target, path, preset)
    return checkpoints.dequantized(gguf.GGUFReader(path))


def add_mask(source: Path, *, token: object = MASK, size: int = 32, value: float = 0.3) -> Path:
    vector = torch.linspace(-1, 1, size) * value
    torch.save({"mask_token_id": token, "embedding": vector}, source / "mask_embedding.pt")
    return source


def lender(
    path: Path, *, tied: bool, tables: tuple[str, ...] = TABLES, ending: tuple[int, ...] = ()
) -> Path:
    """A target's GGUF file with a Q8_0 table, and a BF16 head unless they are tied.

    tables: those that are in the file. ending: its EOS and EOT tokens.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(6)
    writer.add_embedding_length(32)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(checkpoints.N_VOCAB)])
    for add, token in zip((writer.add_eos_token_id, writer.add_eot_token_id), ending, strict=False):
        add(token)
    kinds = (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16)
    for name, kind, seed in zip(TABLES, kinds, (7, 9), strict=True):
        if name in tables and not (tied and name == TABLES[1]):
            table = gguf.quantize(rows(checkpoints.N_VOCAB, 32, seed=seed), kind)
            writer.add_tensor(name, table, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_tables_of_a_targets_file_are_taken(tied: bool, checkpoint: Path, tmp_path: Path) -> None:
    target = lender(tmp_path / "target.gguf", tied=tied)
    found = converted(add_mask(checkpoint), target, tmp_path / "out.gguf")
    theirs = checkpoints.dequantized(gguf.GGUFReader(target))
    table = theirs["token_embd.weight"].copy()
    np.testing.assert_array_equal(
        found["output.weight"], theirs.get("output.weight", theirs["token_embd.weight"])
    )
    table[MASK] = np.linspace(-1, 1, 32, dtype=np.float32) * np.float32(0.3)
    np.testing.assert_allclose(found["token_embd.weight"], table, rtol=1e-6)


def test_the_file_names_the_vectors_hash(checkpoint: Path, tmp_path: Path) -> None:
    source, target = add_mask(checkpoint), lender(tmp_path / "target.gguf", tied=True)
    convert(source, target, tmp_path / "out.gguf")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    files = checkpoints.read_field(reader, "dflash2.source.files")
    hashes = checkpoints.read_field(reader, "dflash2.source.sha256")
    assert files == ["model.safetensors", "config.json", "mask_embedding.pt"]
    assert hashes == [hashlib.sha256((source / name).read_bytes()).hexdigest() for name in files]


def test_a_checkpoints_own_tables_come_first(target: Path, tmp_path: Path) -> None:
    values = with_tables(checkpoints.tensors(checkpoints.config()))
    source = add_mask(checkpoints.write_checkpoint(tmp_path / "c", values=values))
    found = converted(source, target, tmp_path / "out.gguf", "bf16")
    table = values["embed_tokens.weight"].copy()
    table[MASK] = torch.linspace(-1, 1, 32).mul(0.3).bfloat16().float().numpy()
    np.testing.assert_array_equal(found["token_embd.weight"], table)
    np.testing.assert_array_equal(found["output.weight"], values["lm_head.weight"])


@pytest.mark.peer
@pytest.mark.reference
@pytest.mark.parametrize("tied", [True, False])
def test_the_file_equals_upstreams(
    tied: bool, peer_dir: Path, target_gguf: Path, tmp_path: Path
) -> None:
    target = write_hf_target(tmp_path / "hf", target_gguf)
    config = json.loads((target / "config.json").read_text())
    sizes = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4}
    config |= {**sizes, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    (target / "config.json").write_text(json.dumps(config))
    tables = {
        "model.embed_tokens.weight": rows(KNOWN_VOCAB, 32),
        "lm_head.weight": rows(KNOWN_VOCAB, 32, seed=9),
    }
    (target / "model.safetensors").write_bytes(checkpoints.safetensors_bytes(tables))
    data = checkpoints.config(vocab_size=KNOWN_VOCAB)
    source = add_mask(checkpoints.write_checkpoint(tmp_path / "c", data=data))
    theirs = upstream_convert(peer_dir, source, target, "f32", tmp_path / "theirs.gguf")
    converted(source, target, tmp_path / "ours.gguf")
    assert differing(tmp_path / "ours.gguf", theirs) == []


def refusal(source: Path, target: Path, tmp_path: Path) -> tuple[str, str | None]:
    with pytest.raises(CheckpointError) as caught:
        converted(source, target, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
    return caught.value.message, caught.value.hint


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (
            {"token": 4},
            "mask_embedding.pt is of token 4, config.json masks with 3",
            "config.json and the vector do not belong together",
        ),
        (
            {"size": 16},
            "mask_embedding.pt has a vector of [16], the hidden size is 32",
            "config.json and the vector do not belong together",
        ),
        ({"value": float("nan")}, "mask_embedding.pt has NaN or infinite values", AGAIN),
        ({"token": "x"}, "mask_embedding.pt has no mask_token_id and embedding", AGAIN),
    ],
)
def test_a_vector_that_does_not_belong_is_refused(
    change: dict[str, Any],
    message: str,
    hint: str,
    checkpoint: Path,
    target: Path,
    tmp_path: Path,
) -> None:
    assert refusal(add_mask(checkpoint, **change), target, tmp_path) == (message, hint)


@pytest.mark.parametrize("form", ["fp8 by rows", "fp8 by blocks", "nvfp4", "mxfp4", "int4"])
def test_a_quantized_head_of_a_target_is_lent_as_what_it_means(
    form: str, checkpoint: Path, tmp_path: Path
) -> None:
    write, config = FORMS[form]
    target = write_folder(tmp_path / "target", model_type="gpt2", quantization_config=config)
    table, head = rows(checkpoints.N_VOCAB, 32), rows(checkpoints.N_VOCAB, 32, seed=9)
    stored, meant = write("lm_head", head.astype(np.float64))
    tables = {"model.embed_tokens.weight": torch.tensor(table), **stored}
    save_file(tables, target / "model.safetensors")
    found = converted(add_mask(checkpoint), target, tmp_path / "out.gguf")
    np.testing.assert_allclose(found["output.weight"], meant.astype(np.float32), rtol=2e-6)
    table[MASK] = np.linspace(-1, 1, 32, dtype=np.float32) * np.float32(0.3)
    np.testing.assert_allclose(found["token_embd.weight"], table, rtol=1e-6)


def test_a_target_without_weights_cannot_lend(
    checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    message, hint = refusal(add_mask(checkpoint), target, tmp_path)
    assert message == (
        f"{target} has no token_embd.weight, and the drafter's mask_embedding.pt replaces a "
        "row of it"
    )
    assert hint == "give the target with its weights: a GGUF file, or its whole Hugging Face folder"


def test_nothing_in_the_file_is_executed(checkpoint: Path, target: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (shutil.rmtree, (str(tmp_path / "victim"),))

    (tmp_path / "victim").mkdir()
    (checkpoint / "mask_embedding.pt").write_bytes(pickle.dumps(Evil()))
    message, _ = refusal(checkpoint, target, tmp_path)
    assert message.startswith("torch cannot read mask_embedding.pt: ")
    assert (tmp_path / "victim").is_dir()


@pytest.mark.parametrize(
    ("token", "vector", "message"),
    [
        (torch.tensor(float("nan")), torch.ones(32), "has no mask_token_id and embedding"),
        (torch.tensor(float("inf")), torch.ones(32), "has no mask_token_id and embedding"),
        (torch.tensor(3j), torch.ones(32), "has no mask_token_id and embedding"),
        (3, torch.ones(32).to_sparse(), "has an embedding that is no vector of floats"),
        (3, torch._neg_view(torch.ones(32)), "has an embedding that is no vector of floats"),
        (3, torch.ones(32, dtype=torch.bool), "has an embedding that is no vector of floats"),
    ],
)
def test_what_torch_can_save_but_is_no_vector_is_refused(
    token: object, vector: object, message: str, checkpoint: Path, target: Path, tmp_path: Path
) -> None:
    torch.save({"mask_token_id": token, "embedding": vector}, checkpoint / "mask_embedding.pt")
    assert refusal(checkpoint, target, tmp_path) == (f"mask_embedding.pt {message}", AGAIN)
