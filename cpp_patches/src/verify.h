// Which drafted tokens the target keeps. Every rule is lossless: the tokens have the law of plain decoding.

#pragma once

#include "dflash2.h"
#include "target.h"

#include <functional>
#include <memory>
#include <vector>

class dflash2_acceptor {
public:
    virtual ~dflash2_acceptor() = default;

    // Row row of the target judges draft[0], row + i the token after draft[0..i). Appends the accepted prefix of
    // draft and one token of the target's own to out, ending early after a token for which is_stop holds.
    // Returns how many of them are drafted ones.
    virtual int32_t accept(const dflash2_target & target, int32_t row, const std::vector<llama_token> & draft,
                           const std::function<bool(llama_token)> & is_stop, std::vector<llama_token> & out) = 0;

    // tokens before the first accept(): what penalties look at
    virtual void prime(const llama_token * tokens, size_t n_tokens);
};

// Rules:
//   greedy  equality with the argmax of the target's logits, the lowest id on ties
//   match   equality with a sample of the sampler chain, whose state advances with every token (upstream's rule,
//           common/sampling.cpp: common_sampler_sample_and_accept_n); accepts with probability p(draft)
// Throws dflash2_error(DFLASH2_ERROR_ARGUMENT) for parameters that make no chain.
std::unique_ptr<dflash2_acceptor> dflash2_make_acceptor(const llama_model * model, const dflash2_seq_params & params);
