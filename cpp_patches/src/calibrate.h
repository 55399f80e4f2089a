// What the drafter's matrices are multiplied with while it drafts: the statistic of an importance matrix.

#pragma once

#include "ggml.h"
#include "llama.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

// Sees every node of the draft context's graphs (llama_context_params.cb_eval), feature rows and blocks alike, and sums
// the squares of the columns of what is multiplied with a matrix that the drafter owns. Head and embeddings that the
// target lends are not among them.
//
// The selector's codebooks are not multiplied, rows of them are taken: with successor row s, predecessor row p and gate g
// a score is the sum over the columns of s * p * g. What an error in s counts with is p * g, and for p it is s * g, so
// these are their rows.
class dflash2_recorder {
  public:
    struct entry {
        std::vector<double> sums;  // [n_cols]
        int64_t             n_rows = 0;
    };

    explicit dflash2_recorder(const llama_model * draft) : draft_(draft) {}

    // ggml_backend_sched_eval_callback with this object as its data
    static bool on_node(ggml_tensor * node, bool ask, void * recorder);

    // By name of the weight. Throws dflash2_error where something was seen that cannot be summed.
    const std::map<std::string, entry> & entries() const;

  private:
    bool wants(const ggml_tensor * node) const;
    void see(const ggml_tensor * node);
    void see_scores(const ggml_tensor * scores);
    void add(const std::string & name, const std::vector<float> & rows, int64_t n_cols);
    bool owns(const ggml_tensor * weight) const;

    const llama_model *          draft_;
    std::map<std::string, entry> entries_;
    std::vector<float>           gate_;     // of the run of positions whose scores come next, as often as they are used
    std::string                  problem_;  // the first
};
