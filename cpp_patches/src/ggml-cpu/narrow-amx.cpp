// Kernels for weights that ggml-cpu/amx has packed for its tiles: q4_0, q4_1, q8_0, q4_K, q5_K, q6_K, iq4_xs.
//
// With few rows most of a hardware tile is empty, and the weights are unpacked into it once more. Here they are
// unpacked into registers. 16 weight rows are packed together, block by block: words of four neighbouring weights,
// word 0 of all 16 rows, then word 1, and so on; then their scales. See pack_B() of upstream's amx/mmq.cpp.
//
// Signed weights need a signed product of bytes, which there is none of. The activations are kept 128 too high, as
// unsigned bytes, and 128 times the weights is taken off first, once per group of weights for all rows.

#include "narrow-kernels.h"

#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)

#    include "narrow-avx2.h"
#    include "narrow-pack.h"

#    if defined(__GNUC__) && !defined(__clang__)
#        pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12: its own intrinsics, thousands of times
#    endif

namespace dflash2 {

namespace {

constexpr int TILE = 16;

// how many bytes ahead to ask for weights
constexpr size_t PREFETCH_TILE = 4096;

inline __m512i load(const char * p) {
    return _mm512_loadu_si512(p);
}

// 16 scales in half precision
inline __m512 load_halves(const char * p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

inline __m512i low_nibbles(__m512i bytes) {
    return _mm512_and_si512(bytes, _mm512_set1_epi8(0x0f));
}

inline __m512i high_nibbles(__m512i bytes) {
    return low_nibbles(_mm512_srli_epi16(bytes, 4));
}

inline __m512i broadcast_word(const char * p) {
    int32_t word;
    memcpy(&word, p, sizeof(word));
    return _mm512_set1_epi32(word);
}

// Weights of a type. WORDS: words that share a scale, SIZE: bytes of a packed block of 16 weight rows,
// unpack(): the words of group g as bytes.

template <typename B, bool SIGNED> struct weights_4_bit {
    static constexpr int  WORDS       = 8;
    static constexpr bool is_signed   = SIGNED;
    static constexpr bool is_unpacked = false;

    static void unpack(const char * tile, int g, __m512i * words) {
        DFLASH2_UNROLL
        for (int k = 0; k < WORDS; k += 2) {
            const __m512i bytes = load(tile + (g * WORDS + k) * 32);
            words[k]            = low_nibbles(bytes);
            words[k + 1]        = high_nibbles(bytes);
        }
    }
};

struct weights_q4_0 : weights_4_bit<block_q4_0, true> {
    using rows_block                   = block_q8_0;
    static constexpr size_t SIZE       = TILE * sizeof(block_q4_0);
    static constexpr size_t SCALES     = TILE * QK4_0 / 2;
    static constexpr bool   has_minima = false;

    static void unpack(const char * tile, int g, __m512i * words) {
        weights_4_bit::unpack(tile, g, words);
        DFLASH2_UNROLL
        for (int k = 0; k < WORDS; ++k) {
            words[k] = _mm512_sub_epi8(words[k], _mm512_set1_epi8(8));
        }
    }
};

struct weights_q4_1 : weights_4_bit<block_q4_1, false> {
    using rows_block                   = block_q8_1;
    static constexpr size_t SIZE       = TILE * sizeof(block_q4_1);
    static constexpr size_t SCALES     = TILE * QK4_1 / 2;
    static constexpr bool   has_minima = true;
};

struct weights_q8_0 {
    using rows_block                   = block_q8_0;
    static constexpr int    WORDS       = 8;
    static constexpr bool   is_signed   = true;
    static constexpr bool   is_unpacked = true;
    static constexpr size_t SIZE       = TILE * (sizeof(block_q8_0) + sizeof(int32_t));  // and a sum of its weights
    static constexpr size_t SCALES     = TILE * QK8_0;
    static constexpr bool   has_minima = false;

    static void unpack(const char * tile, int, __m512i * words) {
        DFLASH2_UNROLL
        for (int k = 0; k < WORDS; ++k) {
            words[k] = load(tile + k * 64);
        }
    }
};

struct weights_q4_K : weights_4_bit<block_q4_K, false> {
    using rows_block                   = block_q8_K;
    static constexpr size_t SIZE       = TILE * (sizeof(block_q4_K) + 4);  // 16 scales and minima in 16 bytes, not 12
    static constexpr size_t SCALES     = TILE * QK_K / 2;
    static constexpr bool   has_minima = true;
};

struct weights_q5_K : weights_4_bit<block_q5_K, false> {
    using rows_block                   = block_q8_K;
    static constexpr size_t SIZE       = TILE * (sizeof(block_q5_K) + 4);
    static constexpr size_t FIFTH_BITS = TILE * QK_K / 2;
    static constexpr size_t SCALES     = FIFTH_BITS + TILE * QK_K / 8;
    static constexpr bool   has_minima = true;

    static void unpack(const char * tile, int g, __m512i * words) {
        weights_4_bit::unpack(tile, g, words);
        const __m512i bits = load(tile + FIFTH_BITS + g * 64);  // bit k of each byte is for word k
        DFLASH2_UNROLL
        for (int k = 0; k < WORDS; ++k) {
            const __m512i bit = _mm512_and_si512(bits, _mm512_set1_epi8(char(1 << k)));
            words[k] = _mm512_or_si512(words[k], k < 4 ? _mm512_slli_epi16(bit, 4 - k) : _mm512_srli_epi16(bit, k - 4));
        }
    }
};

struct weights_q6_K {
    using rows_block                   = block_q8_K;
    static constexpr int    WORDS       = 4;
    static constexpr bool   is_signed   = true;
    static constexpr bool   is_unpacked = false;
    static constexpr size_t SIZE       = TILE * sizeof(block_q6_K);
    static constexpr size_t UPPER_BITS = TILE * QK_K / 2;
    static constexpr size_t SCALES     = UPPER_BITS + TILE * QK_K / 4;
    static constexpr bool   has_minima = false;

    static void unpack(const char * tile, int g, __m512i * words) {
        const __m512i bytes_0 = load(tile + g * 128);
        const __m512i bytes_1 = load(tile + g * 128 + 64);
        const __m512i upper   = load(tile + UPPER_BITS + g * 64);  // two bits for each word
        const __m512i mask    = _mm512_set1_epi8(0x30);
        words[0] = _mm512_or_si512(low_nibbles(bytes_0), _mm512_and_si512(_mm512_slli_epi16(upper, 4), mask));
        words[1] = _mm512_or_si512(high_nibbles(bytes_0), _mm512_and_si512(_mm512_slli_epi16(upper, 2), mask));
        words[2] = _mm512_or_si512(low_nibbles(bytes_1), _mm512_and_si512(upper, mask));
        words[3] = _mm512_or_si512(high_nibbles(bytes_1), _mm512_and_si512(_mm512_srli_epi16(upper, 2), mask));
        DFLASH2_UNROLL
        for (int k = 0; k < WORDS; ++k) {
            words[k] = _mm512_sub_epi8(words[k], _mm512_set1_epi8(32));
        }
    }
};

struct weights_iq4_xs : weights_4_bit<block_iq4_xs, true> {
    using rows_block                   = block_q8_K;
    static constexpr size_t SIZE       = TILE * (sizeof(block_iq4_xs) + 2);  // 8 scales in 8 bytes, not 6
    static constexpr size_t SCALES     = TILE * QK_K / 2;
    static constexpr bool   has_minima = false;

    static void unpack(const char * tile, int g, __m512i * words) {
        // kvalues_iq4nl of upstream
        const __m512i values = _mm512_broadcast_i32x4(
            _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113));
        weights_4_bit::unpack(tile, g, words);
        DFLASH2_UNROLL
        for (int k = 0; k < WORDS; ++k) {
            words[k] = _mm512_shuffle_epi8(values, words[k]);
        }
    }
};

// The tiles of a product of N rows with one group of weights of 16 rows, in 3 of the 8 tile registers: sums, rows
// and weights. There are two such sets, so that one can be loaded while the other is multiplied.

struct alignas(64) tile_config {
    uint8_t  palette     = 1;
    uint8_t  reserved[15] = {};
    uint16_t row_bytes[16] = {};
    uint8_t  rows[16]      = {};

    tile_config(int n_rows, int words) {
        for (int first : { 0, 3 }) {
            rows[first]          = uint8_t(n_rows);
            row_bytes[first]     = TILE * sizeof(int32_t);
            rows[first + 1]      = uint8_t(n_rows);
            row_bytes[first + 1] = uint16_t(4 * words);
            rows[first + 2]      = uint8_t(words);
            row_bytes[first + 2] = 64;
        }
    }
};

// compilers know too little of what the tile intrinsics read and write
inline void keep_order() {
#    ifdef __GNUC__
    __asm__ volatile("" ::: "memory");
#    endif
}

// A configuration for the life of an object. Upstream sets its own once in a thread, and relies on it from then on.
class configured {
  public:
    explicit configured(const tile_config & config) {
        _tile_storeconfig(before);
        keep_order();
        _tile_loadconfig(&config);
        keep_order();
    }

    ~configured() {
        keep_order();
        _tile_loadconfig(before);
    }

    configured(const configured &)             = delete;
    configured & operator=(const configured &) = delete;

  private:
    alignas(64) char before[64];
};

template <typename W> constexpr bool is_blocks_of_256() {
    return sizeof(typename W::rows_block) == sizeof(block_q8_K);
}

// At a group of weights of 16 rows, and at what it is multiplied with.
template <typename W, int N> struct cursor {
    static constexpr int    n_groups  = is_blocks_of_256<W>() ? QK_K / (4 * W::WORDS) : 1;  // in a block
    static constexpr int    block_len = 4 * W::WORDS * n_groups;
    static constexpr size_t rows_size = N * sizeof(typename W::rows_block);
    static constexpr size_t values_at = rows_size - N * block_len;

    const char * tile_rows;
    int64_t      n_blocks;
    const char * weights;  // of the block
    const char * rows;     // of the block
    int64_t      ib = 0;
    int          g  = 0;

    explicit cursor(const narrow_tile & tile)
        : tile_rows(tile.rows), n_blocks(tile.n_blocks), weights(tile.weights), rows(tile.rows) {}

    const char * values() const { return rows + values_at + g * 4 * W::WORDS; }

    bool is_end_of_block() const { return g == n_groups - 1; }

    bool is_end_of_rows() const { return ib == n_blocks - 1 && is_end_of_block(); }

    void next() {
        if (++g < n_groups) {
            return;
        }
        g = 0;
        weights += W::SIZE;  // the next 16 rows follow
        rows += rows_size;
        if (++ib == n_blocks) {
            ib   = 0;
            rows = tile_rows;
        }
    }
};

// Asks for weights to come, which the hardware does too late.
template <typename W, int N> inline void prefetch(const cursor<W, N> & at) {
    constexpr size_t part = W::SIZE / at.n_groups;
    DFLASH2_UNROLL
    for (size_t line = 0; line < part; line += 64) {
        _mm_prefetch(at.weights + at.g * part + PREFETCH_TILE + line, _MM_HINT_T0);
    }
}

template <typename W, int N> inline void unpack(const cursor<W, N> & at, char * words) {
    __m512i unpacked[W::WORDS];
    W::unpack(at.weights, at.g, unpacked);
    DFLASH2_UNROLL
    for (int k = 0; k < W::WORDS; ++k) {
        _mm512_store_si512(words + k * 64, unpacked[k]);
    }
}

// two macros, because intrinsics want the numbers of tiles as constants
#    define DFLASH2_MULTIPLY_TILES(sums, rows, weights, is_signed, rows_at, rows_stride, weights_at, sums_at) \
        do {                                                                                                  \
            _tile_zero(sums);                                                                                 \
            _tile_loadd(rows, rows_at, rows_stride);                                                          \
            _tile_loadd(weights, weights_at, 64);                                                             \
            if (is_signed) {                                                                                  \
                _tile_dpbssd(sums, rows, weights);                                                            \
            } else {                                                                                          \
                _tile_dpbsud(sums, rows, weights);                                                            \
            }                                                                                                 \
            _tile_stored(sums, sums_at, TILE * sizeof(int32_t));                                              \
        } while (0)

// the integer products of N rows with a group
template <typename W, int N>
inline void multiply(const cursor<W, N> & at, bool second_set, const char * words, int32_t * sums) {
    const char * weights_at = W::is_unpacked ? at.weights : words;
    if (second_set) {
        DFLASH2_MULTIPLY_TILES(3, 4, 5, W::is_signed, at.values(), at.block_len, weights_at, sums);
    } else {
        DFLASH2_MULTIPLY_TILES(0, 1, 2, W::is_signed, at.values(), at.block_len, weights_at, sums);
    }
}

#    undef DFLASH2_MULTIPLY_TILES

// Results of N rows with 16 rows of weights, in upstream's order of operations.
template <typename W, int N> struct results {
    __m512  total[N];
    __m512i block[N];  // scaled sums of the groups of a block so far

    void clear() {
        DFLASH2_UNROLL
        for (int n = 0; n < N; ++n) {
            total[n] = _mm512_setzero_ps();
            block[n] = _mm512_setzero_si512();
        }
    }

    static __m512i sum(const int32_t * sums, int n) { return _mm512_load_si512(sums + n * TILE); }

    // the products with a block of 32
    void add_32(const cursor<W, N> & at, const int32_t * sums) {
        const __m512 d = load_halves(at.weights + W::SCALES);
        const __m512 m = W::has_minima ? load_halves(at.weights + W::SCALES + TILE * sizeof(ggml_half)) : d;

        // one conversion for the scales of 16 rows; it may read over their end, into what is still this block
        alignas(64) float rows_d[16];
        alignas(64) float rows_s[16];
        _mm512_store_ps(rows_d, load_halves(at.rows));
        keep_in_memory(rows_d);
        if (W::has_minima) {
            _mm512_store_ps(rows_s, load_halves(at.rows + N * sizeof(ggml_half)));
            keep_in_memory(rows_s);
        }
        DFLASH2_UNROLL
        for (int n = 0; n < N; ++n) {
            const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(rows_d[n]));
            total[n]           = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum(sums, n)), scale, total[n]);
            if (W::has_minima) {
                total[n] = _mm512_fmadd_ps(m, _mm512_set1_ps(rows_s[n]), total[n]);
            }
        }
    }

    // the products with a group of a block of 256
    void add_256(const cursor<W, N> & at, const int32_t * sums) {
        constexpr size_t minima_at = W::SCALES + TILE * at.n_groups;
        constexpr size_t d_at      = minima_at + (W::has_minima ? TILE * at.n_groups : 0);

        const auto *  scales = reinterpret_cast<const __m128i *>(at.weights + W::SCALES + at.g * TILE);
        const __m512i scale  = _mm512_cvtepi8_epi32(_mm_loadu_si128(scales));
        DFLASH2_UNROLL
        for (int n = 0; n < N; ++n) {
            block[n] = _mm512_add_epi32(block[n], _mm512_mullo_epi32(sum(sums, n), scale));
        }
        if (!at.is_end_of_block()) {
            return;
        }
        const __m512 d = load_halves(at.weights + d_at);
        DFLASH2_UNROLL
        for (int n = 0; n < N; ++n) {
            const __m512 product = _mm512_mul_ps(d, row_scale(at, n));
            total[n]             = _mm512_fmadd_ps(_mm512_cvtepi32_ps(block[n]), product, total[n]);
            block[n]             = _mm512_setzero_si512();
        }
        if (W::has_minima) {
            subtract_minima(at, at.weights + minima_at, load_halves(at.weights + d_at + TILE * sizeof(ggml_half)));
        }
    }

    static __m512 row_scale(const cursor<W, N> & at, int n) {
        return _mm512_castsi512_ps(broadcast_word(at.rows + n * sizeof(float)));
    }

    void subtract_minima(const cursor<W, N> & at, const char * minima, __m512 d) {
        __m512i pairs[4];
        DFLASH2_UNROLL
        for (int k = 0; k < 4; ++k) {
            pairs[k] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(minima + k * 32)));
        }
        DFLASH2_UNROLL
        for (int n = 0; n < N; ++n) {
            __m512i dot = _mm512_setzero_si512();
            DFLASH2_UNROLL
            for (int k = 0; k < 4; ++k) {
                dot = _mm512_dpwssd_epi32(dot, broadcast_word(at.rows + N * sizeof(float) + (k * N + n) * 4), pairs[k]);
            }
            total[n] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(d, row_scale(at, n)), total[n]);
        }
    }

    void store(float * dst, size_t stride) const {
        DFLASH2_UNROLL
        for (int n = 0; n < N; ++n) {
            _mm512_storeu_ps(dst + n * stride, total[n]);
        }
    }
};

// Three stages work on groups that are LAG apart, because each waits long for what the one before has stored.
template <typename W, int N> void kernel(const narrow_tile & tile) {
    constexpr int LAG  = 3;
    constexpr int RING = 8;
    static_assert(RING > 2 * LAG, "a group is kept until it is added");

    alignas(64) char    words[RING][W::WORDS * 64];
    alignas(64) int32_t sums[RING][N * TILE];
    const configured    tiles(tile_config(N, W::WORDS));

    cursor<W, N>  unpacked(tile);
    cursor<W, N>  multiplied(tile);
    cursor<W, N>  added(tile);
    float *       dst = tile.dst;
    results<W, N> result;
    result.clear();

    const int64_t n_steps = tile.n_weights / TILE * tile.n_blocks * unpacked.n_groups;
    for (int64_t step = 0; step < n_steps + 2 * LAG; ++step) {
        if (step < n_steps) {
            prefetch(unpacked);
            if (!W::is_unpacked) {
                unpack(unpacked, words[step % RING]);
            }
            unpacked.next();
        }
        keep_order();
        if (step >= LAG && step < n_steps + LAG) {
            const int64_t i = step - LAG;
            multiply(multiplied, i % 2 != 0, words[i % RING], sums[i % RING]);
            multiplied.next();
        }
        keep_order();
        if (step >= 2 * LAG) {
            const int32_t * done = sums[(step - 2 * LAG) % RING];
            if constexpr (is_blocks_of_256<W>()) {
                result.add_256(added, done);
            } else {
                result.add_32(added, done);
            }
            if (added.is_end_of_rows()) {
                result.store(dst, tile.dst_stride);
                result.clear();
                dst += TILE;
            }
            added.next();
        }
    }
}

template <typename W> constexpr narrow_pack make_pack() {
    if constexpr (is_blocks_of_256<W>()) {
        return W::has_minima ? pack_256_sums_of_32 : pack_256<0>;
    } else {
        return pack_32<typename W::rows_block, 0>;
    }
}

// enough weight rows for a configuration of the tiles to cost nothing
constexpr int N_WEIGHTS = 4 * TILE;

template <typename W> constexpr narrow_type make_type(int rows_min, int rows_max) {
    return {
        make_pack<W>(),
        { nullptr, kernel<W, 1>, kernel<W, 2>, kernel<W, 3>, kernel<W, 4>, kernel<W, 5>, kernel<W, 6>,
                   kernel<W, 7>, kernel<W, 8>, kernel<W, 9>, kernel<W, 10>, kernel<W, 11>, kernel<W, 12>,
                   kernel<W, 13>, kernel<W, 14>, kernel<W, 15>, kernel<W, 16> },
        NARROW_GROUP_MAX,
        rows_min,
        rows_max,
        N_WEIGHTS,
        W::SIZE / TILE,
    };
}

constexpr narrow_type TYPE_Q4_0   = make_type<weights_q4_0>(2, 512);
constexpr narrow_type TYPE_Q4_1   = make_type<weights_q4_1>(2, 512);
constexpr narrow_type TYPE_Q8_0   = make_type<weights_q8_0>(2, 512);
constexpr narrow_type TYPE_Q4_K   = make_type<weights_q4_K>(2, 512);
constexpr narrow_type TYPE_Q5_K   = make_type<weights_q5_K>(1, 512);
constexpr narrow_type TYPE_Q6_K   = make_type<weights_q6_K>(2, 512);
constexpr narrow_type TYPE_IQ4_XS = make_type<weights_iq4_xs>(1, 512);

}  // namespace

const narrow_type * narrow_type_amx(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0:
            return &TYPE_Q4_0;
        case GGML_TYPE_Q4_1:
            return &TYPE_Q4_1;
        case GGML_TYPE_Q8_0:
            return &TYPE_Q8_0;
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

const dflash2::narrow_type * dflash2::narrow_type_amx(ggml_type) {
    return nullptr;
}

#endif
