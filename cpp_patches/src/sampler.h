// The distribution that the target samples from: llama.cpp's samplers without their final draw.
//
// Order: logit bias, grammar, penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature. The grammar
// comes before everything that truncates ("grammar first"), with and without a drafter. At temperature <= 0 all mass
// is on the most likely token, the lowest id on ties.

#pragma once

#include "dflash2.h"
#include "llama-ptr.h"
#include "llama/dflash2-grammar.h"

#include <cstdint>
#include <memory>
#include <vector>

// Tokens with their probabilities, which sum to 1. Tokens not listed have none.
struct dflash2_distribution {
    std::vector<llama_token_data> data;  // logit: of the last sampler; p: probability

    // entry of a token, NULL if it is not listed
    const llama_token_data * find(llama_token token) const;

    float probability(llama_token token) const;

    // the token at which the cumulated probability passes u in (0, 1)
    llama_token draw(double u) const;
};

class dflash2_sampler {
  public:
    // masks: of the grammar in params, from samplers before this one; NULL: none yet. Throws
    // dflash2_error(DFLASH2_ERROR_ARGUMENT) for parameters out of range or a grammar that does not parse.
    dflash2_sampler(const llama_model *                    model,
                    const dflash2_seq_params &             params,
                    std::shared_ptr<dflash2_grammar_masks> masks = nullptr);

    // Deep copy, with the state of all samplers.
    dflash2_sampler(const dflash2_sampler & other);
    dflash2_sampler & operator=(const dflash2_sampler & other);
    dflash2_sampler(dflash2_sampler &&)             = default;
    dflash2_sampler & operator=(dflash2_sampler &&) = default;

    // Distribution of the token at pos, from logits [n_vocab].
    void apply(const float * logits, llama_pos pos, dflash2_distribution & out) const;

    // The same for drafted candidates: scores [n] of ids [n], and only what needs no other token to decide: grammar,
    // top-k, top-p, min-p, temperature. False when no candidate is left.
    bool apply_to_draft(const llama_token * ids, const float * scores, int32_t n, dflash2_distribution & out) const;

    // For logits that are off by up to noise each: is token, which apply() keeps, kept in any case? kept becomes every
    // token that could be, with its logit before truncation.
    bool surely_keeps(const float *          logits,
                      llama_pos              pos,
                      llama_token            token,
                      double                 noise,
                      dflash2_distribution & kept) const;

    // by how much penalties enlarge an error of a logit
    double noise_gain() const { return noise_gain_; }

    // Advances the state by one token. from_prompt: the grammar does not see it.
    void accept(llama_token token, bool from_prompt = false);

    bool is_greedy() const { return temp_ <= 0.0f; }

    // the result depends on nothing but the logits of a row
    bool is_plain_argmax() const;

    bool has_grammar() const { return grammar_ != nullptr; }

    float temperature() const { return temp_; }

    uint32_t seed() const { return seed_; }

  private:
    void weigh(const float * logits, dflash2_distribution & out) const;
    bool weigh_likeliest(const float * logits, dflash2_distribution & out) const;
    void truncate(llama_pos pos, dflash2_distribution & out) const;
    void finish(dflash2_distribution & out) const;

    llama_sampler_ptr bias_;
    llama_sampler_ptr grammar_;
    llama_sampler_ptr history_;   // penalties and DRY
    llama_sampler_ptr truncate_;  // top-n-sigma to min-p

    float    temp_       = 0.0f;
    float    xtc_p_      = 0.0f;
    float    xtc_t_      = 0.1f;
    double   noise_gain_ = 1.0;
    uint32_t seed_       = 0;
    int32_t  n_vocab_    = 0;
    int32_t  n_kept_     = 0;  // no more tokens than this survive truncation, 0 = unknown
};
