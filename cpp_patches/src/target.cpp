#include "target.h"

#include "error.h"
#include "llama-ext.h"
#include "llama/dflash2-model-info.h"

#include <algorithm>
#include <cstring>

llama_context_params dflash2_target_params(const llama_model *            model,
                                           const dflash2_session_params & params,
                                           int32_t                        n_draft_max) {
    const bool has_state = llama_model_is_recurrent(model) || llama_model_is_hybrid(model);

    llama_context_params cparams   = llama_context_default_params();
    const uint32_t       n_ctx_seq = params.n_ctx > 0 ? params.n_ctx : (uint32_t) llama_model_n_ctx_train(model);
    cparams.n_ctx                  = n_ctx_seq * params.n_seq_max;
    cparams.n_batch                = params.n_batch;
    cparams.n_ubatch               = std::min(params.n_ubatch, params.n_batch);
    cparams.n_seq_max              = params.n_seq_max;
    cparams.n_rs_seq               = has_state ? n_draft_max : 0;
    cparams.n_outputs_max          = params.n_seq_max * (n_draft_max + 1);
    cparams.n_threads              = params.n_threads;
    cparams.n_threads_batch        = params.n_threads_batch;
    cparams.type_k                 = (ggml_type) params.type_k;
    cparams.type_v                 = (ggml_type) params.type_v;
    cparams.flash_attn_type        = (llama_flash_attn_type) params.flash_attn;
    cparams.offload_kqv            = params.offload_kqv;
    cparams.swa_full               = false;
    cparams.no_perf                = true;
    return cparams;
}

dflash2_target::dflash2_target(llama_model *                  model,
                               const dflash2_session_params & params,
                               int32_t                        n_draft_max,
                               const std::atomic<bool> &      abort) {
    llama_context_params cparams = dflash2_target_params(model, params, n_draft_max);
    cparams.abort_callback       = [](void * data) {
        return static_cast<const std::atomic<bool> *>(data)->load(std::memory_order_relaxed);
    };
    cparams.abort_callback_data = const_cast<std::atomic<bool> *>(&abort);

    ctx_.reset(llama_init_from_model(model, cparams));
    if (!ctx_) {
        throw dflash2_error(DFLASH2_ERROR_MEMORY,
                            dflash2_format("could not create the target context of %u tokens for %u sequences",
                                           cparams.n_ctx, cparams.n_seq_max));
    }
    batch_.reset(llama_batch_ext_init(ctx_.get()));
    n_embd_  = llama_model_n_embd(model);
    n_ctx_   = params.n_ctx > 0 ? (int32_t) params.n_ctx : llama_model_n_ctx_train(model);
    n_batch_ = (int32_t) llama_n_batch(ctx_.get());
    n_swa_   = llama_model_n_swa(model);
}

void dflash2_target::enable_features(const std::vector<int32_t> & layer_inputs) {
    layer_inputs_ = layer_inputs;
    for (const int32_t lid : layer_inputs_) {
        llama_set_embeddings_layer_inp(ctx_.get(), lid, true);
    }
    // now, so that a lack of memory shows before the first prompt
    dflash2_llama_reserve(ctx_.get());
}

void dflash2_target::clear_batch() {
    llama_batch_ext_clear(batch_.get());
    n_rows_ = 0;
}

int32_t dflash2_target::add(llama_seq_id seq_id, llama_token token, llama_pos pos, bool output) {
    const int32_t row = llama_batch_ext_add_token(batch_.get(), seq_id, token);
    if (row < 0 || !llama_batch_ext_set_pos(batch_.get(), row, &pos) ||
        !llama_batch_ext_set_output_logits(batch_.get(), row, output)) {
        throw dflash2_error(DFLASH2_ERROR_COMPUTE,
                            dflash2_format("token %d of sequence %d does not fit into the batch", token, seq_id));
    }
    n_rows_ = row + 1;
    return row;
}

void dflash2_target::evaluate() {
    const int32_t ret = llama_process(ctx_.get(), LLAMA_PROCESS_TYPE_DECODE, batch_.get());
    switch (ret) {
        case 0:
            return;
        case 1:
            throw dflash2_error(DFLASH2_ERROR_CONTEXT,
                                dflash2_format("the target's cache has no room for %d more tokens", n_rows_));
        case 2:
            throw dflash2_error(DFLASH2_ERROR_ABORTED, "aborted");
        default:
            throw dflash2_error(
                DFLASH2_ERROR_COMPUTE,
                dflash2_format("the target could not evaluate %d tokens (llama_process: %d)", n_rows_, ret));
    }
}

void dflash2_target::append_features(int32_t row, int32_t n, std::vector<float> & out) const {
    const size_t n_tap = layer_inputs_.size();
    const size_t begin = out.size();
    out.resize(begin + n * n_tap * n_embd_);
    for (size_t k = 0; k < n_tap; ++k) {
        const float * layer = llama_get_embeddings_layer_inp(ctx_.get(), layer_inputs_[k]);
        for (int32_t i = 0; i < n; ++i) {
            std::memcpy(out.data() + begin + (i * n_tap + k) * n_embd_, layer + (size_t) (row + i) * n_embd_,
                        n_embd_ * sizeof(float));
        }
    }
}

const float * dflash2_target::logits(int32_t row) const {
    const float * data = llama_get_logits_ith(ctx_.get(), row);
    if (data == nullptr) {
        throw dflash2_error(DFLASH2_ERROR_COMPUTE, dflash2_format("the target returned no logits for row %d", row));
    }
    return data;
}

bool dflash2_target::truncate(llama_seq_id seq_id, llama_pos pos) {
    auto * memory = llama_get_memory(ctx_.get());
    if (llama_memory_seq_rm(memory, seq_id, pos, -1)) {
        return true;
    }
    llama_memory_seq_rm(memory, seq_id, -1, -1);
    return false;
}

bool dflash2_target::can_continue_at(llama_seq_id seq_id, llama_pos pos) const {
    auto * memory = llama_get_memory(ctx_.get());
    if (llama_memory_seq_pos_max(memory, seq_id) == pos - 1) {
        return true;
    }
    // windowed layers need the tokens before pos, which later tokens may have pushed out
    return n_swa_ == 0 || llama_memory_seq_pos_min(memory, seq_id) <= std::max(0, pos - n_swa_);
}
