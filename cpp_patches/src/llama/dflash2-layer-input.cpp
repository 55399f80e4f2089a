#include "dflash2-layer-input.h"

#include "llama-arch.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <exception>
#include <stdexcept>

static bool is_one_row_per_token(const ggml_tensor * t, int64_t n_embd, int64_t n_tokens) {
    return t->type == GGML_TYPE_F32 && t->ne[0] == n_embd && ggml_nelements(t) == n_embd * n_tokens;
}

// unweighted mean over hyper-connection streams: [n_embd, hc, n_tokens] -> [n_embd, n_tokens]
static ggml_tensor * build_stream_mean(ggml_context * ctx, ggml_tensor * streams) {
    const int64_t hc = streams->ne[1];

    ggml_tensor * sum = nullptr;
    for (int64_t s = 0; s < hc; ++s) {
        ggml_tensor * stream =
            ggml_view_2d(ctx, streams, streams->ne[0], streams->ne[2], streams->nb[2], s * streams->nb[1]);
        sum = sum ? ggml_add(ctx, sum, stream) : stream;
    }
    return ggml_scale(ctx, sum, 1.0f / hc);
}

// The trained feature of a hyper-connection target is a property of the model, not of the tensor shape: only
// models whose reference takes the mean are listed. deepseek4 publishes its own mean, but only once asked to.
static bool has_mean_feature(llm_arch arch) {
    return arch == LLM_ARCH_GLM5_NEXT || arch == LLM_ARCH_DEEPSEEK4;
}

void dflash2_publish_layer_input(const llm_graph_context & g, ggml_tensor * cur, int lid) {
    const auto & enabled = g.cparams.embeddings_layer_inp;
    if (lid < 0 || (size_t) lid >= enabled.size()) {
        return;  // graphs that run one layer several times count further
    }

    ggml_tensor * rows = cur;
    if (cur->ne[1] > 1 && cur->ne[2] == g.n_tokens && has_mean_feature(g.arch)) {
        rows = build_stream_mean(g.ctx0, cur);
    }
    if (!is_one_row_per_token(rows, g.n_embd, g.n_tokens)) {
        return;
    }
    if (rows->view_src != nullptr) {
        // marking a view as output does not keep the memory behind it
        rows = ggml_cont(g.ctx0, rows);
    }
    if (enabled[lid] && rows != cur) {
        ggml_build_forward_expand(g.gf, rows);
    }
    g.res->t_layer_inp[lid] = rows;
}

// mimo2 keeps all rows of its last layer, and publishes them, only once asked to
struct asked_last_layer {
    asked_last_layer(llama_context * ctx, int32_t lid) :
        ctx(ctx->get_model().arch == LLM_ARCH_MIMO2 && (uint32_t) lid == ctx->get_model().hparams.n_layer() ? ctx : nullptr),
        lid(lid) {
        set(true);
    }

    ~asked_last_layer() { set(false); }

    void set(bool value) {
        if (ctx != nullptr) {
            ctx->set_embeddings_layer_inp(lid, value);
        }
    }

    llama_context * ctx;
    int32_t         lid;
};

static const ggml_tensor * probe(llama_context * ctx, int32_t lid, uint32_t n_tokens, uint32_t n_outputs) {
    llama_memory_context_ptr mctx;
    if (auto * memory = ctx->get_memory()) {
        mctx = memory->init_full();
    }
    if (!ctx->graph_reserve(n_tokens, 1, n_outputs, mctx.get(), /*split_only =*/true)) {
        throw std::runtime_error("graph_reserve failed");
    }
    return ctx->get_gf_res_reserve()->get_layer_inp(lid);
}

int32_t dflash2_llama_layer_input(llama_context * ctx, int32_t lid) {
    const auto & hparams = ctx->get_model().hparams;
    if (lid < 0 || (uint32_t) lid > hparams.n_layer()) {
        return DFLASH2_LAYER_INPUT_RANGE;
    }

    // fewer outputs than tokens, as while a prompt is read
    const uint32_t         n_tokens = 4;
    const asked_last_layer asked(ctx, lid);
    try {
        if (const ggml_tensor * t = probe(ctx, lid, n_tokens, 1)) {
            return is_one_row_per_token(t, hparams.n_embd, n_tokens) ? DFLASH2_LAYER_INPUT_OK :
                                                                       DFLASH2_LAYER_INPUT_WIDTH;
        }
        return probe(ctx, lid, n_tokens, n_tokens) ? DFLASH2_LAYER_INPUT_NARROWED : DFLASH2_LAYER_INPUT_MISSING;
    } catch (const std::exception & e) {
        LLAMA_LOG_ERROR("%s: layer %d: %s\n", __func__, lid, e.what());
        return DFLASH2_LAYER_INPUT_ERROR;
    }
}
