#include "verify.h"

#include "error.h"
#include "llama-ptr.h"

#include <algorithm>
#include <cmath>

void dflash2_acceptor::prime(const llama_token *, size_t) {}

namespace {

// One token per row from pick(), as long as it equals the draft.
template <typename Pick>
int32_t accept_while_equal(const std::vector<llama_token> & draft, const std::function<bool(llama_token)> & is_stop,
                           std::vector<llama_token> & out, Pick && pick) {
    for (size_t i = 0; ; ++i) {
        const llama_token token = pick((int32_t) i);
        out.push_back(token);
        const bool from_draft = i < draft.size() && token == draft[i];
        if (!from_draft || is_stop(token)) {
            return (int32_t) i + (from_draft ? 1 : 0);
        }
    }
}

class greedy_acceptor : public dflash2_acceptor {
public:
    explicit greedy_acceptor(const llama_model * model) : n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model))) {}

    int32_t accept(const dflash2_target & target, int32_t row, const std::vector<llama_token> & draft,
                   const std::function<bool(llama_token)> & is_stop, std::vector<llama_token> & out) override {
        return accept_while_equal(draft, is_stop, out, [&](int32_t i) {
            const float * logits = target.logits(row + i);
            return (llama_token) (std::max_element(logits, logits + n_vocab_) - logits);
        });
    }

private:
    int32_t n_vocab_;
};

class match_acceptor : public dflash2_acceptor {
public:
    explicit match_acceptor(llama_sampler_ptr chain) : chain_(std::move(chain)) {}

    int32_t accept(const dflash2_target & target, int32_t row, const std::vector<llama_token> & draft,
                   const std::function<bool(llama_token)> & is_stop, std::vector<llama_token> & out) override {
        return accept_while_equal(draft, is_stop, out, [&](int32_t i) {
            return llama_sampler_sample(chain_.get(), target.context(), row + i); // also advances the chain's state
        });
    }

    void prime(const llama_token * tokens, size_t n_tokens) override {
        for (size_t i = 0; i < n_tokens; ++i) {
            llama_sampler_accept(chain_.get(), tokens[i]);
        }
    }

private:
    llama_sampler_ptr chain_;
};

bool has_penalties(const dflash2_seq_params & p) {
    return p.penalty_last_n != 0 && (p.penalty_repeat != 1.0f || p.penalty_freq != 0.0f || p.penalty_present != 0.0f);
}

void check(bool ok, const char * name, double value, const char * expected) {
    if (!ok) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT, dflash2_format("%s is %g, expected %s", name, value, expected));
    }
}

void check_params(const dflash2_seq_params & p) {
    check(std::isfinite(p.temp),            "temp",            p.temp,            "a number");
    check(p.top_p > 0.0f && p.top_p <= 1.0f, "top_p",          p.top_p,           "more than 0 and at most 1");
    check(p.min_p >= 0.0f && p.min_p <= 1.0f, "min_p",         p.min_p,           "0 to 1");
    check(p.penalty_last_n >= -1,           "penalty_last_n",  p.penalty_last_n,  "-1 or more");
    check(std::isfinite(p.penalty_repeat) && p.penalty_repeat > 0.0f, "penalty_repeat", p.penalty_repeat, "more than 0");
    check(std::isfinite(p.penalty_freq),    "penalty_freq",    p.penalty_freq,    "a number");
    check(std::isfinite(p.penalty_present), "penalty_present", p.penalty_present, "a number");
}

llama_sampler_ptr make_chain(const llama_model * model, const dflash2_seq_params & p) {
    llama_sampler_ptr chain(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    auto add = [&](llama_sampler * sampler) { llama_sampler_chain_add(chain.get(), sampler); };

    if (has_penalties(p)) {
        const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        const int32_t last_n  = p.penalty_last_n < 0 ? llama_model_n_ctx_train(model) : p.penalty_last_n;
        add(llama_sampler_init_penalties(n_vocab, last_n, p.penalty_repeat, p.penalty_freq, p.penalty_present));
    }
    if (p.temp <= 0.0f) {
        add(llama_sampler_init_greedy());
        return chain;
    }
    if (p.top_k > 0) {
        add(llama_sampler_init_top_k(p.top_k));
    }
    if (p.top_p < 1.0f) {
        add(llama_sampler_init_top_p(p.top_p, 1));
    }
    if (p.min_p > 0.0f) {
        add(llama_sampler_init_min_p(p.min_p, 1));
    }
    add(llama_sampler_init_temp(p.temp));
    add(llama_sampler_init_dist(p.seed));
    return chain;
}

} // namespace

std::unique_ptr<dflash2_acceptor> dflash2_make_acceptor(const llama_model * model, const dflash2_seq_params & params) {
    check_params(params);

    const bool is_argmax = params.temp <= 0.0f && !has_penalties(params);
    switch (params.verifier) {
        case DFLASH2_VERIFIER_AUTO:
            break;
        case DFLASH2_VERIFIER_MATCH:
            return std::make_unique<match_acceptor>(make_chain(model, params));
        case DFLASH2_VERIFIER_GREEDY:
            if (!is_argmax) {
                throw dflash2_error(DFLASH2_ERROR_ARGUMENT,
                    dflash2_format("the greedy verifier needs temperature 0 and no penalties, temperature is %g", params.temp));
            }
            break;
        default:
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT, dflash2_format("there is no verifier %d", params.verifier));
    }
    if (is_argmax) {
        return std::make_unique<greedy_acceptor>(model);
    }
    return std::make_unique<match_acceptor>(make_chain(model, params));
}
