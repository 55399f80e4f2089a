// Claim: a quantized matrix product of 1, 2, 8 and 32 rows equals the float product of the dequantized
// weights, in every kind of buffer this CPU keeps weights in (plain, repacked, AMX tiles).
//
// Prints one line per product and exits 1 if one is off. With a buffer name as argument (e.g. AMX) it also
// fails when no product ran from such a buffer.

#include "products.h"

#include "ggml-alloc.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

static constexpr int64_t N_IN  = 512;
static constexpr int64_t N_OUT = 64;

// what quantizing the activations to 8 bits costs; upstream's own tests allow as much
static constexpr double NMSE_MAX = 5e-4;

static context_ptr make_context() {
    ggml_init_params params = { 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, /*.no_alloc =*/true };
    return context_ptr(ggml_init(params));
}

static std::vector<float> random_values(size_t n, uint32_t seed) {
    std::mt19937                          engine(seed);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    std::vector<float>                    values(n);
    for (float & value : values) {
        value = uniform(engine);
    }
    return values;
}

static std::vector<ggml_backend_buffer_type_t> buffer_types(ggml_backend_dev_t device) {
    std::vector<ggml_backend_buffer_type_t> types = { ggml_backend_dev_buffer_type(device) };
    auto get_extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
    for (auto * type = get_extra ? get_extra(device) : nullptr; type && *type; ++type) {
        types.push_back(*type);
    }
    return types;
}

// normalized squared error of weights (type, in a buffer of this kind) x n_rows activations; < 0 if the kind
// does not take the product
static double product_error(ggml_backend_t backend, ggml_backend_buffer_type_t kind, ggml_type type, int64_t n_rows) {
    context_ptr   ctx_weights = make_context();
    ggml_tensor * weights     = ggml_new_tensor_2d(ctx_weights.get(), type, N_IN, N_OUT);

    context_ptr   ctx   = make_context();
    ggml_tensor * rows  = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, N_IN, n_rows);
    ggml_tensor * out   = ggml_mul_mat(ctx.get(), weights, rows);
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, out);

    buffer_ptr buffer_weights(ggml_backend_alloc_ctx_tensors_from_buft(ctx_weights.get(), kind));
    if (!buffer_weights || !ggml_backend_dev_supports_op(ggml_backend_get_device(backend), out)) {
        return -1.0;
    }
    buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));

    const std::vector<float> values = random_values(N_IN * N_OUT, 1);
    const std::vector<float> inputs = random_values(N_IN * n_rows, 2);
    std::vector<uint8_t>     packed(ggml_nbytes(weights));
    ggml_quantize_chunk(type, values.data(), packed.data(), 0, N_OUT, N_IN, nullptr);
    std::vector<float> dequantized(values.size());
    ggml_get_type_traits(type)->to_float(packed.data(), dequantized.data(), N_IN * N_OUT);
    ggml_backend_tensor_set(weights, packed.data(), 0, packed.size());
    ggml_backend_tensor_set(rows, inputs.data(), 0, inputs.size() * sizeof(float));

    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
        return INFINITY;
    }
    std::vector<float> got(N_OUT * n_rows);
    ggml_backend_tensor_get(out, got.data(), 0, got.size() * sizeof(float));

    double error = 0.0;
    double power = 0.0;
    for (int64_t row = 0; row < n_rows; ++row) {
        for (int64_t col = 0; col < N_OUT; ++col) {
            double expected = 0.0;
            for (int64_t k = 0; k < N_IN; ++k) {
                expected += double(dequantized[col * N_IN + k]) * double(inputs[row * N_IN + k]);
            }
            const double diff = expected - double(got[row * N_OUT + col]);
            error += diff * diff;
            power += expected * expected;
        }
    }
    return error / power;
}

int main(int argc, char ** argv) {
    const std::string required = argc > 1 ? argv[1] : "";

    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    std::unique_ptr<ggml_backend, backend_deleter> backend(ggml_backend_dev_init(device, nullptr));
    ggml_backend_cpu_set_n_threads(backend.get(), 2);

    const ggml_type types[] = { GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q8_0,   GGML_TYPE_Q4_K,
                                GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS };
    bool good  = true;
    bool found = required.empty();
    for (ggml_backend_buffer_type_t kind : buffer_types(device)) {
        const char * name = ggml_backend_buft_name(kind);
        for (ggml_type type : types) {
            for (int64_t n_rows : { 1, 2, 8, 32 }) {
                const double error = product_error(backend.get(), kind, type, n_rows);
                if (error < 0.0) {
                    continue;
                }
                const bool close = error <= NMSE_MAX;
                printf("%s %-10s %-7s %2d rows, error %.1e\n", close ? "ok  " : "FAIL", name, ggml_type_name(type),
                       int(n_rows), error);
                good  = good && close;
                found = found || required == name;
            }
        }
    }
    if (!found) {
        printf("FAIL no product ran from a buffer of kind %s\n", required.c_str());
    }
    return good && found ? 0 : 1;
}
