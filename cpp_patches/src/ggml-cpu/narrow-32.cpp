// Kernels for weights in blocks of 32: q4_0, q4_1, q5_0, q5_1, q8_0.
//
// One conversion gives the scales of all activation rows, one product with a weight's scale those of all results.

#include "narrow-avx2.h"
#include "narrow-kernels.h"

#ifdef DFLASH2_NARROW_AVX2

#    include "narrow-pack.h"

namespace dflash2 {

namespace {

// Signed weights need a signed product of bytes, which there is none of. With VNNI the activations are kept
// 128 too high, as unsigned bytes, and 128 times the weights is taken off first, once per block for all rows.
// Without it their 16-bit sums would saturate, so the sign moves from the weight to the activation.
#    ifdef DFLASH2_NARROW_VNNI
constexpr uint8_t SIGNED_OFFSET = 128;
#    else
constexpr uint8_t SIGNED_OFFSET = 0;
#    endif

inline __m256 broadcast_half(ggml_half value) {
    return _mm256_cvtph_ps(_mm_set1_epi16(int16_t(value)));
}

// Weights of a type: what upstream's ggml_vec_dot_* does before it multiplies.

struct weights_q4_0 {
    using block                      = block_q4_0;
    using rows_block                 = block_q8_0;
    static constexpr bool is_signed  = true;

    static __m256i unpack(const block & b) {
        return _mm256_sub_epi8(unpack_nibbles(b.qs), _mm256_set1_epi8(8));
    }
};

struct weights_q4_1 {
    using block                      = block_q4_1;
    using rows_block                 = block_q8_1;
    static constexpr bool is_signed  = false;

    static __m256i unpack(const block & b) { return unpack_nibbles(b.qs); }
};

struct weights_q5_0 {
    using block                      = block_q5_0;
    using rows_block                 = block_q8_0;
    static constexpr bool is_signed  = true;

    static __m256i unpack(const block & b) {
        const __m256i minus_16 = _mm256_andnot_si256(unpack_bits(b.qh), _mm256_set1_epi8(char(0xf0)));
        return _mm256_or_si256(unpack_nibbles(b.qs), minus_16);
    }
};

struct weights_q5_1 {
    using block                      = block_q5_1;
    using rows_block                 = block_q8_1;
    static constexpr bool is_signed  = false;

    static __m256i unpack(const block & b) {
        const __m256i plus_16 = _mm256_and_si256(unpack_bits(b.qh), _mm256_set1_epi8(0x10));
        return _mm256_or_si256(unpack_nibbles(b.qs), plus_16);
    }
};

struct weights_q8_0 {
    using block                      = block_q8_0;
    using rows_block                 = block_q8_0;
    static constexpr bool is_signed  = true;

    static __m256i unpack(const block & b) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(b.qs)); }
};

// A block of weights, ready to be multiplied with one block of each row.
template <typename W> struct prepared {
    __m256i values;
    __m256i other;  // signed only: with VNNI what to start from, else the absolute values

    void load(const typename W::block & b) {
        values = W::unpack(b);
        if (W::is_signed) {
#    ifdef DFLASH2_NARROW_VNNI
            const __m256i zero = _mm256_setzero_si256();
            other = _mm256_sub_epi32(zero, add_dot_u8_i8(zero, _mm256_set1_epi8(char(SIGNED_OFFSET)), values));
#    else
            other = _mm256_sign_epi8(values, values);
#    endif
        }
    }

    // eight sums of four products
    __m256 dot(__m256i row) const {
        const __m256i zero = _mm256_setzero_si256();
        if (!W::is_signed) {
            return _mm256_cvtepi32_ps(add_dot_u8_i8(zero, values, row));
        }
#    ifdef DFLASH2_NARROW_VNNI
        return _mm256_cvtepi32_ps(add_dot_u8_i8(other, row, values));
#    else
        return _mm256_cvtepi32_ps(add_dot_u8_i8(zero, other, _mm256_sign_epi8(row, values)));
#    endif
    }
};

template <typename W> constexpr bool has_sums() {
    return sizeof(typename W::rows_block) == sizeof(block_q8_1);
}

// R weight rows from `first` on, with N activation rows
template <typename W, int N, int R> inline void multiply(const narrow_tile & tile, int first) {
    constexpr size_t rows_size  = N * sizeof(typename W::rows_block);
    constexpr size_t sums_at    = N * sizeof(ggml_half);
    constexpr size_t values_at  = rows_size - N * QK8_0;

    __m256 acc[R][N];
    __m256 sums[R];
    DFLASH2_UNROLL
    for (int r = 0; r < R; ++r) {
        sums[r] = _mm256_setzero_ps();
        DFLASH2_UNROLL
        for (int n = 0; n < N; ++n) {
            acc[r][n] = _mm256_setzero_ps();
        }
    }

    const char * weights = tile.weights + first * tile.weights_stride;
    const char * rows    = tile.rows;
    // R short streams confuse the hardware, to which one long one is no trouble: the rows to come, in their order
    const size_t step    = R * tile.weights_stride;
    const size_t ahead   = std::max<size_t>(1, (PREFETCH_AHEAD + step - 1) / step) * step;
    for (int64_t ib = 0; ib < tile.n_blocks; ++ib, rows += rows_size) {
        // reads over the end of N < 8 scales, into what is still this block
        const __m256 rows_d = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(rows)));

        alignas(32) float scale[R][8];
        prepared<W>       block[R];
        DFLASH2_UNROLL
        for (int r = 0; r < R; ++r) {
            const auto & b = reinterpret_cast<const typename W::block *>(weights + r * tile.weights_stride)[ib];
            _mm_prefetch(weights + ahead + (ib * R + r) * sizeof(b), _MM_HINT_T0);
            block[r].load(b);
            if constexpr (has_sums<W>()) {
                const __m256 dm     = _mm256_cvtph_ps(_mm_set1_epi32(int(b.data.dm)));
                const __m256 rows_s =
                    _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(rows + sums_at)));
                // upstream writes a product and a sum, which compilers make one operation of
                sums[r] = _mm256_fmadd_ps(_mm256_movehdup_ps(dm), rows_s, sums[r]);
                _mm256_store_ps(scale[r], _mm256_mul_ps(_mm256_moveldup_ps(dm), rows_d));
            } else {
                _mm256_store_ps(scale[r], _mm256_mul_ps(broadcast_half(b.d), rows_d));
            }
            keep_in_memory(scale[r]);
        }
        DFLASH2_UNROLL
        for (int n = 0; n < N; ++n) {
            const __m256i row =
                _mm256_loadu_si256(reinterpret_cast<const __m256i *>(rows + values_at + n * QK8_0));
            DFLASH2_UNROLL
            for (int r = 0; r < R; ++r) {
                acc[r][n] = _mm256_fmadd_ps(_mm256_set1_ps(scale[r][n]), block[r].dot(row), acc[r][n]);
            }
        }
    }

    DFLASH2_UNROLL
    for (int r = 0; r < R; ++r) {
        __m256 column = sum_lanes<N>(acc[r]);
        if (has_sums<W>()) {
            column = _mm256_add_ps(column, sums[r]);
        }
        store_column<N>(tile.dst + first + r, tile.dst_stride, column);
    }
}

// as many weight rows at once as leaves registers for what is not a sum
template <int N> constexpr int weights_at_once() {
    return NARROW_REGISTERS == 32 ? (N <= 4 ? 4 : 2) : (N <= 2 ? 4 : N <= 4 ? 2 : 1);
}

template <typename W, int N> void kernel(const narrow_tile & tile) {
    constexpr int R = weights_at_once<N>();

    int first = 0;
    for (; first + R <= tile.n_weights; first += R) {
        multiply<W, N, R>(tile, first);
    }
    for (; first < tile.n_weights; ++first) {
        multiply<W, N, 1>(tile, first);
    }
}

template <typename W> constexpr narrow_type make_type(int rows_min, int rows_max) {
    return {
        pack_32<typename W::rows_block, W::is_signed ? SIGNED_OFFSET : 0>,
        { nullptr, kernel<W, 1>, kernel<W, 2>, kernel<W, 3>, kernel<W, 4>, kernel<W, 5>, kernel<W, 6>,
                   kernel<W, 7>, kernel<W, 8> },
        8,
        rows_min,
        rows_max,
        NARROW_WEIGHTS,
        sizeof(typename W::block),
    };
}

// Measured: 1.6 to 2.4 times as fast as upstream with one row, up to 3 with more. From 16 rows on the advantage stays
// the same: about 3 for q4_1 and q5_1, for which upstream has no product of several rows, 1.1 to 1.5 for the others.
constexpr narrow_type TYPE_Q4_0 = make_type<weights_q4_0>(1, 256);
constexpr narrow_type TYPE_Q4_1 = make_type<weights_q4_1>(1, 512);
constexpr narrow_type TYPE_Q5_0 = make_type<weights_q5_0>(1, 256);
constexpr narrow_type TYPE_Q5_1 = make_type<weights_q5_1>(1, 512);
constexpr narrow_type TYPE_Q8_0 = make_type<weights_q8_0>(1, 256);

}  // namespace

const narrow_type * narrow_type_32(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0:
            return &TYPE_Q4_0;
        case GGML_TYPE_Q4_1:
            return &TYPE_Q4_1;
        case GGML_TYPE_Q5_0:
            return &TYPE_Q5_0;
        case GGML_TYPE_Q5_1:
            return &TYPE_Q5_1;
        case GGML_TYPE_Q8_0:
            return &TYPE_Q8_0;
        default:
            return nullptr;
    }
}

}  // namespace dflash2

#else

const dflash2::narrow_type * dflash2::narrow_type_32(ggml_type) {
    return nullptr;
}

#endif
