// Randomness as a function of (seed, position, purpose, token), so that a draw does not depend on how many draws
// came before it: a sequence draws the same noise with and without a drafter, alone and among others.

#pragma once

#include <cmath>
#include <cstdint>

// what a number is drawn for; different purposes are independent
enum class dflash2_purpose : uint64_t {
    TARGET = 1,  // the target's own token
    DRAFT  = 2,  // the drafted token, where it must be independent of the target's
    ACCEPT = 3,  // keep the drafted token?
    XTC    = 4,  // seed of the XTC sampler's coin
};

// finalizer of splitmix64 (Steele, Lea, Flood 2014)
inline uint64_t dflash2_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// key of a position and purpose; combine with a token by dflash2_uniform()
inline uint64_t dflash2_key(uint32_t seed, int32_t pos, dflash2_purpose purpose) {
    return dflash2_mix(dflash2_mix((uint64_t) seed << 32 | (uint32_t) pos) ^ (uint64_t) purpose);
}

// uniform in (0, 1), both ends excluded
inline double dflash2_uniform(uint64_t key, int32_t token = -1) {
    const uint64_t bits = dflash2_mix(key ^ dflash2_mix((uint64_t) (uint32_t) token)) >> 11;
    return ((double) bits + 0.5) * 0x1.0p-53;
}

// standard Gumbel noise: argmax(log p + noise) is a draw from p
inline double dflash2_gumbel(uint64_t key, int32_t token) {
    return -std::log(-std::log(dflash2_uniform(key, token)));
}
