// Attention of few rows: see dflash2-attention.h. The reference is
// ggml_compute_forward_flash_attn_ext_f16_one_chunk() of upstream's ops.cpp, with keys and values in half precision.

#include "dflash2-attention.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "simd-mappings.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && defined(__GNUC__)
#    define DFLASH2_NARROW_ATTENTION
#endif

#ifdef DFLASH2_NARROW_ATTENTION

#    include "attention-lanes.h"

#    include <algorithm>
#    include <cmath>
#    include <cstring>

namespace dflash2 {

namespace {

// more rows are a prompt, which upstream has tiles for
constexpr int64_t ROWS_MAX = 16;

// cells of the cache that are looked at together
constexpr int TILE = 16;

// queries that go through the cache together
constexpr int QUERIES_MAX = 8;

// a llama.cpp context shows its cache in steps of so many cells
constexpr int64_t CACHE_STEP = 256;

// from so many cells on upstream splits the cache among its threads
constexpr int64_t SPLIT_CELLS = 512;

struct problem {
    const ggml_tensor * q;
    const ggml_tensor * k;
    const ggml_tensor * v;
    const ggml_tensor * mask;
    const ggml_tensor * sinks;
    ggml_tensor *       dst;
    float               scale;
    int                 n_threads;

    int64_t n_rows() const { return q->ne[1]; }

    int64_t heads_per_kv() const { return q->ne[2] / k->ne[2]; }

    // queries that share keys and values
    int64_t n_shared() const { return n_rows() * heads_per_kv(); }

    int64_t n_planes() const { return k->ne[2] * q->ne[3]; }
};

// One query: a row, as one head sees it.
struct query {
    const ggml_fp16_t * mask;  // nullptr: sees all
    float *             dst;
    int64_t             n_cells;     // of the cache that it is shown
    int64_t             chunk_size;  // after so many cells the softmax starts anew, and is joined in the end
    float               sink;
    bool                has_sink;

    // of the chunk so far
    float max;
    float sum;

    // of the chunks so far
    float max_all;
    float sum_all;
};

// What a thread keeps of a block of queries, in the work space.
struct scratch {
    float *       keys;      // TILE rows
    float *       values;    // TILE rows
    float *       queries;   // QUERIES_MAX rows
    ggml_fp16_t * totals;    // QUERIES_MAX rows: weighted sums of the values, of a chunk
    float *       joined;    // QUERIES_MAX rows: of all chunks
    ggml_fp16_t * rounded;   // a row of queries

    static size_t n_floats(int64_t dk, int64_t dv) {
        return size_t(TILE * (dk + dv) + QUERIES_MAX * (dk + 2 * dv) + dk + 16);
    }

    scratch(float * space, int64_t dk, int64_t dv) {
        keys    = space;
        values  = keys + TILE * dk;
        queries = values + TILE * dv;
        joined  = queries + QUERIES_MAX * dk;
        totals  = reinterpret_cast<ggml_fp16_t *>(joined + QUERIES_MAX * dv);
        rounded = totals + QUERIES_MAX * dv;
    }
};

// weights of the values of a tile, for one query
struct weights {
    int   n = 0;            // of cells that the query sees
    int   cell[TILE];       // in the tile
    float weight[TILE];     // exp(score - max)
    float rescale[TILE];    // of what was summed before; 1 but for a new maximum
};

// Cells that a context would show to the row alone: up to the last that the mask lets it see.
int64_t visible_cells(const ggml_fp16_t * mask, int64_t n_cells) {
    constexpr ggml_fp16_t hidden = 0xfc00;  // -infinity

    int64_t last = n_cells;
    while (last > 0 && mask[last - 1] == hidden) {
        --last;
    }
    return std::min(n_cells, (last + CACHE_STEP - 1) / CACHE_STEP * CACHE_STEP);
}

query make_query(const problem & p, int64_t row, int64_t head, int64_t plane3) {
    const ggml_tensor * mask = p.mask;
    query               query;
    query.mask = nullptr;
    if (mask) {
        query.mask = reinterpret_cast<const ggml_fp16_t *>(
            static_cast<const char *>(mask->data) + row * mask->nb[1] + (head % mask->ne[2]) * mask->nb[2] +
            (plane3 % mask->ne[3]) * mask->nb[3]);
    }
    const int64_t index = (plane3 * p.dst->ne[2] * p.dst->ne[1] + head + row * p.dst->ne[1]);
    query.dst           = reinterpret_cast<float *>(static_cast<char *>(p.dst->data) + index * p.dst->nb[1]);

    const int64_t n_cells = p.k->ne[1];
    query.n_cells         = p.n_rows() > 1 && mask ? visible_cells(query.mask, n_cells) : n_cells;
    query.chunk_size      = query.n_cells;
    if (p.q->ne[3] == 1 && query.n_cells >= SPLIT_CELLS) {
        query.chunk_size = (query.n_cells + p.n_threads - 1) / p.n_threads;
    }

    query.has_sink = p.sinks != nullptr;
    query.sink     = p.sinks ? static_cast<const float *>(p.sinks->data)[head] : 0.0f;
    query.max      = -INFINITY;
    query.sum      = 0.0f;
    query.max_all  = -INFINITY;
    query.sum_all  = 0.0f;
    return query;
}

// Cells from `begin` on that can be handled in one go: none of the queries starts a new chunk among them.
int tile_end(const query * queries, int n, int64_t begin, int64_t n_cells) {
    int64_t end = std::min(begin + TILE, n_cells);
    for (int j = 0; j < n; ++j) {
        const query & q = queries[j];
        if (begin < q.n_cells) {
            end = std::min(end, std::min(begin / q.chunk_size * q.chunk_size + q.chunk_size, q.n_cells));
        }
    }
    return int(end - begin);
}

bool is_visible(const query & q, int64_t cell) {
    return cell < q.n_cells && !(q.mask && q.mask[cell] == 0xfc00);
}

bool is_any_visible(const query * queries, int n, int64_t begin, int n_cells) {
    for (int j = 0; j < n; ++j) {
        for (int t = 0; t < n_cells; ++t) {
            if (is_visible(queries[j], begin + t)) {
                return true;
            }
        }
    }
    return false;
}

// The online softmax over a tile, in upstream's order: what each value weighs, and where what was summed shrinks.
weights weigh(query & q, const float * scores, float scale, int64_t begin, int n_cells) {
    weights w;
    float   max = q.max;
    float   exponents[TILE];
    bool    is_new[TILE];
    for (int t = 0; t < n_cells; ++t) {
        if (!is_visible(q, begin + t)) {
            continue;
        }
        const float bias  = q.mask ? GGML_CPU_FP16_TO_FP32(q.mask[begin + t]) : 0.0f;
        float       score = scores[t] * scale;
        score += bias;
        is_new[w.n]    = score > max;
        exponents[w.n] = is_new[w.n] ? max - score : score - max;
        max            = is_new[w.n] ? score : max;
        w.cell[w.n++]  = t;
    }
    for (int i = 0; i < w.n; ++i) {
        exponents[i] = expf(exponents[i]);
    }
    for (int i = 0; i < w.n; ++i) {
        w.weight[i]  = is_new[i] ? 1.0f : exponents[i];
        w.rescale[i] = is_new[i] ? exponents[i] : 1.0f;
        q.sum        = std::fma(q.sum, w.rescale[i], w.weight[i]);  // what compilers make of upstream's S*ms + vs
    }
    q.max = max;
    return w;
}

// x, of which the compiler makes no fused multiply-add
float rounded(float x) {
    __asm__("" : "+x"(x));
    return x;
}

// A chunk ends: its sum joins those of the chunks before. As upstream's ggml_flash_attn_ext_reduce_partials().
void join_chunk(query & q, ggml_fp16_t * totals, float * joined, int64_t dv, bool is_first, bool is_only) {
    float values[LANES_DV_MAX];
    for (int64_t d = 0; d < dv; ++d) {
        values[d] = GGML_CPU_FP16_TO_FP32(totals[d]);
    }
    if (q.has_sink && is_first) {
        if (q.sink > q.max) {
            const float rescale = expf(q.max - q.sink);
            for (int64_t d = 0; d < dv; ++d) {
                values[d] *= rescale;
            }
            q.max = q.sink;
            q.sum = rounded(q.sum * rescale) + 1.0f;  // compilers do not make one operation of it upstream
        } else {
            q.sum += expf(q.sink - q.max);
        }
    }
    if (is_only) {
        q.sum_all = q.sum;
        memcpy(joined, values, size_t(dv) * sizeof(float));
    } else if (q.sum != 0.0f) {
        const float max       = fmaxf(q.max_all, q.max);
        const float scale_old = expf(q.max_all - max);
        const float scale_new = expf(q.max - max);
        for (int64_t d = 0; d < dv; ++d) {
            joined[d] = joined[d] * scale_old + values[d] * scale_new;
        }
        q.sum_all = q.sum_all * scale_old + q.sum * scale_new;
        q.max_all = max;
    }
    q.max = -INFINITY;
    q.sum = 0.0f;
    memset(totals, 0, size_t(dv) * sizeof(ggml_fp16_t));
}

void store(const query & q, const float * joined, int64_t dv) {
    const float inverse = q.sum_all == 0.0f ? 0.0f : 1.0f / q.sum_all;
    for (int64_t d = 0; d < dv; ++d) {
        q.dst[d] = joined[d] * inverse;
    }
}

// queries [first, first + n) of those that share the keys and values of a plane
void attend(const problem & p, float * space, int64_t plane, int64_t first, int n) {
    const int64_t dk       = p.k->ne[0];
    const int64_t dv       = p.v->ne[0];
    const int64_t kv_head  = plane % p.k->ne[2];
    const int64_t plane3   = plane / p.k->ne[2];
    const int64_t kv_plane = plane3 / (p.q->ne[3] / p.k->ne[3]);
    const char *  keys     = static_cast<const char *>(p.k->data) + kv_head * p.k->nb[2] + kv_plane * p.k->nb[3];
    const char *  values   = static_cast<const char *>(p.v->data) + kv_head * p.v->nb[2] + kv_plane * p.v->nb[3];

    scratch s(space, dk, dv);
    query   queries[QUERIES_MAX];
    int64_t n_cells = 0;
    for (int j = 0; j < n; ++j) {
        const int64_t row  = (first + j) / p.heads_per_kv();
        const int64_t head = kv_head * p.heads_per_kv() + (first + j) % p.heads_per_kv();
        const char *  from = static_cast<const char *>(p.q->data) + row * p.q->nb[1] + head * p.q->nb[2] +
                            plane3 * p.q->nb[3];
        queries[j] = make_query(p, row, head, plane3);
        n_cells    = std::max(n_cells, queries[j].n_cells);
        ggml_cpu_fp32_to_fp16(reinterpret_cast<const float *>(from), s.rounded, dk);
        ggml_cpu_fp16_to_fp32(s.rounded, s.queries + j * dk, dk);
    }
    memset(s.totals, 0, size_t(n * dv) * sizeof(ggml_fp16_t));
    memset(s.joined, 0, size_t(n * dv) * sizeof(float));

    int n_tile;
    for (int64_t begin = 0; begin < n_cells; begin += n_tile) {
        n_tile = tile_end(queries, n, begin, n_cells);
        if (is_any_visible(queries, n, begin, n_tile)) {
            alignas(64) float scores[QUERIES_MAX][TILE];
            score(s.queries, n, keys + begin * p.k->nb[1], p.k->nb[1], n_tile, dk, s.keys, scores[0]);
            load_values(values + begin * p.v->nb[1], p.v->nb[1], n_tile, dv, s.values);
            for (int j = 0; j < n; ++j) {
                const weights w = weigh(queries[j], scores[j], p.scale, begin, n_tile);
                add_values(w.n, w.cell, w.weight, w.rescale, s.values, dv, s.totals + j * dv);
            }
        }
        for (int j = 0; j < n; ++j) {
            query &       q   = queries[j];
            const int64_t end = begin + n_tile;
            if (begin < q.n_cells && (end % q.chunk_size == 0 || end == q.n_cells)) {
                join_chunk(q, s.totals + j * dv, s.joined + j * dv, dv, end <= q.chunk_size,
                           q.chunk_size == q.n_cells);
            }
        }
    }
    for (int j = 0; j < n; ++j) {
        store(queries[j], s.joined + j * dv, dv);
    }
}

// of queries that share keys and values, as many as there should be in a block
int64_t block_size(const problem & p) {
    // three blocks for each thread, because threads are not equally fast
    const int64_t wanted   = (3 * p.n_threads + p.n_planes() - 1) / p.n_planes();
    const int64_t n_blocks = std::max((p.n_shared() + QUERIES_MAX - 1) / QUERIES_MAX, std::min(wanted, p.n_shared()));
    return (p.n_shared() + n_blocks - 1) / n_blocks;
}

}  // namespace

}  // namespace dflash2

bool dflash2_flash_attn_narrow(const ggml_compute_params * params, ggml_tensor * dst) {
    using namespace dflash2;

    problem p = {};
    p.dst     = dst;
    p.q       = dst->src[0];
    p.k       = dst->src[1];
    p.v       = dst->src[2];
    p.mask    = dst->src[3];
    p.sinks   = dst->src[4];

    float max_bias;
    float softcap;
    memcpy(&p.scale, reinterpret_cast<const float *>(dst->op_params) + 0, sizeof(float));
    memcpy(&max_bias, reinterpret_cast<const float *>(dst->op_params) + 1, sizeof(float));
    memcpy(&softcap, reinterpret_cast<const float *>(dst->op_params) + 2, sizeof(float));
    p.n_threads = params->nth;

    const int64_t dk = p.k->ne[0];
    const int64_t dv = p.v->ne[0];
    const bool    is_plain =
        p.q->type == GGML_TYPE_F32 && p.k->type == GGML_TYPE_F16 && p.v->type == GGML_TYPE_F16 && max_bias == 0.0f &&
        softcap == 0.0f && p.k->ne[2] == p.v->ne[2] && p.k->ne[3] == p.v->ne[3] && dk % LANES_STEP == 0 &&
        dv % LANES_STEP == 0 && dv <= LANES_DV_MAX && !lanes_is_half_arithmetic(dv);
    const size_t n_floats = scratch::n_floats(dk, dv);
    if (!is_plain || params->use_ref || p.n_rows() > ROWS_MAX || p.q->nb[0] != sizeof(float) ||
        p.k->nb[0] != sizeof(ggml_fp16_t) || p.v->nb[0] != sizeof(ggml_fp16_t) ||
        params->wsize < n_floats * sizeof(float) * size_t(params->nth)) {
        return false;
    }
    // a row alone gains nothing from keys read once for all rows, and upstream splits a long cache among the threads
    if (p.n_rows() == 1 && (p.k->ne[1] >= SPLIT_CELLS || p.n_planes() * p.n_shared() < p.n_threads)) {
        return false;
    }

    float *       space     = static_cast<float *>(params->wdata) + size_t(params->ith) * n_floats;
    const int64_t size      = block_size(p);
    const int64_t per_plane = (p.n_shared() + size - 1) / size;
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    for (int64_t block = params->ith; block < per_plane * p.n_planes();
         block         = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t first = block % per_plane * size;
        attend(p, space, block / per_plane, first, int(std::min(size, p.n_shared() - first)));
    }
    return true;
}

#else

bool dflash2_flash_attn_narrow(const ggml_compute_params *, ggml_tensor *) {
    return false;
}

#endif
