#include "pair.h"

#include "error.h"
#include "llama-ext.h"
#include "llama-ptr.h"
#include "llama/dflash2-layer-input.h"
#include "llama/dflash2-model-info.h"

#include <cstdlib>
#include <cstring>

static std::string meta(const llama_model * model, const char * key) {
    char buf[256] = {};
    return llama_model_meta_val_str(model, key, buf, sizeof(buf)) >= 0 ? std::string(buf) : std::string();
}

static dflash2_error pair_error(const std::string & message) {
    return dflash2_error(DFLASH2_ERROR_PAIR, message);
}

std::string dflash2_model_arch(const llama_model * model) {
    return meta(model, "general.architecture");
}

dflash2_drafter_info dflash2_read_drafter(const llama_model * draft) {
    switch (dflash2_llama_drafter_kind(draft)) {
        case 2:
            break;
        case 1:
            throw pair_error(
                "the drafter is a DFlash 1 model (no candidate selector); this version runs DFlash 2 drafters");
        case 3:
            throw pair_error("the drafter is a DSpark model; this version runs DFlash 2 drafters");
        default:
            throw pair_error(dflash2_format("the drafter has architecture '%s', expected 'dflash'",
                                            dflash2_model_arch(draft).c_str()));
    }

    dflash2_drafter_info info = {};
    info.block_size           = std::atoi(meta(draft, "dflash.block_size").c_str());
    info.top_k                = llama_model_dflash_selector_top_k(draft);
    info.window               = dflash2_llama_window(draft);
    info.mask_token           = llama_vocab_mask(llama_model_get_vocab(draft));
    info.causal =
        meta(draft, "dflash.attention.causal") == "true";  // absent = bidirectional, as upstream's runtime reads it
    info.is_mrope = llama_model_rope_type(draft) == LLAMA_ROPE_TYPE_MROPE;

    const int32_t * ids = llama_model_target_layer_ids(draft);
    info.layer_inputs.assign(ids, ids + llama_model_target_layer_ids_n(draft));

    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(draft));
    if (info.block_size < 2 || info.block_size > DFLASH2_MAX_DRAFT) {
        throw pair_error(
            dflash2_format("the drafter's block size is %d, expected 2 to %d", info.block_size, DFLASH2_MAX_DRAFT));
    }
    if (info.mask_token < 0 || info.mask_token >= n_vocab) {
        throw pair_error(dflash2_format("the drafter's mask token id is %d, its vocabulary has %d tokens",
                                        info.mask_token, n_vocab));
    }
    if (info.layer_inputs.empty()) {
        throw pair_error("the drafter names no target layers");
    }
    if (info.top_k > n_vocab) {
        throw pair_error(dflash2_format("the drafter's selector wants %d candidates, its vocabulary has %d tokens",
                                        info.top_k, n_vocab));
    }
    return info;
}

static void require_same_shape(const llama_model * target, const llama_model * draft) {
    const int32_t n_embd_tgt  = llama_model_n_embd(target);
    const int32_t n_embd_dft  = llama_model_n_embd(draft);
    const int32_t n_vocab_tgt = llama_vocab_n_tokens(llama_model_get_vocab(target));
    const int32_t n_vocab_dft = llama_vocab_n_tokens(llama_model_get_vocab(draft));

    if (n_embd_tgt != n_embd_dft) {
        throw pair_error(dflash2_format("hidden size differs: target %d, drafter %d", n_embd_tgt, n_embd_dft));
    }
    if (n_vocab_tgt != n_vocab_dft) {
        throw pair_error(dflash2_format("vocabulary differs: target %d tokens, drafter %d", n_vocab_tgt, n_vocab_dft));
    }
    const bool needs_target = !dflash2_llama_has_tok_embd(draft) || !dflash2_llama_has_output(draft);
    if (needs_target && (!dflash2_llama_has_tok_embd(target) || !dflash2_llama_has_output(target))) {
        throw pair_error("the drafter uses the target's embeddings and output head, and the target has none");
    }
}

// a context only to look at graphs: small, one sequence
static llama_context_ptr init_probe_context(llama_model * model) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = 256;
    params.n_batch              = 32;
    params.n_ubatch             = 32;
    params.n_seq_max            = 1;
    params.no_perf              = true;

    llama_context_ptr ctx(llama_init_from_model(model, params));
    if (!ctx) {
        throw dflash2_error(DFLASH2_ERROR_MEMORY, dflash2_format("could not create a context for the target ('%s')",
                                                                 dflash2_model_arch(model).c_str()));
    }
    return ctx;
}

static std::string layer_input_problem(llama_context * ctx, int32_t lid) {
    const llama_model * model = llama_get_model(ctx);
    const std::string   arch  = dflash2_model_arch(model);

    switch (dflash2_llama_layer_input(ctx, lid)) {
        case DFLASH2_LAYER_INPUT_OK:
            return "";
        case DFLASH2_LAYER_INPUT_RANGE:
            return dflash2_format("the output of target layer %d is wanted, the target has layers 0 to %d", lid - 1,
                                  llama_model_n_layer(model) - 1);
        case DFLASH2_LAYER_INPUT_MISSING:
            return dflash2_format("architecture '%s' does not publish the output of layer %d", arch.c_str(), lid - 1);
        case DFLASH2_LAYER_INPUT_NARROWED:
            return dflash2_format(
                "architecture '%s' computes the output of its last layer (%d) only for sampled tokens", arch.c_str(),
                lid - 1);
        case DFLASH2_LAYER_INPUT_WIDTH:
            return dflash2_format(
                "architecture '%s' keeps several residual streams and how they form one feature is not known",
                arch.c_str());
        default:
            return dflash2_format("the graph of architecture '%s' could not be built", arch.c_str());
    }
}

// Recurrent states can only be taken back where the model keeps snapshots of them.
static void require_rollback(llama_model * target) {
    if (!llama_model_is_recurrent(target) && !llama_model_is_hybrid(target)) {
        return;
    }

    llama_context_params params = llama_context_default_params();
    params.n_ctx                = 256;
    params.n_batch              = 32;
    params.n_ubatch             = 32;
    params.n_rs_seq             = 1;
    llama_context_ptr ctx(llama_init_from_model(target, params));
    if (!ctx || llama_n_rs_seq(ctx.get()) == 0) {
        throw pair_error(
            dflash2_format("architecture '%s' has a recurrent state that cannot be taken back after a rejected draft",
                           dflash2_model_arch(target).c_str()));
    }
}

void dflash2_require_pair(llama_model * target, const llama_model * draft) {
    const dflash2_drafter_info info = dflash2_read_drafter(draft);

    if (llama_model_has_encoder(target) || !llama_model_has_decoder(target)) {
        throw pair_error(
            dflash2_format("architecture '%s' is not a decoder-only target", dflash2_model_arch(target).c_str()));
    }
    if (llama_model_is_diffusion(target)) {
        throw pair_error(dflash2_format("architecture '%s' is a diffusion model and does not decode token by token",
                                        dflash2_model_arch(target).c_str()));
    }
    if (llama_model_is_diffusion(target)) {
        throw pair_error(dflash2_format("architecture '%s' is a diffusion model and does not decode token by token", dflash2_model_arch(target).c_str()));
    }
    require_same_shape(target, draft);
    for (const int32_t lid : info.layer_inputs) {
        if (lid < 1 || lid > llama_model_n_layer(target)) {
            throw pair_error(
                dflash2_format("the drafter reads the output of target layer %d, the target has layers 0 to %d",
                               lid - 1, llama_model_n_layer(target) - 1));
        }
    }

    llama_context_ptr ctx = init_probe_context(target);
    for (const int32_t lid : info.layer_inputs) {
        const std::string problem = layer_input_problem(ctx.get(), lid);
        if (!problem.empty()) {
            throw pair_error(problem);
        }
    }
    require_rollback(target);
}

int32_t dflash2_check_pair(llama_model * target, const llama_model * draft) {
    return dflash2_guard([&]() -> int32_t {
        if (target == nullptr || draft == nullptr) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "target and drafter are required");
        }
        dflash2_require_pair(target, draft);
        return DFLASH2_OK;
    });
}

int32_t dflash2_target_publishes(llama_model * target, int32_t lid) {
    return dflash2_guard([&]() -> int32_t {
        if (target == nullptr) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "a target is required");
        }
        llama_context_ptr ctx     = init_probe_context(target);
        const std::string problem = layer_input_problem(ctx.get(), lid);
        dflash2_set_last_error(problem);
        return problem.empty() ? 1 : 0;
    });
}
