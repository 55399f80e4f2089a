#pragma once

// Matrix products of quantized weights with few rows of activations, for ggml-cpu.
//
// A speculative step multiplies every weight with 2 to 16 rows. Upstream takes such a product for 2 to 16
// products of one row, or for a prompt. Here every block of weights is read and unpacked once for up to 8 rows,
// and asked for in time. Where that is faster it also serves one row, and prompts: rows_min and rows_max of a type.
//
// Every element of the result has exactly the bits of the product with that row alone: the same integers, and
// the same float operations in the same order as ggml_vec_dot_* of this architecture. What a target computes
// for a row therefore does not depend on how many rows were verified beside it.

#include <stdbool.h>

struct ggml_compute_params;
struct ggml_tensor;

#ifdef __cplusplus
extern "C" {
#endif

// Computes dst = src[0] x src[1] as one of params->nth threads, all of which must call it, like the rest of
// ggml_compute_forward_mul_mat; false, with nothing done, for a product that is upstream's to compute. The
// answer depends on shapes, types and params->use_ref only, so that it is the same in all threads.
bool dflash2_mul_mat_narrow(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// The same for weights in a buffer of ggml-cpu/amx, as one of the threads in ggml_backend_amx_mul_mat; rows then
// have the bits that they have there alone.
bool dflash2_mul_mat_narrow_amx(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
