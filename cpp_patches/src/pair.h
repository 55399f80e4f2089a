// Do a target and a drafter belong together?

#pragma once

#include "llama.h"

#include <cstdint>
#include <string>
#include <vector>

// What the engine needs to know of a drafter.
struct dflash2_drafter_info {
    int32_t              block_size;  // trained block, anchor included
    int32_t              top_k;       // candidates per position
    int32_t              window;      // tokens, 0 = unlimited
    llama_token          mask_token;
    bool                 causal;
    bool                 is_mrope;
    std::vector<int32_t> layer_inputs;  // of the target, in feature order
};

// Throws dflash2_error(DFLASH2_ERROR_PAIR) when draft is not a complete DFlash 2 drafter.
dflash2_drafter_info dflash2_read_drafter(const llama_model * draft);

// Throws dflash2_error(DFLASH2_ERROR_PAIR) with the first reason why this drafter cannot draft for this target.
void dflash2_require_pair(llama_model * target, const llama_model * draft);

// general.architecture of a model
std::string dflash2_model_arch(const llama_model * model);
