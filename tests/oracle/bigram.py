"""Drafters made by construction, so that random targets accept some of what they propose.

A random drafter is right once in a vocabulary, and then nothing after a rejection is ever tested.
This one knows which token followed which in answers that the target gave: its blocks hardly depend
on the context, its final norm puts the tokens seen most often on top, and the selector's codebooks
hold the pairs. It is wrong about one of them on purpose: answers that only repeat themselves would
otherwise leave it nothing to be refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.oracle.tiny_pairs import DraftShape, write_draft

__all__ = ["write_bigram_draft"]

_LIFT, _PAIR = 20.0, 40.0


def write_bigram_draft(
    directory: Path, shape: DraftShape, target: Path, answers: Sequence[Sequence[int]]
) -> Path:
    """Write a drafter for a float32 target GGUF that proposes what followed in answers.

    After the token followed least often it proposes one that hardly came there.
    """
    write_draft(directory, shape)
    weights = load_file(directory / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= np.float32(1e-3)
    embedding, head = _tables(target)
    known = [token for token, _ in Counter(chain.from_iterable(answers)).most_common(shape.top_k)]
    weights["norm.weight"] = _final_norm(embedding[shape.mask_token_id], head, known)
    hidden = _normed(embedding[shape.mask_token_id]) * weights["norm.weight"]
    _fill_selector(weights, hidden, known, answers)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _tables(target: Path) -> tuple[np.ndarray, np.ndarray]:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    head = tensors.get("output.weight", tensors["token_embd.weight"])
    return tuple(
        gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in (tensors["token_embd.weight"], head)
    )


def _normed(row: np.ndarray) -> np.ndarray:
    return row / np.sqrt(np.mean(row**2) + 1e-6)


def _final_norm(mask_row: np.ndarray, head: np.ndarray, known: Sequence[int]) -> np.ndarray:
    """Norm weights [H] that give the mask token's own row high logits for known tokens only."""
    wanted = np.zeros(len(head), dtype=np.float32)
    wanted[list(known)] = _LIFT
    solved = np.linalg.lstsq(head * _normed(mask_row), wanted, rcond=1e-3)[0]
    return solved.astype(np.float32)


def _mistake(pairs: Counter[tuple[int, int]], known: Sequence[int]) -> tuple[int, int]:
    """The token followed least often, and the known token that came least often after it."""
    followed: Counter[int] = Counter()
    for (before, _), count in pairs.items():
        followed[before] += count
    mistaken = min(followed, key=followed.__getitem__)
    return mistaken, min(known, key=lambda token: pairs[mistaken, token])


def _fill_selector(
    weights: dict[str, np.ndarray],
    hidden: np.ndarray,
    known: Sequence[int],
    answers: Sequence[Sequence[int]],
) -> None:
    """Codebooks so that the score of b after a gains _PAIR when b followed a most often."""
    prefix = "candidate_selector."
    predecessor = np.zeros_like(weights[prefix + "predecessor_codebook"])
    successor = np.zeros_like(weights[prefix + "successor_codebook"])
    place = {token: i for i, token in enumerate(known)}
    pairs = Counter(pair for answer in answers for pair in pairwise(answer))
    usual = {a: b for (a, b), _ in reversed(pairs.most_common()) if b in place}
    for before, after in (usual | dict([_mistake(pairs, known)])).items():
        predecessor[before, place[after]] = _PAIR
    for token, i in place.items():
        successor[token, i] = 1
    weights[prefix + "predecessor_codebook"] = predecessor
    weights[prefix + "successor_codebook"] = successor
    # the gate of the formula becomes one for every rank
    rank = predecessor.shape[1]
    projection = np.tile(hidden / np.float32(hidden @ hidden), (rank, 1))
    weights[prefix + "hidden_projection.weight"] = projection.astype(np.float32)
