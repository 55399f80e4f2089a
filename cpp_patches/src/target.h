// The target's side: its context, one batch per step, the features of its rows, and taking rows back.

#pragma once

#include "dflash2.h"
#include "draft.h"
#include "llama-ptr.h"

#include <atomic>
#include <cstdint>
#include <vector>

class dflash2_target {
  public:
    // n_draft_max sizes the snapshots that recurrent targets need to take tokens back; abort is polled while computing
    dflash2_target(llama_model *                  model,
                   const dflash2_session_params & params,
                   int32_t                        n_draft_max,
                   const std::atomic<bool> &      abort);

    llama_context * context() const { return ctx_.get(); }

    int32_t n_ctx() const { return n_ctx_; }

    int32_t n_batch() const { return n_batch_; }

    // publish the inputs of these layers for every token; before the first batch
    void enable_features(const std::vector<int32_t> & layer_inputs);

    // Builds the batch of one step. add() returns the row.
    void    clear_batch();
    int32_t add(llama_seq_id seq_id, llama_token token, llama_pos pos, bool output);

    int32_t n_rows() const { return n_rows_; }

    // Evaluates the batch. Throws dflash2_error; the memory is then as it was before, see llama_decode().
    void evaluate();

    // appends the features of n rows from row on, [n][n_tap * n_embd] in layer order
    void append_features(int32_t row, int32_t n, std::vector<float> & out) const;

    // logits of a row that was added with output
    const float * logits(int32_t row) const;

    // Keeps positions before pos. False when the memory cannot go back there: the sequence must then be evaluated anew.
    bool truncate(llama_seq_id seq_id, llama_pos pos);

    // Can the sequence be continued at pos with everything in the cache that pos may attend to?
    bool can_continue_at(llama_seq_id seq_id, llama_pos pos) const;

  private:
    llama_context_ptr    ctx_;
    llama_batch_ptr      batch_;
    std::vector<int32_t> layer_inputs_;
    int32_t              n_embd_  = 0;
    int32_t              n_ctx_   = 0;
    int32_t              n_batch_ = 0;
    int32_t              n_rows_  = 0;
    int32_t              n_swa_   = 0;
};

// parameters of the target context of a session
llama_context_params dflash2_target_params(const llama_model *            model,
                                           const dflash2_session_params & params,
                                           int32_t                        n_draft_max);
