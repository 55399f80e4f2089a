// Sequences and steps: prefill, draft, verify, accept, roll back, inject.

#pragma once

#include "dflash2.h"
#include "draft.h"
#include "target.h"
#include "verify.h"
#include "width.h"

#include <atomic>
#include <memory>
#include <vector>

struct dflash2_session {
  public:
    dflash2_session(llama_model * target, llama_model * draft, const dflash2_session_params & params);

    int32_t seq_begin(llama_seq_id               seq_id,
                      const llama_token *        tokens,
                      size_t                     n_tokens,
                      const dflash2_seq_params & params);
    void    seq_end(llama_seq_id seq_id);
    void    seq_clear(llama_seq_id seq_id);

    int32_t step(dflash2_step_result * results);

    void abort() { abort_.store(true); }

    void draft_view(llama_seq_id seq_id, dflash2_draft_view & view) const;
    void memory(dflash2_memory & memory) const;

    uint32_t n_ctx() const { return target_->n_ctx(); }

    int32_t n_draft_max() const { return draft_ ? draft_->n_draft_max() : 0; }

    int32_t seq_n_past(llama_seq_id seq_id) const { return checked(seq_id).n_past; }

    dflash2_stats stats = {};

  private:
    // All tokens known of a sequence; the first n_past are in the target's cache. While a sequence is generated,
    // exactly one is not: the anchor, which the target has chosen but not evaluated.
    struct sequence {
        bool                                   active      = false;
        int32_t                                n_past      = 0;
        int32_t                                n_predicted = 0;
        dflash2_seq_params                     params      = {};
        std::vector<llama_token>               tokens;
        std::vector<llama_token>               stop;
        std::unique_ptr<dflash2_verifier_rule> rule;

        // of the step in progress
        int32_t                  row    = -1;     // first row in the target's batch
        int32_t                  n_rows = 0;
        bool                     judged = false;  // the rows end with the last known token
        dflash2_path             path;
        std::vector<llama_token> produced;

        dflash2_lattice     lattice;  // of the last draft
        dflash2_features    pending;  // rows not in the draft cache yet; they end at n_past
        dflash2_calibration calibration;

        int32_t n_pending() const { return (int32_t) tokens.size() - n_past; }

        // all but the anchor is evaluated: the next step is a round of drafting and verifying
        bool generates() const { return active && n_pending() == 1; }
    };

    sequence &       checked(llama_seq_id seq_id);
    const sequence & checked(llama_seq_id seq_id) const;

    int32_t reuse_prefix(llama_seq_id seq_id, sequence & seq, const llama_token * tokens, int32_t n_tokens);
    int32_t width_limit(const sequence & seq) const;
    int32_t plan_round();
    void    draft_all();
    void    choose_widths();
    void    learn(double target_us);
    void    fill_batch();
    void    evaluate();
    void    accept(llama_seq_id seq_id, sequence & seq, dflash2_step_result & result);
    void    keep_features(sequence & seq, int32_t n_keep);
    void    inject(sequence & seq);
    bool    is_stop(const sequence & seq, llama_token token) const;
    void    recover();

    std::atomic<bool> abort_{ false };

    dflash2_session_params          params_;
    const llama_vocab *             vocab_;
    llama_model *                   model_;
    std::unique_ptr<dflash2_target> target_;
    std::unique_ptr<dflash2_draft>  draft_;
    std::vector<sequence>           sequences_;
    dflash2_costs                   costs_;
    dflash2_width                   width_;

    // of the step in progress
    struct round {
        int32_t n_auto   = 0;      // generating sequences whose width is automatic
        int32_t n_blocks = 0;      // drafted
        double  us_draft = 0.0;    // draft pass and injection
        bool    mixed    = false;  // reads prompts too: says nothing about the cost of a round
    } round_;
};
