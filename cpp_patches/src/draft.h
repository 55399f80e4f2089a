// The drafter's side: its context, the window of injected target features, and the block pass.

#pragma once

#include "calibrate.h"
#include "dflash2.h"
#include "llama-ptr.h"
#include "pair.h"

#include <cstdint>
#include <memory>
#include <vector>

// Candidates and pairwise scores of one drafted block, K per position. Row t holds position t + 1 of the block.
struct dflash2_lattice {
    int32_t                  n_rows = 0;
    int32_t                  top_k  = 0;
    std::vector<llama_token> candidates;  // [n_rows][K], unordered
    std::vector<float>       scores;      // [n_rows][K][K], predecessor-major

    const float * row_scores(int32_t t, int32_t predecessor) const {
        return scores.data() + ((size_t) t * top_k + predecessor) * top_k;
    }
};

struct dflash2_block {
    llama_seq_id seq_id;
    llama_token  anchor;
    llama_pos    pos;  // of the anchor
};

// Rows of target features for the draft cache, one per evaluated target token.
struct dflash2_features {
    llama_seq_id       seq_id = 0;
    llama_pos          pos    = 0;  // of the first row; rows are consecutive
    int32_t            n_rows = 0;
    std::vector<float> rows;        // [n_rows][n_tap * n_embd]

    // gives the memory back: the rows of a prompt are many, those of a round few
    void clear() {
        n_rows = 0;
        rows   = std::vector<float>();
    }
};

class dflash2_draft {
  public:
    // feature rows per injection pass; the compute buffer of a drafter grows with it times the vocabulary
    static constexpr int32_t N_INJECT_ROWS = 64;

    // ctx_target lends embeddings and head to drafters that have none
    dflash2_draft(llama_model * model, llama_context * ctx_target, const dflash2_session_params & params);

    const dflash2_drafter_info & info() const { return info_; }

    llama_context * context() const { return ctx_.get(); }

    int32_t n_draft_max() const { return n_draft_max_; }

    int32_t n_features() const { return n_features_; }

    // first position whose row a block anchored at pos may read
    llama_pos window_begin(llama_pos pos) const;

    // null unless params.calibrate
    const dflash2_recorder * recorder() const { return recorder_.get(); }

    // rows of a sequence in the cache, end exclusive
    struct range {
        llama_pos begin = 0;
        llama_pos end   = 0;
    };

    // drops the block of the last draft and says what is left
    range only_rows(llama_seq_id seq_id);

    // the cache of a sequence was filled with these rows from outside
    void set_rows(llama_seq_id seq_id, const range & rows) { held_[seq_id] = rows; }

    // Are all rows that a block anchored at pos may read in the cache, and none beyond?
    bool has_window(llama_seq_id seq_id, llama_pos pos) const;

    // Writes rows into the cache. Rows that do not continue the sequence replace it. False on failure.
    bool inject(const dflash2_features & features);

    // Evaluates [anchor, mask x n] for all blocks in one pass. False on failure; failure tells why.
    bool draft(const std::vector<dflash2_block> & blocks,
               int32_t                            n,
               std::vector<dflash2_lattice> &     lattices,
               dflash2_draft_failure &            failure);

    // forget rows at pos and beyond; pos 0 forgets the sequence
    void truncate(llama_seq_id seq_id, llama_pos pos);

  private:
    void make_room(llama_seq_id seq_id, int32_t n_rows);
    bool read_lattice(int32_t row, int32_t n, dflash2_lattice & lattice) const;

    dflash2_drafter_info info_;
    llama_context_ptr    ctx_;
    llama_batch_ptr      batch_;
    int32_t              n_draft_max_ = 0;
    int32_t              n_features_  = 0;  // floats per row
    int32_t              n_embd_      = 0;
    int32_t              n_vocab_     = 0;
    int32_t              n_cells_     = 0;        // per sequence
    std::vector<range>   held_;                   // per sequence

    std::unique_ptr<dflash2_recorder> recorder_;  // called by the context, while that computes
};
