#pragma once

// Owners, types and values for the programs that run single operators.

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

inline const ggml_type TYPES[] = {
    GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,   GGML_TYPE_Q8_0,
    GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS,
};

struct context_deleter {
    void operator()(ggml_context * ctx) const { ggml_free(ctx); }
};

struct buffer_deleter {
    void operator()(ggml_backend_buffer * buffer) const { ggml_backend_buffer_free(buffer); }
};

struct backend_deleter {
    void operator()(ggml_backend * backend) const { ggml_backend_free(backend); }
};

using context_ptr = std::unique_ptr<ggml_context, context_deleter>;
using buffer_ptr  = std::unique_ptr<ggml_backend_buffer, buffer_deleter>;
using backend_ptr = std::unique_ptr<ggml_backend, backend_deleter>;

inline context_ptr make_context(size_t n_tensors) {
    const size_t     size   = (n_tensors + 8) * ggml_tensor_overhead() + ggml_graph_overhead_custom(4096, false);
    ggml_init_params params = { size, nullptr, /*.no_alloc =*/true };
    return context_ptr(ggml_init(params));
}

// where this CPU's AMX kernels want their weights; nullptr where it has none
inline ggml_backend_buffer_type_t amx_buffer_type() {
    ggml_backend_reg_t reg  = ggml_backend_cpu_reg();
    const auto         list = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts"));
    ggml_backend_buffer_type_t * type = list ? list(ggml_backend_reg_dev_get(reg, 0)) : nullptr;
    while (type && *type && strcmp(ggml_backend_buft_name(*type), "AMX") != 0) {
        ++type;
    }
    return type ? *type : nullptr;
}

// magnitudes of many sizes, and now and then a run of zeros
inline void fill(std::vector<float> & values, std::mt19937 & engine) {
    std::normal_distribution<float>       normal;
    std::uniform_real_distribution<float> exponent(-2.0f, 2.0f);
    for (size_t i = 0; i < values.size(); i += 32) {
        const bool  zero  = engine() % 16 == 0;
        const float scale = zero ? 0.0f : std::pow(10.0f, exponent(engine));
        for (size_t k = i; k < std::min(i + 32, values.size()); ++k) {
            values[k] = scale * normal(engine);
        }
    }
}

inline std::vector<uint8_t> random_weights(ggml_type type, int64_t n_in, int64_t n, std::mt19937 & engine) {
    std::vector<float> values(size_t(n_in * n));
    fill(values, engine);
    std::vector<uint8_t> packed(ggml_row_size(type, n_in) * size_t(n));
    ggml_quantize_chunk(type, values.data(), packed.data(), 0, n, n_in, nullptr);
    if (type == GGML_TYPE_Q8_0) {
        // -128 too, which upstream's quantizer does not write
        for (size_t i = 0; i < packed.size(); i += ggml_type_size(type)) {
            for (size_t k = 2; k < ggml_type_size(type); ++k) {
                packed[i + k] = uint8_t(engine());
            }
        }
    }
    return packed;
}
