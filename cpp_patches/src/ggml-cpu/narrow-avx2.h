#pragma once

// Vector operations that more than one kernel needs, for AVX2 and, where the compiler may use it, VNNI.

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#    define DFLASH2_NARROW_AVX2
#endif

#ifdef DFLASH2_NARROW_AVX2

#    include <immintrin.h>

#    include <algorithm>
#    include <cstdint>
#    include <cstring>

#    if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#        define DFLASH2_NARROW_VNNI
#        define DFLASH2_DPBUSD _mm256_dpbusd_epi32
#        define DFLASH2_DPWSSD _mm256_dpwssd_epi32
#    elif defined(__AVXVNNI__)
#        define DFLASH2_NARROW_VNNI
#        define DFLASH2_DPBUSD _mm256_dpbusd_avx_epi32
#        define DFLASH2_DPWSSD _mm256_dpwssd_avx_epi32
#    endif

#    ifdef __clang__
#        define DFLASH2_UNROLL _Pragma("clang loop unroll(full)")
#    elif defined(__GNUC__)
#        define DFLASH2_UNROLL _Pragma("GCC unroll 16")
#    else
#        define DFLASH2_UNROLL
#    endif

namespace dflash2 {

// vector registers, which bound how many sums a kernel can keep
#    ifdef __AVX512VL__
constexpr int NARROW_REGISTERS = 32;
#    else
constexpr int NARROW_REGISTERS = 16;
#    endif

// 32 values of 4 bits as bytes: the low halves of the 16 bytes first
inline __m256i unpack_nibbles(const uint8_t * packed) {
    const __m128i low   = _mm_loadu_si128(reinterpret_cast<const __m128i *>(packed));
    const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_srli_epi16(low, 4), 1);
    return _mm256_and_si256(bytes, _mm256_set1_epi8(0x0f));
}

// 32 bits as bytes 0x00 or 0xff
inline __m256i unpack_bits(const uint8_t * packed) {
    uint32_t bits;
    memcpy(&bits, packed, sizeof(bits));
    const __m256i which =
        _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0x0000000000000000);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(int(bits)), which);
    const __m256i rest  = _mm256_or_si256(bytes, _mm256_set1_epi64x(0x7fbfdfeff7fbfdfe));
    return _mm256_cmpeq_epi8(rest, _mm256_set1_epi64x(-1));
}

// sum + what four neighbouring products of bytes add up to
inline __m256i add_dot_u8_i8(__m256i sum, __m256i u, __m256i i) {
#    ifdef DFLASH2_NARROW_VNNI
    return DFLASH2_DPBUSD(sum, u, i);
#    else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, i), _mm256_set1_epi16(1)));
#    endif
}

// sum + what two neighbouring products of 16-bit integers add up to
inline __m256i add_dot_i16(__m256i sum, __m256i a, __m256i b) {
#    ifdef DFLASH2_NARROW_VNNI
    return DFLASH2_DPWSSD(sum, a, b);
#    else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#    endif
}

// The sum of each vector's eight floats, in the order of hsum_float_8 of upstream's quants.c:
// ((x4+x0) + (x6+x2)) + ((x5+x1) + (x7+x3)). Entries from N on are 0.
template <int N> inline __m256 sum_lanes(const __m256 * x) {
    const __m256 zero = _mm256_setzero_ps();
    __m256       half[4];
    DFLASH2_UNROLL
    for (int i = 0; i < 4; ++i) {
        const __m256 a = i < N ? x[i] : zero;
        const __m256 b = i + 4 < N ? x[i + 4] : zero;
        half[i]        = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x31), _mm256_permute2f128_ps(a, b, 0x20));
    }
    __m256 quarter[2];
    DFLASH2_UNROLL
    for (int i = 0; i < 2; ++i) {
        const __m256d a = _mm256_castps_pd(half[2 * i]);
        const __m256d b = _mm256_castps_pd(half[2 * i + 1]);
        quarter[i]      = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                                        _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
    }
    return _mm256_add_ps(_mm256_shuffle_ps(quarter[0], quarter[1], _MM_SHUFFLE(2, 0, 2, 0)),
                         _mm256_shuffle_ps(quarter[0], quarter[1], _MM_SHUFFLE(3, 1, 3, 1)));
}

// `scale` as memory: a scale that is broadcast from there costs no shuffle
inline void keep_in_memory(float * scale) {
#    ifdef __GNUC__
    __asm__("" : "+m"(*reinterpret_cast<float(*)[8]>(scale)));
#    else
    (void) scale;
#    endif
}

// how many bytes ahead to ask for weights
constexpr size_t PREFETCH_AHEAD = 2048;

// entry i goes to dst[i * stride]
template <int N> inline void store_column(float * dst, size_t stride, __m256 column) {
    alignas(32) float values[8];
    _mm256_store_ps(values, column);
    DFLASH2_UNROLL
    for (int i = 0; i < N; ++i) {
        dst[i * stride] = values[i];
    }
}

}  // namespace dflash2

#endif  // DFLASH2_NARROW_AVX2
