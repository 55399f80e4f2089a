"""Text to token ids and back, with the target's own tokenizer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from dflash2_gguf.errors import NativeError, UsageError
from dflash2_gguf.native import api

__all__ = ["Vocab"]


class Vocab:
    """View of a loaded model's vocabulary; valid as long as the model is."""

    def __init__(self, model: int) -> None:
        self._llama: Any = api().llama
        self._model = model
        self._vocab = self._llama.llama_model_get_vocab(model)
        self.n_tokens: int = self._llama.llama_vocab_n_tokens(self._vocab)
        self.bos: int = self._llama.llama_vocab_bos(self._vocab)
        self.eos: int = self._llama.llama_vocab_eos(self._vocab)
        self.adds_bos: bool = self._llama.llama_vocab_get_add_bos(self._vocab)

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of ``text``; the two options as in ``llama_tokenize``."""
        data = _encode(text)
        room = len(data) + 8
        tokens = (ctypes.c_int32 * room)()
        count = self._llama.llama_tokenize(
            self._vocab, data, len(data), tokens, room, add_special, parse_special
        )
        if count < 0:
            raise NativeError(f"the tokenizer failed on a text of {len(data)} bytes")
        return list(tokens[:count])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes that ``token`` adds to a text; control tokens add none unless ``special``."""
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            size = self._llama.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if size >= 0:
                return buffer.raw[:size]
            room = -size

    def text(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens`` in the middle of a prompt, control tokens included."""
        data = b"".join(self.piece(token, special=True) for token in tokens)
        return data.decode("utf-8", errors="replace")

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of ``tokens``, as the tokenizer would have read it."""
        self.require_ids(tokens)
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        room = 16 * len(tokens) + 16
        while True:
            buffer = ctypes.create_string_buffer(room)
            size = self._llama.llama_detokenize(
                self._vocab, ids, len(tokens), buffer, room, False, special
            )
            if size >= 0:
                return buffer.raw[:size].decode("utf-8", errors="replace")
            room = -size

    def token_text(self, token: int) -> str:
        """The vocabulary's entry for a special token, "" for none (id -1)."""
        if token < 0:
            return ""
        text: bytes | None = self._llama.llama_vocab_get_text(self._vocab, token)
        return (text or b"").decode("utf-8", errors="replace")

    def chat_template(self) -> str | None:
        """The model's default chat template, None when it has none."""
        text: bytes | None = self._llama.llama_model_chat_template(self._model, None)
        return text.decode("utf-8", errors="replace") if text else None

    def require_ids(self, tokens: Sequence[int]) -> None:
        """UsageError for the first id that is not in the vocabulary."""
        for token in tokens:
            if not 0 <= token < self.n_tokens:
                raise UsageError(
                    f"token id {token} is not in the vocabulary",
                    f"ids go from 0 to {self.n_tokens - 1}",
                )


def _encode(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"the text is not valid Unicode at character {error.start}") from error
