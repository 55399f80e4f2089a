#include "width.h"

#include <algorithm>
#include <cmath>
#include <limits>

static constexpr double NOT_KNOWN = std::numeric_limits<double>::quiet_NaN();

// an estimate forgets with this many observations; clipping keeps one page fault or preemption from counting as cost
static constexpr double  COST_MEMORY    = 16.0;
static constexpr double  COST_CLIP      = 2.0;
static constexpr double  CHANCE_MEMORY  = 200.0;  // observations per bin
static constexpr double  CHANCE_PRIOR   = 4.0;
static constexpr double  RATE_MEMORY    = 96.0;   // drafting rounds
static constexpr double  RATE_DOUBT     = 1.0;    // standard errors by which a rate must miss before drafting stops
static constexpr int64_t PROVEN_ROUNDS  = 64;     // of drafting that pays, after which a stop is a new event
static constexpr int32_t EXPLORE_ROUNDS = 3;
static constexpr int32_t PROBE_ROUNDS   = 4;
static constexpr int32_t PROBE_FIRST    = 64;    // plain steps until the first probe; doubles up to the last
static constexpr int32_t PROBE_LAST     = 2048;
static constexpr double  PROBE_SHARE    = 0.01;  // of the time, for finding out again that drafting does not pay;
                                                 // less by the square of how far it was from paying
static constexpr double  PROBE_LONGEST  = 65536.0;  // plain steps, also when a pause of the machine looked like a cost
static constexpr int32_t PROBE_HOPELESS = 2;     // rounds of a probe after which it may end early,
static constexpr double  HOPELESS       = 0.6;   // below this part of the plain rate
static constexpr int32_t REFRESH_EVERY  = 48;    // drafting rounds

//
// costs
//

void dflash2_costs::estimate::observe(double value) {
    if (count > 0.0) {
        value = std::min(value, COST_CLIP * us);
    }
    count = std::min(count + 1.0, COST_MEMORY);
    us += (value - us) / count;
}

dflash2_costs::dflash2_costs(int32_t n_rows_max) : n_rows_max_(n_rows_max) {
    for (auto & row : target_) {
        row.resize(n_rows_max + 1);
    }
    draft_.resize(n_rows_max + 1);
}

int32_t dflash2_costs::bucket(int32_t n_past) {
    int32_t b = 0;
    while (b + 1 < N_BUCKETS && n_past >= (512 << b)) {
        ++b;
    }
    return b;
}

void dflash2_costs::observe_target(int32_t n_past, int32_t n_rows, double us) {
    if (n_rows >= 1 && n_rows <= n_rows_max_) {
        target_[bucket(n_past)][n_rows].observe(us);
    }
}

void dflash2_costs::observe_draft(int32_t n_blocks, double us) {
    if (n_blocks >= 1 && n_blocks <= n_rows_max_) {
        draft_[n_blocks].observe(us);
    }
}

// Of this row count, the measurement at the closest context length.
const dflash2_costs::estimate * dflash2_costs::nearest(int32_t n_past, int32_t n_rows) const {
    const int32_t b = bucket(n_past);
    for (int32_t d = 0; d < N_BUCKETS; ++d) {
        for (const int32_t i : { b - d, b + d }) {
            if (i >= 0 && i < N_BUCKETS && target_[i][n_rows].count > 0.0) {
                return &target_[i][n_rows];
            }
        }
    }
    return nullptr;
}

bool dflash2_costs::knows_target(int32_t n_past, int32_t n_rows) const {
    return n_rows >= 1 && n_rows <= n_rows_max_ && target_[bucket(n_past)][n_rows].count > 0.0;
}

double dflash2_costs::target(int32_t n_past, int32_t n_rows) const {
    n_rows = std::min(n_rows, n_rows_max_);
    if (const estimate * exact = nearest(n_past, n_rows)) {
        return exact->us;
    }
    int32_t lo = n_rows, hi = n_rows;
    while (lo >= 1 && !nearest(n_past, lo)) {
        --lo;
    }
    while (hi <= n_rows_max_ && !nearest(n_past, hi)) {
        ++hi;
    }
    if (lo < 1 || hi > n_rows_max_) {
        return NOT_KNOWN;
    }
    const double a = nearest(n_past, lo)->us;
    const double b = nearest(n_past, hi)->us;
    return a + (b - a) * (n_rows - lo) / (hi - lo);
}

double dflash2_costs::draft(int32_t n_blocks) const {
    return n_blocks >= 1 && n_blocks <= n_rows_max_ && draft_[n_blocks].count > 0.0 ? draft_[n_blocks].us : NOT_KNOWN;
}

//
// calibration
//

static int32_t bin_of(float q, int32_t n_bins) {
    return std::max(0, std::min(n_bins - 1, (int32_t) (q * n_bins)));
}

double dflash2_calibration::chance(float sure) const {
    const bin & b = bins_[bin_of(sure, N_BINS)];
    // before evidence, the drafter's own word
    return (b.kept + CHANCE_PRIOR * sure) / (b.total + CHANCE_PRIOR);
}

double dflash2_calibration::chance() const {
    double kept = 0.5 * CHANCE_PRIOR, total = CHANCE_PRIOR;
    for (const bin & b : bins_) {
        kept += b.kept;
        total += b.total;
    }
    return kept / total;
}

void dflash2_calibration::observe(const std::vector<float> & sure, int32_t n_verified, int32_t n_accepted) {
    // only tokens whose predecessors were all kept say something
    for (int32_t i = 0; i < std::min(n_verified, n_accepted + 1); ++i) {
        bin & b = bins_[bin_of(sure[i], N_BINS)];
        if (b.total >= CHANCE_MEMORY) {
            b.kept *= 0.5;
            b.total *= 0.5;
        }
        b.total += 1.0;
        b.kept += i < n_accepted;
    }
}

//
// width
//

double dflash2_width::drafting_rate() const {
    return us_ > 0.0 ? tokens_ / us_ : 0.0;
}

// standard error of the mean of tokens per round, relative to it
double dflash2_width::relative_error() const {
    if (weight_ <= 1.0) {
        return 1.0;
    }
    const double mean     = tokens_ / weight_;
    const double variance = std::max(0.0, squares_ / weight_ - mean * mean);
    return std::sqrt(variance / (weight_ - 1.0)) / mean;
}

int32_t dflash2_width::plan(const dflash2_costs & costs, int32_t n_past, int32_t n_seqs) {
    if (n_draft_max_ <= 0) {
        reason_ = DFLASH2_WIDTH_PLAIN;
        return 0;
    }
    // a plain step and a few rounds, before anything can be compared
    if (!costs.knows_target(n_past, n_seqs)) {
        reason_ = DFLASH2_WIDTH_REFRESHES;
        return 0;
    }
    if (n_explored_ < EXPLORE_ROUNDS) {
        ++n_explored_;
        reason_ = DFLASH2_WIDTH_EXPLORES;
        return n_draft_max_;
    }
    if (drafting_) {
        return plan_drafting(n_seqs, costs.target(n_past, n_seqs));
    }
    if (--until_probe_ > 0) {
        reason_ = DFLASH2_WIDTH_PLAIN;
        return 0;
    }
    // what was learned of earlier text says little of this one: the probe is judged alone
    tokens_ = squares_ = us_ = weight_ = 0.0;
    n_rounds_                          = 0;
    drafting_                          = true;
    probe_rounds_                      = PROBE_ROUNDS - 1;
    reason_                            = DFLASH2_WIDTH_PROBES;
    return n_draft_max_;
}

// Drafting stops. The dearer it was to see that it does not pay, and the further it is from paying, the longer until it
// is tried again.
void dflash2_width::stop_drafting(int32_t n_seqs, double plain_us) {
    const double lost_us  = us_ - tokens_ * plain_us / n_seqs;
    const double nearness = std::min(1.0, drafting_rate() * plain_us / n_seqs);
    const double share    = PROBE_SHARE * nearness * nearness;
    drafting_             = false;
    probe_rounds_         = 0;
    probe_every_          = std::min(std::max(PROBE_FIRST, 2 * probe_every_), PROBE_LAST);
    until_probe_          = std::max(probe_every_, (int32_t) std::min(lost_us / (share * plain_us), PROBE_LONGEST));
    reason_               = DFLASH2_WIDTH_PLAIN;
}

int32_t dflash2_width::plan_drafting(int32_t n_seqs, double plain_us) {
    const double plain_rate = n_seqs / plain_us;
    if (probe_rounds_ > 0) {
        if (n_rounds_ >= PROBE_HOPELESS && drafting_rate() < HOPELESS * plain_rate) {
            stop_drafting(n_seqs, plain_us);
            return 0;
        }
        --probe_rounds_;
        reason_ = DFLASH2_WIDTH_PROBES;
        return n_draft_max_;
    }
    if (drafting_rate() * (1.0 + RATE_DOUBT * relative_error()) < plain_rate) {
        stop_drafting(n_seqs, plain_us);
        return 0;
    }
    if (++until_refresh_ >= REFRESH_EVERY) {
        until_refresh_ = 0;
        reason_        = DFLASH2_WIDTH_REFRESHES;
        return 0;
    }
    if (n_rounds_ >= PROVEN_ROUNDS) {
        probe_every_ = 0;
    }
    reason_ = DFLASH2_WIDTH_DRAFTS;
    return n_draft_max_;
}

int32_t dflash2_width::choose(const dflash2_costs &       costs,
                              const dflash2_calibration & calibration,
                              int32_t                     n_past,
                              int32_t                     n_rows_other,
                              const std::vector<float> &  sure) const {
    const int32_t n = std::min(n_draft_max_, (int32_t) sure.size());
    if (n <= 0) {
        return 0;
    }
    if (reason_ == DFLASH2_WIDTH_EXPLORES) {
        // n, n/2, 1, n, ...: enough points of the cost line to interpolate
        const int32_t widths[3] = { n, std::max(1, n / 2), 1 };
        return widths[(n_explored_ - 1) % 3];
    }

    // The draft is paid for. A wider verification is worth its time while it yields more than that time yields elsewhere.
    const double plain_rate = (n_rows_other + 1) / costs.target(n_past, n_rows_other + 1);
    const double rate       = std::max(plain_rate, drafting_rate());
    const auto   price      = [&](int32_t width) {
        return rate * costs.target(n_past, n_rows_other + 1 + width);
    };
    const double typical = calibration.chance();

    double chain = 1.0;  // of all positions so far being kept
    for (int32_t i = 0; i < n; ++i) {
        // the best that going on from here can come to, the positions after i being typical ones
        double       gain = 0.0, best = -INFINITY;
        double       ahead = chain * calibration.chance(sure[i]);
        const double here  = ahead;
        for (int32_t width = i + 1; width <= n; ++width) {
            gain += ahead;
            best = std::max(best, gain - price(width));
            ahead *= typical;
        }
        if (best <= -price(i)) {
            return i;
        }
        chain = here;
    }
    return n;
}

void dflash2_width::observe(int32_t n_tokens, double us) {
    if (reason_ == DFLASH2_WIDTH_PLAIN || reason_ == DFLASH2_WIDTH_REFRESHES) {
        return;
    }
    const double keep = 1.0 - 1.0 / RATE_MEMORY;
    tokens_           = keep * tokens_ + n_tokens;
    squares_          = keep * squares_ + (double) n_tokens * n_tokens;
    us_               = keep * us_ + us;
    weight_           = keep * weight_ + 1.0;
    ++n_rounds_;
}
