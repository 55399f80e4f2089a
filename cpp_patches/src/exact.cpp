#include "exact.h"

#include "random.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <vector>

static constexpr double  SAFETY     = 4.0;
static constexpr double  FLOAT_ULPS = 16.0;
static constexpr int32_t N_HEAD     = 16;  // tokens read as a prompt
static constexpr int32_t N_TAIL     = 16;  // tokens decoded

// 2 rows, 3 or 4, 5 to 8, ...
static size_t bucket(int32_t n_rows, size_t n_buckets) {
    size_t b = 0;
    while (b + 1 < n_buckets && (2 << b) < n_rows) {
        ++b;
    }
    return b;
}

void dflash2_noise::observe(int32_t n_rows, const float * alone, const float * among, size_t n) {
    double & largest = largest_[bucket(n_rows, largest_.size())];
    for (size_t i = 0; i < n; ++i) {
        if (std::isfinite(alone[i]) && std::isfinite(among[i])) {
            largest    = std::max(largest, (double) std::fabs(alone[i] - among[i]));
            magnitude_ = std::max(magnitude_, (double) std::fabs(alone[i]));
        }
    }
}

double dflash2_noise::largest() const {
    return *std::max_element(largest_.begin(), largest_.end());
}

double dflash2_noise::bound(int32_t n_rows) const {
    const auto   end  = largest_.begin() + bucket(n_rows, largest_.size()) + 1;
    const double seen = *std::max_element(largest_.begin(), end);
    return std::max({ at_least_, SAFETY * seen, FLOAT_ULPS * FLT_EPSILON * magnitude_ });
}

using on_row = std::function<void(int32_t i, const float * logits)>;

// Rows begin..end of the sequences first..first + n_seqs in one batch; reports those of sequence 0 that are decoded.
static void evaluate(dflash2_target &                 target,
                     const std::vector<llama_token> & tokens,
                     llama_seq_id                     first,
                     int32_t                          n_seqs,
                     int32_t                          begin,
                     int32_t                          end,
                     const on_row &                   report) {
    target.clear_batch();
    for (llama_seq_id s = first; s < first + n_seqs; ++s) {
        for (int32_t i = begin; i < end; ++i) {
            target.add(s, tokens[i], i, report != nullptr);
        }
    }
    target.evaluate();
    for (int32_t i = begin; i < end && report; ++i) {
        report(i, target.logits(i - begin));
    }
}

// Every prompt alone, the rest in blocks whose width next() names.
static void decode(dflash2_target &                 target,
                   const std::vector<llama_token> & tokens,
                   int32_t                          n_seqs,
                   const std::function<int32_t()> & next,
                   const on_row &                   report) {
    const int32_t n_tokens = (int32_t) tokens.size();
    const int32_t n_head   = std::min(N_HEAD, n_tokens);
    for (llama_seq_id s = 0; s < n_seqs; ++s) {
        evaluate(target, tokens, s, 1, 0, n_head, nullptr);
    }
    for (int32_t i = n_head; i < n_tokens;) {
        const int32_t n = std::min(next(), n_tokens - i);
        evaluate(target, tokens, 0, n_seqs, i, i + n, report);
        i += n;
    }
    for (llama_seq_id s = 0; s < n_seqs; ++s) {
        target.truncate(s, 0);
    }
}

void dflash2_measure_noise(dflash2_target & target,
                           int32_t          n_vocab,
                           int32_t          n_seq_max,
                           int32_t          n_draft_max,
                           dflash2_noise &  noise) {
    std::vector<llama_token> tokens;
    for (int32_t i = 0; i < std::min(N_HEAD + N_TAIL, target.n_ctx()); ++i) {
        tokens.push_back((llama_token) (dflash2_mix((uint64_t) i) % (uint64_t) n_vocab));
    }
    std::vector<std::vector<float>> alone(tokens.size());
    decode(
        target, tokens, 1, [] { return 1; },
        [&](int32_t i, const float * logits) { alone[i].assign(logits, logits + n_vocab); });

    // blocks of 2, 3, ... rows, again from 2; a pass for every size of company
    for (int32_t n_seqs = 1; n_seqs <= n_seq_max; n_seqs *= 2) {
        int32_t width = 1;
        decode(
            target, tokens, n_seqs,
            [&] {
                width = width > n_draft_max ? std::min(2, n_draft_max + 1) : width + 1;
                return width;
            },
            [&](int32_t i, const float * logits) {
                noise.observe(n_seqs * width, alone[i].data(), logits, (size_t) n_vocab);
            });
    }
}
