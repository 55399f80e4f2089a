"""The authors' torch model (dflash 0.1.0) as an oracle, in float32 on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Lattice", "Reference", "load_draft", "walk"]


@dataclass(frozen=True)
class Lattice:
    """One drafted block: n positions, K candidates each, all pairs scored."""

    candidates: np.ndarray  # [n, K] token ids, unordered
    scores: np.ndarray  # [n, K, K], [t, a, b]: b of t after a of t - 1; all a equal for t = 0
    path: np.ndarray  # [n] greedy path
    logits: np.ndarray  # [n, V] unary values


def load_draft(directory: Path) -> Any:
    """The authors' DFlash2DraftModel with the checkpoint's weights in float32."""
    import torch
    from dflash import DFlash2DraftModel

    return DFlash2DraftModel.from_pretrained(directory, dtype=torch.float32).eval()


class Reference:
    """A torch target with a torch drafter."""

    def __init__(self, target: Any, draft: Any) -> None:
        self.target = target
        self.draft = draft

    def features(self, tokens: list[int]) -> Any:
        """Tapped hidden states of tokens, [1, n, n_tap * H]."""
        import torch
        from dflash import extract_context_feature

        if not tokens:
            width = len(self.draft.target_layer_ids) * self.draft.config.hidden_size
            return torch.zeros(1, 0, width)
        with torch.inference_mode():
            ids = torch.tensor([tokens], dtype=torch.long)
            output = self.target(ids, output_hidden_states=True, use_cache=False)
        return extract_context_feature(output.hidden_states, self.draft.target_layer_ids)

    def lattice(self, tokens: list[int], anchor: int, n_draft: int) -> Lattice:
        """Draft n_draft tokens after tokens + [anchor]; the target has evaluated tokens only."""
        return self.lattice_from(self.features(tokens), anchor, n_draft)

    def lattice_from(self, features: Any, anchor: int, n_draft: int) -> Lattice:
        """The same from features [1, n, n_tap * H] that the caller already has."""
        import torch

        block = torch.tensor([[anchor] + [self.draft.mask_token_id] * n_draft])
        with torch.inference_mode():
            hidden = self._block_hidden(features, block)
            logits = self.draft.compute_logits(hidden, self.target.get_output_embeddings())
            path, candidates, _ = self.draft.candidate_selector.select(
                hidden, logits, block[:, 0], temperature=0.0
            )
            scores = self._scores(hidden, logits, candidates, anchor)
        return Lattice(
            candidates=candidates[0].numpy(),
            scores=scores.numpy(),
            path=path[0].numpy(),
            logits=logits[0].numpy(),
        )

    def _block_hidden(self, features: Any, block: Any) -> Any:
        import torch
        from dflash.model import _draft_value, _raw_input_embeddings

        scale = float(_draft_value(self.draft.config, "input_embedding_scale", 1.0))
        positions = torch.arange(features.shape[1] + block.shape[1])[None]
        hidden = self.draft(
            target_hidden=features,
            noise_embedding=_raw_input_embeddings(self.target, block, scale),
            position_ids=positions,
        )
        return hidden[:, 1:, :]

    def _scores(self, hidden: Any, logits: Any, candidates: Any, anchor: int) -> Any:
        import torch

        selector = self.draft.candidate_selector
        gate = selector.hidden_projection(hidden)[0]  # [n, R]
        unary = logits[0].gather(-1, candidates[0])  # [n, K]
        first = torch.full_like(candidates[0, :1], anchor)
        previous = torch.cat([first, candidates[0, :-1]])  # [n, K]
        left = selector.predecessor_codebook(previous) * gate[:, None, :]
        right = selector.successor_codebook(candidates[0])
        return unary[:, None, :] + torch.einsum("nar,nbr->nab", left, right)


def walk(scores: np.ndarray) -> list[int]:
    """Candidate indices of the greedy path through scores [n, K, K]."""
    chosen: list[int] = []
    for row in scores:
        chosen.append(int(np.argmax(row[chosen[-1] if chosen else 0])))
    return chosen
