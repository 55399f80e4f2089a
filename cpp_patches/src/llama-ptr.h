// Owning pointers and a batch for llama.cpp's C objects.

#pragma once

#include "llama.h"

#include <memory>

struct llama_context_deleter {
    void operator()(llama_context * ctx) const { llama_free(ctx); }
};

struct llama_sampler_deleter {
    void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
};

struct llama_batch_deleter {
    void operator()(llama_batch_ext * batch) const { llama_batch_ext_free(batch); }
};

using llama_context_ptr = std::unique_ptr<llama_context, llama_context_deleter>;
using llama_sampler_ptr = std::unique_ptr<llama_sampler, llama_sampler_deleter>;
using llama_batch_ptr   = std::unique_ptr<llama_batch_ext, llama_batch_deleter>;
