// Session parameters made definite, and the memory they take.

#pragma once

#include "dflash2.h"

// Replaces "default" values; throws dflash2_error(DFLASH2_ERROR_ARGUMENT) for impossible ones.
dflash2_session_params dflash2_resolve_params(const llama_model * target, const dflash2_session_params & params);

// prompt tokens that plain decoding of one sequence with these parameters evaluates at once
int32_t dflash2_plain_chunk(const llama_model * target, const dflash2_session_params & params);

// drafted tokens per round that a session of these parameters may ask of draft
int32_t dflash2_draft_max(const llama_model * draft, const dflash2_session_params & params);

// Bytes held by the contexts and their models. draft may be NULL.
dflash2_memory dflash2_measure_memory(const llama_context * target, const llama_context * draft);
