"""Memory counted up front against what is then used, and what --fit chooses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash2_gguf import SamplingParams, Session
from dflash2_gguf import plan as planning
from dflash2_gguf.errors import NativeError, PairError, UsageError
from dflash2_gguf.launch import Launch, open_session
from dflash2_gguf.machine import Free
from dflash2_gguf.plan import Choices, find_fit
from dflash2_gguf.stats import Memory
from dflash2_gguf.ui import Terminal
from tests.runtime.terminal import ENVIRONMENT, PROGRAM

MIB, GIB = 2**20, 2**30


@pytest.fixture
def set_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the planner believe in so many free bytes."""

    def set_free(host: int) -> None:
        monkeypatch.setattr(planning, "free_memory", lambda: Free(host=host))

    return set_free


#
# what is counted
#


@pytest.mark.native
@pytest.mark.parametrize(("preset", "n_ctx"), [("q8_0", 512), ("q8_0", 4096), ("q4_0", 512)])
def test_a_plan_is_what_the_session_then_uses(
    target_gguf: Path, drafter_gguf: Callable[[str], Path], preset: str, n_ctx: int
) -> None:
    """Also of q4_0, which ggml keeps in an order of its own besides the mapped file."""
    drafter = drafter_gguf(preset)
    plan = Session.plan(target_gguf, drafter, n_ctx=n_ctx)
    with Session(target_gguf, drafter, n_ctx=n_ctx, n_threads=1) as session:
        greedy = SamplingParams(temperature=0)
        list(session.generate("one two " * 200, max_tokens=24, sampling=greedy, draft=7))
        used = session.memory
        assert session.stats.n_drafted > 0
        assert (plan.n_ctx, plan.draft_max) == (session.n_ctx, session.draft_max)
    assert plan.memory.target == pytest.approx(used.target, rel=0.05)
    assert plan.memory.draft == pytest.approx(used.draft, rel=0.05)
    assert plan.memory.target_cache == used.target_cache


@pytest.mark.native
def test_the_plan_without_drafter_is_what_the_session_then_uses(target_gguf: Path) -> None:
    plan = Session.plan(target_gguf, n_ctx=1024)
    with Session(target_gguf, n_ctx=1024, n_threads=1) as session:
        list(session.generate("one two " * 200, max_tokens=4))
        assert plan.memory.total == pytest.approx(session.memory.total, rel=0.05)
    assert (plan.draft_max, plan.memory.draft) == (0, 0)


_GROWTH = """
import sys
from dflash2_gguf import Session

def allocated():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:"))

target, draft, n_ctx = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Session(target, draft, n_ctx=n_ctx, n_threads=1, draft_max=7) as session:
    list(session.generate("one two " * 200, max_tokens=24))
    print(allocated())
"""


@pytest.mark.native
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_larger_context_makes_the_process_grow_as_planned(
    target_gguf: Path, drafter: Path
) -> None:
    """Vocabulary and interpreter are in both processes and drop out of the difference."""
    command = [sys.executable, "-c", _GROWTH, str(target_gguf), str(drafter)]
    small, large = (
        int(subprocess.run([*command, n], check=True, capture_output=True, text=True).stdout)
        for n in ("1024", "8192")
    )
    plans = [Session.plan(target_gguf, drafter, n_ctx=n).memory.total for n in (1024, 8192)]
    assert large - small == pytest.approx(plans[1] - plans[0], rel=0.05)


@pytest.mark.native
def test_a_plan_for_several_sequences_is_what_the_session_then_uses(
    target_gguf: Path, drafter: Path
) -> None:
    plan = Session.plan(target_gguf, drafter, n_ctx=512, n_parallel=3)
    with Session(target_gguf, drafter, n_ctx=512, n_parallel=3, n_threads=1) as session:
        greedy = SamplingParams(temperature=0)
        running = [
            session.generate(f"{i} one two " * 60, max_tokens=8, sampling=greedy, draft=7)
            for i in range(3)
        ]
        for _ in zip(*running, strict=False):  # in turns, so that they are open together
            pass
        used = session.memory
        assert session.stats.n_drafted > 0
    assert plan.memory.target == pytest.approx(used.target, rel=0.05)
    assert plan.memory.draft == pytest.approx(used.draft, rel=0.05)


@pytest.mark.native
def test_parallel_sequences_each_have_their_context(target_gguf: Path, drafter: Path) -> None:
    one = Session.plan(target_gguf, drafter, n_ctx=512).memory
    four = Session.plan(target_gguf, drafter, n_ctx=512, n_parallel=4).memory
    assert four.target_cache == 4 * one.target_cache
    assert four.draft_cache == 4 * one.draft_cache
    assert four.target_weights == one.target_weights


def _write_huge_target(path: Path) -> int:
    """A llama of 80 layers in float32 whose data is a hole in the file; bytes of its weights."""
    hidden, inner, layers, vocab = 8192, 28672, 80, 512
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(64)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("test")
    writer.add_token_list([f"tok_{i}" for i in range(vocab)])
    writer.add_token_scores([0.0] * vocab)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (vocab, hidden),
        "output": (vocab, hidden),
        "output_norm": (hidden,),
    }
    for layer in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{name}"] = (hidden,)
        for name in ("attn_q", "attn_output"):
            shapes[f"blk.{layer}.{name}"] = (hidden, hidden)
        for name in ("attn_k", "attn_v"):
            shapes[f"blk.{layer}.{name}"] = (hidden // 8, hidden)
        for name in ("ffn_gate", "ffn_up"):
            shapes[f"blk.{layer}.{name}"] = (inner, hidden)
        shapes[f"blk.{layer}.ffn_down"] = (hidden, inner)
    total = 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype("float32"), size)
        total += size
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + total + 4096)
    return total


@pytest.mark.native
def test_a_target_far_larger_than_the_memory_can_be_planned(
    tmp_path: Path, set_free: Callable[[int], None]
) -> None:
    set_free(64 * GIB)
    path = tmp_path / "huge.gguf"
    weights = _write_huge_target(path)
    assert weights > 250 * GIB
    plan = Session.plan(path, n_ctx=4096)
    assert plan.memory.target_weights == pytest.approx(weights, rel=0.001)
    # 80 layers x (K and V) x 4096 tokens x 1024 values x 2 bytes
    assert plan.memory.target_cache == 80 * 2 * 4096 * 1024 * 2
    assert not plan.fits
    assert (plan.shortage() or "").endswith("GiB of memory are needed, 64.00 GiB are free")


#
# what fits
#


def _linear(n_ctx: int, n_gpu_layers: int | None) -> Memory:
    """1 GiB of weights in 10 layers, 1 MiB of cache per 256 tokens; layers take both along."""
    weights, cache = GIB, n_ctx * MIB // 256
    device = (weights + cache) * (n_gpu_layers or 0) // 10
    return Memory(target_weights=weights, target_cache=cache, device=device)


@given(free=st.integers(GIB + 2 * MIB, 3 * GIB), largest=st.integers(512, 300_000))
def test_the_largest_context_that_fits_is_chosen(free: int, largest: int) -> None:
    memory = Free(host=free)
    n_ctx, layers = find_fit(_linear, memory, Choices(smallest=512, largest=largest))
    assert layers is None
    assert _linear(n_ctx, None).host <= free
    if n_ctx < largest:
        assert n_ctx % 256 == 0
        assert _linear(min(n_ctx + 256, largest), None).host > free


def test_few_measurements_are_needed() -> None:
    asked: list[int] = []

    def measure(n_ctx: int, n_gpu_layers: int | None) -> Memory:
        asked.append(n_ctx)
        return _linear(n_ctx, n_gpu_layers)

    find_fit(measure, Free(host=GIB + 100 * MIB), Choices(smallest=512, largest=2**20))
    assert len(asked) < 20


def test_nothing_is_reduced_where_the_system_does_not_tell_what_is_free() -> None:
    assert find_fit(_linear, Free(), Choices(smallest=512, largest=2**20)) == (2**20, None)


def test_when_the_smallest_does_not_fit_both_numbers_are_told() -> None:
    with pytest.raises(NativeError) as caught:
        find_fit(_linear, Free(host=GIB), Choices(smallest=2560, largest=4096))
    assert caught.value.message == (
        "a context of 2560 tokens does not fit: 1.01 GiB of memory are needed, 1.00 GiB are free"
    )


@given(device=st.integers(0, 2 * GIB))
def test_as_many_layers_as_leave_room_for_a_usual_context_are_offloaded(device: int) -> None:
    free = Free(host=4 * GIB, device=device)
    n_ctx, layers = find_fit(_linear, free, Choices(smallest=512, largest=65536, n_layers=10))
    assert layers is not None
    assert _linear(n_ctx, layers).device <= device
    if layers < 10:
        assert _linear(4096, layers + 1).device > device
    if n_ctx < 65536:
        assert _linear(min(n_ctx + 256, 65536), layers).device > device


def test_layers_that_are_given_stay() -> None:
    def measure(n_ctx: int, n_gpu_layers: int | None) -> Memory:
        assert n_gpu_layers is None
        return _linear(n_ctx, 5)

    free = Free(host=4 * GIB, device=GIB)
    assert find_fit(measure, free, Choices(smallest=512, largest=1024)) == (1024, None)


def test_too_little_gpu_memory_is_told_apart() -> None:
    def measure(n_ctx: int, n_gpu_layers: int | None) -> Memory:
        return _linear(n_ctx, 10)

    with pytest.raises(NativeError, match=r"1\.00 GiB of GPU memory are needed, 0\.50 GiB are"):
        find_fit(measure, Free(host=GIB, device=GIB // 2), Choices(smallest=512, largest=1024))


#
# with the real pair on a machine that has little
#


@pytest.mark.native
def test_a_fitted_session_has_the_context_that_the_plan_says(
    target_gguf: Path, drafter: Path, set_free: Callable[[int], None]
) -> None:
    set_free(300 * MIB)
    plan = Session.plan(target_gguf, drafter, fit=True)
    assert 512 < plan.n_ctx < 8192
    assert plan.n_ctx % 256 == 0
    with Session(target_gguf, drafter, fit=True, n_threads=1) as session:
        assert session.n_ctx == plan.n_ctx
        assert session.memory.total <= 270 * MIB  # a tenth stays free
    larger = Session.plan(target_gguf, drafter, n_ctx=plan.n_ctx + 256)
    assert larger.memory.total > 270 * MIB


@pytest.mark.native
def test_a_context_that_is_given_is_kept_or_refused(
    target_gguf: Path, drafter: Path, set_free: Callable[[int], None]
) -> None:
    set_free(300 * MIB)
    assert Session.plan(target_gguf, drafter, n_ctx=1024, fit=True).n_ctx == 1024
    needed = Session.plan(target_gguf, drafter, n_ctx=8192).memory.total
    assert needed > 340 * MIB
    message = f"a context of 8192 tokens does not fit: {needed / GIB:.2f} GiB"
    with pytest.raises(NativeError, match=re.escape(message)):
        Session.plan(target_gguf, drafter, n_ctx=8192, fit=True)


@pytest.mark.native
def test_a_machine_that_is_too_small_is_told_before_the_weights_are_read(
    target_gguf: Path, drafter: Path, set_free: Callable[[int], None]
) -> None:
    set_free(100 * MIB)
    read: list[float] = []
    with pytest.raises(NativeError, match="a context of 512 tokens does not fit"):
        Session(target_gguf, drafter, fit=True, on_progress=read.append)
    assert read == []


@pytest.mark.native
def test_what_was_chosen_is_noted(
    target_gguf: Path,
    drafter: Path,
    set_free: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_free(300 * MIB)
    launch = Launch(target=target_gguf, draft=drafter, n_threads=1, fit=True)
    with open_session(launch, Terminal()) as session:
        assert f"fitted: context {session.n_ctx}\n" in capsys.readouterr().err


#
# the program
#


def _plan(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, "plan", *options], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )


def _tensor_bytes(path: Path) -> int:
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)


@pytest.mark.native
def test_the_program_prints_a_table(target_gguf: Path, drafter: Path) -> None:
    done = _plan("-m", str(target_gguf), "-d", str(drafter), "-c", "1024")
    names = [line.split()[0] for line in done.stdout.splitlines()[1:6]]
    assert names == ["weights", "cache", "snapshots", "compute", "sum"]
    memory = Session.plan(target_gguf, drafter, n_ctx=1024).memory
    shown = [f"{size / MIB:.1f} MiB" for size in (memory.target_weights, memory.draft_weights)]
    assert done.stdout.splitlines()[1] == f"weights {shown[0]:>14} {shown[1]:>11}"
    # more than in the files where the CPU wants some tables in two orders
    assert 0 <= memory.target_weights - _tensor_bytes(target_gguf) < 40 * MIB
    assert 0 <= memory.draft_weights - _tensor_bytes(drafter) < 4 * MIB
    assert "for 1 sequence of 1024 tokens, up to 7 drafted at once\n" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.native
def test_without_drafter_the_table_has_no_column_for_it(target_gguf: Path, drafter: Path) -> None:
    pair = ["-m", str(target_gguf), "-d", str(drafter)]
    for options in (pair[:2], [*pair, "--draft-max", "off"]):
        shown = _plan(*options, "-c", "1024").stdout
        assert "drafter\n" not in shown.splitlines(keepends=True)[0]
        assert "for 1 sequence of 1024 tokens, no drafter\n" in shown


@pytest.mark.native
def test_the_program_prints_json(target_gguf: Path, drafter: Path) -> None:
    options = ["-m", str(target_gguf), "-d", str(drafter), "-c", "1024", "--parallel", "2"]
    shown = json.loads(_plan(*options, "--json").stdout)
    plan = Session.plan(target_gguf, drafter, n_ctx=1024, n_parallel=2)
    assert shown["memory"] == plan.as_dict()["memory"]
    assert shown["memory"]["total"] == sum(
        size for name, size in asdict(plan.memory).items() if name != "device"
    )
    assert (shown["n_ctx"], shown["n_parallel"], shown["draft_max"]) == (1024, 2, 7)


@pytest.mark.native
def test_what_does_not_fit_is_a_warning(target_gguf: Path) -> None:
    done = _plan("-m", str(target_gguf), "-c", "100000000")
    first, second = done.stderr.splitlines()
    assert first == (
        "warning: the context of 100000000 tokens is longer than the 8192 that the target was "
        "trained for"
    )
    assert second.startswith("warning: it does not fit: ")
    assert done.stdout.startswith("                target\n")
    assert done.returncode == 0


@pytest.mark.native
def test_a_plan_that_cannot_be_made_is_an_error(target_gguf: Path, drafter: Path) -> None:
    swapped = _plan("-m", str(drafter), "-d", str(target_gguf))
    assert swapped.stderr.startswith("error: ")
    assert (swapped.returncode, swapped.stdout) == (1, "")
    with pytest.raises(PairError):
        Session.plan(drafter, target_gguf)


@pytest.mark.native
def test_layers_on_a_gpu_that_is_not_there_are_refused(target_gguf: Path) -> None:
    from dflash2_gguf.native import api

    if api().llama.llama_supports_gpu_offload():
        assert Session.plan(target_gguf, n_gpu_layers=2).memory.device > 0
        return
    with pytest.raises(UsageError, match="2 layers are wanted on a GPU"):
        Session.plan(target_gguf, n_gpu_layers=2)
    with pytest.raises(UsageError, match="2 layers are wanted on a GPU"):
        Session(target_gguf, n_gpu_layers=2)
    with pytest.raises(UsageError, match=r"^1 layer is wanted on a GPU"):
        Session.plan(target_gguf, n_gpu_layers=1)
    assert Session.plan(target_gguf, n_gpu_layers=0).memory.device == 0
