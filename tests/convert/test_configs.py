"""config.json: the published ones are understood, any other gives hyperparameters or one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash2_gguf.convert.hparams import default_target_layer_ids, read_hparams
from dflash2_gguf.convert.metadata import build_metadata, read_provenance, size_label
from dflash2_gguf.convert.target import Target, open_target
from dflash2_gguf.errors import CheckpointError
from dflash2_gguf.gguf_schema import draft_tensors
from dflash2_gguf.presets import load_preset
from tests.convert import checkpoints
from tests.convert.releases import PUBLISHED
from tests.convert.test_target import write_folder

BOUNDED = settings(
    max_examples=400,
    deadline=2000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_understood_without_a_warning(name: str) -> None:
    data, n_params = PUBLISHED[name]
    hparams = read_hparams(data)
    assert hparams.warnings == ()
    assert (hparams.causal, hparams.sliding_window) == (False, 2048)
    assert all(hparams.sliding_layers)
    count = 0
    for spec in draft_tensors(hparams.shape()):
        size = 1
        for n in spec.shape:
            size *= n
        count += size
    assert count == n_params


@pytest.mark.parametrize(
    ("n_target", "n_draft", "expected"),
    [(36, 1, (18,)), (6, 2, (1, 3)), (36, 5, (1, 9, 17, 25, 33)), (64, 5, (1, 16, 31, 46, 61))],
)
def test_default_layers_are_the_references(
    n_target: int, n_draft: int, expected: tuple[int, ...]
) -> None:
    assert default_target_layer_ids(n_target, n_draft) == expected


@pytest.mark.reference
def test_default_layers_equal_the_references_for_all_sizes() -> None:
    from dflash.model import build_target_layer_ids

    for n_target in range(4, 100):
        for n_draft in range(1, 10):
            expected = tuple(build_target_layer_ids(n_target, n_draft))
            assert default_target_layer_ids(n_target, n_draft) == expected


@pytest.mark.parametrize(
    ("count", "label"),
    [(19_120_512, "19M"), (1_924_404_480, "1.9B"), (25_824, "26K"), (999, "1.0K"), (0, "0.00K")],
)
def test_size_label_is_upstreams(count: int, label: str) -> None:
    from gguf.utility import size_label as theirs

    assert size_label(count) == theirs(count, 0, 0, 0) == label


NUMBERS = st.one_of(
    st.integers(-3, 300), st.integers(), st.floats(), st.booleans(), st.just(2**31 - 1)
)
VALUES = st.recursive(
    st.one_of(
        st.none(), NUMBERS, st.sampled_from(["yarn", "linear", "sliding_attention", "DFlash"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["rope_theta", "rope_type", "factor", "full_attention", "sliding_attention"]
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=5,
)
KEYS = [
    *checkpoints.config(),
    *(f"dflash__{key}" for key in checkpoints.config()["dflash_config"]),
    *("rope_theta", "rope_scaling", "license", "max_window_layers", "quantization_config"),
    *("dflash__use_swa", "dflash__swa_window_size", "dflash__causal", "dflash__rope_dim"),
    *("dflash__partial_rotary_factor", "dflash__rope_is_neox_style", "dflash__softcap"),
    *("dflash__output_multiplier", "dflash__final_logit_softcapping", "speculators_model_type"),
]
TARGET = Target(name="t", arch="llama", n_embd=32, n_layer=6, n_vocab=24, mrope=True, tokenizer={})


@BOUNDED
@given(changes=st.dictionaries(st.sampled_from(KEYS), st.just(...) | VALUES, max_size=3))
def test_any_config_gives_metadata_or_one_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    if "dflash_config" in changes:
        changes = {key: value for key, value in changes.items() if "dflash__" not in key}
    data = checkpoints.config(**changes)
    try:
        hparams = read_hparams(data)
    except CheckpointError as error:
        assert error.message.isprintable()
        return
    values = build_metadata(
        hparams,
        TARGET,
        load_preset("bf16"),
        read_provenance(tmp_path, hparams),
        n_params=1,
        files=["model.safetensors"],
    )
    assert b"".join(value.encode() for value in values.values())


def test_more_layers_than_llama_cpp_reads_are_refused_before_they_are_counted_out() -> None:
    data = checkpoints.config(num_hidden_layers=2**31 - 1)
    del data["layer_types"]
    with pytest.raises(CheckpointError, match=r"num_hidden_layers is 2147483647, .* at most 512"):
        read_hparams(data)


def test_a_vocabulary_no_model_has_is_refused_before_it_is_written_out(tmp_path: Path) -> None:
    write_folder(tmp_path / "t", model_type="gpt2")
    config = tmp_path / "t" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 2**31 - 1}))
    with pytest.raises(CheckpointError, match=r"vocab_size is 2147483647, at most 4194304"):
        open_target(tmp_path / "t")


TOKENIZER_KEYS = ["model", "added_tokens", "pre_tokenizer", "post_processor"]
JSON_VALUES = st.recursive(
    st.one_of(st.none(), NUMBERS.filter(lambda n: n == n), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["type", "vocab", "merges", "id", "content", "special", "single", "processors"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)


@BOUNDED
@given(
    file=st.sampled_from(["tokenizer.json", "tokenizer_config.json", "config.json"]),
    key=st.sampled_from(
        [*TOKENIZER_KEYS, "bos_token", "chat_template", "text_config", "vocab_size", "eos_token_id"]
    ),
    inner=st.sampled_from([None, "vocab", "merges", "type"]),
    value=JSON_VALUES,
)
def test_any_tokenizer_gives_keys_or_one_error(
    tmp_path: Path, file: str, key: str, inner: str | None, value: Any
) -> None:
    folder = tmp_path / "t"
    if not folder.exists():
        write_folder(folder, model_type="gpt2")
    original = (folder / file).read_text()
    data = json.loads(original)
    if inner is not None and isinstance(data.get(key), dict):
        data[key][inner] = value
    else:
        data[key] = value
    try:
        (folder / file).write_text(json.dumps(data))
        open_target(folder)
    except CheckpointError as error:
        assert error.message.isprintable()
    finally:
        (folder / file).write_text(original)
