#pragma once

// What narrow.cpp, which splits a product among threads, and the kernels of one type each know of one another.

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace dflash2 {

// Rows that any kernel takes at once.
constexpr int NARROW_GROUP_MAX = 16;

// Some weight rows and one group of activation rows, packed.
struct narrow_tile {
    const char * weights;
    size_t       weights_stride;  // bytes from one weight row to the next; of rows packed together, their mean
    int          n_weights;       // weight rows, each of which is one column of the result
    const char * rows;
    int64_t      n_blocks;    // of a row
    float *      dst;         // product of the first activation row with the first weight row
    size_t       dst_stride;  // floats from the results of one activation row to those of the next
};

using narrow_kernel = void (*)(const narrow_tile & tile);

// Puts n_blocks quantized blocks of one row into a group of n_rows rows, of which it is number `row`.
// group: where the first of these blocks starts, for all rows of the group.
using narrow_pack = void (*)(const char * blocks, int64_t n_blocks, char * group, int n_rows, int row);

// A type of weights in one layout.
struct narrow_type {
    narrow_pack   pack                          = nullptr;
    narrow_kernel kernels[NARROW_GROUP_MAX + 1] = {};  // by number of rows, from 1
    int           group_max                     = 0;   // more rows are computed in groups, while weights are in the cache
    int           rows_min                      = 0;   // products of rows_min to rows_max rows are faster than
    int           rows_max                      = 0;   // upstream's
    int           n_weights                     = 0;   // weight rows of a tile, at most
    size_t        weight_size                   = 0;   // bytes of one block of a weight row
};

// Weight rows for which all groups of rows are computed before the next: they should stay in the L1 cache.
constexpr int NARROW_WEIGHTS = 8;

// nullptr: not a type, or not a CPU, with kernels of ours
const narrow_type * narrow_type_32(ggml_type type);   // blocks of 32 weights
const narrow_type * narrow_type_256(ggml_type type);  // blocks of 256
const narrow_type * narrow_type_amx(ggml_type type);  // as packed by ggml-cpu/amx

}  // namespace dflash2
