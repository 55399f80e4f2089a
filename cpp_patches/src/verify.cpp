#include "verify.h"

#include "error.h"
#include "random.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

void dflash2_path::clear() {
    tokens.clear();
    q.clear();
    sure.clear();
}

void dflash2_path::truncate(int32_t n) {
    tokens.resize(std::min<size_t>(n, tokens.size()));
    sure.resize(tokens.size());
    q.resize(std::min(q.size(), tokens.size()));
}

void dflash2_verifier_rule::prime(const llama_token * tokens, size_t n_tokens) {
    for (size_t i = 0; i < n_tokens; ++i) {
        sampler_.accept(tokens[i], /*from_prompt =*/true);
    }
}

void dflash2_verifier_rule::catch_up(const llama_token * tokens, size_t n_tokens) {
    for (size_t i = 0; i < n_tokens; ++i) {
        sampler_.accept(tokens[i]);
    }
}

namespace {

using is_stop_fn = std::function<bool(llama_token)>;

llama_token argmax_with_noise(const dflash2_distribution & p, uint64_t key) {
    llama_token best       = p.data.front().id;
    double      best_score = -INFINITY;
    for (const auto & entry : p.data) {
        if (entry.p <= 0.0f) {
            continue;
        }
        const double score = std::log((double) entry.p) + dflash2_gumbel(key, entry.id);
        if (score > best_score || (score == best_score && entry.id < best)) {
            best       = entry.id;
            best_score = score;
        }
    }
    return best;
}

// of the softmax of n scores
float largest_probability(const float * scores, int32_t n) {
    const double best = *std::max_element(scores, scores + n);
    double       sum  = 0.0;
    for (int32_t i = 0; i < n; ++i) {
        sum += std::exp(scores[i] - best);
    }
    return (float) (1.0 / sum);
}

// Follows the lattice; pick(q, pos) chooses among the candidates after the realised predecessor.
template <typename Pick>
void walk_lattice(const dflash2_sampler & sampler,
                  const dflash2_lattice & lattice,
                  int32_t                 n,
                  llama_pos               pos,
                  bool                    keep_q,
                  dflash2_path &          path,
                  Pick &&                 pick) {
    path.clear();
    dflash2_sampler      state = sampler;  // its grammar sees the drafted tokens
    dflash2_distribution q;
    int32_t              predecessor = 0;
    for (int32_t t = 0; t < std::min(n, lattice.n_rows); ++t) {
        const llama_token * ids = lattice.candidates.data() + (size_t) t * lattice.top_k;
        if (!state.apply_to_draft(ids, lattice.row_scores(t, predecessor), lattice.top_k, q)) {
            return;
        }
        const llama_token token  = pick(q, pos + t);
        const int32_t     before = predecessor;
        predecessor              = (int32_t) (std::find(ids, ids + lattice.top_k, token) - ids);
        path.tokens.push_back(token);
        path.sure.push_back(largest_probability(lattice.row_scores(t, before), lattice.top_k));
        if (keep_q) {
            path.q.push_back(q);
        }
        if (state.has_grammar()) {
            state.accept(token);
        }
    }
}

llama_token most_likely(const dflash2_distribution & q) {
    return std::max_element(q.data.begin(), q.data.end(),
                            [](const llama_token_data & a, const llama_token_data & b) {
                                return a.logit < b.logit || (a.logit == b.logit && a.id > b.id);
                            })
        ->id;
}

// One token per row from pick(i, token), as long as it equals the draft; pick says whether the token is certain.
template <typename Pick>
dflash2_verdict accept_while_equal(const dflash2_path &       path,
                                   const is_stop_fn &         is_stop,
                                   std::vector<llama_token> & out,
                                   Pick &&                    pick) {
    for (int32_t i = 0;; ++i) {
        llama_token token;
        if (!pick(i, token)) {
            return { i, /*doubtful =*/true };
        }
        out.push_back(token);
        const bool from_draft = i < (int32_t) path.tokens.size() && token == path.tokens[i];
        if (!from_draft || is_stop(token)) {
            return { i + (from_draft ? 1 : 0) };
        }
    }
}

// greedy without samplers: no copy of the vocabulary
class argmax_rule : public dflash2_verifier_rule {
  public:
    argmax_rule(dflash2_sampler sampler, int32_t n_vocab) :
        dflash2_verifier_rule(std::move(sampler)),
        n_vocab_(n_vocab) {}

    void walk(const dflash2_lattice & lattice, int32_t n, llama_pos, dflash2_path & path) const override {
        path.clear();
        int32_t predecessor = 0;
        for (int32_t t = 0; t < std::min(n, lattice.n_rows); ++t) {
            const float * scores = lattice.row_scores(t, predecessor);
            path.sure.push_back(largest_probability(scores, lattice.top_k));
            predecessor = (int32_t) (std::max_element(scores, scores + lattice.top_k) - scores);
            path.tokens.push_back(lattice.candidates[(size_t) t * lattice.top_k + predecessor]);
        }
    }

    dflash2_verdict accept(const dflash2_rows & rows,
                           llama_pos,
                           const dflash2_path &       path,
                           const is_stop_fn &         is_stop,
                           double                     noise,
                           std::vector<llama_token> & out) override {
        return accept_while_equal(path, is_stop, out, [&](int32_t i, llama_token & token) {
            const float * logits = rows(i);
            const float * best   = std::max_element(logits, logits + n_vocab_);
            token                = (llama_token) (best - logits);
            return noise <= 0.0 || is_ahead(logits, best, 2.0 * noise);
        });
    }

  private:
    // is the best logit larger than every other by more than margin?
    bool is_ahead(const float * logits, const float * best, double margin) const {
        const float others =
            std::max(best == logits ? -INFINITY : *std::max_element(logits, best),
                     best + 1 == logits + n_vocab_ ? -INFINITY : *std::max_element(best + 1, logits + n_vocab_));
        return (double) *best - others > margin;
    }

    int32_t n_vocab_;
};

// match and coupled, and greedy with samplers: the target's token is argmax(log p + noise) either way
class equality_rule : public dflash2_verifier_rule {
  public:
    equality_rule(dflash2_sampler sampler, bool coupled) :
        dflash2_verifier_rule(std::move(sampler)),
        coupled_(coupled) {}

    void walk(const dflash2_lattice & lattice, int32_t n, llama_pos pos, dflash2_path & path) const override {
        walk_lattice(sampler_, lattice, n, pos, false, path, [&](const dflash2_distribution & q, llama_pos p) {
            return coupled_ ? argmax_with_noise(q, dflash2_key(sampler_.seed(), p, dflash2_purpose::TARGET)) :
                              most_likely(q);
        });
    }

    dflash2_verdict accept(const dflash2_rows &       rows,
                           llama_pos                  pos,
                           const dflash2_path &       path,
                           const is_stop_fn &         is_stop,
                           double                     noise,
                           std::vector<llama_token> & out) override {
        return accept_while_equal(path, is_stop, out, [&](int32_t i, llama_token & token) {
            sampler_.apply(rows(i), pos + i, p_);
            token = argmax_with_noise(p_, dflash2_key(sampler_.seed(), pos + i, dflash2_purpose::TARGET));
            if (noise > 0.0 && !is_certain(rows(i), pos + i, token, noise * sampler_.noise_gain())) {
                return false;
            }
            sampler_.accept(token);
            return true;
        });
    }

  private:
    // Would token be chosen from all logits that differ by up to noise from these?
    bool is_certain(const float * logits, llama_pos pos, llama_token token, double noise) {
        if (!sampler_.surely_keeps(logits, pos, token, noise, p_)) {
            return false;
        }
        // argmax(log p + g) is argmax(logit + T g): normalisation moves all alike
        const uint64_t key   = dflash2_key(sampler_.seed(), pos, dflash2_purpose::TARGET);
        const double   scale = std::max(0.0f, sampler_.temperature());
        const auto     score = [&](const llama_token_data & e) {
            return e.logit + (scale > 0.0 ? scale * dflash2_gumbel(key, e.id) : 0.0);
        };
        const double own = score(*p_.find(token));
        return std::all_of(p_.data.begin(), p_.data.end(),
                           [&](const llama_token_data & e) { return e.id == token || own - score(e) > 2.0 * noise; });
    }

    bool                 coupled_;
    dflash2_distribution p_;
};

// (scale * p - q)+, not normalised; returns its sum. Tokens outside q keep scale * p.
double residual(const dflash2_distribution & p,
                const dflash2_distribution & q,
                double                       scale,
                dflash2_distribution &       out) {
    out        = p;
    double sum = 0.0;
    for (auto & entry : out.data) {
        entry.p = (float) (scale * entry.p);
    }
    for (const auto & drafted : q.data) {
        if (const llama_token_data * found = out.find(drafted.id)) {
            llama_token_data & entry = out.data[found - out.data.data()];
            entry.p                  = std::max(0.0f, entry.p - drafted.p);
        }
    }
    for (const auto & entry : out.data) {
        sum += entry.p;
    }
    return sum;
}

// Numbers for drafts and coins are drawn anew for every round, which its first position names. A rule that looks at
// coins behind the prefix it keeps would else meet them again in the next round, knowing how they fell.
class sampled_rule : public dflash2_verifier_rule {
  public:
    explicit sampled_rule(dflash2_sampler sampler) : dflash2_verifier_rule(std::move(sampler)) {}

    void walk(const dflash2_lattice & lattice, int32_t n, llama_pos pos, dflash2_path & path) const override {
        walk_lattice(sampler_, lattice, n, pos, true, path, [&](const dflash2_distribution & q, llama_pos p) {
            return q.draw(uniform(p, dflash2_purpose::DRAFT, round_of(pos)));
        });
    }

  protected:
    static constexpr llama_pos ANY_ROUND = -1;

    // round that starts at pos; ANY_ROUND for rules that look at nothing behind what they keep
    virtual llama_pos round_of(llama_pos) const { return ANY_ROUND; }

    double uniform(llama_pos pos, dflash2_purpose purpose, llama_pos round = ANY_ROUND) const {
        return dflash2_uniform(dflash2_key(sampler_.seed(), pos, purpose), round);
    }

    // a draw from an unnormalised distribution; from p where rounding left nothing
    llama_token draw(const dflash2_distribution & weights,
                     double                       sum,
                     const dflash2_distribution & p,
                     llama_pos                    pos) const {
        const double u = uniform(pos, dflash2_purpose::TARGET);
        return sum > 0.0 ? weights.draw(u * sum) : p.draw(u);
    }
};

class reject_rule : public sampled_rule {
  public:
    using sampled_rule::sampled_rule;

    dflash2_verdict accept(const dflash2_rows & rows,
                           llama_pos            pos,
                           const dflash2_path & path,
                           const is_stop_fn &   is_stop,
                           double /*noise*/,
                           std::vector<llama_token> & out) override {
        const int32_t n = (int32_t) path.tokens.size();
        for (int32_t i = 0;; ++i) {
            sampler_.apply(rows(i), pos + i, p_);
            bool        accepted = false;
            llama_token token;
            if (i == n) {
                token = p_.draw(uniform(pos + i, dflash2_purpose::TARGET));
            } else {
                token          = path.tokens[i];
                const double q = path.q[i].probability(token);
                accepted       = uniform(pos + i, dflash2_purpose::ACCEPT) * q < p_.probability(token);
                if (!accepted) {
                    const double sum = residual(p_, path.q[i], 1.0, residual_);
                    token            = draw(residual_, sum, p_, pos + i);
                }
            }
            out.push_back(token);
            sampler_.accept(token);
            if (!accepted || is_stop(token)) {
                return { i + (accepted ? 1 : 0) };
            }
        }
    }

  private:
    dflash2_distribution p_, residual_;
};

// Keeps the longest prefix i whose independent coin falls below h_i, where with joint ratio
//   r_0 = 1, r_i = min(1, r_{i-1} p_i(d_i)/q_i(d_i)),   S_i = sum (r_i p_{i+1} - q_{i+1})+
//   h_i = S_i/(S_i + 1 - r_i) for i < n,  h_n = r_n
// and draws the next token from (r_i p_{i+1} - q_{i+1})+, or from p_{n+1} when all are kept.
class block_rule : public sampled_rule {
  public:
    using sampled_rule::sampled_rule;

    dflash2_verdict accept(const dflash2_rows & rows,
                           llama_pos            pos,
                           const dflash2_path & path,
                           const is_stop_fn &   is_stop,
                           double /*noise*/,
                           std::vector<llama_token> & out) override {
        const int32_t n = n_until_stop(path, is_stop);

        dflash2_sampler state  = sampler_;  // runs ahead along the drafted tokens
        int32_t         n_kept = 0;
        double          ratio  = 1.0;
        for (int32_t i = 0;; ++i) {
            state.apply(rows(i), pos + i, p_);
            if (i == n) {
                // h_n = r_n; the whole path is kept and the next token is the target's
                if (n == 0 || uniform(pos + n - 1, dflash2_purpose::ACCEPT, pos) < ratio) {
                    n_kept   = n;
                    sum_     = 1.0;
                    weights_ = p_;
                    kept_p_  = p_;
                }
                break;
            }
            const double sum = residual(p_, path.q[i], ratio, residual_);
            const double h   = sum > 0.0 ? sum / (sum + 1.0 - ratio) : 0.0;
            if (i == 0 || uniform(pos + i - 1, dflash2_purpose::ACCEPT, pos) < h) {
                n_kept = i;
                sum_   = sum;
                std::swap(weights_, residual_);
                kept_p_ = p_;
            }
            const llama_token token = path.tokens[i];
            const double      q     = path.q[i].probability(token);
            ratio                   = std::min(1.0, ratio * p_.probability(token) / q);
            if (ratio <= 0.0) {
                break;  // every longer prefix has h = 0
            }
            state.accept(token);
        }
        return { finish(path, n, n_kept, pos, is_stop, out) };
    }

  private:
    llama_pos round_of(llama_pos pos) const override { return pos; }

    // nothing after a drafted stop token can be produced
    static int32_t n_until_stop(const dflash2_path & path, const is_stop_fn & is_stop) {
        const auto end = std::find_if(path.tokens.begin(), path.tokens.end(), is_stop);
        return (int32_t) (end - path.tokens.begin()) + (end != path.tokens.end() ? 1 : 0);
    }

    int32_t finish(const dflash2_path &       path,
                   int32_t                    n,
                   int32_t                    n_kept,
                   llama_pos                  pos,
                   const is_stop_fn &         is_stop,
                   std::vector<llama_token> & out) {
        for (int32_t i = 0; i < n_kept; ++i) {
            out.push_back(path.tokens[i]);
            sampler_.accept(path.tokens[i]);
        }
        if (n_kept > 0 && n_kept == n && is_stop(path.tokens[n - 1])) {
            return n_kept;
        }
        const llama_token token = draw(weights_, sum_, kept_p_, pos + n_kept);
        out.push_back(token);
        sampler_.accept(token);
        return n_kept;
    }

    dflash2_distribution p_, residual_, weights_, kept_p_;
    double               sum_ = 0.0;
};

}  // namespace

static bool is_plain_rule(int32_t verifier) {
    return verifier == DFLASH2_VERIFIER_GREEDY || verifier == DFLASH2_VERIFIER_MATCH ||
           verifier == DFLASH2_VERIFIER_COUPLED;
}

dflash2_seq_params dflash2_resolve_seq_params(const dflash2_seq_params & params, bool exact) {
    const bool         greedy      = params.temp <= 0.0f;
    const bool         has_seed    = params.seed != LLAMA_DEFAULT_SEED;
    const bool         has_grammar = params.grammar != nullptr && params.grammar[0] != '\0';
    dflash2_seq_params p           = params;

    if (p.verifier < DFLASH2_VERIFIER_AUTO || p.verifier > DFLASH2_VERIFIER_BLOCK) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT, dflash2_format("there is no verifier %d", p.verifier));
    }
    if (p.verifier == DFLASH2_VERIFIER_AUTO) {
        // A named seed asks for the same text again, whatever width the clock makes us choose: only coupled keeps that.
        // And a grammar makes a row dear: coupled stops at the first difference, block reads every row.
        const bool coupled = has_seed || has_grammar || exact;
        p.verifier = greedy ? DFLASH2_VERIFIER_GREEDY : coupled ? DFLASH2_VERIFIER_COUPLED : DFLASH2_VERIFIER_BLOCK;
    }
    if (p.verifier == DFLASH2_VERIFIER_GREEDY && !greedy) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT,
                            dflash2_format("the greedy verifier needs temperature 0, temperature is %g", p.temp));
    }
    if (exact && !greedy && !is_plain_rule(p.verifier)) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT,
                            "exact mode gives the tokens of plain decoding, which the verifiers reject and block do "
                            "not: they only have the same law");
    }
    p.seed = has_seed ? p.seed : std::random_device{}();
    return p;
}

std::unique_ptr<dflash2_verifier_rule> dflash2_make_rule(const llama_model *                    model,
                                                         const dflash2_seq_params &             params,
                                                         std::shared_ptr<dflash2_grammar_masks> masks) {
    dflash2_sampler sampler(model, params, std::move(masks));
    // at temperature 0 both p and q are certain, and every rule is equality
    if (sampler.is_greedy()) {
        if (sampler.is_plain_argmax()) {
            return std::make_unique<argmax_rule>(std::move(sampler),
                                                 llama_vocab_n_tokens(llama_model_get_vocab(model)));
        }
        return std::make_unique<equality_rule>(std::move(sampler), false);
    }
    switch (params.verifier) {
        case DFLASH2_VERIFIER_REJECT:
            return std::make_unique<reject_rule>(std::move(sampler));
        case DFLASH2_VERIFIER_BLOCK:
            return std::make_unique<block_rule>(std::move(sampler));
        default:
            return std::make_unique<equality_rule>(std::move(sampler), params.verifier == DFLASH2_VERIFIER_COUPLED);
    }
}
