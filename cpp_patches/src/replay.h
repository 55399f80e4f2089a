// Several drafters on the same rows of target features, to compare what they propose.

#pragma once

#include "dflash2.h"
#include "draft.h"
#include "target.h"

#include <atomic>
#include <memory>
#include <vector>

struct dflash2_replay {
  public:
    dflash2_replay(llama_model *                      target,
                   const std::vector<llama_model *> & drafts,
                   const dflash2_session_params &     params);

    int32_t n_features() const { return drafts_.front()->n_features(); }

    int32_t n_draft_max() const { return n_draft_max_; }

    void read(const llama_token * tokens, int32_t n_tokens, int32_t n_prompt, float * rows, float * log_p);
    void inject(int32_t drafter, llama_pos pos, const float * rows, int32_t n_rows);
    void draft(int32_t drafter, llama_token anchor, int32_t n, dflash2_draft_view & view);

  private:
    dflash2_draft & checked(int32_t drafter);

    const std::atomic<bool>                     never_{ false };  // aborted
    int32_t                                     n_vocab_;
    int32_t                                     n_draft_max_ = DFLASH2_MAX_DRAFT;
    std::unique_ptr<dflash2_target>             target_;
    std::vector<std::unique_ptr<dflash2_draft>> drafts_;
    std::vector<dflash2_lattice>                lattices_;  // of the last draft
};
