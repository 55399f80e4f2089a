// Splits a product with few rows among threads; the arithmetic is in the kernels of each type.

#include "dflash2-narrow.h"
#include "narrow-kernels.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"

#include <algorithm>

namespace dflash2 {

namespace {

// weight rows that a thread takes at once, at least: one cache line of a row of the result, one tile of AMX
constexpr int64_t CHUNK_WEIGHTS_MIN = 16;

// chunks per thread, for threads that are not equally fast
constexpr int64_t CHUNKS_PER_THREAD = 8;

// quantized blocks on the stack, on their way into a group
constexpr int64_t PACK_BLOCKS = 8;
constexpr size_t  PACK_BYTES  = 2560;

struct product {
    const ggml_tensor * weights;
    const ggml_tensor * rows;
    ggml_tensor *       dst;
    const narrow_type * type;
    ggml_from_float_t   quantize;
    int64_t             block_len;
    size_t              block_size;  // bytes of a quantized block of activations
    int                 n_groups;    // of rows in a plane of src[1]
    bool                is_packed;   // the weights are in another layout than their tensor says

    int n_rows() const { return int(rows->ne[1]); }

    // groups are as equal as can be; the first ones have one row more
    int group_begin(int group) const {
        return group * (n_rows() / n_groups) + std::min(group, n_rows() % n_groups);
    }

    int group_rows(int group) const { return group_begin(group + 1) - group_begin(group); }

    int64_t n_blocks() const { return rows->ne[0] / block_len; }

    // bytes from one weight row to the next
    size_t weights_stride() const { return is_packed ? size_t(n_blocks()) * type->weight_size : weights->nb[1]; }

    int64_t n_planes() const { return rows->ne[2] * rows->ne[3]; }

    // where the rows from number `row` on are packed; groups of a plane follow one another
    size_t offset(int64_t plane, int row) const {
        return size_t(plane * n_rows() + row) * size_t(n_blocks()) * block_size;
    }
};

// like upstream, thread ith of nth quantizes its share of the blocks of every row
void quantize_rows(const product & p, const ggml_compute_params * params) {
    const int64_t begin = params->ith * p.n_blocks() / params->nth;
    const int64_t end   = (params->ith + 1) * p.n_blocks() / params->nth;

    alignas(32) char blocks[PACK_BYTES];
    for (int64_t plane = 0; plane < p.n_planes(); ++plane) {
        const int64_t i2     = plane % p.rows->ne[2];
        const int64_t i3     = plane / p.rows->ne[2];
        const char *  source = static_cast<const char *>(p.rows->data) + i2 * p.rows->nb[2] + i3 * p.rows->nb[3];
        for (int group = 0; group < p.n_groups; ++group) {
            const int n_rows = p.group_rows(group);
            char *    packed = static_cast<char *>(params->wdata) + p.offset(plane, p.group_begin(group));
            for (int row = 0; row < n_rows; ++row) {
                const char * values = source + (p.group_begin(group) + row) * p.rows->nb[1];
                for (int64_t ib = begin; ib < end; ib += PACK_BLOCKS) {
                    const int64_t n = std::min(PACK_BLOCKS, end - ib);
                    p.quantize(reinterpret_cast<const float *>(values) + ib * p.block_len, blocks, n * p.block_len);
                    p.type->pack(blocks, n, packed + ib * n_rows * p.block_size, n_rows, row);
                }
            }
        }
    }
}

// weight rows [begin, end) with all rows of a plane
void multiply(const product & p, const char * packed, int64_t plane, int64_t begin, int64_t end) {
    const int64_t i2 = plane % p.rows->ne[2];
    const int64_t i3 = plane / p.rows->ne[2];

    // src[0] is broadcast to the planes of src[1]
    const char * weights = static_cast<const char *>(p.weights->data) +
                           i2 / (p.rows->ne[2] / p.weights->ne[2]) * p.weights->nb[2] +
                           i3 / (p.rows->ne[3] / p.weights->ne[3]) * p.weights->nb[3];
    char *       dst     = static_cast<char *>(p.dst->data) + i2 * p.dst->nb[2] + i3 * p.dst->nb[3];

    narrow_tile tile;
    tile.weights_stride = p.weights_stride();
    tile.n_blocks       = p.n_blocks();
    tile.dst_stride     = p.dst->nb[1] / sizeof(float);
    for (int64_t first = begin; first < end; first += p.type->n_weights) {
        tile.weights   = weights + first * tile.weights_stride;
        tile.n_weights = int(std::min<int64_t>(p.type->n_weights, end - first));
        for (int group = 0; group < p.n_groups; ++group) {
            const int row = p.group_begin(group);
            tile.rows     = packed + p.offset(plane, row);
            tile.dst      = reinterpret_cast<float *>(dst + row * p.dst->nb[1]) + first;
            p.type->kernels[p.group_rows(group)](tile);
        }
    }
}

// weight rows of a chunk
int64_t chunk_weights(int64_t n_weights, int n_threads) {
    const int64_t n_chunks = ggml_is_numa() ? n_threads : n_threads * CHUNKS_PER_THREAD;
    const int64_t wanted   = (n_weights + n_chunks - 1) / n_chunks;
    return (wanted + CHUNK_WEIGHTS_MIN - 1) / CHUNK_WEIGHTS_MIN * CHUNK_WEIGHTS_MIN;
}

void multiply_chunks(const product & p, const ggml_compute_params * params) {
    const int64_t n_weights = p.weights->ne[1];
    const int64_t size      = chunk_weights(n_weights, params->nth);
    const int64_t per_plane = (n_weights + size - 1) / size;

    // every thread starts at its number, so the first chunk not taken is number nth
    for (int64_t chunk = params->ith; chunk < per_plane * p.n_planes();
         chunk         = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t begin = chunk % per_plane * size;
        multiply(p, static_cast<const char *>(params->wdata), chunk / per_plane, begin,
                 std::min(begin + size, n_weights));
    }
}

bool compute(const ggml_compute_params * params, ggml_tensor * dst, const narrow_type * type, bool is_packed) {
    const ggml_tensor * weights = dst->src[0];
    const ggml_tensor * rows    = dst->src[1];
    if (!type || params->use_ref || rows->type != GGML_TYPE_F32 || rows->ne[1] < type->rows_min ||
        rows->ne[1] > type->rows_max) {
        return false;
    }

    const ggml_type rows_type = ggml_get_type_traits_cpu(weights->type)->vec_dot_type;

    product p;
    p.weights    = weights;
    p.rows       = rows;
    p.dst        = dst;
    p.type       = type;
    p.quantize   = ggml_get_type_traits_cpu(rows_type)->from_float;
    p.block_len  = ggml_blck_size(rows_type);
    p.block_size = ggml_type_size(rows_type);
    p.n_groups   = (p.n_rows() + type->group_max - 1) / type->group_max;
    p.is_packed  = is_packed;

    // what upstream demands of a product, too
    GGML_ASSERT(weights->nb[0] == ggml_type_size(weights->type) && rows->nb[0] == sizeof(float));
    GGML_ASSERT(dst->nb[0] == sizeof(float) && dst->nb[0] <= dst->nb[1] && dst->nb[1] <= dst->nb[2]);
    GGML_ASSERT(params->wsize >= p.offset(p.n_planes(), 0) && PACK_BLOCKS * p.block_size <= PACK_BYTES);

    quantize_rows(p, params);
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    multiply_chunks(p, params);
    return true;
}

}  // namespace

}  // namespace dflash2

bool dflash2_mul_mat_narrow(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_type type  = dst->src[0]->type;
    const auto *    found = dflash2::narrow_type_32(type);
    return dflash2::compute(params, dst, found ? found : dflash2::narrow_type_256(type), false);
}

bool dflash2_mul_mat_narrow_amx(const ggml_compute_params * params, ggml_tensor * dst) {
    // upstream packs the first plane of weights only
    const bool one_plane = dst->ne[2] * dst->ne[3] == 1;
    return one_plane && dflash2::compute(params, dst, dflash2::narrow_type_amx(dst->src[0]->type), true);
}
