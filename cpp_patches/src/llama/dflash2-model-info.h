// Facts about models and contexts that llama.h does not tell. Compiled into libllama.

#pragma once

#include "llama.h"

#include <cstdint>
#include <map>

// Bytes of the weights by buffer type. Upstream's breakdown counts a mapped file from the first tensor that stays in it
// to the last, so twice what a backend keeps in an order of its own; a model without memory (no_alloc) has no mapping.
LLAMA_API std::map<ggml_backend_buffer_type_t, uint64_t> dflash2_llama_weight_bytes(const struct llama_model * model);

extern "C" {

// Sliding window of a drafter in tokens if every one of its layers has it, else 0 (some layer sees everything).
LLAMA_API int32_t dflash2_llama_window(const struct llama_model * model);

// 0 = not a drafter, 1 = DFlash 1, 2 = DFlash 2, 3 = DSpark
LLAMA_API int32_t dflash2_llama_drafter_kind(const struct llama_model * model);

LLAMA_API bool dflash2_llama_has_tok_embd(const struct llama_model * model);
LLAMA_API bool dflash2_llama_has_output(const struct llama_model * model);

// Does the model's own file hold a tensor of this name?
LLAMA_API bool dflash2_llama_has_tensor(const struct llama_model * model, const char * name);

// Tells models apart: a hash of names, types, shapes and some bytes of the weights. Reads a little of every tensor.
LLAMA_API uint64_t dflash2_llama_fingerprint(const struct llama_model * model);

// Bytes of recurrent state kept only so that a few tokens can be taken back (n_rs_seq snapshots per sequence).
LLAMA_API uint64_t dflash2_llama_snapshot_bytes(const struct llama_context * ctx);

// Bytes of the host buffer for what batches output (logits, layer inputs, nextn rows), at its largest. It grows with
// use, and llama_get_memory_breakdown() leaves it out.
LLAMA_API uint64_t dflash2_llama_output_bytes(const struct llama_context * ctx);

// Reserves the compute buffers now if what the graph publishes has changed since; else the next batch would do it.
LLAMA_API void dflash2_llama_reserve(struct llama_context * ctx);
}
