// How a path is drawn from the drafter's lattice, and which of its tokens the target keeps.
//
// p is what a step without drafting samples from (sampler.h); q is the softmax of the drafter's scores over the K
// candidates that follow the realised predecessor, at the request's temperature and truncated like p.
//
//   greedy   best path; equality with the most likely token of p at temperature 0
//   match    best path; equality with a draw from p. Accepts with probability p(draft)
//            (common/sampling.cpp: common_sampler_sample_and_accept_n)
//   coupled  argmax(log q + g), equality with argmax(log p + g), g Gumbel noise of (seed, position, token): both are
//            draws from q and p, and they agree with probability at least (1 - TV)/(1 + TV)
//   reject   path drawn from q; keep with probability min(1, p/q), else draw from (p - q)+ (Leviathan et al. 2023,
//            arXiv 2211.17192; dflash/model.py: rejection_sample)
//   block    path drawn from q; keeps the longest prefix that the joint ratio allows (Sun et al. 2024,
//            arXiv 2403.10444, Algorithm 2)
//
// greedy, match and coupled yield the tokens of plain decoding with the same seed, whatever the drafter proposes.

#pragma once

#include "dflash2.h"
#include "draft.h"
#include "sampler.h"
#include "target.h"

#include <functional>
#include <memory>
#include <vector>

// A drafted path, with the distribution each of its tokens was drawn from (empty where the rule needs none).
struct dflash2_path {
    std::vector<llama_token>          tokens;
    std::vector<dflash2_distribution> q;
    // How sure the drafter was at each position: its largest probability there. It does not depend on which token was
    // drawn, so a width chosen from it leaves the law of the drawn token alone (see dflash2_width::choose).
    std::vector<float>                sure;

    void clear();
    void truncate(int32_t n);
};

struct dflash2_verdict {
    int32_t n_accepted = 0;      // how many of the appended tokens are drafted ones
    bool    doubtful   = false;  // ended before row n_accepted: rounding could turn the decision there
};

// logits [n_vocab] of row i of a step: row 0 judges the first drafted token
using dflash2_rows = std::function<const float *(int32_t i)>;

class dflash2_verifier_rule {
  public:
    virtual ~dflash2_verifier_rule() = default;

    // Draws up to n tokens for positions pos, pos + 1, ... Fewer where a grammar leaves no candidate.
    virtual void walk(const dflash2_lattice & lattice, int32_t n, llama_pos pos, dflash2_path & path) const = 0;

    // Appends the accepted prefix of path and one token of the target's own to out, ending early after a token for
    // which is_stop holds. pos is the position of the first token. noise is by how much a logit may be off, 0 = not at
    // all: the rules that equal plain decoding leave out a token that such an error could turn.
    virtual dflash2_verdict accept(const dflash2_rows &                     rows,
                                   llama_pos                                pos,
                                   const dflash2_path &                     path,
                                   const std::function<bool(llama_token)> & is_stop,
                                   double                                   noise,
                                   std::vector<llama_token> &               out) = 0;

    // tokens before the first accept(): what penalties look at
    void prime(const llama_token * tokens, size_t n_tokens);

    // tokens that a rule like this one has accepted before
    void catch_up(const llama_token * tokens, size_t n_tokens);

  protected:
    explicit dflash2_verifier_rule(dflash2_sampler sampler) : sampler_(std::move(sampler)) {}

    dflash2_sampler sampler_;
};

// Replaces what is left open (seed, verifier) by a choice. exact: only rules that equal plain decoding will do. Throws
// dflash2_error(DFLASH2_ERROR_ARGUMENT) for a verifier that does not fit the rest.
dflash2_seq_params dflash2_resolve_seq_params(const dflash2_seq_params & params, bool exact);

// params are resolved; masks: see dflash2_sampler, of its own when NULL. Throws dflash2_error(DFLASH2_ERROR_ARGUMENT) for
// samplers out of range.
std::unique_ptr<dflash2_verifier_rule> dflash2_make_rule(const llama_model *                    model,
                                                         const dflash2_seq_params &             params,
                                                         std::shared_ptr<dflash2_grammar_masks> masks = nullptr);
