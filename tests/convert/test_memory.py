"""Peak memory depends on neither the model's size nor the largest tensor's."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.convert import checkpoints

# allowed above a conversion of a checkpoint of some kilobytes: buffers of rows, floats, temporaries
ALLOWED_BYTES = 64 << 20

_MEASURED = """
import resource, sys
from dflash2_gguf.convert_cli import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


def write_large(folder: Path) -> int:
    """A checkpoint of about 370 MB whose two largest tensors have 134 MB; returns its bytes."""
    data = checkpoints.config(
        hidden_size=512,
        intermediate_size=16384,
        head_dim=64,
        num_attention_heads=8,
        vocab_size=1 << 17,
        dflash__selector_rank=512,
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(data))
    header, at = {}, 0
    shapes = checkpoints.shapes(data)
    for name, shape in shapes.items():
        count = 2
        for size in shape:
            count *= size
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + count]}
        at += count
    text = json.dumps(header).encode()
    block = checkpoints.to_bytes(checkpoints.round_bf16([0.5, -1.0, 0.25, 2.0]), "BF16") * 65536
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, at, len(block)):
            file.write(block[: min(len(block), at - start)])
    return at


def peak(folder: Path, target: Path, presets: list[str]) -> int:
    words = [str(folder), "--target", str(target), "-o", str(folder) + "-out"]
    for preset in presets:
        words += ["--preset", preset]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.mark.native
def test_memory_is_a_small_constant(tmp_path: Path, checkpoint: Path, target: Path) -> None:
    presets = ["bf16", "f32", "q8_0"]
    base = peak(checkpoint, target, presets)
    size = write_large(tmp_path / "large")
    assert size > 370e6
    large_target = checkpoints.write_target(tmp_path / "large.gguf", n_vocab=1 << 17, n_embd=512)
    used = peak(tmp_path / "large", large_target, presets)
    assert used - base < ALLOWED_BYTES, f"{used - base:,} bytes for a checkpoint of {size:,}"
