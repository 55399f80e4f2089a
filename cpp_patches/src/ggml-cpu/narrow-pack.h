#pragma once

// Puts quantized rows of activations into groups, for the kernels of all layouts of weights. AVX2.
//
// A group of N rows is packed block by block. In blocks of 32: N scales, N sums (q8_1 only), then 32 values of each
// row. In blocks of 256: N scales, N times 16 sums, then 256 values of each row. Types with minima need 8 sums of
// 32 values instead. Of these, sums 0 and 1 of all rows come first, then 2 and 3, and so on, so that what the
// minima add can be computed for all rows at once.

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace dflash2 {

// `OFFSET` is added to the values, which then are unsigned bytes where it is 128
template <uint8_t OFFSET> inline void pack_values(char * values, const int8_t * source, size_t n) {
    for (size_t i = 0; i < n; i += sizeof(__m256i)) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(source + i));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(values + i),
                            _mm256_xor_si256(bytes, _mm256_set1_epi8(char(OFFSET))));
    }
}

// B: block_q8_0 or block_q8_1
template <typename B, uint8_t OFFSET>
void pack_32(const char * blocks, int64_t n_blocks, char * group, int n_rows, int row) {
    constexpr size_t head   = sizeof(B) - QK8_0;  // a scale, and a sum in q8_1
    const B *        source = reinterpret_cast<const B *>(blocks);
    for (int64_t ib = 0; ib < n_blocks; ++ib, group += n_rows * sizeof(B)) {
        for (size_t part = 0; part < head; part += sizeof(ggml_half)) {
            memcpy(group + part * n_rows + row * sizeof(ggml_half),
                   reinterpret_cast<const char *>(&source[ib]) + part, sizeof(ggml_half));
        }
        pack_values<OFFSET>(group + n_rows * head + row * QK8_0, source[ib].qs, QK8_0);
    }
}

// Packs the scale and the values of a block; where its sums belong.
template <uint8_t OFFSET> inline char * pack_block_256(const block_q8_K & block, char * group, int n_rows, int row) {
    memcpy(group + row * sizeof(float), &block.d, sizeof(float));
    pack_values<OFFSET>(group + n_rows * (sizeof(block) - QK_K) + row * QK_K, block.qs, QK_K);
    return group + n_rows * sizeof(float);
}

template <uint8_t OFFSET> void pack_256(const char * blocks, int64_t n_blocks, char * group, int n_rows, int row) {
    const auto * source = reinterpret_cast<const block_q8_K *>(blocks);
    for (int64_t ib = 0; ib < n_blocks; ++ib, group += n_rows * sizeof(block_q8_K)) {
        char * sums = pack_block_256<OFFSET>(source[ib], group, n_rows, row);
        memcpy(sums + row * sizeof(source[ib].bsums), source[ib].bsums, sizeof(source[ib].bsums));
    }
}

// q8_K has sums of 16 values only
inline void pack_256_sums_of_32(const char * blocks, int64_t n_blocks, char * group, int n_rows, int row) {
    const auto * source = reinterpret_cast<const block_q8_K *>(blocks);
    for (int64_t ib = 0; ib < n_blocks; ++ib, group += n_rows * sizeof(block_q8_K)) {
        char *          sums  = pack_block_256<0>(source[ib], group, n_rows, row);
        const int16_t * of_16 = source[ib].bsums;
        for (int i = 0; i < 4; ++i) {
            const int16_t pair[2] = { int16_t(of_16[4 * i] + of_16[4 * i + 1]),
                                      int16_t(of_16[4 * i + 2] + of_16[4 * i + 3]) };
            memcpy(sums + (i * n_rows + row) * sizeof(pair), pair, sizeof(pair));
        }
    }
}

}  // namespace dflash2
