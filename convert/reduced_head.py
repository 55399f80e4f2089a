"""A head with fewer rows: those of the tokens that are chosen most often, and a map to their ids.

A token that the drafter cannot name is never drafted, which changes how much is accepted and never
what is said. Upstream loads such files (``src/models/dflash.cpp``, ``d2t``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash2_gguf.convert.gguf_values import Value
from dflash2_gguf.convert.imatrix import ImportanceMatrix
from dflash2_gguf.convert.source import Checkpoint, SourceTensor
from dflash2_gguf.convert.stored_weights import StoredWeight
from dflash2_gguf.convert.target_tables import lend_tables
from dflash2_gguf.convert.tensors import Ids, PlannedTensor
from dflash2_gguf.errors import CheckpointError, UsageError
from dflash2_gguf.gguf_schema import Key, Name, Role, TensorSpec, arch_key, tensor_name

__all__ = ["Reduction", "choose_tokens", "map_bytes", "plan_reduction", "reduce_head"]

_PURPOSE = "--draft-vocab keeps rows of it"


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The tokens that are kept [n], ascending, and the file that says how often each was chosen.

    coverage: of all that was counted, the share of theirs. n_unseen: how many of them it never saw.
    """

    kept: Ids
    counts: Path
    coverage: float
    n_unseen: int

    def summary(self, n_vocab: int) -> str:
        """One line for the user."""
        line = (
            f"the head keeps {len(self.kept)} of {n_vocab} tokens, {100 * self.coverage:.1f} % of "
            f"those counted in {self.counts}"
        )
        return f"{line}; {self.n_unseen} of them were never seen" if self.n_unseen else line


def plan_reduction(
    n_rows: int, imatrix: ImportanceMatrix | None, metadata: Mapping[str, Value], n_vocab: int
) -> Reduction:
    """Choose ``n_rows`` tokens by the counts in ``imatrix``.

    ``metadata``: of the file to be written, which names the tokens that end an answer and how many
    candidates the selector takes. Raises UsageError for a number that cannot be, CheckpointError
    for counts of another vocabulary or none.
    """
    if imatrix is None:
        raise UsageError(
            "--draft-vocab needs to know which tokens are chosen often",
            "`dflash2-convert calibrate` counts them; give its file with --imatrix",
        )
    counts = imatrix.token_counts
    if counts is None:
        raise CheckpointError(
            f"{imatrix.path} does not say how often tokens were chosen",
            "`dflash2-convert calibrate` of this version counts them",
        )
    if len(counts) != n_vocab:
        raise CheckpointError(
            f"{imatrix.path} counts {len(counts)} tokens, the vocabulary has {n_vocab}",
            "make it with this drafter and its target",
        )
    ending = _tokens_that_end(metadata, n_vocab)
    least = max(len(ending) + 1, _selector_top_k(metadata))
    if not least <= n_rows < n_vocab:
        raise UsageError(
            f"--draft-vocab {n_rows} of a vocabulary of {n_vocab}",
            f"it can be {least} to {n_vocab - 1}",
        )
    kept = choose_tokens(counts, n_rows, ending)
    total = int(counts.sum())
    return Reduction(
        kept=kept,
        counts=imatrix.path,
        coverage=float(counts[kept].sum() / total) if total else 0.0,
        n_unseen=int((counts[kept] == 0).sum()),
    )


def choose_tokens(counts: Ids, n: int, always: Collection[int]) -> Ids:
    """The ``n`` tokens to keep, ascending: ``always``, then those counted most often.

    Equal counts, as of all that were never seen, are ranked by id: byte pair encoding numbers its
    tokens in the order of their frequency.
    """
    wanted = np.zeros(len(counts), dtype=bool)
    wanted[list(always)] = True
    order = np.lexsort((np.arange(len(counts)), -counts, ~wanted))
    return np.sort(order[:n]).astype(np.int64)


def _tokens_that_end(metadata: Mapping[str, Value], n_vocab: int) -> set[int]:
    """Without them the drafter would draft beyond every end of an answer."""
    values = [metadata.get(Key.SPECIAL_TOKEN_IDS[kind]) for kind in ("eos", "eot", "eom")]
    found = (value.scalar() for value in values if value is not None)
    return {token for token in found if isinstance(token, int) and 0 <= token < n_vocab}


def _selector_top_k(metadata: Mapping[str, Value]) -> int:
    value = metadata.get(arch_key(Key.Arch.SELECTOR_TOP_K))
    return int(value.scalar()) if value is not None else 1


def reduce_head(
    tensors: Sequence[PlannedTensor],
    kept: Ids,
    *,
    checkpoint: Checkpoint,
    target: Path | None,
) -> tuple[PlannedTensor, ...]:
    """``tensors`` with a head of the rows ``kept`` and their map in front.

    The rows are of the drafter's own head, of the embeddings that it uses as one, or of the
    target's. Raises UsageError where the head is reduced already or a target is missing, and
    CheckpointError where the target has no such table.
    """
    stored = next((t for t in tensors if t.spec.role is Role.VOCAB_MAP), None)
    if stored is not None:
        raise UsageError(
            f"the drafter's head has {stored.n_cols} rows already", "leave --draft-vocab out"
        )
    own = next((t for t in tensors if t.spec.role is Role.OUTPUT), None)
    n_embd = next(t.spec.shape[0] for t in tensors if t.spec.role is Role.FC)
    spec = TensorSpec(
        name=Name.OUTPUT,
        hf_name=Name.HF_HEAD,
        shape=(len(kept), n_embd),
        role=Role.OUTPUT,
    )
    if own is None:
        head = _lent_head(spec, kept, target)
        others = list(tensors)
    elif own.spec.name == Name.OUTPUT:
        head = replace(own, spec=spec, kept=kept)
        others = [tensor for tensor in tensors if tensor is not own]
    else:  # the embeddings stay whole and are read a second time
        head = replace(own, spec=spec, kept=kept, lender=own.lender or checkpoint)
        table = replace(own, spec=replace(own.spec, role=Role.TOKEN_EMBD))
        others = [table if tensor is own else tensor for tensor in tensors]
    return (head, _map(kept), *others)


def _lent_head(spec: TensorSpec, kept: Ids, target: Path | None) -> PlannedTensor:
    if target is None:
        raise UsageError(
            "the drafter has no head of its own, and rows of the target's are kept",
            "name the target's file with --target",
        )
    tables = lend_tables(target, _PURPOSE)
    weight = tables.weights[Name.HF_HEAD]
    if len(weight.shape) != 2 or weight.shape[1] != spec.shape[1] or weight.shape[0] <= kept[-1]:
        raise CheckpointError(
            f"{target} has a head of {list(weight.shape)}, the drafter needs rows of "
            f"{spec.shape[1]} for tokens up to {kept[-1]}",
            "give the target that the drafter was trained for",
        )
    return PlannedTensor(
        spec=spec, weight=weight, lender=tables.checkpoints[Name.HF_HEAD], kept=kept
    )


def _map(kept: Ids) -> PlannedTensor:
    name = str(tensor_name(Name.HF_VOCAB_MAP))
    shape = (len(kept),)
    source = SourceTensor(
        name=name,
        stored_name=name,
        dtype="I64",
        shape=shape,
        file="",
        begin=0,
        nbytes=kept.nbytes,
    )
    spec = TensorSpec(name=name, hf_name=Name.HF_VOCAB_MAP, shape=shape, role=Role.VOCAB_MAP)
    return PlannedTensor(spec=spec, weight=StoredWeight(name=name, main=source), kept=kept)


def map_bytes(kept: Ids) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The map as a file stores it: token ids, little-endian."""
    return np.frombuffer(kept.astype("<i8").tobytes(), dtype=np.uint8)
