// Exact mode: by how much rounding can move a logit.

#pragma once

#include "target.h"

#include <array>
#include <cstddef>

// Differences seen between evaluations of one row, alone and among others. More rows take other kernels, so they are
// kept by how many rows there were.
class dflash2_noise {
  public:
    explicit dflash2_noise(double at_least = 0.0) : at_least_(at_least) {}

    // [n] logits of a row, alone and where up to n_rows were evaluated together
    void observe(int32_t n_rows, const float * alone, const float * among, size_t n);

    double largest() const;

    // What a logit may be off by after up to n_rows at once: several times the largest difference seen, because not every
    // row was looked at, and at least what float arithmetic leaves in numbers of this size.
    double bound(int32_t n_rows) const;

  private:
    double                 at_least_;
    double                 magnitude_ = 0.0;  // of the logits
    std::array<double, 16> largest_   = {};   // [log2 of the rows]
};

// Evaluates a few arbitrary tokens as plain decoding does, then in blocks of up to n_draft_max + 1 and in up to n_seq_max
// sequences together, and adds what it sees to noise. All sequences are empty before and after.
void dflash2_measure_noise(dflash2_target & target,
                           int32_t          n_vocab,
                           int32_t          n_seq_max,
                           int32_t          n_draft_max,
                           dflash2_noise &  noise);
