// Kernels for weights in blocks of 256: q4_K, q5_K, q6_K, iq4_xs.

#include "narrow-avx2.h"
#include "narrow-kernels.h"

#include <type_traits>

#ifdef DFLASH2_NARROW_AVX2

#    include "narrow-pack.h"

namespace dflash2 {

namespace {

inline float from_half(ggml_half value) {
    return _cvtsh_ss(value);
}

inline uint32_t load_u32(const uint8_t * p) {
    uint32_t value;
    memcpy(&value, p, sizeof(value));
    return value;
}

inline __m256i load(const void * p) {
    return _mm256_loadu_si256(static_cast<const __m256i *>(p));
}

// 16-bit entry i of each half, everywhere in that half
inline __m256i repeat_i16(__m256i values, int i) {
    return _mm256_shuffle_epi8(values, _mm256_set1_epi16(short(2 * i | (2 * i + 1) << 8)));
}

// Where the parts of a packed block of N rows are.
template <int N> struct packed_rows {
    static constexpr size_t SIZE = N * sizeof(block_q8_K);

    const char * at;

    // For N < 8 this reads over the end, into what is still this block; so do the others. Sums would be denormal
    // scales, which are slow to multiply.
    __m256 scales() const {
        const __m256 read = _mm256_loadu_ps(reinterpret_cast<const float *>(at));
        return _mm256_blend_ps(_mm256_setzero_ps(), read, (1 << N) - 1);
    }

    __m256i sums(int n) const { return load(at + N * sizeof(float) + n * sizeof(block_q8_K::bsums)); }

    __m256i sum_pairs(int i) const { return load(at + N * sizeof(float) + i * N * 2 * sizeof(int16_t)); }

    __m256i values(int n, int k) const { return load(at + SIZE - (N - n) * QK_K + k); }
};

// Adds the products of 32 weights, unsigned bytes, with values from k on of each row, times 16-bit scales.
template <int N>
inline void add_products(__m256i * sums, __m256i weights, __m256i scales, const packed_rows<N> & rows, int k) {
    DFLASH2_UNROLL
    for (int n = 0; n < N; ++n) {
        sums[n] = add_dot_i16(sums[n], scales, _mm256_maddubs_epi16(weights, rows.values(n, k)));
    }
}

// acc += d of the weights x d of the row x sums
template <int N> inline void add_scaled(__m256 * acc, float d, const packed_rows<N> & rows, const __m256i * sums) {
    alignas(32) float scale[8];
    _mm256_store_ps(scale, _mm256_mul_ps(rows.scales(), _mm256_set1_ps(d)));
    keep_in_memory(scale);
    DFLASH2_UNROLL
    for (int n = 0; n < N; ++n) {
        acc[n] = _mm256_fmadd_ps(_mm256_set1_ps(scale[n]), _mm256_cvtepi32_ps(sums[n]), acc[n]);
    }
}

// asks for the weights to come, which the hardware does too late
template <typename B> inline void prefetch_block(const B & block) {
    DFLASH2_UNROLL
    for (size_t line = 0; line < sizeof(B); line += 64) {
        _mm_prefetch(reinterpret_cast<const char *>(&block) + PREFETCH_AHEAD + line, _MM_HINT_T0);
    }
}

// the scales and minima of q4_K and q5_K, 8 each, as 16-bit integers: scales in the lower half
inline __m256i unpack_scales(const uint8_t * packed) {
    constexpr uint32_t mask_6 = 0x3f3f3f3f;
    constexpr uint32_t mask_4 = 0x0f0f0f0f;
    constexpr uint32_t mask_2 = 0x03030303;

    // not as one array, which compilers would put into memory
    const uint32_t in[3] = { load_u32(packed), load_u32(packed + 4), load_u32(packed + 8) };
    const uint32_t mins_high   = ((in[2] >> 4) & mask_4) | (((in[1] >> 6) & mask_2) << 4);
    const uint32_t scales_high = (in[2] & mask_4) | (((in[0] >> 6) & mask_2) << 4);
    return _mm256_cvtepu8_epi16(
        _mm_set_epi32(int(mins_high), int(in[1] & mask_6), int(scales_high), int(in[0] & mask_6)));
}

// minima 2 i and 2 i + 1 times the sums of each row
template <int N> inline __m256i dot_mins(__m256i sum, __m256i scales_mins, const packed_rows<N> & rows, int i) {
    const __m256i pair = _mm256_permutevar8x32_epi32(scales_mins, _mm256_set1_epi32(4 + i));
    return add_dot_i16(sum, pair, rows.sum_pairs(i));
}

// Weights of a type: the integer part of upstream's ggml_vec_dot_*, and what the minima add to the result.

struct weights_q4_K {
    using block = block_q4_K;

    template <int N>
    static void multiply(const block & b, const packed_rows<N> & rows, __m256i * sums, __m256i scales) {
        const __m256i mask = _mm256_set1_epi8(0x0f);
        DFLASH2_UNROLL
        for (int j = 0; j < QK_K / 64; ++j) {
            const __m256i bits = load(b.qs + 32 * j);
            const __m256i low  = _mm256_and_si256(bits, mask);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bits, 4), mask);
            add_products(sums, low, repeat_i16(scales, 2 * j), rows, 64 * j);
            add_products(sums, high, repeat_i16(scales, 2 * j + 1), rows, 64 * j + 32);
        }
    }

    // What the minima add to the results, which upstream keeps as four floats: here four vectors with one entry
    // for each row.
    struct min_sum {
        __m256 parts[4];

        template <int N> void add(__m256 dmin, __m256i scales_mins, const packed_rows<N> & rows) {
            DFLASH2_UNROLL
            for (int i = 0; i < 4; ++i) {
                const __m256i dot = dot_mins(_mm256_setzero_si256(), scales_mins, rows, i);
                parts[i]          = _mm256_fmadd_ps(dmin, _mm256_cvtepi32_ps(dot), parts[i]);
            }
        }

        __m256 total() const {
            return _mm256_add_ps(_mm256_add_ps(parts[0], parts[2]), _mm256_add_ps(parts[1], parts[3]));
        }
    };
};

struct weights_q5_K {
    using block = block_q5_K;

    template <int N>
    static void multiply(const block & b, const packed_rows<N> & rows, __m256i * sums, __m256i scales) {
        const __m256i mask  = _mm256_set1_epi8(0x0f);
        const __m256i fifth = _mm256_set1_epi8(0x10);
        const __m256i highs = load(b.qh);
        DFLASH2_UNROLL
        for (int j = 0; j < QK_K / 64; ++j) {
            const __m256i bits = load(b.qs + 32 * j);
            // bit 2 j of each byte, then bit 2 j + 1, to where 16 stands
            const __m256i at_0 = j < 2 ? _mm256_slli_epi16(highs, 4 - 2 * j) : _mm256_srli_epi16(highs, 2 * j - 4);
            const __m256i at_1 = j < 2 ? _mm256_slli_epi16(highs, 3 - 2 * j) : _mm256_srli_epi16(highs, 2 * j - 3);
            const __m256i low  = _mm256_or_si256(_mm256_and_si256(bits, mask), _mm256_and_si256(at_0, fifth));
            const __m256i high = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(bits, 4), mask),
                                                 _mm256_and_si256(at_1, fifth));
            add_products(sums, low, repeat_i16(scales, 2 * j), rows, 64 * j);
            add_products(sums, high, repeat_i16(scales, 2 * j + 1), rows, 64 * j + 32);
        }
    }

    // upstream keeps one float here
    struct min_sum {
        __m256 sum;

        template <int N> void add(__m256 dmin, __m256i scales_mins, const packed_rows<N> & rows) {
            __m256i dot = _mm256_setzero_si256();
            DFLASH2_UNROLL
            for (int i = 0; i < 4; ++i) {
                dot = dot_mins(dot, scales_mins, rows, i);
            }
            // upstream writes a product and a sum, which compilers make one operation of
            sum = _mm256_fmadd_ps(dmin, _mm256_cvtepi32_ps(dot), sum);
        }

        __m256 total() const { return sum; }
    };
};

// N activation rows with weight row i of a type with minima
template <typename W, int N> void multiply_mins(const narrow_tile & tile, int i) {
    __m256 acc[N];
    DFLASH2_UNROLL
    for (int n = 0; n < N; ++n) {
        acc[n] = _mm256_setzero_ps();
    }
    typename W::min_sum mins = {};

    const auto *   blocks = reinterpret_cast<const typename W::block *>(tile.weights + i * tile.weights_stride);
    packed_rows<N> rows   = { tile.rows };
    for (int64_t ib = 0; ib < tile.n_blocks; ++ib, rows.at += rows.SIZE) {
        const auto & b = blocks[ib];
        prefetch_block(b);
        const __m256i scales_mins = unpack_scales(b.scales);

        __m256i sums[N];
        DFLASH2_UNROLL
        for (int n = 0; n < N; ++n) {
            sums[n] = _mm256_setzero_si256();
        }
        W::multiply(b, rows, sums, _mm256_broadcastsi128_si256(_mm256_castsi256_si128(scales_mins)));
        add_scaled<N>(acc, from_half(b.data.data.d), rows, sums);

        const __m256 dmin = _mm256_set1_ps(-from_half(b.data.data.dmin));
        mins.add(_mm256_mul_ps(rows.scales(), dmin), scales_mins, rows);
    }
    store_column<N>(tile.dst + i, tile.dst_stride, _mm256_add_ps(sum_lanes<N>(acc), mins.total()));
}

struct weights_q6_K {
    using block = block_q6_K;

    template <int N> static void multiply(const block & b, const packed_rows<N> & rows, __m256i * sums) {
        const __m256i scales = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(b.scales)));

        // weights are kept 32 too high
        const __m256i excess = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(scales, 5));
        DFLASH2_UNROLL
        for (int n = 0; n < N; ++n) {
            sums[n] = _mm256_madd_epi16(rows.sums(n), excess);
        }
        multiply_half(b, 0, rows, sums, scales);
        multiply_half(b, 1, rows, sums, scales);
    }

    template <int N>
    static void multiply_half(const block & b, int half, const packed_rows<N> & rows, __m256i * sums, __m256i scales) {
        const __m256i mask   = _mm256_set1_epi8(0x0f);
        const __m256i upper  = _mm256_set1_epi8(0x30);
        const __m256i bits_0 = load(b.ql + 64 * half);
        const __m256i bits_1 = load(b.ql + 64 * half + 32);
        const __m256i highs  = load(b.qh + 32 * half);
        const __m256i q[4]   = {
            _mm256_or_si256(_mm256_and_si256(bits_0, mask), _mm256_and_si256(_mm256_slli_epi16(highs, 4), upper)),
            _mm256_or_si256(_mm256_and_si256(bits_1, mask), _mm256_and_si256(_mm256_slli_epi16(highs, 2), upper)),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(bits_0, 4), mask), _mm256_and_si256(highs, upper)),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(bits_1, 4), mask),
                            _mm256_and_si256(_mm256_srli_epi16(highs, 2), upper)),
        };
        // 16 weights have a scale, so the lower half of the products has another one than the upper
        const __m256i which = _mm256_setr_m128i(_mm_set1_epi16(0x0100), _mm_set1_epi16(0x0302));
        DFLASH2_UNROLL
        for (int j = 0; j < 4; ++j) {
            const __m256i pair = _mm256_permutevar8x32_epi32(scales, _mm256_set1_epi32(4 * half + j));
            add_products(sums, q[j], _mm256_shuffle_epi8(pair, which), rows, 128 * half + 32 * j);
        }
    }
};

struct weights_iq4_xs {
    using block = block_iq4_xs;

    template <int N> static void multiply(const block & b, const packed_rows<N> & rows, __m256i * sums) {
        // kvalues_iq4nl of upstream
        const __m256i values = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113));
        DFLASH2_UNROLL
        for (int n = 0; n < N; ++n) {
            sums[n] = _mm256_setzero_si256();
        }
        DFLASH2_UNROLL
        for (int j = 0; j < QK_K / 32; ++j) {
            const __m256i weights  = _mm256_shuffle_epi8(values, unpack_nibbles(b.qs + 16 * j));
            const __m256i absolute = _mm256_sign_epi8(weights, weights);
            const int     low      = (b.scales_l[j / 2] >> (4 * (j % 2))) & 0x0f;
            const int     high     = (b.scales_h >> (2 * j)) & 0x03;
            const __m256i scale    = _mm256_set1_epi16(int16_t((low | high << 4) - 32));
            DFLASH2_UNROLL
            for (int n = 0; n < N; ++n) {
                const __m256i row = _mm256_sign_epi8(rows.values(n, 32 * j), weights);
                sums[n]           = add_dot_i16(sums[n], scale, _mm256_maddubs_epi16(absolute, row));
            }
        }
    }
};

// N activation rows with weight row i of a type without minima
template <typename W, int N> void multiply_plain(const narrow_tile & tile, int i) {
    __m256 acc[N];
    DFLASH2_UNROLL
    for (int n = 0; n < N; ++n) {
        acc[n] = _mm256_setzero_ps();
    }

    const auto *   blocks = reinterpret_cast<const typename W::block *>(tile.weights + i * tile.weights_stride);
    packed_rows<N> rows   = { tile.rows };
    for (int64_t ib = 0; ib < tile.n_blocks; ++ib, rows.at += rows.SIZE) {
        prefetch_block(blocks[ib]);
        __m256i sums[N];
        W::multiply(blocks[ib], rows, sums);
        add_scaled<N>(acc, from_half(blocks[ib].d), rows, sums);
    }
    store_column<N>(tile.dst + i, tile.dst_stride, sum_lanes<N>(acc));
}

template <typename W> constexpr bool has_mins() {
    return std::is_same<W, weights_q4_K>::value || std::is_same<W, weights_q5_K>::value;
}

template <typename W, int N> void kernel(const narrow_tile & tile) {
    for (int i = 0; i < tile.n_weights; ++i) {
        if constexpr (has_mins<W>()) {
            multiply_mins<W, N>(tile, i);
        } else {
            multiply_plain<W, N>(tile, i);
        }
    }
}

template <typename W> constexpr narrow_type make_type(int rows_min, int rows_max) {
    return {
        has_mins<W>() ? pack_256_sums_of_32 : pack_256<0>,
        { nullptr, kernel<W, 1>, kernel<W, 2>, kernel<W, 3>, kernel<W, 4>, kernel<W, 5>, kernel<W, 6>,
                   kernel<W, 7>, kernel<W, 8> },
        8,
        rows_min,
        rows_max,
        NARROW_WEIGHTS,
        sizeof(typename W::block),
    };
}

// Measured: with many rows upstream's tiles win, from 24 on (q6_K: 32); with one row q6_K is no faster.
constexpr narrow_type TYPE_Q4_K   = make_type<weights_q4_K>(1, 16);
constexpr narrow_type TYPE_Q5_K   = make_type<weights_q5_K>(1, 16);
constexpr narrow_type TYPE_Q6_K   = make_type<weights_q6_K>(2, 16);
constexpr narrow_type TYPE_IQ4_XS = make_type<weights_iq4_xs>(1, 16);

}  // namespace

const narrow_type * narrow_type_256(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_K:
            return &TYPE_Q4_K;
        case GGML_TYPE_Q5_K:
            return &TYPE_Q5_K;
        case GGML_TYPE_Q6_K:
            return &TYPE_Q6_K;
        case GGML_TYPE_IQ4_XS:
            return &TYPE_IQ4_XS;
        default:
            return nullptr;
    }
}

}  // namespace dflash2

#else

const dflash2::narrow_type * dflash2::narrow_type_256(ggml_type) {
    return nullptr;
}

#endif
