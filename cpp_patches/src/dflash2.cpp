// The C boundary of sessions: arguments checked, exceptions turned into statuses.

#include "dflash2.h"

#include "error.h"
#include "session.h"

#include <iterator>

#ifndef DFLASH2_BUILD_INFO
#    error "DFLASH2_BUILD_INFO must name the pin and the patch stack"
#endif

int32_t dflash2_abi_version(void) {
    return DFLASH2_ABI_VERSION;
}

const char * dflash2_build_info(void) {
    return DFLASH2_BUILD_INFO;
}

dflash2_session_params dflash2_session_default_params(void) {
    dflash2_session_params params = {};
    params.n_ctx                  = 4096;
    params.n_batch                = 512;
    params.n_batch_shared         = 128;
    params.n_ubatch               = 512;
    params.n_seq_max              = 1;
    params.n_draft_max            = -1;
    params.type_k                 = GGML_TYPE_F16;
    params.type_v                 = GGML_TYPE_F16;
    params.flash_attn             = LLAMA_FLASH_ATTN_TYPE_AUTO;
    params.offload_kqv            = true;
    return params;
}

dflash2_seq_params dflash2_seq_default_params(void) {
    dflash2_seq_params params = {};
    params.verifier           = DFLASH2_VERIFIER_AUTO;
    params.n_predict          = -1;
    params.n_draft_max        = -1;
    params.seed               = LLAMA_DEFAULT_SEED;
    params.top_p              = 1.0f;
    params.penalty_last_n     = 64;
    params.penalty_repeat     = 1.0f;
    params.typical_p          = 1.0f;
    params.xtc_threshold      = 0.1f;
    params.dry_base           = 1.75f;
    params.dry_allowed_length = 2;
    params.dry_penalty_last_n = -1;
    return params;
}

static dflash2_session & require(dflash2_session * session) {
    if (session == nullptr) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "a session is required");
    }
    return *session;
}

dflash2_session * dflash2_session_init(llama_model *                  target,
                                       llama_model *                  draft,
                                       const dflash2_session_params * params,
                                       int32_t *                      status) {
    dflash2_session * session = nullptr;
    const int32_t     result  = dflash2_guard([&]() -> int32_t {
        if (target == nullptr || params == nullptr) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "target and params are required");
        }
        session = new dflash2_session(target, draft, *params);
        return DFLASH2_OK;
    });
    if (status != nullptr) {
        *status = result;
    }
    return session;
}

void dflash2_session_free(dflash2_session * session) {
    delete session;
}

int32_t dflash2_session_seq_begin(dflash2_session *          session,
                                  llama_seq_id               seq_id,
                                  const llama_token *        tokens,
                                  size_t                     n_tokens,
                                  const dflash2_seq_params * params) {
    return dflash2_guard([&] {
        return require(session).seq_begin(seq_id, tokens, n_tokens, params ? *params : dflash2_seq_default_params());
    });
}

int32_t dflash2_session_seq_end(dflash2_session * session, llama_seq_id seq_id) {
    return dflash2_guard([&]() -> int32_t {
        require(session).seq_end(seq_id);
        return DFLASH2_OK;
    });
}

int32_t dflash2_session_seq_clear(dflash2_session * session, llama_seq_id seq_id) {
    return dflash2_guard([&]() -> int32_t {
        require(session).seq_clear(seq_id);
        return DFLASH2_OK;
    });
}

int32_t dflash2_session_step(dflash2_session * session, dflash2_step_result * results) {
    return dflash2_guard([&]() -> int32_t {
        if (results == nullptr) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "results are required");
        }
        return require(session).step(results);
    });
}

void dflash2_session_abort(dflash2_session * session) {
    if (session != nullptr) {
        session->abort();
    }
}

int32_t dflash2_session_draft_view(const dflash2_session * session, llama_seq_id seq_id, dflash2_draft_view * view) {
    return dflash2_guard([&]() -> int32_t {
        if (view == nullptr) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "a view is required");
        }
        require(const_cast<dflash2_session *>(session)).draft_view(seq_id, *view);
        return DFLASH2_OK;
    });
}

uint32_t dflash2_session_n_ctx(const dflash2_session * session) {
    return session ? session->n_ctx() : 0;
}

int32_t dflash2_session_n_draft_max(const dflash2_session * session) {
    return session ? session->n_draft_max() : 0;
}

int32_t dflash2_session_seq_save(dflash2_session * session, llama_seq_id seq_id, const uint8_t ** data, size_t * size) {
    return dflash2_guard([&]() -> int32_t {
        if (data == nullptr || size == nullptr) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "data and size are required");
        }
        const auto & bytes = require(session).seq_save(seq_id);
        *data              = bytes.data();
        *size              = bytes.size();
        return DFLASH2_OK;
    });
}

int32_t dflash2_session_seq_restore(dflash2_session * session, llama_seq_id seq_id, const uint8_t * data, size_t size) {
    return dflash2_guard([&]() -> int32_t {
        if (data == nullptr) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "data is required");
        }
        return require(session).seq_restore(seq_id, data, size);
    });
}

int32_t dflash2_session_seq_is_active(const dflash2_session * session, llama_seq_id seq_id) {
    return dflash2_guard(
        [&]() -> int32_t { return require(const_cast<dflash2_session *>(session)).seq_is_active(seq_id); });
}

int32_t dflash2_session_seq_tokens(const dflash2_session * session, llama_seq_id seq_id, const llama_token ** tokens) {
    return dflash2_guard([&]() -> int32_t {
        if (tokens == nullptr) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "tokens are required");
        }
        const auto & known = require(const_cast<dflash2_session *>(session)).seq_tokens(seq_id);
        *tokens            = known.data();
        return (int32_t) known.size();
    });
}

int32_t dflash2_session_seq_n_past(const dflash2_session * session, llama_seq_id seq_id) {
    return dflash2_guard([&] { return require(const_cast<dflash2_session *>(session)).seq_n_past(seq_id); });
}

int32_t dflash2_session_seq_logits(const dflash2_session * session, llama_seq_id seq_id, const float ** logits) {
    return dflash2_guard([&]() -> int32_t {
        if (logits == nullptr) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "logits are required");
        }
        *logits = require(const_cast<dflash2_session *>(session)).seq_logits(seq_id);
        return DFLASH2_OK;
    });
}

int32_t dflash2_session_seq_stats(const dflash2_session * session, llama_seq_id seq_id, dflash2_stats * stats) {
    return dflash2_guard([&]() -> int32_t {
        if (stats == nullptr) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "stats are required");
        }
        *stats = require(const_cast<dflash2_session *>(session)).seq_stats(seq_id);
        return DFLASH2_OK;
    });
}

int32_t dflash2_session_importance_size(const dflash2_session * session) {
    return dflash2_guard(
        [&]() -> int32_t { return (int32_t) require(const_cast<dflash2_session *>(session)).calibration().size(); });
}

int32_t dflash2_session_importance(const dflash2_session * session, int32_t i, dflash2_importance * importance) {
    return dflash2_guard([&]() -> int32_t {
        const auto & entries = require(const_cast<dflash2_session *>(session)).calibration();
        if (importance == nullptr || i < 0 || i >= (int32_t) entries.size()) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT,
                                dflash2_format("entry %d is wanted, there are %zu", i, entries.size()));
        }
        const auto & [name, entry] = *std::next(entries.begin(), i);
        *importance                = { name.c_str(), entry.sums.data(), (int64_t) entry.sums.size(), entry.n_rows };
        return DFLASH2_OK;
    });
}

void dflash2_session_stats(const dflash2_session * session, dflash2_stats * stats) {
    if (session != nullptr && stats != nullptr) {
        *stats = session->stats;
    }
}

void dflash2_session_stats_reset(dflash2_session * session) {
    if (session != nullptr) {
        session->stats = {};
    }
}

void dflash2_session_memory(const dflash2_session * session, dflash2_memory * memory) {
    if (session != nullptr && memory != nullptr) {
        session->memory(*memory);
    }
}
