#include "memory.h"

#include "draft.h"
#include "error.h"
#include "llama-ext.h"
#include "llama/dflash2-model-info.h"
#include "pair.h"
#include "target.h"

#include <algorithm>
#include <thread>

static int32_t usable_cpus() {
    return std::max(1, (int32_t) std::thread::hardware_concurrency());
}

static void require(bool ok, const char * name, long long value, const char * expected) {
    if (!ok) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT, dflash2_format("%s is %lld, expected %s", name, value, expected));
    }
}

dflash2_session_params dflash2_resolve_params(const llama_model * target, const dflash2_session_params & params) {
    dflash2_session_params p = params;
    require(p.n_seq_max >= 1 && p.n_seq_max <= 64, "n_seq_max", p.n_seq_max, "1 to 64");
    require(p.n_batch >= 1 && p.n_ubatch >= 1, "n_batch", p.n_batch, "1 or more");
    require(p.noise_min >= 0.0f && p.noise_min < 1e6f, "noise_min", (long long) p.noise_min, "0 or more");
    require(p.type_k >= 0 && p.type_k < GGML_TYPE_COUNT, "type_k", p.type_k, "a ggml type");
    require(p.type_v >= 0 && p.type_v < GGML_TYPE_COUNT, "type_v", p.type_v, "a ggml type");

    const int32_t n_train = llama_model_n_ctx_train(target);
    p.n_ctx               = p.n_ctx > 0 ? p.n_ctx : (uint32_t) std::max(1, n_train);
    require(p.n_ctx <= (1u << 30), "n_ctx", p.n_ctx, "at most 2^30 tokens");

    p.n_threads       = p.n_threads > 0 ? p.n_threads : usable_cpus();
    p.n_threads_batch = p.n_threads_batch > 0 ? p.n_threads_batch : p.n_threads;
    // every generating sequence brings a whole block
    p.n_batch         = std::max(p.n_batch, p.n_seq_max * (DFLASH2_MAX_DRAFT + 1));
    return p;
}

int32_t dflash2_plain_chunk(const llama_model * target, const dflash2_session_params & params) {
    dflash2_session_params alone = params;
    alone.n_seq_max              = 1;
    alone                        = dflash2_resolve_params(target, alone);
    return (int32_t) std::min(alone.n_batch, alone.n_ctx);
}

int32_t dflash2_draft_max(const llama_model * draft, const dflash2_session_params & params) {
    const int32_t n_trained = dflash2_read_drafter(draft).block_size - 1;
    return params.n_draft_max < 0 ? n_trained : std::min(params.n_draft_max, n_trained);
}

static bool is_on_device(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t device = ggml_backend_buft_get_device(buft);
    if (device == nullptr || ggml_backend_buft_is_host(buft)) {
        return false;
    }
    const auto type = ggml_backend_dev_type(device);
    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

static void add_context(const llama_context * ctx,
                        uint64_t &            weights,
                        uint64_t &            cache,
                        uint64_t &            compute,
                        uint64_t &            device) {
    for (const auto & [buft, bytes] : dflash2_llama_weight_bytes(llama_get_model(ctx))) {
        weights += bytes;
        device += is_on_device(buft) ? bytes : 0;
    }
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(ctx)) {
        cache += bytes.context;
        compute += bytes.compute;
        device += is_on_device(buft) ? bytes.context + bytes.compute : 0;
    }
}

// Feature rows on their way from the target to the draft cache: those of a batch, and of every sequence some that wait.
static uint64_t feature_bytes(const llama_context * target, const llama_context * draft) {
    const dflash2_drafter_info info    = dflash2_read_drafter(llama_get_model(draft));
    const uint64_t             n_batch = llama_n_batch(target);
    const uint64_t             n_rows  = info.window > 0 ? std::min<uint64_t>(info.window, n_batch) : n_batch;
    const uint64_t             n_wait  = (uint64_t) llama_n_seq_max(target) * dflash2_draft::N_INJECT_ROWS;
    const uint64_t             n_row   = info.layer_inputs.size() * llama_model_n_embd(llama_get_model(draft));
    return (n_rows + n_wait) * n_row * sizeof(float);
}

dflash2_memory dflash2_measure_memory(const llama_context * target, const llama_context * draft) {
    dflash2_memory memory = {};
    add_context(target, memory.target_weights, memory.target_cache, memory.target_compute, memory.device);
    memory.target_compute += dflash2_llama_output_bytes(target);
    memory.target_snapshots = dflash2_llama_snapshot_bytes(target);
    memory.target_cache -= memory.target_snapshots;
    if (draft != nullptr) {
        add_context(draft, memory.draft_weights, memory.draft_cache, memory.draft_compute, memory.device);
        memory.draft_compute += dflash2_llama_output_bytes(draft) + feature_bytes(target, draft);
    }
    return memory;
}

int32_t dflash2_plan(llama_model *                  target,
                     llama_model *                  draft,
                     const dflash2_session_params * params,
                     dflash2_memory *               memory) {
    return dflash2_guard([&]() -> int32_t {
        if (target == nullptr || params == nullptr || memory == nullptr) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "target, params and memory are required");
        }
        const dflash2_session_params p           = dflash2_resolve_params(target, *params);
        const bool                   drafts      = draft != nullptr && p.n_draft_max != 0;
        const int32_t                n_draft_max = drafts ? dflash2_draft_max(draft, p) : 0;

        const std::atomic<bool>        never{ false };
        dflash2_target                 target_part(target, p, n_draft_max, never);
        std::unique_ptr<dflash2_draft> draft_part;
        if (drafts) {
            draft_part = std::make_unique<dflash2_draft>(draft, target_part.context(), p);
            target_part.enable_features(draft_part->info().layer_inputs);
        }
        *memory = dflash2_measure_memory(target_part.context(), draft_part ? draft_part->context() : nullptr);
        return DFLASH2_OK;
    });
}
