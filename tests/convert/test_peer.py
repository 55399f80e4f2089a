"""Our files against those of the unpatched pin's own converter and quantizer, tensor for tensor."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dflash2_gguf.convert.gguf_reader import read_gguf
from dflash2_gguf.convert.migration import plan_migration
from dflash2_gguf.convert.pipeline import make_plan, run
from dflash2_gguf.presets import load_preset, preset_names
from tests.convert import checkpoints
from tests.convert.hf_targets import write_hf_target
from tests.convert.test_imatrix import write_imatrix

# llama-quantize has no d4
QUANTIZED = [p for p in preset_names() if p not in ("f32", "f16", "bf16", "d4")]

# keys that only one side writes: names upstream guesses from the folder, and where our file is from
ONLY_UPSTREAM = {"general.finetune", "general.basename"}
OUR_PREFIX = "dflash2."


def ours(
    source: Path, target: Path, presets: list[str], folder: Path, imatrix: Path | None = None
) -> dict[str, Path]:
    paths = {preset: folder / f"ours-{preset}.gguf" for preset in presets}
    outputs = [(load_preset(p), path) for p, path in paths.items()]
    plan = make_plan(source, target, outputs, imatrix=imatrix)
    run(plan, force=False, progress=lambda _count: None)
    return paths


def differing(path: Path, other: Path) -> list[str]:
    """Tensors whose name, shape, type or bytes differ; read by our reader, which is a quick one."""
    first, second = contents(path), contents(other)
    return [
        name for name in sorted(set(first) | set(second)) if first.get(name) != second.get(name)
    ]


def contents(path: Path) -> dict[str, tuple[object, ...]]:
    """Shape, type and hash of the bytes of every tensor."""
    header, raw = read_gguf(path), np.memmap(path, dtype=np.uint8, mode="r")
    result: dict[str, tuple[object, ...]] = {}
    for tensor in header.tensors.values():
        start = header.data_offset + tensor.offset
        digest = hashlib.sha256(raw[start : start + tensor.nbytes]).hexdigest()
        assert tensor.nbytes > 0
        result[tensor.name] = (tensor.shape, tensor.type, digest)
    return result


def metadata(path: Path) -> dict[str, tuple[list[str], Any]]:
    reader = gguf.GGUFReader(path)
    return {
        key: ([kind.name for kind in field.types], field.contents())
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.") and not key.startswith(OUR_PREFIX)
    }


@pytest.fixture(scope="module")
def hf_target(tmp_path_factory: pytest.TempPathFactory, target_gguf: Path) -> Path:
    return write_hf_target(tmp_path_factory.mktemp("hf") / "target", target_gguf)


def upstream_convert(peer_dir: Path, source: Path, target: Path, outtype: str, path: Path) -> Path:
    """Run the pin's ``convert_hf_to_gguf.py``."""
    script = peer_dir.parents[1] / "convert_hf_to_gguf.py"
    options = ["--target-model-dir", target, "--outtype", outtype, "--outfile", path]
    done = subprocess.run(
        [sys.executable, str(script), str(source), *map(str, options)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def upstream_converted(
    tmp_path_factory: pytest.TempPathFactory, peer_dir: Path, drafter_dir: Path, hf_target: Path
) -> Callable[[str], Path]:
    """The bundled drafter by the pin's converter."""
    folder = tmp_path_factory.mktemp("upstream")

    def convert(outtype: str) -> Path:
        path = folder / f"{outtype}.gguf"
        if path.exists():
            return path
        return upstream_convert(peer_dir, drafter_dir, hf_target, outtype, path)

    return convert


@pytest.mark.peer
@pytest.mark.reference
@pytest.mark.native
@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
def test_tensors_equal_those_of_upstreams_converter(
    upstream_converted: Callable[[str], Path],
    drafter_dir: Path,
    target_gguf: Path,
    tmp_path: Path,
    outtype: str,
) -> None:
    path = ours(drafter_dir, target_gguf, [outtype], tmp_path)[outtype]
    assert differing(path, upstream_converted(outtype)) == []


@pytest.mark.peer
@pytest.mark.reference
def test_file_of_upstreams_converter_needs_no_migration(
    upstream_converted: Callable[[str], Path], drafter_dir: Path, target_gguf: Path
) -> None:
    migration = plan_migration(upstream_converted("bf16"), target=target_gguf, config=drafter_dir)
    assert (migration.changes, migration.warnings) == ((), ())


@pytest.mark.peer
@pytest.mark.reference
def test_metadata_equals_that_of_upstreams_converter(
    upstream_converted: Callable[[str], Path],
    drafter_dir: Path,
    target_gguf: Path,
    hf_target: Path,
    tmp_path: Path,
) -> None:
    theirs = metadata(upstream_converted("bf16"))
    for key in ONLY_UPSTREAM:
        del theirs[key]
    del theirs["general.name"]
    for name, target in (("gguf", target_gguf), ("hf", hf_target)):
        (tmp_path / name).mkdir()
        mine = metadata(ours(drafter_dir, target, ["bf16"], tmp_path / name)["bf16"])
        assert mine.pop("general.name") == (["STRING"], "smollm2-135m-dflash2")
        if name == "hf":
            # upstream knows this one vocabulary and writes llama.cpp's default for it
            assert mine.setdefault("tokenizer.ggml.add_bos_token", (["BOOL"], False))
        assert mine == theirs
        own = [key for key in mine if not key.startswith("tokenizer.")]
        assert own == [key for key in theirs if not key.startswith("tokenizer.")]


@pytest.mark.peer
@pytest.mark.reference
def test_variant_equals_upstreams(
    peer_dir: Path, drafter_dir: Path, hf_target: Path, tmp_path: Path
) -> None:
    """Interleaved rotation, an M-RoPE target, YaRN, partial windows and all three scales."""
    source, target = tmp_path / "variant", tmp_path / "target"
    source.mkdir()
    (source / "model.safetensors").symlink_to(drafter_dir / "model.safetensors")
    config = json.loads((drafter_dir / "config.json").read_text())
    del config["rope_theta"]
    config["rope_is_neox_style"] = False
    config["layer_types"][1] = "full_attention"
    config["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 16.0,
    }
    scales = {"output_multiplier": 0.5, "final_logit_softcapping": 20.0}
    config["dflash_config"] |= {**scales, "input_embedding_scale": 1.5}
    (source / "config.json").write_text(json.dumps(config))
    shutil.copytree(hf_target, target)
    config = json.loads((target / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e5,
        "mrope_section": [16, 8, 8],
    }
    (target / "config.json").write_text(json.dumps(config))

    theirs = upstream_convert(peer_dir, source, target, "f32", tmp_path / "theirs.gguf")
    mine = ours(source, target, ["f32"], tmp_path)["f32"]
    assert differing(mine, theirs) == []
    expected = {k: v for k, v in metadata(theirs).items() if k.startswith("dflash.")}
    assert {k: v for k, v in metadata(mine).items() if k.startswith("dflash.")} == expected
    assert expected["dflash.rope.dimension_sections"][1] == [32, 0, 0, 0]
    assert expected["dflash.attention.sliding_window_pattern"][1] == [True, False, True]


def wide_checkpoint(folder: Path) -> Path:
    """Nine layers with rows of 256 and four query heads per key-value head, to reach every rule."""
    data = checkpoints.config(
        hidden_size=256,
        intermediate_size=512,
        head_dim=32,
        num_attention_heads=8,
        num_hidden_layers=9,
        layer_types=["sliding_attention"] * 9,
        dflash__selector_rank=256,
    )
    return checkpoints.write_checkpoint(folder, data=data)


def random_imatrix(drafter: Path, path: Path) -> Path:
    """Weights for every matrix of a drafter but one, over several orders of magnitude."""
    rng = np.random.default_rng(11)
    matrices = [t for t in read_gguf(drafter).tensors.values() if len(t.shape) == 2]
    entries = []
    for tensor in matrices[1:]:
        sums = rng.lognormal(mean=3.0, sigma=2.0, size=tensor.shape[-1]).astype(np.float32)
        entries.append((tensor.name, sums, float(rng.integers(1, 10000))))
    return write_imatrix(path, *entries)


@pytest.mark.peer
@pytest.mark.native
@pytest.mark.parametrize("with_imatrix", [False, True], ids=["plain", "imatrix"])
@pytest.mark.parametrize(
    ("drafter", "presets"),
    [("bundled", ["q2_k", "q4_k_m", "q8_0"]), ("wide", QUANTIZED), ("narrow", QUANTIZED)],
)
def test_quantized_tensors_equal_those_of_llama_quantize(
    peer_bin: Callable[[str], Path],
    drafter_dir: Path,
    target_gguf: Path,
    tmp_path: Path,
    drafter: str,
    presets: list[str],
    with_imatrix: bool,
) -> None:
    source, target = drafter_dir, target_gguf
    if drafter == "narrow":  # rows of 32 and 64, for the replacements of types with larger blocks
        source = checkpoints.write_checkpoint(tmp_path / "narrow")
        target = checkpoints.write_target(tmp_path / "target.gguf")
    if drafter == "wide":
        source = wide_checkpoint(tmp_path / "wide")
        target = checkpoints.write_target(tmp_path / "target.gguf", n_embd=256)
    f32 = ours(source, target, ["f32"], tmp_path)["f32"]
    imatrix = random_imatrix(f32, tmp_path / "imatrix.gguf") if with_imatrix else None
    paths = ours(source, target, presets, tmp_path, imatrix)
    for preset in presets:
        theirs = tmp_path / f"theirs-{preset}.gguf"
        options = ["--imatrix", imatrix] if imatrix else []
        command = [peer_bin("llama-quantize"), *options, f32, theirs, preset.upper(), "2"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert differing(paths[preset], theirs) == [], preset
        mine, other = metadata(paths[preset]), metadata(theirs)
        keys = [key for key in other if key == "general.file_type" or "imatrix" in key]
        assert len(keys) == (5 if with_imatrix else 1)
        assert {key: mine[key] for key in keys} == {key: other[key] for key in keys}
