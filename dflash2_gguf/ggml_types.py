"""Numbers of ggml and llama.cpp that GGUF files hold: types of values, tensors, files, tokens."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = ["FileType", "GGMLType", "TokenType", "ValueType"]


class ValueType(IntEnum):
    """Type of a metadata value, ``gguf_type`` of ggml."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


class GGMLType(IntEnum):
    """Tensor types this project can write; values are ``ggml_type``."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    I64 = 27
    BF16 = 30

    @property
    def block_size(self) -> int:
        """Weights per block; rows must be a multiple of it."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return _BLOCKS[self][1]

    @property
    def is_quantized(self) -> bool:
        """False for floats and integers."""
        return self.block_size > 1

    def row_bytes(self, n_cols: int) -> int:
        """Bytes of a row of ``n_cols`` weights (a multiple of the block size)."""
        return n_cols // self.block_size * self.block_bytes


# weights per block, bytes per block
_BLOCKS: Final = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.I64: (1, 8),
    GGMLType.BF16: (1, 2),
}


class FileType(IntEnum):
    """``general.file_type``, ``llama_ftype`` of llama.h."""

    ALL_F32 = 0
    MOSTLY_F16 = 1
    MOSTLY_Q4_0 = 2
    MOSTLY_Q4_1 = 3
    MOSTLY_Q8_0 = 7
    MOSTLY_Q5_0 = 8
    MOSTLY_Q5_1 = 9
    MOSTLY_Q2_K = 10
    MOSTLY_Q3_K_M = 12
    MOSTLY_Q4_K_M = 15
    MOSTLY_Q5_K_M = 17
    MOSTLY_Q6_K = 18
    MOSTLY_IQ4_NL = 25
    MOSTLY_IQ4_XS = 30
    MOSTLY_BF16 = 32


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type`` entries."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6
