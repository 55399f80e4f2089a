#pragma once

// Attention of few rows of queries, for ggml-cpu.
//
// A speculative step asks the cache with 2 to 16 rows. Upstream takes them one by one, and reads, converts and
// reduces every key and value anew for each row and head. Here a block of queries that share keys and values goes
// through them together, and cells that no row may see are passed over.
//
// Every row has exactly the bits that upstream gives it when it is alone in a batch: the same operations in the
// same order, the split of long caches among threads included. What a target computes for a row therefore does not
// depend on how many rows were verified beside it.

#include <stdbool.h>

struct ggml_compute_params;
struct ggml_tensor;

#ifdef __cplusplus
extern "C" {
#endif

// Computes dst of GGML_OP_FLASH_ATTN_EXT as one of params->nth threads, all of which must call it; false, with
// nothing done, for what is upstream's to compute. The answer is the same in all threads.
bool dflash2_flash_attn_narrow(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
