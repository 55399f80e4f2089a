// Which layer inputs a target's graph publishes: the features that a DFlash drafter reads.
//
// Compiled into libllama, because it touches graph construction.

#pragma once

#include "llama.h"

#include <cstdint>

struct llm_graph_context;

// Called where almost every graph passes after a layer (llm_graph_context::build_cvec). Publishes the completed
// residual stream cur as the input of layer lid, unless the row count or the stream layout makes it something
// else than one n_embd row per token. Models that publish on their own assign the same slot afterwards and win.
void dflash2_publish_layer_input(const llm_graph_context & g, ggml_tensor * cur, int lid);

enum dflash2_layer_input {
    DFLASH2_LAYER_INPUT_OK       = 0,
    DFLASH2_LAYER_INPUT_RANGE    = 1,  // no such layer
    DFLASH2_LAYER_INPUT_MISSING  = 2,  // the graph does not publish it
    DFLASH2_LAYER_INPUT_NARROWED = 3,  // only for output tokens, and a drafter needs every token
    DFLASH2_LAYER_INPUT_WIDTH    = 4,  // published, but not as one row of n_embd floats per token
    DFLASH2_LAYER_INPUT_ERROR    = 5,  // the graph could not be built
};

extern "C" {

// Builds the graph of a small batch, evaluates nothing, and looks. Works on a context of a model without weights.
// Invalidates graphs kept for reuse, so it is meant for a context of its own.
LLAMA_API int32_t dflash2_llama_layer_input(struct llama_context * ctx, int32_t lid);
}
