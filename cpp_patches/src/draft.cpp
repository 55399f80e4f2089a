#include "draft.h"

#include "error.h"
#include "llama-ext.h"

#include <algorithm>
#include <cmath>

// The window is small: quantizing its cache saves little and costs acceptance.
static ggml_type float_type(int32_t type) {
    return ggml_is_quantized((ggml_type) type) ? GGML_TYPE_F16 : (ggml_type) type;
}

static uint32_t pad_256(uint32_t n) {
    return (n + 255) / 256 * 256;
}

dflash2_draft::dflash2_draft(llama_model * model, llama_context * ctx_target, const dflash2_session_params & params) :
    info_(dflash2_read_drafter(model)) {
    const int32_t n_trained = info_.block_size - 1;
    n_draft_max_            = params.n_draft_max < 0 ? n_trained : std::min(params.n_draft_max, n_trained);
    n_embd_                 = llama_model_n_embd(model);
    n_vocab_                = llama_vocab_n_tokens(llama_model_get_vocab(model));
    n_features_             = (int32_t) info_.layer_inputs.size() * n_embd_;

    const uint32_t n_block  = params.n_seq_max * (n_draft_max_ + 1);
    const uint32_t n_ubatch = std::max(n_block, (uint32_t) N_INJECT_ROWS);
    // the window, the block, and room to inject a chunk without losing window rows
    const uint32_t n_ctx    = llama_n_ctx_seq(ctx_target);
    n_cells_ =
        pad_256((info_.window > 0 ? std::min<uint32_t>(info_.window, n_ctx) + n_ubatch : n_ctx) + n_draft_max_ + 1);

    llama_context_params cparams = llama_context_default_params();
    cparams.n_ctx                = n_cells_ * params.n_seq_max;
    cparams.n_batch              = n_ubatch;
    cparams.n_ubatch             = n_ubatch;
    cparams.n_seq_max            = params.n_seq_max;
    cparams.n_outputs_max        = params.n_seq_max;
    cparams.n_threads            = params.n_threads;
    cparams.n_threads_batch      = params.n_threads_batch;
    cparams.flash_attn_type      = (llama_flash_attn_type) params.flash_attn;
    cparams.type_k               = float_type(params.type_k);
    cparams.type_v               = float_type(params.type_v);
    cparams.offload_kqv          = params.offload_kqv;
    cparams.swa_full             = false;
    cparams.no_perf              = true;
    cparams.ctx_other            = ctx_target;
    if (params.calibrate) {
        recorder_                 = std::make_unique<dflash2_recorder>(model);
        cparams.cb_eval           = dflash2_recorder::on_node;
        cparams.cb_eval_user_data = recorder_.get();
    }

    ctx_.reset(llama_init_from_model(model, cparams));
    if (!ctx_) {
        throw dflash2_error(DFLASH2_ERROR_MEMORY, "could not create the draft context");
    }
    // the selector's lattice travels in the rows of the nextn embeddings
    llama_set_embeddings_nextn(ctx_.get(), true, /*masked =*/false);
    llama_set_causal_attn(ctx_.get(), info_.causal);

    batch_.reset(llama_batch_ext_init(ctx_.get()));
    held_.resize(params.n_seq_max);
}

llama_pos dflash2_draft::window_begin(llama_pos pos) const {
    return info_.window > 0 ? std::max(0, pos - (info_.window - 1)) : 0;
}

bool dflash2_draft::has_window(llama_seq_id seq_id, llama_pos pos) const {
    if (pos == 0) {
        return true;
    }
    const range & held = held_[seq_id];
    if (held.end != pos || held.begin > window_begin(pos)) {
        return false;
    }
    // the cache may have recycled cells that left the window of a later position
    return llama_memory_seq_pos_min(llama_get_memory(ctx_.get()), seq_id) <= window_begin(pos);
}

void dflash2_draft::truncate(llama_seq_id seq_id, llama_pos pos) {
    range & held = held_[seq_id];
    llama_memory_seq_rm(llama_get_memory(ctx_.get()), seq_id, pos, -1);
    held.end = std::min(held.end, pos);
    if (held.end <= held.begin) {
        held = {};
    }
}

dflash2_draft::range dflash2_draft::only_rows(llama_seq_id seq_id) {
    truncate(seq_id, held_[seq_id].end);
    return held_[seq_id];
}

// Drops rows that left the window so that n_rows and a block fit.
void dflash2_draft::make_room(llama_seq_id seq_id, int32_t n_rows) {
    range &         held = held_[seq_id];
    const llama_pos end  = held.end + n_rows;
    if (info_.window == 0 || end - held.begin + n_draft_max_ + 1 <= n_cells_) {
        return;
    }
    const llama_pos begin = std::min(held.end, window_begin(end));
    llama_memory_seq_rm(llama_get_memory(ctx_.get()), seq_id, 0, begin);
    held.begin = begin;
}

bool dflash2_draft::inject(const dflash2_features & features) {
    range & held = held_[features.seq_id];
    truncate(features.seq_id, features.pos);  // also removes the last block
    if (held.end != features.pos) {
        truncate(features.seq_id, 0);
        held = { features.pos, features.pos };
    }

    const int32_t n_chunk = (int32_t) llama_n_ubatch(ctx_.get());
    for (int32_t i0 = 0; i0 < features.n_rows; i0 += n_chunk) {
        const int32_t n = std::min(n_chunk, features.n_rows - i0);
        make_room(features.seq_id, n);

        llama_batch_ext_clear(batch_.get());
        for (int32_t i = i0; i < i0 + n; ++i) {
            const llama_pos  p      = features.pos + i;
            const llama_pos  pos[4] = { p, p, p, 0 };  // M-RoPE reads four, others the first
            const llama_embd row    = { features.rows.data() + (size_t) i * n_features_, 1, (size_t) n_features_ };
            const int32_t    idx    = llama_batch_ext_add_embd(batch_.get(), features.seq_id, row);
            if (idx < 0 || !llama_batch_ext_set_pos(batch_.get(), idx, pos)) {
                return false;
            }
        }
        if (llama_process(ctx_.get(), LLAMA_PROCESS_TYPE_DECODE, batch_.get()) != 0) {
            truncate(features.seq_id, 0);
            return false;
        }
        held.end = features.pos + i0 + n;
    }
    return true;
}

bool dflash2_draft::read_lattice(int32_t row, int32_t n, dflash2_lattice & lattice) const {
    const int32_t K    = info_.top_k;
    const float * base = llama_get_embeddings_nextn(ctx_.get());
    if (base == nullptr) {
        return false;
    }

    lattice.n_rows = n;
    lattice.top_k  = K;
    lattice.candidates.resize((size_t) n * K);
    lattice.scores.resize((size_t) n * K * K);
    for (int32_t t = 0; t < n; ++t) {
        // [K ids as floats][K x K scores], row 0 of the block belongs to the anchor and is empty
        const float * packed = base + (size_t) (row + 1 + t) * n_embd_;
        for (int32_t k = 0; k < K; ++k) {
            if (!(packed[k] >= 0.0f && packed[k] < (float) n_vocab_)) {
                return false;
            }
            lattice.candidates[(size_t) t * K + k] = (llama_token) packed[k];
        }
        for (int32_t k = 0; k < K * K; ++k) {
            if (std::isnan(packed[K + k])) {
                return false;
            }
            lattice.scores[(size_t) t * K * K + k] = packed[K + k];
        }
    }
    return true;
}

bool dflash2_draft::draft(const std::vector<dflash2_block> & blocks,
                          int32_t                            n,
                          std::vector<dflash2_lattice> &     lattices,
                          dflash2_draft_failure &            failure) {
    llama_batch_ext_clear(batch_.get());
    for (const auto & block : blocks) {
        truncate(block.seq_id, block.pos);
        for (int32_t i = 0; i <= n; ++i) {
            const llama_pos pos = block.pos + i;
            const int32_t   idx =
                llama_batch_ext_add_token(batch_.get(), block.seq_id, i == 0 ? block.anchor : info_.mask_token);
            if (idx < 0 || !llama_batch_ext_set_pos(batch_.get(), idx, &pos)) {
                failure = DFLASH2_DRAFT_FAILURE_COMPUTE;
                return false;
            }
        }
    }

    const int32_t ret = llama_process(ctx_.get(), LLAMA_PROCESS_TYPE_DECODE, batch_.get());
    if (ret != 0) {
        failure = ret == 1 ? DFLASH2_DRAFT_FAILURE_CACHE : DFLASH2_DRAFT_FAILURE_COMPUTE;
        return false;
    }

    lattices.resize(blocks.size());
    for (size_t i = 0; i < blocks.size(); ++i) {
        if (!read_lattice((int32_t) i * (n + 1), n, lattices[i])) {
            failure = DFLASH2_DRAFT_FAILURE_VALUES;
            return false;
        }
    }
    return true;
}
