#include "session.h"

#include "error.h"
#include "memory.h"

#include <algorithm>

dflash2_session::dflash2_session(llama_model * target, llama_model * draft, const dflash2_session_params & params) :
    n_chunk_(dflash2_plain_chunk(target, params)),
    params_(dflash2_resolve_params(target, params)),
    vocab_(llama_model_get_vocab(target)),
    model_(target),
    draft_model_(nullptr),
    costs_(1),
    width_(0) {
    const bool drafts = draft != nullptr && params_.n_draft_max != 0;
    if (drafts) {
        dflash2_require_pair(target, draft);
    }

    const int32_t n_draft_max = drafts ? dflash2_draft_max(draft, params_) : 0;
    target_                   = std::make_unique<dflash2_target>(target, params_, n_draft_max, abort_);
    if (drafts) {
        draft_model_ = draft;
        draft_       = std::make_unique<dflash2_draft>(draft, target_->context(), params_);
        target_->enable_features(draft_->info().layer_inputs);
    }
    costs_ = dflash2_costs(params_.n_seq_max * (n_draft_max + 1));
    width_ = dflash2_width(n_draft_max);
    sequences_.resize(params_.n_seq_max);
    if (params_.exact) {
        noise_ = dflash2_noise(params_.noise_min);
        dflash2_measure_noise(*target_, llama_vocab_n_tokens(vocab_), (int32_t) params_.n_seq_max, n_draft_max, noise_);
        stats.noise = noise_.largest();
    }
}

dflash2_request::dflash2_request(const dflash2_seq_params & lent) :
    params(lent),
    stop(lent.stop, lent.stop + (lent.stop ? lent.n_stop : 0)),
    logit_bias(lent.logit_bias, lent.logit_bias + (lent.logit_bias ? lent.n_logit_bias : 0)),
    grammar(lent.grammar ? lent.grammar : "") {
    params.stop       = nullptr;
    params.logit_bias = nullptr;
    params.grammar    = nullptr;
}

dflash2_seq_params dflash2_request::view() const {
    dflash2_seq_params p = params;
    p.stop               = stop.data();
    p.n_stop             = stop.size();
    p.logit_bias         = logit_bias.data();
    p.n_logit_bias       = logit_bias.size();
    p.grammar            = grammar.c_str();
    return p;
}

dflash2_session::sequence & dflash2_session::checked(llama_seq_id seq_id) {
    if (seq_id < 0 || seq_id >= (llama_seq_id) sequences_.size()) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT, dflash2_format("sequence %d does not exist, the session has %zu",
                                                                   seq_id, sequences_.size()));
    }
    return sequences_[seq_id];
}

const dflash2_session::sequence & dflash2_session::checked(llama_seq_id seq_id) const {
    return const_cast<dflash2_session *>(this)->checked(seq_id);
}

//
// sequences
//

// Cuts both caches to what they share with the new prompt. Returns how many tokens stay evaluated; at least the
// last prompt token does not, because its logits are wanted.
int32_t dflash2_session::reuse_prefix(llama_seq_id        seq_id,
                                      sequence &          seq,
                                      const llama_token * tokens,
                                      int32_t             n_tokens) {
    const int32_t n_old = std::min(seq.n_past, n_tokens - 1);

    int32_t n_keep = 0;
    while (n_keep < n_old && seq.tokens[n_keep] == tokens[n_keep]) {
        ++n_keep;
    }
    if (draft_) {
        inject(seq);
    }
    if (draft_ && n_keep > 0) {
        // what a block after the prompt reads: if the old part of it is lost, evaluate that part again
        const llama_pos begin = draft_->window_begin(n_tokens);
        if (begin < n_keep) {
            draft_->truncate(seq_id, n_keep);
            if (!draft_->has_window(seq_id, n_keep)) {
                n_keep = begin;
            }
        }
    }
    if (n_keep > 0 && !target_->can_continue_at(seq_id, n_keep)) {
        n_keep = 0;
    }
    if (params_.exact) {
        // whole chunks of both prompts: what plain decoding reads the same way
        n_keep      = std::min({ n_keep, seq.n_plain, seq.n_prompt }) / n_chunk_ * n_chunk_;
        seq.n_plain = n_keep;
    }
    rewind(seq_id, seq, n_keep);
    if (draft_) {
        draft_->truncate(seq_id, seq.n_past);
    }
    return seq.n_past;
}

// Keeps the first n_keep rows of the target's cache, none where it cannot go back there.
void dflash2_session::rewind(llama_seq_id seq_id, sequence & seq, int32_t n_keep) {
    seq.n_past  = target_->truncate(seq_id, n_keep) ? n_keep : 0;
    seq.n_plain = std::min(seq.n_plain, seq.n_past);
}

void dflash2_session::check_tokens(const llama_token * tokens, size_t n_tokens, const char * what) const {
    const int32_t n_vocab = llama_vocab_n_tokens(vocab_);
    for (size_t i = 0; i < n_tokens; ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT, dflash2_format("%s token %zu is %d, the vocabulary has %d",
                                                                       what, i, tokens[i], n_vocab));
        }
    }
}

std::unique_ptr<dflash2_verifier_rule> dflash2_session::make_rule(const dflash2_seq_params & resolved) {
    static constexpr size_t MAX_GRAMMARS = 4;

    const std::string text = resolved.grammar != nullptr ? resolved.grammar : "";
    if (grammars_.size() >= MAX_GRAMMARS && grammars_.count(text) == 0) {
        grammars_.clear();  // those in use stay with their samplers
    }
    auto & masks = grammars_[text];
    if (!masks) {
        masks = std::make_shared<dflash2_grammar_masks>();
    }
    return dflash2_make_rule(model_, resolved, masks);
}

int32_t dflash2_session::seq_begin(llama_seq_id               seq_id,
                                   const llama_token *        tokens,
                                   size_t                     n_tokens,
                                   const dflash2_seq_params & params) {
    sequence & seq = checked(seq_id);
    if (tokens == nullptr || n_tokens == 0) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "the prompt is empty");
    }
    if (n_tokens > n_ctx()) {
        throw dflash2_error(DFLASH2_ERROR_CONTEXT,
                            dflash2_format("the prompt has %zu tokens, the context holds %u", n_tokens, n_ctx()));
    }
    check_tokens(tokens, n_tokens, "prompt");
    const dflash2_seq_params resolved = dflash2_resolve_seq_params(params, params_.exact);
    auto                     rule     = make_rule(resolved);
    rule->prime(tokens, n_tokens);

    abort_.store(false);  // meant for an earlier step
    reuse_prefix(seq_id, seq, tokens, (int32_t) n_tokens);
    seq.tokens.assign(tokens, tokens + n_tokens);
    seq.request     = dflash2_request(resolved);
    seq.rule        = std::move(rule);
    seq.arrival     = n_arrivals_++;
    seq.n_prompt    = (int32_t) n_tokens;
    seq.n_predicted = 0;
    seq.replays     = false;
    seq.active      = params.n_predict != 0;
    seq.stats       = {};
    seq.stats.n_prompt_reused += seq.n_past;
    stats.n_prompt_reused += seq.n_past;
    return seq.n_past;
}

void dflash2_session::seq_end(llama_seq_id seq_id) {
    checked(seq_id).active = false;
}

void dflash2_session::seq_clear(llama_seq_id seq_id) {
    checked(seq_id) = sequence();
    target_->truncate(seq_id, 0);
    if (draft_) {
        draft_->truncate(seq_id, 0);
    }
}

bool dflash2_session::is_stop(const sequence & seq, llama_token token) const {
    if (!seq.request.params.ignore_eos && llama_vocab_is_eog(vocab_, token)) {
        return true;
    }
    const auto & stop = seq.request.stop;
    return std::find(stop.begin(), stop.end(), token) != stop.end();
}

const float * dflash2_session::seq_logits(llama_seq_id seq_id) const {
    const sequence & seq = checked(seq_id);
    if (seq.chosen < 0) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT,
                            dflash2_format("the last step chose no token of sequence %d", seq_id));
    }
    return target_->logits(seq.chosen);
}

void dflash2_session::draft_view(llama_seq_id seq_id, dflash2_draft_view & view) const {
    const sequence & seq = checked(seq_id);
    view.n_drafted       = (int32_t) seq.path.tokens.size();
    view.top_k           = seq.lattice.top_k;
    view.path            = seq.path.tokens.data();
    view.candidates      = seq.lattice.candidates.data();
    view.scores          = seq.lattice.scores.data();
}

const std::map<std::string, dflash2_recorder::entry> & dflash2_session::calibration() const {
    if (!draft_ || draft_->recorder() == nullptr) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "the session has no drafter or does not calibrate");
    }
    return draft_->recorder()->entries();
}

void dflash2_session::memory(dflash2_memory & memory) const {
    memory = dflash2_measure_memory(target_->context(), draft_ ? draft_->context() : nullptr);
}
