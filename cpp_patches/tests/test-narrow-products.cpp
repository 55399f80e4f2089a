// Claim: in a product of quantized weights with 1 to 16 rows of activations, every element has the bits that
// ggml_vec_dot of this CPU gives for that row alone, whatever the shapes, strides, planes and threads; and it is
// the product, by a sum in double precision. With weights packed for AMX, the bits are those of upstream's product
// of that row alone with these weights.

#include "products.h"

#include "ggml-alloc.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

// the widest product for which the claim is made
static constexpr int64_t ROWS_MAX = 16;

// How far a result may be from the sum in double precision, as a part of the largest weight times the sum of the
// activations' magnitudes. q8_1 keeps the sum of a block in half precision, and so errs more.
static double error_max(ggml_type type) {
    return ggml_get_type_traits_cpu(type)->vec_dot_type == GGML_TYPE_Q8_1 ? 1e-3 : 1e-5;
}

struct shape {
    ggml_type type;
    int64_t   n_in;
    int64_t   n_out;
    int64_t   n_rows;
    int64_t   planes[2];        // of the weights
    int64_t   broadcast[2];     // planes of activations for each of them
    int64_t   weights_gap;      // blocks between the weight rows
    int64_t   rows_gap;         // floats between the activation rows
    int       n_threads;
};

static std::string describe(const shape & s) {
    char text[256];
    snprintf(text, sizeof(text), "%-6s %5d x %4d, %2d rows, planes %dx%d of %dx%d, gaps %d and %d, %d threads",
             ggml_type_name(s.type), int(s.n_in), int(s.n_out), int(s.n_rows), int(s.planes[0]), int(s.planes[1]),
             int(s.broadcast[0]), int(s.broadcast[1]), int(s.weights_gap), int(s.rows_gap), s.n_threads);
    return text;
}

struct difference {
    int64_t n_bits  = 0;    // elements with other bits
    double  largest = 0.0;  // error, as error_max() counts it
};

// what the blocks of q8_0, q8_1 and q8_K say
static std::vector<float> dequantized_row(ggml_type type, const std::vector<char> & packed, int64_t n_in) {
    const int64_t      len  = ggml_blck_size(type);
    const size_t       head = type == GGML_TYPE_Q8_0 ? 2 : 4;
    std::vector<float> values(static_cast<size_t>(n_in));
    for (int64_t k = 0; k < n_in; ++k) {
        const char * block = packed.data() + k / len * int64_t(ggml_type_size(type));
        ggml_fp16_t  half;
        float        scale;
        memcpy(&half, block, sizeof(half));
        memcpy(&scale, block, sizeof(scale));
        values[k] = (type == GGML_TYPE_Q8_K ? scale : ggml_fp16_to_fp32(half)) * float(block[head + k % len]);
    }
    return values;
}

// one row of the result against vec_dot, and against double precision
static void compare_row(const ggml_tensor * weights, const char * plane, const float * row, const float * got,
                        difference & diff) {
    const auto *    traits    = ggml_get_type_traits_cpu(weights->type);
    const ggml_type rows_type = traits->vec_dot_type;
    const int64_t   n_in      = weights->ne[0];

    std::vector<char> packed(ggml_row_size(rows_type, n_in));
    ggml_get_type_traits_cpu(rows_type)->from_float(row, packed.data(), n_in);

    const std::vector<float> r = dequantized_row(rows_type, packed, n_in);
    std::vector<float>       w(static_cast<size_t>(n_in));
    for (int64_t i = 0; i < weights->ne[1]; ++i) {
        const char * weight   = plane + i * weights->nb[1];
        float        expected = 0.0f;
        traits->vec_dot(int(n_in), &expected, 0, weight, 0, packed.data(), 0, 1);
        diff.n_bits += memcmp(&expected, &got[i], sizeof(float)) != 0;

        ggml_get_type_traits(weights->type)->to_float(weight, w.data(), n_in);
        double sum        = 0.0;
        double weight_max = 0.0;
        double magnitude  = 0.0;
        for (int64_t k = 0; k < n_in; ++k) {
            sum += double(w[k]) * double(r[k]);
            weight_max = std::max(weight_max, std::fabs(double(w[k])));
            magnitude += std::fabs(double(r[k]));
        }
        const double error = std::fabs(double(got[i]) - sum);
        if (error > 0.0) {
            diff.largest = std::max(diff.largest, error / (weight_max * magnitude));
        }
    }
}

static difference compare(ggml_backend_t backend, const shape & s, std::mt19937 & engine) {
    const int64_t block  = ggml_blck_size(s.type);
    const int64_t row    = s.n_in + s.weights_gap * block;
    const int64_t ne2    = s.planes[0] * s.broadcast[0];
    const int64_t ne3    = s.planes[1] * s.broadcast[1];
    context_ptr   ctx    = make_context(16);
    ggml_tensor * all_w  = ggml_new_tensor_4d(ctx.get(), s.type, row, s.n_out, s.planes[0], s.planes[1]);
    ggml_tensor * all_r  = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, s.n_in + s.rows_gap, s.n_rows, ne2, ne3);
    ggml_tensor * w      = ggml_view_4d(ctx.get(), all_w, s.n_in, s.n_out, s.planes[0], s.planes[1], all_w->nb[1],
                                        all_w->nb[2], all_w->nb[3], 0);
    ggml_tensor * r      = ggml_view_4d(ctx.get(), all_r, s.n_in, s.n_rows, ne2, ne3, all_r->nb[1], all_r->nb[2],
                                        all_r->nb[3], 0);
    ggml_tensor * out    = ggml_mul_mat(ctx.get(), w, r);
    ggml_cgraph * graph  = ggml_new_graph_custom(ctx.get(), 64, false);
    ggml_build_forward_expand(graph, out);
    buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));

    const std::vector<uint8_t> packed = random_weights(s.type, row, s.n_out * s.planes[0] * s.planes[1], engine);
    std::vector<float>         rows(static_cast<size_t>(ggml_nelements(all_r)));
    fill(rows, engine);
    ggml_backend_tensor_set(all_w, packed.data(), 0, packed.size());
    ggml_backend_tensor_set(all_r, rows.data(), 0, rows.size() * sizeof(float));
    ggml_backend_cpu_set_n_threads(backend, s.n_threads);

    difference diff;
    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
        diff.largest = INFINITY;
        return diff;
    }
    for (int64_t i3 = 0; i3 < ne3; ++i3) {
        for (int64_t i2 = 0; i2 < ne2; ++i2) {
            const char * plane = static_cast<const char *>(w->data) + i2 / s.broadcast[0] * w->nb[2] +
                                 i3 / s.broadcast[1] * w->nb[3];
            for (int64_t i1 = 0; i1 < s.n_rows; ++i1) {
                const char * from = static_cast<const char *>(r->data) + i1 * r->nb[1] + i2 * r->nb[2] + i3 * r->nb[3];
                const char * got  = static_cast<const char *>(out->data) + i1 * out->nb[1] + i2 * out->nb[2] +
                                    i3 * out->nb[3];
                compare_row(w, plane, reinterpret_cast<const float *>(from), reinterpret_cast<const float *>(got),
                            diff);
            }
        }
    }
    return diff;
}

static int64_t pick(std::mt19937 & engine, std::initializer_list<int64_t> values) {
    return values.begin()[engine() % values.size()];
}

static bool check_type(ggml_backend_t backend, ggml_type type, std::mt19937 & engine) {
    const int64_t      block = ggml_blck_size(type);
    std::vector<shape> shapes;
    for (int64_t n_rows = 1; n_rows <= ROWS_MAX; ++n_rows) {
        shapes.push_back({ type, 5 * block, 67, n_rows, { 1, 1 }, { 1, 1 }, 0, 0, 2 });
    }
    for (int64_t n_blocks : { int64_t(1), int64_t(2), 4096 / block }) {
        shapes.push_back({ type, n_blocks * block, 9, 7, { 1, 1 }, { 1, 1 }, 0, 0, 3 });
    }
    for (int i = 0; i < 24; ++i) {
        shapes.push_back({
            type,
            pick(engine, { 1, 3, 576 / block, 1536 / block }) * block,
            pick(engine, { 1, 2, 15, 16, 17, 64, 131 }),
            int64_t(1 + engine() % ROWS_MAX),
            { pick(engine, { 1, 2, 3 }), pick(engine, { 1, 2 }) },
            { pick(engine, { 1, 1, 3 }), pick(engine, { 1, 2 }) },
            pick(engine, { 0, 0, 1, 5 }),
            pick(engine, { 0, 0, 4, 33 }),
            int(pick(engine, { 1, 1, 2, 3 })),
        });
    }

    bool   good    = true;
    double largest = 0.0;
    for (const shape & s : shapes) {
        const difference diff = compare(backend, s, engine);
        largest               = std::max(largest, diff.largest);
        if (diff.n_bits != 0 || !(diff.largest <= error_max(type))) {
            printf("FAIL %s: %d elements with other bits, error %.1e\n", describe(s).c_str(), int(diff.n_bits),
                   diff.largest);
            good = false;
        }
    }
    printf("%s %-6s %d products, error at most %.1e\n", good ? "ok  " : "FAIL", ggml_type_name(type),
           int(shapes.size()), largest);
    return good;
}

// A product of packed weights, as many floats as there are elements. `in_buffer` is where the weights go.
static std::vector<float> product(ggml_backend_t backend, ggml_backend_buffer_type_t in_buffer, ggml_type type,
                                  int64_t n_in, int64_t n_out, const std::vector<uint8_t> & packed,
                                  const std::vector<float> & rows) {
    context_ptr        ctx    = make_context(1);
    context_ptr        others = make_context(2);
    const int64_t      n_rows = int64_t(rows.size()) / n_in;
    ggml_tensor *      w      = ggml_new_tensor_2d(ctx.get(), type, n_in, n_out);
    ggml_tensor *      r      = ggml_new_tensor_2d(others.get(), GGML_TYPE_F32, n_in, n_rows);
    ggml_tensor *      out    = ggml_mul_mat(others.get(), w, r);
    ggml_cgraph *      graph  = ggml_new_graph_custom(others.get(), 64, false);
    std::vector<float> result(size_t(n_out * n_rows), NAN);
    ggml_build_forward_expand(graph, out);
    buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), in_buffer));
    buffer_ptr other_buffer(ggml_backend_alloc_ctx_tensors(others.get(), backend));
    ggml_backend_tensor_set(w, packed.data(), 0, packed.size());
    ggml_backend_tensor_set(r, rows.data(), 0, rows.size() * sizeof(float));
    if (ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS) {
        ggml_backend_tensor_get(out, result.data(), 0, result.size() * sizeof(float));
    }
    return result;
}

static bool check_packed_type(ggml_backend_t backend, ggml_backend_buffer_type_t amx, ggml_type type,
                              std::mt19937 & engine) {
    bool good       = true;
    int  n_products = 0;
    for (int64_t n_rows = 1; n_rows <= ROWS_MAX; ++n_rows) {
        for (int64_t n_out : { 32, 96, 576 }) {
            const int64_t              n_in   = ggml_blck_size(type) * pick(engine, { 1, 2, 5, 16 });
            const int                  n      = int(pick(engine, { 1, 2, 3 }));
            const std::vector<uint8_t> packed = random_weights(type, n_in, n_out, engine);
            std::vector<float>         rows(static_cast<size_t>(n_in * n_rows));
            fill(rows, engine);
            ggml_backend_cpu_set_n_threads(backend, n);
            ggml_backend_cpu_set_use_ref(backend, false);
            const std::vector<float> got = product(backend, amx, type, n_in, n_out, packed, rows);
            ggml_backend_cpu_set_use_ref(backend, true);
            int64_t n_bits = 0;
            for (int64_t i = 0; i < n_rows; ++i) {
                const std::vector<float> row(rows.begin() + i * n_in, rows.begin() + (i + 1) * n_in);
                const std::vector<float> alone = product(backend, amx, type, n_in, n_out, packed, row);
                for (int64_t k = 0; k < n_out; ++k) {
                    n_bits += memcmp(&got[size_t(i * n_out + k)], &alone[size_t(k)], sizeof(float)) != 0;
                }
            }
            ++n_products;
            if (n_bits != 0) {
                printf("FAIL AMX %-6s %d x %d, %d rows, %d threads: %d elements with other bits\n",
                       ggml_type_name(type), int(n_in), int(n_out), int(n_rows), n, int(n_bits));
                good = false;
            }
        }
    }
    ggml_backend_cpu_set_use_ref(backend, false);
    printf("%s %-6s %d products packed for AMX\n", good ? "ok  " : "FAIL", ggml_type_name(type), n_products);
    return good;
}

int main() {
    backend_ptr  backend(ggml_backend_cpu_init());
    std::mt19937 engine(7);
    bool         good = true;
    for (ggml_type type : TYPES) {
        good = check_type(backend.get(), type, engine) && good;
    }
    ggml_backend_buffer_type_t amx = amx_buffer_type();
    for (ggml_type type : TYPES) {
        // what upstream packs
        if (amx && type != GGML_TYPE_Q5_0 && type != GGML_TYPE_Q5_1) {
            good = check_packed_type(backend.get(), amx, type, engine) && good;
        }
    }
    return good ? 0 : 1;
}
