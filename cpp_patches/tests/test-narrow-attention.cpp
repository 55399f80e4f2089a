// Claim: in attention with 1 to 16 rows, every row has the bits that it has alone, whatever the head sizes, heads,
// planes, masks, sinks and threads, in caches short and long; and it is attention, by a sum in double precision.
// Alone is upstream's kernel where that does not split the cache among threads, and this one where it does.

#include "products.h"

#include "ggml-alloc.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

struct shape {
    int64_t n_key;     // values of a head's keys
    int64_t n_value;
    int64_t n_heads;
    int64_t n_kv_heads;
    int64_t n_planes;
    int64_t n_cells;
    int64_t n_used;    // the rows' own cells are the last of these
    int64_t n_rows;
    int64_t window;    // a row sees so many cells; 0: all
    bool    has_mask;
    bool    has_sinks;
    int     n_threads;
};

struct inputs {
    std::vector<float>       q;
    std::vector<ggml_fp16_t> k;
    std::vector<ggml_fp16_t> v;
    std::vector<ggml_fp16_t> mask;
    std::vector<float>       sinks;
};

static std::vector<ggml_fp16_t> random_halves(size_t n, std::mt19937 & engine) {
    std::normal_distribution<float> normal;
    std::vector<ggml_fp16_t>        values(n);
    for (auto & value : values) {
        value = ggml_fp32_to_fp16(normal(engine));
    }
    return values;
}

static inputs make_inputs(const shape & s, std::mt19937 & engine) {
    std::normal_distribution<float> normal;
    inputs                          in;
    in.q.resize(static_cast<size_t>(s.n_key * s.n_rows * s.n_heads * s.n_planes));
    for (auto & value : in.q) {
        value = 2.0f * normal(engine);
    }
    in.k = random_halves(size_t(s.n_key * s.n_cells * s.n_kv_heads * s.n_planes), engine);
    in.v = random_halves(size_t(s.n_value * s.n_cells * s.n_kv_heads * s.n_planes), engine);
    in.sinks.resize(size_t(s.n_heads));
    for (auto & value : in.sinks) {
        value = 3.0f * normal(engine);
    }
    in.mask.assign(size_t(s.n_cells * s.n_rows * s.n_planes), ggml_fp32_to_fp16(-INFINITY));
    for (int64_t plane = 0; plane < s.n_planes; ++plane) {
        for (int64_t row = 0; row < s.n_rows; ++row) {
            const int64_t last = s.n_used - s.n_rows + row;
            for (int64_t cell = s.window ? std::max<int64_t>(0, last - s.window + 1) : 0; cell <= last; ++cell) {
                in.mask[size_t((plane * s.n_rows + row) * s.n_cells + cell)] = 0;
            }
        }
    }
    return in;
}

// rows [first, first + n), and the cells that a context shows them
static std::vector<float> attend(ggml_backend_t backend, const shape & s, const inputs & in, int64_t first, int64_t n,
                                 int64_t n_cells) {
    context_ptr   ctx   = make_context(12);
    ggml_tensor * q     = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, s.n_key, s.n_rows, s.n_heads, s.n_planes);
    ggml_tensor * k     = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F16, s.n_key, s.n_cells, s.n_kv_heads, s.n_planes);
    ggml_tensor * v     = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F16, s.n_value, s.n_cells, s.n_kv_heads, s.n_planes);
    ggml_tensor * mask  = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F16, n_cells, n, 1, s.n_planes);
    ggml_tensor * sinks = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, s.n_heads);
    const auto    view  = [&](ggml_tensor * t, int64_t rows, int64_t begin) {
        return ggml_view_4d(ctx.get(), t, t->ne[0], rows, t->ne[2], t->ne[3], t->nb[1], t->nb[2], t->nb[3],
                            size_t(begin) * t->nb[1]);
    };
    ggml_tensor * out =
        ggml_flash_attn_ext(ctx.get(), view(q, n, first), view(k, n_cells, 0), view(v, n_cells, 0),
                            s.has_mask ? mask : nullptr, 1.0f / std::sqrt(float(s.n_key)), 0.0f, 0.0f);
    if (s.has_sinks) {
        ggml_flash_attn_ext_add_sinks(out, sinks);
    }
    ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), 64, false);
    ggml_build_forward_expand(graph, out);
    buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));

    ggml_backend_tensor_set(q, in.q.data(), 0, ggml_nbytes(q));
    ggml_backend_tensor_set(k, in.k.data(), 0, ggml_nbytes(k));
    ggml_backend_tensor_set(v, in.v.data(), 0, ggml_nbytes(v));
    ggml_backend_tensor_set(sinks, in.sinks.data(), 0, ggml_nbytes(sinks));
    for (int64_t plane = 0; plane < s.n_planes; ++plane) {
        for (int64_t row = 0; row < n; ++row) {
            const ggml_fp16_t * from = in.mask.data() + (plane * s.n_rows + first + row) * s.n_cells;
            ggml_backend_tensor_set(mask, from, size_t((plane * n + row) * n_cells) * sizeof(ggml_fp16_t),
                                    size_t(n_cells) * sizeof(ggml_fp16_t));
        }
    }
    std::vector<float> result(static_cast<size_t>(ggml_nelements(out)), NAN);
    if (ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS) {
        ggml_backend_tensor_get(out, result.data(), 0, result.size() * sizeof(float));
    }
    return result;
}

// one value of the result, in double precision; the result is [n_planes][n_rows][n_heads][n_value]
static std::vector<double> exact(const shape & s, const inputs & in, int64_t plane, int64_t row, int64_t head) {
    const int64_t       kv = head / (s.n_heads / s.n_kv_heads);
    const float *       q  = in.q.data() + ((plane * s.n_heads + head) * s.n_rows + row) * s.n_key;
    const ggml_fp16_t * k  = in.k.data() + (plane * s.n_kv_heads + kv) * s.n_cells * s.n_key;
    const ggml_fp16_t * v  = in.v.data() + (plane * s.n_kv_heads + kv) * s.n_cells * s.n_value;
    std::vector<double> sum(static_cast<size_t>(s.n_value));
    std::vector<double> scores(static_cast<size_t>(s.n_cells), -INFINITY);
    double              total = 0.0;
    double              max   = s.has_sinks ? in.sinks[size_t(head)] : -INFINITY;
    for (int64_t cell = 0; cell < s.n_cells; ++cell) {
        if (s.has_mask && in.mask[size_t((plane * s.n_rows + row) * s.n_cells + cell)] != 0) {
            continue;
        }
        double dot = 0.0;
        for (int64_t d = 0; d < s.n_key; ++d) {
            dot += double(q[d]) * double(ggml_fp16_to_fp32(k[cell * s.n_key + d]));
        }
        scores[size_t(cell)] = dot / std::sqrt(double(s.n_key));
        max                  = std::max(max, scores[size_t(cell)]);
    }
    for (int64_t cell = 0; cell < s.n_cells; ++cell) {
        const double weight = std::exp(scores[size_t(cell)] - max);
        total += weight;
        for (int64_t d = 0; weight > 0.0 && d < s.n_value; ++d) {
            sum[size_t(d)] += weight * double(ggml_fp16_to_fp32(v[cell * s.n_value + d]));
        }
    }
    total += s.has_sinks ? std::exp(double(in.sinks[size_t(head)]) - max) : 0.0;
    for (auto & value : sum) {
        value /= total;
    }
    return sum;
}

static bool check(ggml_backend_t backend, const shape & s, std::mt19937 & engine) {
    const inputs in = make_inputs(s, engine);
    ggml_backend_cpu_set_n_threads(backend, s.n_threads);
    // The reference is asked for to get upstream's kernel, which also keeps that from splitting the cache: a split
    // cache is therefore compared with a single row of this kernel.
    const bool               splits = s.n_planes == 1 && s.n_cells >= 512;
    const std::vector<float> got    = attend(backend, s, in, 0, s.n_rows, s.n_cells);

    int64_t       n_bits  = 0;
    double        largest = 0.0;
    const int64_t size    = s.n_heads * s.n_value;
    for (int64_t row = 0; row < s.n_rows; ++row) {
        const int64_t last    = s.n_used - s.n_rows + row + 1;
        const int64_t n_cells = s.has_mask ? std::min(s.n_cells, (last + 255) / 256 * 256) : s.n_cells;
        ggml_backend_cpu_set_use_ref(backend, !splits);
        const std::vector<float> alone = attend(backend, s, in, row, 1, n_cells);
        ggml_backend_cpu_set_use_ref(backend, false);
        for (int64_t plane = 0; plane < s.n_planes; ++plane) {
            const float * mine = got.data() + (plane * s.n_rows + row) * size;
            for (int64_t i = 0; i < size; ++i) {
                n_bits += memcmp(&mine[i], &alone[size_t(plane * size + i)], sizeof(float)) != 0;
            }
            for (int64_t head = 0; head < s.n_heads; ++head) {
                const std::vector<double> expected = exact(s, in, plane, row, head);
                for (int64_t d = 0; d < s.n_value; ++d) {
                    const double error = std::fabs(double(mine[head * s.n_value + d]) - expected[size_t(d)]);
                    largest            = std::max(largest, std::isnan(error) ? INFINITY : error);
                }
            }
        }
    }
    const bool good = n_bits == 0 && largest < 0.02;  // sums in half precision
    printf("%s keys of %d, values of %d, %d heads on %d, %d planes, %d of %d cells, %d rows%s%s, window %d, %d threads: "
           "%d other bits, error at most %.1e\n",
           good ? "ok  " : "FAIL", int(s.n_key), int(s.n_value), int(s.n_heads), int(s.n_kv_heads), int(s.n_planes),
           int(s.n_used), int(s.n_cells), int(s.n_rows), s.has_mask ? "" : ", no mask", s.has_sinks ? ", sinks" : "",
           int(s.window), s.n_threads, int(n_bits), largest);
    return good;
}

int main() {
    backend_ptr  backend(ggml_backend_cpu_init());
    std::mt19937 engine(11);
    bool         good = true;
    for (int64_t n_rows : { 1, 2, 3, 5, 8, 11, 16 }) {
        const bool few = n_rows < 8;
        good = check(backend.get(), { 64, 64, 9, 3, 1, 256, 200, n_rows, 0, true, false, 2 }, engine) && good;
        good = check(backend.get(), { 64, 64, 8, 8, 1, 768, 515, n_rows, 0, true, few, 2 }, engine) && good;
        good = check(backend.get(), { 64, 64, 4, 1, 1, 1024, 1000, n_rows, 300, true, false, 3 }, engine) && good;
        good = check(backend.get(), { 128, 128, 4, 2, 1, 256, 256, n_rows, 0, true, !few, 2 }, engine) && good;
        good = check(backend.get(), { 192, 128, 4, 4, 1, 512, 300, n_rows, 0, true, false, 1 }, engine) && good;
        good = check(backend.get(), { 64, 64, 6, 2, 3, 512, 400, n_rows, 0, true, true, 2 }, engine) && good;
        good = check(backend.get(), { 256, 256, 2, 1, 1, 256, 100, n_rows, 50, true, false, 2 }, engine) && good;
        good = check(backend.get(), { 96, 64, 2, 2, 1, 48, 48, n_rows, 0, false, false, 2 }, engine) && good;
    }
    return good ? 0 : 1;
}
