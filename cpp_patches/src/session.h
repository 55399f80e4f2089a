// Sequences and steps: prefill, draft, verify, accept, roll back, inject.

#pragma once

#include "dflash2.h"
#include "draft.h"
#include "exact.h"
#include "target.h"
#include "verify.h"
#include "width.h"

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

// What was asked of a sequence, with copies of what the caller only lends.
struct dflash2_request {
    dflash2_seq_params            params = {};
    std::vector<llama_token>      stop;
    std::vector<llama_logit_bias> logit_bias;
    std::string                   grammar;

    dflash2_request() = default;
    explicit dflash2_request(const dflash2_seq_params & lent);

    // params whose pointers lead to these copies; valid as long as this object stays where it is
    dflash2_seq_params view() const;
};

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

    // state.cpp; the result is valid until the next call
    const std::vector<uint8_t> & seq_save(llama_seq_id seq_id);
    int32_t                      seq_restore(llama_seq_id seq_id, const uint8_t * data, size_t size);

    void draft_view(llama_seq_id seq_id, dflash2_draft_view & view) const;
    void memory(dflash2_memory & memory) const;

    // of a session with params.calibrate
    const std::map<std::string, dflash2_recorder::entry> & calibration() const;

    uint32_t n_ctx() const { return target_->n_ctx(); }

    int32_t n_draft_max() const { return draft_ ? draft_->n_draft_max() : 0; }

    bool seq_is_active(llama_seq_id seq_id) const { return checked(seq_id).active; }

    int32_t seq_n_past(llama_seq_id seq_id) const { return checked(seq_id).n_past; }

    const dflash2_stats & seq_stats(llama_seq_id seq_id) const { return checked(seq_id).stats; }

    const float * seq_logits(llama_seq_id seq_id) const;

    const std::vector<llama_token> & seq_tokens(llama_seq_id seq_id) const { return checked(seq_id).tokens; }

    dflash2_stats stats = {};

  private:
    // All tokens known of a sequence; the first n_past are in the target's cache. While a sequence is generated,
    // exactly one is not: the anchor, which the target has chosen but not evaluated.
    struct sequence {
        bool                                   active      = false;
        int32_t                                n_past      = 0;
        int32_t                                n_prompt    = 0;
        int32_t                                n_predicted = 0;
        uint64_t                               arrival     = 0;  // older ones read their prompts first
        dflash2_request                        request;
        std::vector<llama_token>               tokens;
        std::unique_ptr<dflash2_verifier_rule> rule;
        dflash2_stats                          stats = {};  // since it began

        // exact mode: the first n_plain rows of the cache are those of plain decoding, the others were evaluated with up
        // to n_company rows at once. A sequence that replays evaluates them again, to decide what the logits it doubted
        // could not.
        int32_t            n_plain   = 0;
        int32_t            n_company = 0;
        bool               replays   = false;
        std::vector<float> doubted;

        // of the step in progress
        int32_t                  row    = -1;     // first row in the target's batch
        int32_t                  n_rows = 0;
        bool                     judged = false;  // the rows end with the last known token
        int32_t                  chosen = -1;     // row that the last produced token was chosen from
        dflash2_path             path;
        std::vector<llama_token> produced;

        dflash2_lattice     lattice;  // of the last draft
        dflash2_features    pending;  // rows not in the draft cache yet; they end at n_past
        dflash2_calibration calibration;

        int32_t n_pending() const { return (int32_t) tokens.size() - n_past; }

        // all but the anchor is evaluated: the next step is a round of drafting and verifying
        bool generates() const { return active && !replays && n_pending() == 1; }

        // has tokens to evaluate before it can generate
        bool reads() const { return active && !generates(); }
    };

    sequence &       checked(llama_seq_id seq_id);
    const sequence & checked(llama_seq_id seq_id) const;

    // session.cpp
    std::unique_ptr<dflash2_verifier_rule> make_rule(const dflash2_seq_params & resolved);

    int32_t reuse_prefix(llama_seq_id seq_id, sequence & seq, const llama_token * tokens, int32_t n_tokens);
    void    rewind(llama_seq_id seq_id, sequence & seq, int32_t n_keep);
    void    rebuild_window(llama_seq_id seq_id, sequence & seq);
    void    check_tokens(const llama_token * tokens, size_t n_tokens, const char * what) const;

    // step.cpp
    int32_t      width_limit(const sequence & seq) const;
    int32_t      plan_round();
    void         draft_all();
    void         choose_widths();
    void         learn(double target_us);
    llama_seq_id next_alone();
    int32_t      plain_chunk(const sequence & seq) const;
    bool         is_plain(const sequence & seq) const;
    void         add_rows(llama_seq_id seq_id, sequence & seq, int32_t n);
    void         fill_shared_batch();
    void         evaluate();
    void         recover();
    void         advance(llama_seq_id seq_id, sequence & seq, dflash2_step_result & result);
    void         accept(llama_seq_id seq_id, sequence & seq, dflash2_step_result & result);
    void         replay(llama_seq_id seq_id, sequence & seq, const float * doubted);
    void         keep_features(sequence & seq, int32_t n_keep);
    void         inject(sequence & seq);
    bool         is_stop(const sequence & seq, llama_token token) const;

    std::atomic<bool> abort_{ false };

    const int32_t                   n_chunk_;  // prompt tokens at once in plain decoding
    dflash2_session_params          params_;
    const llama_vocab *             vocab_;
    llama_model *                   model_;
    llama_model *                   draft_model_;
    std::unique_ptr<dflash2_target> target_;
    std::unique_ptr<dflash2_draft>  draft_;
    std::vector<sequence>           sequences_;
    dflash2_costs                   costs_;
    dflash2_width                   width_;
    dflash2_noise                   noise_;
    uint64_t                        n_arrivals_ = 0;

    // what grammars of late allowed, by their text
    std::map<std::string, std::shared_ptr<dflash2_grammar_masks>> grammars_;

    bool                            alone_last_ = false;
    std::vector<uint8_t>            saved_;

    // of the step in progress
    struct round {
        int32_t n_auto      = 0;      // generating sequences whose width is automatic
        int32_t n_blocks    = 0;      // drafted
        int32_t n_sequences = 0;      // in the target's batch
        bool    reads       = false;  // some of it is prompts
        double  us_draft    = 0.0;    // draft pass and injection
        bool    mixed       = false;  // reads prompts too: says nothing about the cost of a round
    } round_;
};
