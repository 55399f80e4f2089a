#include "dflash2-model-info.h"

#include "llama-arch.h"
#include "llama-context.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>

std::map<ggml_backend_buffer_type_t, uint64_t> dflash2_llama_weight_bytes(const llama_model * model) {
    std::map<ggml_backend_buffer_type_t, uint64_t> bytes;
    for (const auto & [name, tensor] : model->tensors_by_name) {
        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(tensor->buffer);
        bytes[buft] += ggml_backend_buft_get_alloc_size(buft, tensor);
    }
    return bytes;
}

int32_t dflash2_llama_window(const llama_model * model) {
    const auto & hparams = model->hparams;
    if (hparams.swa_type == LLAMA_SWA_TYPE_NONE) {
        return 0;
    }
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        if (!hparams.is_swa(il)) {
            return 0;
        }
    }
    return (int32_t) hparams.n_swa;
}

int32_t dflash2_llama_drafter_kind(const llama_model * model) {
    if (model->arch != LLM_ARCH_DFLASH) {
        return 0;
    }
    if (model->dspark_markov_w1 != nullptr || model->hparams.dsv4_hc_mult > 0) {
        return 3;
    }
    return model->dflash_selector_hidden != nullptr ? 2 : 1;
}

bool dflash2_llama_has_tok_embd(const llama_model * model) {
    return model->tok_embd != nullptr;
}

bool dflash2_llama_has_output(const llama_model * model) {
    return model->output != nullptr;
}

bool dflash2_llama_has_tensor(const llama_model * model, const char * name) {
    return model->get_tensor(name) != nullptr;
}

// FNV-1a
static void hash_bytes(uint64_t & hash, const void * data, size_t size) {
    for (size_t i = 0; i < size; ++i) {
        hash = (hash ^ static_cast<const uint8_t *>(data)[i]) * 0x100000001b3ull;
    }
}

uint64_t dflash2_llama_fingerprint(const llama_model * model) {
    static constexpr size_t N_BYTES = 64;

    uint64_t hash = 0xcbf29ce484222325ull;
    for (const auto & [name, tensor] : model->tensors_by_name) {
        hash_bytes(hash, name.data(), name.size());
        hash_bytes(hash, &tensor->type, sizeof(tensor->type));
        hash_bytes(hash, tensor->ne, sizeof(tensor->ne));
        // matrices that a backend keeps in an order of its own cannot be read back; vectors always can
        const bool is_vector = ggml_nelements(tensor) == tensor->ne[0];
        if (tensor->buffer == nullptr || !(is_vector || ggml_backend_buffer_is_host(tensor->buffer))) {
            continue;
        }
        uint8_t      bytes[N_BYTES] = {};
        const size_t n_bytes        = std::min(N_BYTES, ggml_nbytes(tensor));
        ggml_backend_tensor_get(tensor, bytes, (ggml_nbytes(tensor) - n_bytes) / 2, n_bytes);
        hash_bytes(hash, bytes, n_bytes);
    }
    return hash;
}

static const llama_memory_recurrent * recurrent_part(const llama_memory_i * memory) {
    if (const auto * recurrent = dynamic_cast<const llama_memory_recurrent *>(memory)) {
        return recurrent;
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_recr();
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_recr();
    }
    return nullptr;
}

// deepseek4 keeps states of its compressors, with n_rs_seq planes behind the current one
static uint64_t compressor_snapshots(const llama_kv_cache_dsv4 & cache) {
    uint64_t total = 0;
    for (const auto * state : { cache.get_csa_state(), cache.get_hca_state(), cache.get_lid_state() }) {
        const uint64_t n_behind = state ? state->get_n_rs_seq() : 0;
        if (n_behind == 0) {
            continue;
        }
        for (const auto & [buft, bytes] : state->memory_breakdown()) {
            total += bytes * n_behind / (n_behind + 1);
        }
    }
    return total;
}

uint64_t dflash2_llama_snapshot_bytes(const llama_context * ctx) {
    if (const auto * cache = dynamic_cast<const llama_kv_cache_dsv4 *>(ctx->get_memory())) {
        return compressor_snapshots(*cache);
    }
    const auto * recurrent = recurrent_part(ctx->get_memory());
    if (recurrent == nullptr || recurrent->n_rs_seq == 0) {
        return 0;
    }

    uint64_t total = 0;
    for (const auto * states : { &recurrent->r_l, &recurrent->s_l, &recurrent->p_l }) {
        for (const ggml_tensor * state : *states) {
            total += state ? ggml_nbytes(state) : 0;
        }
    }
    return total * recurrent->n_rs_seq / (recurrent->n_rs_seq + 1);
}

// see llama_context::output_reserve
uint64_t dflash2_llama_output_bytes(const llama_context * ctx) {
    const auto & hparams = ctx->get_model().hparams;
    const auto & cparams = ctx->get_cparams();

    const uint64_t n_outputs = std::max(cparams.n_outputs_max, cparams.n_seq_max);
    uint64_t       n_floats  = n_outputs * ctx->get_model().vocab.n_tokens();
    if (cparams.embeddings_nextn) {
        n_floats += (uint64_t) hparams.n_embd_out() * (cparams.embeddings_nextn_masked ? n_outputs : cparams.n_batch);
    }
    const auto & enabled = cparams.embeddings_layer_inp;
    n_floats += std::count(enabled.begin(), enabled.end(), true) * (uint64_t) hparams.n_embd * cparams.n_batch;
    return n_floats * sizeof(float);
}

void dflash2_llama_reserve(llama_context * ctx) {
    ctx->sched_reserve();
}
