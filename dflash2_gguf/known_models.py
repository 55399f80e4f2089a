"""What is known of models by name: which targets can feed a drafter, what releases state.

Architectures: ``docs/targets.md``, which a test makes from upstream's tiny models and compares with
this file. Releases: the config.json of published drafters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "HF_ARCHITECTURES",
    "NO_ROLLBACK",
    "PUBLISHES_INNER",
    "PUBLISHES_LAST",
    "RELEASES",
    "UNUSABLE",
    "Release",
    "find_release",
    "usual_layers",
]

_INNER = """
    afmoe arcee arctic baichuan bailingmoe bailingmoe2 bailingmoe3 bloom chatglm codeshell cogvlm
    cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek32 deepseek4 dots1 dots3note
    dream ernie4_5 ernie4_5-moe exaone exaone-moe exaone4 falcon falcon-h1 gemma gemma2 gemma3
    glm-dsa glm4 glm4moe glm5-next gpt-oss gpt2 gptneox granite granite_swa granitehybrid granitemoe
    grok grovemoe hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 internlm2 jais jais2 jamba
    kimi-k3 kimi-linear laguna lfm2 lfm2moe llada llada-moe llama llama4 maincoder mamba mamba2
    maple mellum mimo2 minicpm minicpm3 minimax-01 minimax-m2 minimax-m3 mistral3 mistral4 mpt
    muse-glimmer nanbeige nemotron nemotron_h nemotron_h_moe olmo olmo2 olmoe openelm orion
    paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo3 pockettts qwen qwen2 qwen2moe qwen2vl
    qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3tts qwen3vl qwen3vlmoe refact rnd1 seed_oss
    smallthinker smollm3 spark2_5 stablelm starcoder starcoder2 talkie xverse
"""
_LAST = """
    bailingmoe3 cogvlm cohere2moe deepseek4 glm5-next gpt-oss hrm_text hy_v3 kimi-k3 mimo2
    nemotron_h nemotron_h_moe qwen35 qwen35moe qwen3next
"""
_RECURRENT = "falcon-h1 granitehybrid jamba kimi-linear mamba mamba2 minimax-01 qwen3next"

# the patched llama.cpp publishes the output of every layer but the last, or of the last one too
PUBLISHES_INNER: Final = frozenset(_INNER.split())
PUBLISHES_LAST: Final = frozenset(_LAST.split())

_NOTHING = "does not publish the output of its layers"
_STREAMS = "keeps several residual streams and how they form one feature is not known"
_DIFFUSION = "is a diffusion model and does not decode token by token"

# architectures that no drafter can draft for, and why
UNUSABLE: Final = {
    "hy_v4": _NOTHING,
    "plamo2": _NOTHING,
    "qwen4exp": _STREAMS,
    "dream": _DIFFUSION,
    "llada": _DIFFUSION,
    "llada-moe": _DIFFUSION,
    "rnd1": _DIFFUSION,
}

# recurrent ones that keep no snapshots to go back to after a rejected draft (llama-arch.cpp)
NO_ROLLBACK: Final = frozenset(_RECURRENT.split())

# model classes of Hugging Face folders -> the architecture upstream's converter makes of them
HF_ARCHITECTURES: Final = {
    "Glm5NextForConditionalGeneration": "glm5-next",
    "GlmMoeDsaForCausalLM": "glm-dsa",
    "LlamaForCausalLM": "llama",
    "MuseGlimmerForConditionalGeneration": "muse-glimmer",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
}

_SHAPE: Final = ("hidden_size", "feed_forward", "layers", "heads", "vocabulary")


@dataclass(frozen=True, kw_only=True)
class Release:
    """A published drafter; names as in the facts of ``inspect``, layer ids are 0-based outputs."""

    name: str
    hidden_size: int
    feed_forward: int
    layers: int
    heads: int
    vocabulary: int
    target_layers: tuple[int, ...]
    target_layer_count: int
    mask_token_id: int
    rope_base: float
    block_size: int = 8
    norm_epsilon: float = 1e-5
    output_multiplier: float | None = None
    softcap: float | None = None
    sliding_window: int = 2048
    causal: bool = False
    conv_kernel: int = 2
    conv_group: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16


RELEASES: Final = (
    Release(
        name="GLM-5.3-Flash-DFlash2",
        hidden_size=4096,
        feed_forward=12288,
        layers=5,
        heads=32,
        vocabulary=154880,
        target_layers=(5, 14, 24, 33, 42),
        target_layer_count=45,
        mask_token_id=154856,
        rope_base=1e4,
    ),
    Release(
        name="GLM-5.3-DFlash2",
        hidden_size=6144,
        feed_forward=12288,
        layers=6,
        heads=64,
        vocabulary=154880,
        target_layers=(5, 19, 33, 47, 61, 75),
        target_layer_count=78,
        mask_token_id=154856,
        rope_base=1e6,
    ),
    Release(
        name="Qwen3.8-27B-DFlash2",
        hidden_size=5120,
        feed_forward=17408,
        layers=5,
        heads=32,
        vocabulary=248320,
        target_layers=(5, 19, 33, 47, 61),
        target_layer_count=64,
        mask_token_id=248070,
        rope_base=1e7,
        norm_epsilon=1e-6,
    ),
    Release(
        name="Muse-Glimmer-30B-DFlash2",
        hidden_size=6656,
        feed_forward=19968,
        layers=5,
        heads=32,
        vocabulary=202048,
        target_layers=(1, 13, 25, 37, 49),
        target_layer_count=52,
        mask_token_id=201818,
        rope_base=5e5,
        block_size=16,
        output_multiplier=0.19611613513818404,
        softcap=20.0,
    ),
)


def find_release(facts: dict[str, Any]) -> Release | None:
    """The release whose shape a drafter has; others may be trained in the same shape."""
    for release in RELEASES:
        if all(facts.get(name) == getattr(release, name) for name in _SHAPE):
            return release
    return None


def usual_layers(n_layer: int, n_tap: int) -> tuple[tuple[int, ...], ...]:
    """Layouts that drafters are trained with: evenly from layer 1 or 5 to the third last.

    The first is the reference's default (``dflash/model.py:build_target_layer_ids``), the second
    that of the releases for GLM-5.3 and Qwen3.8. Layer ids are 0-based outputs.
    """
    if n_tap < 2 or n_layer < 8:
        return ()
    spans = ((first, n_layer - 3 - first) for first in (1, 5))
    return tuple(
        tuple(round(first + i * span / (n_tap - 1)) for i in range(n_tap)) for first, span in spans
    )
