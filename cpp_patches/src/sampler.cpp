#include "sampler.h"

#include "error.h"
#include "random.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>

const llama_token_data * dflash2_distribution::find(llama_token token) const {
    if (token >= 0 && (size_t) token < data.size() && data[token].id == token) {
        return &data[token];  // nothing was cut or moved
    }
    for (const auto & entry : data) {
        if (entry.id == token) {
            return &entry;
        }
    }
    return nullptr;
}

float dflash2_distribution::probability(llama_token token) const {
    const llama_token_data * entry = find(token);
    return entry ? entry->p : 0.0f;
}

llama_token dflash2_distribution::draw(double u) const {
    double      sum  = 0.0;
    llama_token last = data.front().id;
    for (const auto & entry : data) {
        if (entry.p <= 0.0f) {
            continue;
        }
        sum += entry.p;
        last = entry.id;
        if (u < sum) {
            break;
        }
    }
    return last;  // also where rounding left u above the sum
}

//
// parameters
//

static void check(bool ok, const char * name, double value, const char * expected) {
    if (!ok) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT, dflash2_format("%s is %g, expected %s", name, value, expected));
    }
}

static bool in_unit(float value) {
    return value >= 0.0f && value <= 1.0f;
}

static void check_params(const dflash2_seq_params & p) {
    check(std::isfinite(p.temp), "temp", p.temp, "a number");
    check(p.top_p > 0.0f && p.top_p <= 1.0f, "top_p", p.top_p, "more than 0 and at most 1");
    check(in_unit(p.min_p), "min_p", p.min_p, "0 to 1");
    check(p.typical_p > 0.0f && p.typical_p <= 1.0f, "typical_p", p.typical_p, "more than 0 and at most 1");
    check(std::isfinite(p.top_n_sigma), "top_n_sigma", p.top_n_sigma, "a number");
    check(in_unit(p.xtc_probability), "xtc_probability", p.xtc_probability, "0 to 1");
    check(in_unit(p.xtc_threshold), "xtc_threshold", p.xtc_threshold, "0 to 1");
    check(p.penalty_last_n >= -1, "penalty_last_n", p.penalty_last_n, "-1 or more");
    check(std::isfinite(p.penalty_repeat) && p.penalty_repeat > 0.0f, "penalty_repeat", p.penalty_repeat,
          "more than 0");
    check(std::isfinite(p.penalty_freq), "penalty_freq", p.penalty_freq, "a number");
    check(std::isfinite(p.penalty_present), "penalty_present", p.penalty_present, "a number");
    check(std::isfinite(p.dry_multiplier) && p.dry_multiplier >= 0.0f, "dry_multiplier", p.dry_multiplier, "0 or more");
    check(p.dry_multiplier == 0.0f || p.dry_base >= 1.0f, "dry_base", p.dry_base, "1 or more");
    check(p.dry_penalty_last_n >= -1, "dry_penalty_last_n", p.dry_penalty_last_n, "-1 or more");
}

static bool has_penalties(const dflash2_seq_params & p) {
    return p.penalty_last_n != 0 && (p.penalty_repeat != 1.0f || p.penalty_freq != 0.0f || p.penalty_present != 0.0f);
}

static llama_sampler_ptr make_chain(const std::vector<llama_sampler *> & samplers) {
    if (samplers.empty()) {
        return nullptr;
    }
    llama_sampler_ptr chain(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    for (llama_sampler * sampler : samplers) {
        llama_sampler_chain_add(chain.get(), sampler);
    }
    return chain;
}

static llama_sampler_ptr make_history(const llama_model * model, const dflash2_seq_params & p) {
    const llama_vocab * vocab   = llama_model_get_vocab(model);
    const int32_t       n_train = llama_model_n_ctx_train(model);

    std::vector<llama_sampler *> samplers;
    if (has_penalties(p)) {
        samplers.push_back(llama_sampler_init_penalties(llama_vocab_n_tokens(vocab),
                                                        p.penalty_last_n < 0 ? n_train : p.penalty_last_n,
                                                        p.penalty_repeat, p.penalty_freq, p.penalty_present));
    }
    if (p.dry_multiplier > 0.0f && p.dry_penalty_last_n != 0) {
        // sequence breakers of common/common.h: common_params_sampling
        static const char * breakers[] = { "\n", ":", "\"", "*" };
        samplers.push_back(llama_sampler_init_dry(vocab, p.dry_multiplier, p.dry_base, p.dry_allowed_length,
                                                  p.dry_penalty_last_n < 0 ? n_train : p.dry_penalty_last_n, breakers,
                                                  4));
    }
    return make_chain(samplers);
}

static llama_sampler_ptr make_truncation(const dflash2_seq_params & p) {
    std::vector<llama_sampler *> samplers;
    if (p.temp <= 0.0f) {
        return nullptr;
    }
    if (p.top_n_sigma > 0.0f) {
        samplers.push_back(llama_sampler_init_top_n_sigma(p.top_n_sigma));
    }
    if (p.top_k > 0) {
        samplers.push_back(llama_sampler_init_top_k(p.top_k));
    }
    if (p.typical_p < 1.0f) {
        samplers.push_back(llama_sampler_init_typical(p.typical_p, 1));
    }
    if (p.top_p < 1.0f) {
        samplers.push_back(llama_sampler_init_top_p(p.top_p, 1));
    }
    if (p.min_p > 0.0f) {
        samplers.push_back(llama_sampler_init_min_p(p.min_p, 1));
    }
    return make_chain(samplers);
}

static llama_sampler_ptr make_bias(const llama_model * model, const dflash2_seq_params & p) {
    if (p.n_logit_bias == 0 || p.logit_bias == nullptr) {
        return nullptr;
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (size_t i = 0; i < p.n_logit_bias; ++i) {
        const auto & bias = p.logit_bias[i];
        if (bias.token < 0 || bias.token >= n_vocab || std::isnan(bias.bias)) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT,
                                dflash2_format("logit bias of token %d is %g, the vocabulary has %d tokens", bias.token,
                                               bias.bias, n_vocab));
        }
    }
    return llama_sampler_ptr(llama_sampler_init_logit_bias(n_vocab, (int32_t) p.n_logit_bias, p.logit_bias));
}

static llama_sampler_ptr make_grammar(const llama_model *                    model,
                                      const dflash2_seq_params &             p,
                                      std::shared_ptr<dflash2_grammar_masks> masks) {
    if (p.grammar == nullptr || p.grammar[0] == '\0') {
        return nullptr;
    }
    if (!masks) {
        masks = std::make_shared<dflash2_grammar_masks>();
    }
    llama_sampler_ptr grammar(dflash2_llama_grammar(llama_model_get_vocab(model), p.grammar, std::move(masks)));
    if (!grammar) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT,
                            "the grammar does not parse; it must be GBNF with a rule named root");
    }
    return grammar;
}

static llama_sampler_ptr clone(const llama_sampler_ptr & sampler) {
    return llama_sampler_ptr(sampler ? llama_sampler_clone(sampler.get()) : nullptr);
}

dflash2_sampler::dflash2_sampler(const llama_model *                    model,
                                 const dflash2_seq_params &             params,
                                 std::shared_ptr<dflash2_grammar_masks> masks) {
    check_params(params);
    bias_     = make_bias(model, params);
    grammar_  = make_grammar(model, params, std::move(masks));
    history_  = make_history(model, params);
    truncate_ = make_truncation(params);
    temp_     = params.temp;
    xtc_p_    = params.temp > 0.0f ? params.xtc_probability : 0.0f;
    xtc_t_    = params.xtc_threshold;
    seed_     = params.seed;
    n_vocab_  = llama_vocab_n_tokens(llama_model_get_vocab(model));
    if (is_greedy()) {
        n_kept_ = 1;
    } else if (params.top_k > 0 && params.top_n_sigma <= 0.0f) {
        n_kept_ = params.top_k;  // the first to look at the tokens
    }
    // a repetition penalty divides positive logits and multiplies negative ones
    if (has_penalties(params)) {
        noise_gain_ = std::max<double>(params.penalty_repeat, 1.0 / params.penalty_repeat);
    }
}

dflash2_sampler::dflash2_sampler(const dflash2_sampler & other) :
    bias_(clone(other.bias_)),
    grammar_(clone(other.grammar_)),
    history_(clone(other.history_)),
    truncate_(clone(other.truncate_)),
    temp_(other.temp_),
    xtc_p_(other.xtc_p_),
    xtc_t_(other.xtc_t_),
    noise_gain_(other.noise_gain_),
    seed_(other.seed_),
    n_vocab_(other.n_vocab_),
    n_kept_(other.n_kept_) {}

dflash2_sampler & dflash2_sampler::operator=(const dflash2_sampler & other) {
    *this = dflash2_sampler(other);
    return *this;
}

bool dflash2_sampler::is_plain_argmax() const {
    return is_greedy() && !bias_ && !grammar_ && !history_;
}

//
// distribution
//

// Softmax of what is left; at temperature 0 the first maximum takes all.
void dflash2_sampler::finish(dflash2_distribution & out) const {
    auto &     data = out.data;
    const auto less = [](const llama_token_data & a, const llama_token_data & b) {
        return a.logit < b.logit || (a.logit == b.logit && a.id > b.id);
    };
    const llama_token_data best = *std::max_element(data.begin(), data.end(), less);
    if (!(best.logit > -INFINITY)) {
        throw dflash2_error(DFLASH2_ERROR_COMPUTE,
                            has_grammar() ? "the grammar allows no token here" : "the target's logits are not numbers");
    }
    if (is_greedy()) {
        data.assign(1, { best.id, best.logit, 1.0f });
        return;
    }

    double sum = 0.0;
    for (auto & entry : data) {
        entry.p = std::exp((entry.logit - best.logit) / temp_);
        sum += entry.p;
    }
    for (auto & entry : data) {
        entry.p = (float) (entry.p / sum);
    }
}

// Applies samplers in their order. They may replace and shorten the list of candidates.
static void apply_all(std::initializer_list<const llama_sampler_ptr *> samplers, dflash2_distribution & out) {
    auto &                 data  = out.data;
    llama_token_data_array array = { data.data(), data.size(), -1, false };
    for (const llama_sampler_ptr * sampler : samplers) {
        if (*sampler) {
            llama_sampler_apply(sampler->get(), &array);
        }
    }
    if (array.data != data.data()) {
        data.assign(array.data, array.data + array.size);
    }
    data.resize(array.size);
}

// what comes before truncation
void dflash2_sampler::weigh(const float * logits, dflash2_distribution & out) const {
    out.data.resize(n_vocab_);
    for (llama_token id = 0; id < n_vocab_; ++id) {
        out.data[id] = { id, logits[id], 0.0f };
    }
    apply_all({ &bias_, &grammar_, &history_ }, out);
}

// The same, but only the likeliest tokens, where no other can matter: a grammar takes long to look at a vocabulary, and
// mostly allows what the target wants. False where that is not known.
bool dflash2_sampler::weigh_likeliest(const float * logits, dflash2_distribution & out) const {
    if (!grammar_ || n_kept_ == 0) {
        return false;
    }
    // bias and penalties change tokens one by one, so the grammar may come after them
    dflash2_distribution all;
    all.data.resize(n_vocab_);
    for (llama_token id = 0; id < n_vocab_; ++id) {
        all.data[id] = { id, logits[id], 0.0f };
    }
    apply_all({ &bias_, &history_ }, all);

    const auto likelier = [](const llama_token_data & a, const llama_token_data & b) {
        return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
    };
    for (size_t n = std::max(64, 2 * n_kept_); n < all.data.size(); n *= 8) {
        std::nth_element(all.data.begin(), all.data.begin() + n, all.data.end(), likelier);
        out.data.assign(all.data.begin(), all.data.begin() + n);
        apply_all({ &grammar_ }, out);
        const auto forbidden = [](const llama_token_data & e) {
            return !(e.logit > -INFINITY);
        };
        out.data.erase(std::remove_if(out.data.begin(), out.data.end(), forbidden), out.data.end());
        if (out.data.size() >= (size_t) n_kept_) {
            std::sort(out.data.begin(), out.data.end(), likelier);
            return true;
        }
    }
    return false;
}

void dflash2_sampler::truncate(llama_pos pos, dflash2_distribution & out) const {
    llama_sampler_ptr xtc;
    if (xtc_p_ > 0.0f) {
        // the coin of this position, not the next one of a stream
        const uint32_t seed = (uint32_t) dflash2_key(seed_, pos, dflash2_purpose::XTC);
        xtc.reset(llama_sampler_init_xtc(xtc_p_, xtc_t_, 1, seed));
    }
    apply_all({ &truncate_, &xtc }, out);
}

void dflash2_sampler::apply(const float * logits, llama_pos pos, dflash2_distribution & out) const {
    if (!weigh_likeliest(logits, out)) {
        weigh(logits, out);
    }
    truncate(pos, out);
    finish(out);
}

// Truncation keeps tokens above a threshold that depends on all logits. Errors lower it most when what is kept loses
// and the rest gains, and cut a token soonest when all that is above it gains and it loses.
bool dflash2_sampler::surely_keeps(const float *          logits,
                                   llama_pos              pos,
                                   llama_token            token,
                                   double                 noise,
                                   dflash2_distribution & kept) const {
    weigh(logits, kept);
    if (!truncate_ && xtc_p_ <= 0.0f) {
        return true;
    }
    const dflash2_distribution all  = kept;
    const float                step = (float) noise;

    dflash2_distribution fewest = all;
    for (auto & entry : fewest.data) {
        entry.logit += entry.logit > all.data[token].logit ? step : -step;
    }
    truncate(pos, fewest);

    truncate(pos, kept);
    dflash2_distribution most = all;
    for (auto & entry : most.data) {
        entry.logit += step;
    }
    for (const auto & entry : kept.data) {
        most.data[entry.id].logit -= 2 * step;
    }
    truncate(pos, most);

    kept.data.insert(kept.data.end(), most.data.begin(), most.data.end());
    for (auto & entry : kept.data) {
        entry.logit = all.data[entry.id].logit;
    }
    return fewest.find(token) != nullptr;
}

bool dflash2_sampler::apply_to_draft(const llama_token *    ids,
                                     const float *          scores,
                                     int32_t                n,
                                     dflash2_distribution & out) const {
    out.data.resize(n);
    for (int32_t i = 0; i < n; ++i) {
        out.data[i] = { ids[i], scores[i], 0.0f };
    }
    apply_all({ &grammar_ }, out);

    const bool any =
        std::any_of(out.data.begin(), out.data.end(), [](const llama_token_data & e) { return e.logit > -INFINITY; });
    if (any) {
        apply_all({ &truncate_ }, out);
        finish(out);
    }
    return any;
}

void dflash2_sampler::accept(llama_token token, bool from_prompt) {
    if (history_) {
        llama_sampler_accept(history_.get(), token);
    }
    if (grammar_ && !from_prompt) {
        llama_sampler_accept(grammar_.get(), token);
    }
}
