"""Memory counted up front against what is then used, on upstream's tiny targets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dflash2_gguf import SamplingParams, Session
from dflash2_gguf.gguf_header import StringArray, read_header
from dflash2_gguf.gguf_schema import Key
from tests.oracle.tiny_pairs import DraftShape, write_draft

pytestmark = [pytest.mark.native, pytest.mark.peer]

# caches: plain, windowed, compressed, with an indexer; then those with states to go back to
ATTENTION = ("llama-dense", "gemma3-dense", "deepseek2-moe", "glm-dsa-moe")
STATES = ("qwen35-dense", "nemotron_h-dense", "lfm2-dense", "glm5-next-moe", "deepseek4-moe")


@dataclass(frozen=True)
class Pair:
    """Two files that belong together, and how many tokens they know."""

    name: str
    target: Path
    draft: Path
    n_vocab: int


@pytest.fixture(scope="module", params=[*ATTENTION, *STATES])
def pair(
    request: pytest.FixtureRequest,
    tiny_models: Path,
    convert: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Pair:
    target = tiny_models / f"{request.param}.gguf"
    folder = tmp_path_factory.mktemp(request.param)
    header = read_header(target)
    n_vocab = len(header.get(Key.TOKENS, StringArray) or ())
    shape = DraftShape(
        name=request.param,
        hidden=header.arch(Key.Arch.EMBEDDING_LENGTH, int) or 0,
        vocab=n_vocab,
        num_target_layers=header.arch(Key.Arch.BLOCK_COUNT, int) or 0,
        taps=(0,),
        layers=1,
        heads=2,
        heads_kv=1,
        head_dim=32,
        feed_forward=64,
        rank=8,
        top_k=8,
    )
    source = write_draft(folder / "draft", shape)
    return Pair(request.param, target, convert(source, target, "f32", folder / "d.gguf"), n_vocab)


@pytest.mark.parametrize("n_ctx", [512, 2048])
def test_a_plan_is_what_the_session_then_uses(pair: Pair, n_ctx: int) -> None:
    plan = Session.plan(pair.target, pair.draft, n_ctx=n_ctx).memory
    prompt = np.random.default_rng(4).integers(1, pair.n_vocab, size=300).tolist()
    with Session(pair.target, pair.draft, n_ctx=n_ctx, n_threads=1) as session:
        greedy = SamplingParams(temperature=0)
        list(session.generate(prompt, max_tokens=40, sampling=greedy, draft=7))
        used, stats = session.memory, session.stats
    assert stats.n_drafted > 0
    assert not any(stats.draft_failures.values())
    assert plan.target == pytest.approx(used.target, rel=0.05)
    assert plan.draft == pytest.approx(used.draft, rel=0.05)
    cached = (plan.target_cache, plan.target_snapshots, plan.draft_cache)
    assert cached == (used.target_cache, used.target_snapshots, used.draft_cache)


def test_snapshots_are_those_of_states_one_per_drafted_token(pair: Pair) -> None:
    few = Session.plan(pair.target, pair.draft, n_ctx=512, draft_max=2).memory
    many = Session.plan(pair.target, pair.draft, n_ctx=512, draft_max=6).memory
    assert (few.target_snapshots > 0) is (pair.name in STATES)
    assert many.target_snapshots == 3 * few.target_snapshots
    assert many.target_cache == few.target_cache


_PEAK = """
import resource, sys
from dflash2_gguf import Session

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

target, draft = sys.argv[1:]
Session.plan(target, draft, n_ctx=512)
before = peak()
memory = Session.plan(target, draft, n_ctx=512, n_parallel=64).memory
print(peak() - before, memory.target_cache + memory.target_snapshots)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit elsewhere")
@pytest.mark.parametrize("pair", ["qwen35-dense", "nemotron_h-dense"], indirect=True)
def test_planning_does_not_take_the_memory_it_counts(pair: Pair) -> None:
    command = [sys.executable, "-c", _PEAK, str(pair.target), str(pair.draft)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    taken, counted = map(int, done.stdout.split())
    assert counted > 64 * 2**20
    assert taken < counted / 4
