// The width controller on simulated machines: never clearly slower than the best fixed width, nor than no drafter.
//
// Cost lines are published ones (MoE over two hosts: 48 ms + 17.6 ms per verified token, 13-26 ms per draft), a
// memory-bound GPU (flat), and a small CPU target (steep). Seeds are fixed, so the outcome is too.

#include "random.h"
#include "width.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

struct machine {
    const char *                          name;
    std::function<double(int32_t n_rows)> target;  // ms
    double                                draft;   // ms
};

struct text {
    const char * name;
    double       sure;  // probability that the drafter is sure of a token
    double       kept_sure;
    double       kept_unsure;
    double       period;  // tokens after which text of the other kind follows; 0 = never
};

static constexpr int32_t N_MAX   = 7;
static constexpr int32_t N_LONG  = 20000;  // tokens of a session that served for a while
static constexpr int32_t N_SHORT = 600;    // and of one that answers two questions
static constexpr int32_t N_SEEDS = 3;

struct outcome {
    double  tokens_per_ms;
    int32_t plain, drafted;
};

// fixed < 0: the controller
static outcome simulate(const machine & m, const text & t, int32_t n_tokens, int32_t fixed, uint32_t seed) {
    dflash2_costs       costs(N_MAX + 1);
    dflash2_width       width(N_MAX);
    dflash2_calibration calibration;
    uint64_t            draws   = 0;
    const auto          uniform = [&] {
        return dflash2_uniform(dflash2_mix((uint64_t) seed << 32 | draws++));
    };

    double  ms     = 0.0;
    outcome result = {};
    for (int32_t produced = 0; produced < n_tokens;) {
        const bool   other = t.period > 0 && (int32_t) (produced / t.period) % 2 == 1;
        const double sure  = other ? 1.0 - t.sure : t.sure;

        const int32_t      n_draft = fixed >= 0 ? fixed : width.plan(costs, produced % 2048, 1);
        std::vector<float> q;
        std::vector<bool>  kept;
        for (int32_t i = 0; i < n_draft; ++i) {
            const bool s = uniform() < sure;
            q.push_back((float) (s ? 0.75 + 0.25 * uniform() : 0.1 + 0.4 * uniform()));
            kept.push_back(uniform() < (s ? t.kept_sure : t.kept_unsure));
        }
        const int32_t n          = fixed >= 0  ? fixed :
                                   n_draft > 0 ? width.choose(costs, calibration, produced % 2048, 0, q) :
                                                 0;
        const int32_t n_accepted = (int32_t) (std::find(kept.begin(), kept.begin() + n, false) - kept.begin());

        // every measurement is off by up to 15 %, and one in 200 is six times too long
        const double noise    = (0.85 + 0.3 * uniform()) * (uniform() < 0.005 ? 6.0 : 1.0);
        const double ms_draft = n_draft > 0 ? m.draft : 0.0;
        const double ms_step  = m.target(n + 1);
        ms += ms_draft + ms_step;

        if (fixed < 0) {
            costs.observe_target(produced % 2048, n + 1, 1000.0 * ms_step * noise);
            if (n_draft > 0) {
                costs.observe_draft(1, 1000.0 * ms_draft * noise);
            }
            calibration.observe(q, n, n_accepted);
            width.observe(1 + n_accepted, 1000.0 * (ms_draft + ms_step) * noise);
        }
        produced += 1 + n_accepted;
        (n_draft > 0 ? result.drafted : result.plain)++;
    }
    result.tokens_per_ms = n_tokens / ms;
    return result;
}

// automatic against no drafting and against every fixed width, on the same draws
static bool compare(const machine & m, const text & t, uint32_t seed) {
    const double plain  = simulate(m, t, N_LONG, 0, seed).tokens_per_ms;
    double       best   = plain;
    int32_t      best_n = 0;
    for (int32_t n = 1; n <= N_MAX; ++n) {
        const double rate = simulate(m, t, N_LONG, n, seed).tokens_per_ms;
        if (rate > best) {
            best   = rate;
            best_n = n;
        }
    }
    const outcome c     = simulate(m, t, N_LONG, -1, seed);
    const double  start = simulate(m, t, N_SHORT, -1, seed).tokens_per_ms / plain;
    const bool    ok    = c.tokens_per_ms >= 0.98 * plain && c.tokens_per_ms >= 0.95 * best && start >= 0.95;
    printf(
        "%-20s %-22s best fixed %d: %.2f x plain, auto: %.3f x plain (%.3f at first), %.3f x best fixed (%d drafted, "
        "%d "
        "plain)  %s\n",
        m.name, t.name, best_n, best / plain, c.tokens_per_ms / plain, start, c.tokens_per_ms / best, c.drafted,
        c.plain, ok ? "ok" : "FAILED");
    return ok;
}

int main() {
    const std::vector<machine> machines = {
        { "MoE over two hosts", [](int32_t r) { return 48.0 + 17.6 * r; },      20.0 },
        { "memory-bound GPU",   [](int32_t r) { return 20.0 + 0.1 * r; },       2.0  },
        { "GPU with a cut-off", [](int32_t r) { return r <= 4 ? 20.0 : 34.0; }, 2.0  },
        { "small CPU target",   [](int32_t r) { return 5.5 + 4.3 * (r - 1); },  7.0  },
        { "two CPU cores",      [](int32_t r) { return 17.5 + 9.6 * (r - 1); }, 28.0 },
        { "CPU, good kernels",  [](int32_t r) { return 5.5 + 0.4 * (r - 1); },  2.0  },
    };
    const std::vector<text> texts = {
        { "code",                 0.85, 0.93, 0.40, 0    },
        { "chat",                 0.50, 0.85, 0.30, 0    },
        { "prose",                0.20, 0.70, 0.20, 0    },
        { "dead drafter",         0.30, 0.01, 0.01, 0    },
        { "code, prose by turns", 0.90, 0.93, 0.25, 1500 },
    };

    int failures = 0;
    for (const auto & m : machines) {
        for (const auto & t : texts) {
            for (uint32_t seed = 1; seed <= N_SEEDS; ++seed) {
                failures += !compare(m, t, seed);
            }
        }
    }
    printf("%s\n", failures == 0 ? "never slower" : "slower somewhere");
    return failures == 0 ? 0 : 1;
}
