// The law of the verifiers: whatever the drafter proposes, the tokens of a step must have the distribution of plain
// decoding. A toy target and a toy drafter give every row; a million steps are compared with the exact law by a
// chi-square test per position. Rules that are wrong on purpose must fail the same test.
//
// usage: test-verifier-law MODEL.gguf   (only its vocabulary is read)
//
// Seeds are fixed, so a run passes always or never. False alarm rate of the whole program under correct rules:
// every single test uses the level 1e-6, and there are fewer than 1000 of them.

#include "dflash2.h"
#include "random.h"
#include "verify.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <tuple>
#include <vector>

static constexpr int N_TOKENS = 6;  // of the vocabulary, the only ones that the toys use
static constexpr int K        = 4;  // candidates of the toy drafter
static constexpr int N_DRAFT  = 3;
static constexpr int N_STEPS  = 100000;

static double toy(uint64_t salt, int a, int b, int c) {
    return dflash2_uniform(dflash2_mix(salt * 1000003 + a * 10007 + b * 101 + c));
}

struct world {
    int                n_vocab;
    uint64_t           salt;
    dflash2_seq_params params;
    int                wrong = 0;  // a mistake in place of the rule

    // logits after a token at a depth; other tokens of the vocabulary are out of reach
    std::vector<float> target_logits(int depth, llama_token last) const {
        std::vector<float> logits(n_vocab, -1e9f);
        for (int t = 0; t < N_TOKENS; ++t) {
            logits[t] = (float) (4.0 * toy(salt, depth, last, t));
        }
        return logits;
    }

    // scores resemble the target's logits, but not quite; one candidate is missing
    dflash2_lattice lattice(int depth, llama_token anchor) const {
        dflash2_lattice l;
        l.n_rows = N_DRAFT;
        l.top_k  = K;
        for (int t = 0; t < N_DRAFT; ++t) {
            for (int k = 0; k < K; ++k) {
                l.candidates.push_back((t + k) % N_TOKENS);
            }
        }
        for (int t = 0; t < N_DRAFT; ++t) {
            for (int a = 0; a < K; ++a) {
                const llama_token last = t == 0 ? anchor : l.candidates[(t - 1) * K + a];
                for (int b = 0; b < K; ++b) {
                    const llama_token id = l.candidates[t * K + b];
                    l.scores.push_back(
                        (float) (4.0 * toy(salt, depth + t, last, id) + 1.5 * toy(salt + 7, depth + t, last, id)));
                }
            }
        }
        return l;
    }
};

// largest probability at position t, averaged over the tokens that may stand before it
static double mean_confidence(const dflash2_lattice & l, int t) {
    double mean = 0.0;
    for (int a = 0; a < K; ++a) {
        const float * scores = l.row_scores(t, a);
        const double  best   = *std::max_element(scores, scores + K);
        double        sum    = 0.0;
        for (int b = 0; b < K; ++b) {
            sum += std::exp(scores[b] - best);
        }
        mean += 1.0 / sum / K;
    }
    return mean;
}

using rule_ptr   = std::unique_ptr<dflash2_verifier_rule>;
using counts_map = std::map<std::vector<llama_token>, double>;

static constexpr llama_token ANCHOR = 5;

// Rejection sampling as people get it wrong.
enum class mistake { NONE, SWAP_P_AND_Q, NO_RESIDUAL, STALE_STATE };

class wrong_rule : public dflash2_verifier_rule {
  public:
    wrong_rule(const llama_model * model, const dflash2_seq_params & params, mistake m) :
        dflash2_verifier_rule(dflash2_sampler(model, params)),
        mistake_(m) {
        auto p     = params;
        p.verifier = DFLASH2_VERIFIER_REJECT;
        walker_    = dflash2_make_rule(model, p);
    }

    void walk(const dflash2_lattice & lattice, int32_t n, llama_pos pos, dflash2_path & path) const override {
        walker_->walk(lattice, n, pos, path);
    }

    dflash2_verdict accept(const dflash2_rows & rows,
                           llama_pos            pos,
                           const dflash2_path & path,
                           const std::function<bool(llama_token)> &,
                           double,
                           std::vector<llama_token> & out) override {
        dflash2_distribution p;
        for (size_t i = 0;; ++i) {
            const auto uniform = [&](dflash2_purpose purpose) {
                return dflash2_uniform(dflash2_key(sampler_.seed(), pos + i, purpose));
            };
            sampler_.apply(rows(i), pos + i, p);
            bool        accepted = false;
            llama_token token    = p.draw(uniform(dflash2_purpose::TARGET));
            if (i < path.tokens.size()) {
                const llama_token drafted = path.tokens[i];
                double            num     = p.probability(drafted);
                double            den     = path.q[i].probability(drafted);
                if (mistake_ == mistake::SWAP_P_AND_Q) {
                    std::swap(num, den);
                }
                accepted = uniform(dflash2_purpose::ACCEPT) * den < num;
                if (accepted) {
                    token = drafted;
                } else if (mistake_ != mistake::NO_RESIDUAL) {
                    double sum = 0.0;
                    for (auto & e : p.data) {
                        sum += e.p = std::max(0.0f, e.p - path.q[i].probability(e.id));
                    }
                    token = sum > 0.0 ? p.draw(uniform(dflash2_purpose::TARGET) * sum) : token;
                }
            }
            out.push_back(token);
            if (mistake_ != mistake::STALE_STATE || !accepted) {
                sampler_.accept(token);
            }
            if (!accepted) {
                return { (int32_t) i };
            }
        }
    }

  private:
    mistake  mistake_;
    rule_ptr walker_;
};

// tokens of plain decoding: what every rule has to reproduce in law, by enumeration
static void enumerate(const world &            w,
                      const llama_model *      model,
                      std::vector<llama_token> prefix,
                      double                   p,
                      size_t                   depth,
                      counts_map &             law) {
    if (prefix.size() == depth) {
        law[prefix] += p;
        return;
    }
    dflash2_sampler sampler(model, w.params);
    sampler.accept(ANCHOR, true);
    for (const llama_token t : prefix) {
        sampler.accept(t);
    }
    dflash2_distribution d;
    sampler.apply(w.target_logits((int) prefix.size(), prefix.empty() ? ANCHOR : prefix.back()).data(),
                  (llama_pos) prefix.size(), d);
    for (const auto & entry : d.data) {
        if (entry.p > 0.0f) {
            auto next = prefix;
            next.push_back(entry.id);
            enumerate(w, model, next, p * entry.p, depth, law);
        }
    }
}

// Rounds until depth tokens exist. mutate may spoil the path that the rule judges.
static std::vector<llama_token> decode(const world &                                                        w,
                                       const llama_model *                                                  model,
                                       uint32_t                                                             seed,
                                       size_t                                                               depth,
                                       const std::function<void(dflash2_path &, const dflash2_lattice &)> & mutate,
                                       double &                                                             accepted) {
    auto params = w.params;
    params.seed = seed;
    rule_ptr rule =
        w.wrong ? rule_ptr(new wrong_rule(model, params, (mistake) w.wrong)) : dflash2_make_rule(model, params);
    const llama_token anchor = ANCHOR;
    rule->prime(&anchor, 1);

    // rounds that follow each other: what one round drew must not tell the next
    std::vector<llama_token> out;
    while (out.size() < depth) {
        const int                       begin   = (int) out.size();
        const llama_token               last    = out.empty() ? ANCHOR : out.back();
        const dflash2_lattice           lattice = w.lattice(begin, last);
        dflash2_path                    path;
        std::vector<std::vector<float>> rows;
        rule->walk(lattice, N_DRAFT, begin, path);
        if (mutate) {
            mutate(path, lattice);
        }
        for (size_t i = 0; i <= path.tokens.size(); ++i) {
            rows.push_back(w.target_logits(begin + (int) i, i == 0 ? last : path.tokens[i - 1]));
        }
        const auto verdict = rule->accept([&](int32_t i) { return rows[i].data(); }, begin, path,
                                          [](llama_token) { return false; }, 0.0, out);
        accepted += begin == 0 ? verdict.n_accepted : 0;
    }
    out.resize(depth);
    return out;
}

// survival function of chi-square by the Wilson-Hilferty approximation, good at these sizes
static double chi_square_p(double x, double k) {
    const double z = (std::cbrt(x / k) - (1.0 - 2.0 / (9.0 * k))) / std::sqrt(2.0 / (9.0 * k));
    return 0.5 * std::erfc(z / std::sqrt(2.0));
}

static double test(const counts_map & law, const counts_map & counts, double n) {
    double x = 0.0, rest_expected = 0.0, rest_seen = 0.0;
    int    cells = 0;
    for (const auto & [tokens, p] : law) {
        const auto   it   = counts.find(tokens);
        const double seen = it == counts.end() ? 0.0 : it->second;
        if (p * n < 10.0) {  // too rare for a cell of its own
            rest_expected += p * n;
            rest_seen += seen;
            continue;
        }
        x += (seen - p * n) * (seen - p * n) / (p * n);
        ++cells;
    }
    for (const auto & [tokens, seen] : counts) {
        if (law.find(tokens) == law.end() && seen > 0) {
            return 0.0;  // impossible tokens were produced
        }
    }
    if (rest_expected >= 10.0) {
        x += (rest_seen - rest_expected) * (rest_seen - rest_expected) / rest_expected;
        ++cells;
    }
    return cells > 1 ? chi_square_p(x, cells - 1) : 1.0;
}

struct chain {
    const char *                              name;
    std::function<void(dflash2_seq_params &)> set;
};

static const std::vector<chain> CHAINS = {
    { "T 1",
     [](auto & p) {
          p.temp = 1.0f;
      } },
    { "T 0.7",
     [](auto & p) {
          p.temp = 0.7f;
      } },
    { "T 1.5",
     [](auto & p) {
          p.temp = 1.5f;
      } },
    { "top-k 3",
     [](auto & p) {
          p.temp  = 1.0f;
          p.top_k = 3;
      } },
    { "top-p 0.9",
     [](auto & p) {
          p.temp  = 1.0f;
          p.top_p = 0.9f;
      } },
    { "min-p 0.2",
     [](auto & p) {
          p.temp  = 1.0f;
          p.min_p = 0.2f;
      } },
    { "typical 0.8",
     [](auto & p) {
          p.temp      = 1.0f;
          p.typical_p = 0.8f;
      } },
    { "top-n-sigma 1",
     [](auto & p) {
          p.temp        = 1.0f;
          p.top_n_sigma = 1.0f;
      } },
    { "penalties",
     [](auto & p) {
          p.temp            = 1.0f;
          p.penalty_repeat  = 1.6f;
          p.penalty_freq    = 0.4f;
          p.penalty_present = 0.3f;
      } },
    { "DRY",
     [](auto & p) {
          p.temp               = 1.0f;
          p.dry_multiplier     = 2.0f;
          p.dry_allowed_length = 1;
      } },
    { "bias",
     [](auto & p) {
          static const llama_logit_bias b[] = {
              {                 1, 1.5f }, { 2, -INFINITY }
          };
          p.temp         = 1.0f;
          p.logit_bias   = b;
          p.n_logit_bias = 2;
      }        },
    { "all",
     [](auto & p) {
          p.temp            = 0.8f;
          p.top_k           = 5;
          p.top_p           = 0.95f;
          p.min_p           = 0.02f;
          p.penalty_repeat  = 1.2f;
          p.penalty_present = 0.3f;
      }  },
};

static const std::vector<std::pair<const char *, int>> RULES = {
    { "match",   DFLASH2_VERIFIER_MATCH   },
    { "coupled", DFLASH2_VERIFIER_COUPLED },
    { "reject",  DFLASH2_VERIFIER_REJECT  },
    { "block",   DFLASH2_VERIFIER_BLOCK   },
};

static world make_world(const llama_model * model, const chain & c, int verifier, uint64_t salt) {
    world w = { llama_vocab_n_tokens(llama_model_get_vocab(model)), salt, dflash2_seq_default_params() };
    c.set(w.params);
    w.params.verifier = verifier;
    return w;
}

// smallest p-value over the joint law of the first 2 and of all N_DRAFT + 1 tokens and the margin of the last
static double p_value(const world &                                                        w,
                      const llama_model *                                                  model,
                      const std::function<void(dflash2_path &, const dflash2_lattice &)> & mutate,
                      double &                                                             acceptance) {
    double                       smallest = 1.0;
    double                       accepted = 0.0;
    std::map<size_t, counts_map> seen;
    for (int i = 0; i < N_STEPS; ++i) {
        const auto out = decode(w, model, (uint32_t) i + 1, N_DRAFT + 1, mutate, accepted);
        for (const size_t depth : { (size_t) 1, (size_t) 2, (size_t) N_DRAFT + 1 }) {
            ++seen[depth][{ out.begin(), out.begin() + depth }];
        }
    }
    for (auto & [depth, counts] : seen) {
        counts_map law;
        enumerate(w, model, {}, 1.0, depth, law);
        smallest = std::min(smallest, test(law, counts, N_STEPS));
    }
    acceptance = accepted / N_STEPS;
    return smallest;
}

// Widths chosen as dflash2_width does it: whether a position is verified depends on the confidence there, which the
// tokens before it decide.
static int check_adaptive(const llama_model * model, const chain & c) {
    const auto cut = [](dflash2_path & path, const dflash2_lattice & l) {
        int32_t n = 1;
        while (n < (int32_t) path.sure.size() && path.sure[n] >= mean_confidence(l, n)) {
            ++n;
        }
        path.truncate(n);
    };
    int failures = 0;
    for (const int verifier : { DFLASH2_VERIFIER_REJECT, DFLASH2_VERIFIER_BLOCK }) {
        double       a  = 0.0;
        const double p  = p_value(make_world(model, c, verifier, 11), model, cut, a);
        const bool   ok = p > 1e-6;
        failures += !ok;
        printf("%-14s %-8s p = %.3g  accepted %.3f, width by confidence  %s\n", c.name,
               verifier == DFLASH2_VERIFIER_REJECT ? "reject" : "block", p, a, ok ? "ok" : "FAILED");
    }
    return failures;
}

static int check_rules(const llama_model * model) {
    int failures = 0;
    for (const auto & c : CHAINS) {
        std::map<std::string, double> acceptance;
        for (const auto & [name, verifier] : RULES) {
            double       a   = 0.0;
            const double p   = p_value(make_world(model, c, verifier, 11), model, nullptr, a);
            acceptance[name] = a;
            const bool ok    = p > 1e-6;
            failures += !ok;
            printf("%-14s %-8s p = %.3g  accepted %.3f of %d  %s\n", c.name, name, p, a, N_DRAFT, ok ? "ok" : "FAILED");
            fflush(stdout);
        }
        failures += check_adaptive(model, c);
        // three standard errors of a mean of N_STEPS draws below N_DRAFT
        const double noise = 3.0 * N_DRAFT / std::sqrt((double) N_STEPS);
        const bool   order =
            acceptance["block"] > acceptance["reject"] - noise && acceptance["reject"] > acceptance["match"] - noise;
        failures += !order;
        if (!order) {
            printf("%-14s acceptance is not block >= reject >= match: FAILED\n", c.name);
        }
    }
    return failures;
}

// mistakes that are easy to make; each must be seen
static int check_mistakes(const llama_model * model) {
    using path_fn                          = std::function<void(dflash2_path &, const dflash2_lattice &)>;
    const path_fn row_of_wrong_predecessor = [](dflash2_path & path, const dflash2_lattice & l) {
        for (size_t t = 1; t < path.q.size(); ++t) {
            double sum = 0.0;
            for (auto & e : path.q[t].data) {
                const auto b = std::find(&l.candidates[t * K], &l.candidates[t * K] + K, e.id) - &l.candidates[t * K];
                sum += e.p   = std::exp(l.row_scores((int) t, 0)[b]);
            }
            for (auto & e : path.q[t].data) {
                e.p = (float) (e.p / sum);
            }
        }
    };
    const path_fn greedy_path_claimed_sampled = [](dflash2_path & path, const dflash2_lattice &) {
        for (size_t t = 0; t < path.q.size(); ++t) {
            path.tokens[t] = std::max_element(path.q[t].data.begin(), path.q[t].data.end(), [](auto & a, auto & b) {
                                 return a.p < b.p;
                             })->id;
            if (t + 1 < path.q.size()) {
                path.q.resize(t + 1);
                path.tokens.resize(t + 1);
            }  // keep the claim consistent
        }
    };
    const path_fn q_understated = [](dflash2_path & path, const dflash2_lattice &) {
        for (auto & q : path.q) {
            for (auto & e : q.data) {
                e.p *= 0.8f;
            }
        }
    };
    const path_fn q_at_another_temperature = [](dflash2_path & path, const dflash2_lattice &) {
        for (auto & q : path.q) {
            double sum = 0.0;
            for (auto & e : q.data) {
                sum += e.p = std::pow(e.p, 0.7f);
            }
            for (auto & e : q.data) {
                e.p = (float) (e.p / sum);
            }
        }
    };

    // a width chosen from the drafted token itself
    const path_fn cut_by_own_token = [](dflash2_path & path, const dflash2_lattice &) {
        int32_t n = 0;
        while (n < (int32_t) path.tokens.size() && path.q[n].probability(path.tokens[n]) > 0.3f) {
            ++n;
        }
        path.truncate(n);
    };
    // how sure the drafter is at the second position depends on which token was drawn at the first
    const path_fn cut_by_later_position = [](dflash2_path & path, const dflash2_lattice & l) {
        if (path.sure[1] < mean_confidence(l, 1)) {
            path.truncate(0);
        }
    };

    const std::vector<std::pair<const char *, path_fn>> mistakes = {
        { "width from the token itself",     cut_by_own_token            },
        { "width from a later position",     cut_by_later_position       },
        { "q of the wrong predecessor row",  row_of_wrong_predecessor    },
        { "best path claimed to be sampled", greedy_path_claimed_sampled },
        { "q understated",                   q_understated               },
        { "q at another temperature",        q_at_another_temperature    },
    };
    int failures = 0;
    for (const auto & [name, mutate] : mistakes) {
        for (const int verifier : { DFLASH2_VERIFIER_REJECT, DFLASH2_VERIFIER_BLOCK }) {
            double       a      = 0.0;
            const double p      = p_value(make_world(model, CHAINS[0], verifier, 11), model, mutate, a);
            const bool   caught = p < 1e-6;
            failures += !caught;
            printf("mistake: %-34s %s p = %.3g  %s\n", name, verifier == DFLASH2_VERIFIER_REJECT ? "reject" : "block ",
                   p, caught ? "caught" : "NOT CAUGHT");
        }
    }
    const chain &                                               penalties = CHAINS[8];
    const std::vector<std::tuple<const char *, mistake, chain>> wrong     = {
        { "p and q swapped", mistake::SWAP_P_AND_Q, CHAINS[0] },
        { "no residual",     mistake::NO_RESIDUAL,  CHAINS[0] },
        { "stale penalties", mistake::STALE_STATE,  penalties },
    };
    for (const auto & [name, m, c] : wrong) {
        double a            = 0.0;
        world  w            = make_world(model, c, DFLASH2_VERIFIER_REJECT, 11);
        w.wrong             = (int) m;
        const double p      = p_value(w, model, nullptr, a);
        const bool   caught = p < 1e-6;
        failures += !caught;
        printf("mistake: %-34s reject p = %.3g  %s\n", name, p, caught ? "caught" : "NOT CAUGHT");
    }
    return failures;
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL.gguf\n", argv[0]);
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model_params mparams = llama_model_default_params();
    mparams.vocab_only         = true;
    llama_model * model        = llama_model_load_from_file(argv[1], mparams);
    if (model == nullptr) {
        fprintf(stderr, "error: cannot load %s\n", argv[1]);
        return 1;
    }
    const int failures = check_rules(model) + check_mistakes(model);
    llama_model_free(model);
    printf("%s\n", failures == 0 ? "all laws hold" : "some laws do not hold");
    return failures == 0 ? 0 : 1;
}
