"""Rounds of the unpatched pin's llama-server, read from the timings of streamed tokens."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2_gguf.peer import PeerOptions, peer_server

__all__ = ["Answer", "answers", "rounds_of"]

_SLOTS, _CELLS = 8, 512


@dataclass(frozen=True)
class Answer:
    """Tokens, and for rounds counted from 1 what was accepted in them and all before."""

    tokens: list[int]
    accepted: dict[int, int]  # a round that sent no text of its own is missing
    n_rounds: int
    stopped: bool  # by an end-of-generation token

    def counted(self, n_predict: int, block: int) -> tuple[int, int]:
        """Tokens and rounds of the answer that no length limit and no stop can have cut."""
        n_tokens = n_rounds = 0
        for number, accepted in sorted(self.accepted.items()):
            if self.stopped and number == self.n_rounds:
                break
            n_tokens, n_rounds = number + accepted, number
            if 1 + n_tokens > n_predict - block:
                break
        return n_tokens, n_rounds


def answers(
    program: Path,
    pair: tuple[Path, Path],
    width: int,
    requests: Sequence[dict[str, Any]],
) -> list[Answer]:
    """Answers of one server to /completion requests, several at a time."""
    target, draft = pair
    options = PeerOptions(
        program=program,
        target=target,
        draft=draft,
        draft_max=width,
        n_ctx=_SLOTS * _CELLS,
        n_slots=_SLOTS,
    )
    with peer_server(options) as server, ThreadPoolExecutor(_SLOTS) as pool:
        return list(pool.map(lambda one: rounds_of(_stream(server.port, one), width), requests))


def rounds_of(chunks: Iterator[dict[str, Any]], width: int) -> Answer:
    """What the chunks of a streamed answer say about its rounds, ``width`` drafted in each."""
    tokens: list[int] = []
    accepted: dict[int, int] = {}
    last: dict[str, Any] = {}
    for last in chunks:
        tokens += last["tokens"]
        drafted = last["timings"].get("draft_n", 0)
        if drafted and drafted % width == 0:
            accepted[drafted // width] = last["timings"]["draft_n_accepted"]
    n_rounds = last["timings"]["predicted_n"] - 1 - last["timings"].get("draft_n_accepted", 0)
    return Answer(tokens, accepted, n_rounds, last["stop_type"] == "eos")


def _stream(port: int, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    body = {**request, "stream": True, "timings_per_token": True, "return_tokens": True}
    post = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(post, timeout=3600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
