#pragma once

// The vector parts of attention.cpp, for AVX2 and AVX-512, in the order of operations of upstream's vec.h.

#include "ggml-cpu-impl.h"

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace dflash2 {

// values of a head, at most
constexpr int LANES_DV_MAX = 1024;

// Does upstream add up heads of so many values in half precision, 128 at a time?
inline bool lanes_is_half_arithmetic(int64_t n_out) {
#ifdef __AVX512FP16__
    return n_out >= 128;
#else
    (void) n_out;
    return false;
#endif
}

#ifdef __AVX512F__

// ggml_vec_dot_f16 sums in 4 vectors of 16, GGML_F16_DOT_STEP
constexpr int LANES      = 16;
constexpr int LANES_STEP = 64;

using lanes = __m512;

inline lanes lanes_zero() {
    return _mm512_setzero_ps();
}

inline lanes lanes_load(const float * p) {
    return _mm512_loadu_ps(p);
}

inline lanes lanes_load_half(const void * p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
}

inline void lanes_store(float * p, lanes x) {
    _mm512_storeu_ps(p, x);
}

inline __m256i lanes_to_half(lanes x) {
    return _mm512_cvtps_ph(x, 0);
}

inline lanes lanes_from_half(__m256i x) {
    return _mm512_cvtph_ps(x);
}

inline void lanes_store_half(void * p, __m256i x) {
    _mm256_storeu_si256(static_cast<__m256i *>(p), x);
}

inline lanes lanes_set(float x) {
    return _mm512_set1_ps(x);
}

inline lanes lanes_mul(lanes a, lanes b) {
    return _mm512_mul_ps(a, b);
}

inline lanes lanes_add(lanes a, lanes b) {
    return _mm512_add_ps(a, b);
}

inline lanes lanes_fma(lanes a, lanes b, lanes c) {
    return _mm512_fmadd_ps(a, b, c);
}

// Entry i is the sum of x[i] in the order of _mm512_reduce_add_ps: lanes 8 apart, then 4, 2 and 1.
inline lanes lanes_sums(const lanes * x) {
    __m512 a[8];
    for (int i = 0; i < 8; ++i) {
        // 8 sums of x[i], then of x[i + 8]
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee));
    }
    __m512 b[4];
    for (int i = 0; i < 4; ++i) {
        // 4 sums each of x[i], x[i + 8], x[i + 4], x[i + 12]
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
    }
    __m512 c[2];
    for (int i = 0; i < 2; ++i) {
        // in each quarter 2 sums of b[i], then of b[i + 2]
        c[i] = _mm512_add_ps(_mm512_shuffle_ps(b[i], b[i + 2], 0x44), _mm512_shuffle_ps(b[i], b[i + 2], 0xee));
    }
    // in each quarter the sum of c[0], c[0]'s second, c[1], c[1]'s second
    const __m512 d = _mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
    // quarters are x[0], x[8], x[4], x[12] and so on; entries of a quarter 0, 2, 1, 3 further
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return _mm512_permutexvar_ps(order, d);
}

#else

constexpr int LANES      = 8;
constexpr int LANES_STEP = 32;

using lanes = __m256;

inline lanes lanes_zero() {
    return _mm256_setzero_ps();
}

inline lanes lanes_load(const float * p) {
    return _mm256_loadu_ps(p);
}

inline lanes lanes_load_half(const void * p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i *>(p)));
}

inline void lanes_store(float * p, lanes x) {
    _mm256_storeu_ps(p, x);
}

inline __m128i lanes_to_half(lanes x) {
    return _mm256_cvtps_ph(x, 0);
}

inline lanes lanes_from_half(__m128i x) {
    return _mm256_cvtph_ps(x);
}

inline void lanes_store_half(void * p, __m128i x) {
    _mm_storeu_si128(static_cast<__m128i *>(p), x);
}

inline lanes lanes_set(float x) {
    return _mm256_set1_ps(x);
}

inline lanes lanes_mul(lanes a, lanes b) {
    return _mm256_mul_ps(a, b);
}

inline lanes lanes_add(lanes a, lanes b) {
    return _mm256_add_ps(a, b);
}

inline lanes lanes_fma(lanes a, lanes b, lanes c) {
    return _mm256_fmadd_ps(a, b, c);
}

// Entry i is the sum of x[i] in the order of GGML_F32x8_REDUCE: the halves, then neighbours, then their sums.
inline lanes lanes_sums(const lanes * x) {
    __m256 a[4];
    for (int i = 0; i < 4; ++i) {
        // 4 sums of x[i], then of x[i + 4]
        a[i] = _mm256_add_ps(_mm256_permute2f128_ps(x[i], x[i + 4], 0x20),
                             _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    }
    return _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
}

#endif

// what ggml_vec_dot_f16 adds up at last
inline lanes lanes_dot(const lanes (&sum)[4]) {
    return lanes_add(lanes_add(sum[0], sum[2]), lanes_add(sum[1], sum[3]));
}

// Products of n queries with n_keys <= 16 keys; scores: 16 of each query. n_in is a multiple of LANES_STEP.
inline void score(const float * queries, int n, const char * keys, size_t stride, int n_keys, int64_t n_in,
                  float * converted, float * scores) {
    for (int t = 0; t < n_keys; ++t) {
        for (int64_t d = 0; d < n_in; d += LANES) {
            lanes_store(converted + t * n_in + d, lanes_load_half(keys + t * stride + d * sizeof(ggml_fp16_t)));
        }
    }
    for (int j = 0; j < n; ++j) {
        lanes part[16];
        for (int t = 0; t < n_keys; ++t) {
            const float * key    = converted + t * n_in;
            const float * query  = queries + j * n_in;
            lanes         sum[4] = { lanes_zero(), lanes_zero(), lanes_zero(), lanes_zero() };
            for (int64_t d = 0; d < n_in; d += LANES_STEP) {
                for (int i = 0; i < 4; ++i) {
                    sum[i] = lanes_fma(lanes_load(key + d + i * LANES), lanes_load(query + d + i * LANES), sum[i]);
                }
            }
            part[t] = lanes_dot(sum);
        }
        for (int t = n_keys; t < 16; ++t) {
            part[t] = lanes_zero();
        }
        for (int t = 0; t < 16; t += LANES) {
            lanes_store(scores + j * 16 + t, lanes_sums(part + t));
        }
    }
}

inline void load_values(const char * values, size_t stride, int n_values, int64_t n_out, float * converted) {
    for (int t = 0; t < n_values; ++t) {
        for (int64_t d = 0; d < n_out; d += LANES) {
            lanes_store(converted + t * n_out + d, lanes_load_half(values + t * stride + d * sizeof(ggml_fp16_t)));
        }
    }
}

// totals += weight x value for n values, each sum rounded to half precision as ggml_vec_mad_f16 and
// ggml_vec_scale_f16 do it.
inline void add_values(int n, const int * cell, const float * weight, const float * rescale, const float * values,
                       int64_t n_out, ggml_fp16_t * totals) {
    for (int64_t d = 0; d < n_out; d += LANES_STEP) {
        lanes total[4];
        for (int i = 0; i < 4; ++i) {
            total[i] = lanes_load_half(totals + d + i * LANES);
        }
        for (int t = 0; t < n; ++t) {
            if (rescale[t] != 1.0f) {
                for (int i = 0; i < 4; ++i) {
                    total[i] = lanes_from_half(lanes_to_half(lanes_mul(total[i], lanes_set(rescale[t]))));
                }
            }
            const float * value = values + cell[t] * n_out + d;
            for (int i = 0; i < 4; ++i) {
                const lanes sum = lanes_add(lanes_mul(lanes_load(value + i * LANES), lanes_set(weight[t])), total[i]);
                total[i]        = lanes_from_half(lanes_to_half(sum));
            }
        }
        for (int i = 0; i < 4; ++i) {
            lanes_store_half(totals + d + i * LANES, lanes_to_half(total[i]));
        }
    }
}

}  // namespace dflash2
