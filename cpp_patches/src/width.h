// How many drafted tokens are worth verifying, and whether drafting pays at all.
//
// Learns while running: what a target evaluation of R rows costs (per context length), what a draft pass costs, and
// how often a drafted token is kept given how sure the drafter was of it. From these it picks the width with the best
// expected tokens per second, decodes plainly where no width beats that, and tries again now and then.

#pragma once

#include "dflash2.h"

#include <array>
#include <cstdint>
#include <vector>

// What evaluations cost, in microseconds. Shared by the sequences of a session.
class dflash2_costs {
  public:
    explicit dflash2_costs(int32_t n_rows_max);

    void observe_target(int32_t n_past, int32_t n_rows, double us);
    void observe_draft(int32_t n_blocks, double us);  // draft pass and injection of one round

    // NaN where nothing is known yet; between measured row counts it interpolates
    double target(int32_t n_past, int32_t n_rows) const;
    double draft(int32_t n_blocks) const;

    bool knows_target(int32_t n_past, int32_t n_rows) const;

    // context lengths that share a measurement: 0, 512, 1024, 2048, ... tokens
    static int32_t bucket(int32_t n_past);

  private:
    struct estimate {
        double us    = 0.0;
        double count = 0.0;  // forgets

        void observe(double value);
    };

    static constexpr int32_t N_BUCKETS = 12;

    const estimate * nearest(int32_t n_past, int32_t n_rows) const;

    int32_t                                      n_rows_max_;
    std::array<std::vector<estimate>, N_BUCKETS> target_;  // [bucket][n_rows]
    std::vector<estimate>                        draft_;   // [n_blocks]
};

// How often a drafted token is kept when its predecessors were, by how sure the drafter was there.
class dflash2_calibration {
  public:
    // chance of a token at a position of this confidence, in (0, 1)
    double chance(float sure) const;

    // of a position about which nothing is known
    double chance() const;

    // confidence of the drafted positions, how many of them were verified, and how many kept
    void observe(const std::vector<float> & sure, int32_t n_verified, int32_t n_accepted);

  private:
    static constexpr int32_t N_BINS = 10;

    struct bin {
        double kept  = 0.0;
        double total = 0.0;
    };

    std::array<bin, N_BINS> bins_;
};

// What sequences draft together: one decision per round whether to draft, one width per sequence.
class dflash2_width {
  public:
    explicit dflash2_width(int32_t n_draft_max) : n_draft_max_(n_draft_max) {}

    // Tokens to draft per sequence in a round of n_seqs sequences, 0 = decode plainly. n_past: of the longest.
    int32_t plan(const dflash2_costs & costs, int32_t n_past, int32_t n_seqs);

    // Of a path with this confidence per position (dflash2_path::sure), how many tokens to verify. n_rows_other: rows of
    // other sequences in the same batch, one each where they have not chosen yet.
    //
    // Whether position i is verified depends on the path before i and on the distribution at i, never on the token drawn
    // at i or on anything after it. Rejection sampling needs that: a token kept or dropped because of what it is no
    // longer follows q.
    int32_t choose(const dflash2_costs &       costs,
                   const dflash2_calibration & calibration,
                   int32_t                     n_past,
                   int32_t                     n_rows_other,
                   const std::vector<float> &  sure) const;

    // What the planned round came to: tokens produced by all its sequences, time of draft, injection and target.
    void observe(int32_t n_tokens, double us);

    dflash2_width_reason last_reason() const { return reason_; }

  private:
    int32_t plan_drafting(int32_t n_seqs, double plain_us);
    void    stop_drafting(int32_t n_seqs, double plain_us);
    double  drafting_rate() const;
    double  relative_error() const;

    int32_t              n_draft_max_;
    dflash2_width_reason reason_ = DFLASH2_WIDTH_EXPLORES;

    // recent drafting rounds, forgetting: tokens, their squares, time, and how many rounds
    double tokens_  = 0.0;
    double squares_ = 0.0;
    double us_      = 0.0;
    double weight_  = 0.0;

    int64_t n_rounds_      = 0;  // that they come from
    bool    drafting_      = true;
    int32_t n_explored_    = 0;
    int32_t until_refresh_ = 0;  // drafting rounds until a plain step measures again what that costs
    int32_t until_probe_   = 0;  // plain steps until drafting is tried again
    int32_t probe_rounds_  = 0;  // left of the probe in progress
    int32_t probe_every_   = 0;
};
