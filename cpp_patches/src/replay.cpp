#include "replay.h"

#include "error.h"
#include "memory.h"
#include "pair.h"

#include <algorithm>
#include <cmath>

dflash2_replay::dflash2_replay(llama_model *                      target,
                               const std::vector<llama_model *> & drafts,
                               const dflash2_session_params &     params) :
    n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(target))) {
    dflash2_session_params p = dflash2_resolve_params(target, params);
    p.n_seq_max              = 1;
    for (llama_model * draft : drafts) {
        dflash2_require_pair(target, draft);
        n_draft_max_ = std::min(n_draft_max_, dflash2_draft_max(draft, p));
    }
    if (drafts.empty() || n_draft_max_ < 1) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "a replay needs drafters that may draft");
    }

    target_ = std::make_unique<dflash2_target>(target, p, n_draft_max_, never_);
    for (llama_model * draft : drafts) {
        drafts_.push_back(std::make_unique<dflash2_draft>(draft, target_->context(), p));
        if (drafts_.back()->info().layer_inputs != drafts_.front()->info().layer_inputs) {
            throw dflash2_error(DFLASH2_ERROR_PAIR,
                                dflash2_format("drafter %zu reads other layers than the first", drafts_.size()));
        }
    }
    target_->enable_features(drafts_.front()->info().layer_inputs);
}

dflash2_draft & dflash2_replay::checked(int32_t drafter) {
    if (drafter < 0 || drafter >= (int32_t) drafts_.size()) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT,
                            dflash2_format("drafter %d is wanted, there are %zu", drafter, drafts_.size()));
    }
    return *drafts_[drafter];
}

static float log_probability(const float * logits, int32_t n, llama_token token) {
    const float largest = *std::max_element(logits, logits + n);
    double      sum     = 0.0;
    for (int32_t i = 0; i < n; ++i) {
        sum += std::exp((double) logits[i] - largest);
    }
    return (float) ((double) logits[token] - largest - std::log(sum));
}

void dflash2_replay::read(const llama_token * tokens, int32_t n_tokens, int32_t n_prompt, float * rows, float * log_p) {
    if (n_prompt < 1 || n_tokens <= n_prompt || n_tokens > target_->n_ctx()) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT,
                            dflash2_format("a text of %d tokens, %d of them prompt, does not fit a context of %d",
                                           n_tokens, n_prompt, target_->n_ctx()));
    }
    for (int32_t i = 0; i < n_tokens; ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab_) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT,
                                dflash2_format("token %d is %d, the vocabulary has %d", i, tokens[i], n_vocab_));
        }
    }
    target_->truncate(0, 0);
    std::vector<float> features;
    for (int32_t begin = 0; begin < n_tokens - 1;) {
        const bool    is_prompt = begin < n_prompt;
        const int32_t n_most    = is_prompt ? target_->n_batch() : n_draft_max_ + 1;
        const int32_t end       = std::min(is_prompt ? n_prompt : n_tokens - 1, begin + n_most);

        target_->clear_batch();
        for (int32_t i = begin; i < end; ++i) {
            target_->add(0, tokens[i], i, i >= n_prompt - 1);
        }
        target_->evaluate();
        features.clear();
        target_->append_features(0, end - begin, features);
        std::copy(features.begin(), features.end(), rows + (size_t) begin * n_features());
        for (int32_t i = std::max(begin, n_prompt - 1); i < end; ++i) {
            log_p[i + 1 - n_prompt] = log_probability(target_->logits(i - begin), n_vocab_, tokens[i + 1]);
        }
        begin = end;
    }
}

void dflash2_replay::inject(int32_t drafter, llama_pos pos, const float * rows, int32_t n_rows) {
    dflash2_draft & draft = checked(drafter);
    if (pos < 0 || n_rows < 1) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT, dflash2_format("%d rows at position %d", n_rows, pos));
    }
    dflash2_features features;
    features.pos    = pos;
    features.n_rows = n_rows;
    features.rows.assign(rows, rows + (size_t) n_rows * n_features());
    if (!draft.inject(features)) {
        throw dflash2_error(DFLASH2_ERROR_COMPUTE,
                            dflash2_format("drafter %d could not take %d rows at position %d", drafter, n_rows, pos));
    }
}

void dflash2_replay::draft(int32_t drafter, llama_token anchor, int32_t n, dflash2_draft_view & view) {
    dflash2_draft & draft = checked(drafter);
    if (anchor < 0 || anchor >= n_vocab_ || n < 1 || n > n_draft_max_) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT,
                            dflash2_format("%d tokens after token %d, at most %d after 0 to %d can be drafted", n,
                                           anchor, n_draft_max_, n_vocab_ - 1));
    }
    dflash2_draft_failure failure;
    if (!draft.draft(
            {
                { 0, anchor, draft.only_rows(0).end }
    },
            n, lattices_, failure)) {
        throw dflash2_error(DFLASH2_ERROR_COMPUTE,
                            dflash2_format("drafter %d could not draft (failure %d)", drafter, (int) failure));
    }
    const dflash2_lattice & lattice = lattices_.front();

    view = { lattice.n_rows, lattice.top_k, nullptr, lattice.candidates.data(), lattice.scores.data() };
}

//
// the C boundary
//

static dflash2_replay & require(dflash2_replay * replay, bool rest = true) {
    if (replay == nullptr || !rest) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "a replay and memory for what is read or written are required");
    }
    return *replay;
}

dflash2_replay * dflash2_replay_init(llama_model *                  target,
                                     llama_model * const *          drafts,
                                     int32_t                        n_drafts,
                                     const dflash2_session_params * params,
                                     int32_t *                      status) {
    dflash2_replay * replay = nullptr;
    const int32_t    result = dflash2_guard([&]() -> int32_t {
        if (target == nullptr || drafts == nullptr || params == nullptr ||
            std::find(drafts, drafts + n_drafts, nullptr) != drafts + n_drafts) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "target, drafters and params are required");
        }
        replay = new dflash2_replay(target, { drafts, drafts + n_drafts }, *params);
        return DFLASH2_OK;
    });
    if (status != nullptr) {
        *status = result;
    }
    return replay;
}

void dflash2_replay_free(dflash2_replay * replay) {
    delete replay;
}

int32_t dflash2_replay_n_features(const dflash2_replay * replay) {
    return replay ? replay->n_features() : 0;
}

int32_t dflash2_replay_n_draft_max(const dflash2_replay * replay) {
    return replay ? replay->n_draft_max() : 0;
}

int32_t dflash2_replay_read(dflash2_replay *    replay,
                            const llama_token * tokens,
                            int32_t             n_tokens,
                            int32_t             n_prompt,
                            float *             rows,
                            float *             log_p) {
    return dflash2_guard([&]() -> int32_t {
        require(replay, tokens && rows && log_p).read(tokens, n_tokens, n_prompt, rows, log_p);
        return DFLASH2_OK;
    });
}

int32_t dflash2_replay_inject(dflash2_replay * replay,
                              int32_t          drafter,
                              llama_pos        pos,
                              const float *    rows,
                              int32_t          n_rows) {
    return dflash2_guard([&]() -> int32_t {
        require(replay, rows).inject(drafter, pos, rows, n_rows);
        return DFLASH2_OK;
    });
}

int32_t dflash2_replay_draft(dflash2_replay *     replay,
                             int32_t              drafter,
                             llama_token          anchor,
                             int32_t              n,
                             dflash2_draft_view * view) {
    return dflash2_guard([&]() -> int32_t {
        require(replay, view).draft(drafter, anchor, n, *view);
        return DFLASH2_OK;
    });
}
