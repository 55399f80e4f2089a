#include "calibrate.h"

#include "error.h"
#include "ggml-backend.h"
#include "llama/dflash2-model-info.h"

#include <cmath>
#include <cstring>

static const char * const GATE_WEIGHT = "selector_hidden.weight";

// A weight's own name: a copy for another backend is called CUDA0#name#0.
static std::string weight_name(const ggml_tensor * tensor) {
    const std::string name  = tensor->name;
    const size_t      begin = name.find('#');
    if (begin == std::string::npos) {
        return name;
    }
    return name.substr(begin + 1, name.find('#', begin + 1) - begin - 1);
}

// the node that a tensor's values come from, unchanged
static const ggml_tensor * origin(const ggml_tensor * tensor) {
    while (tensor != nullptr && (tensor->op == GGML_OP_RESHAPE || tensor->op == GGML_OP_VIEW ||
                                 tensor->op == GGML_OP_CONT || tensor->op == GGML_OP_PERMUTE)) {
        tensor = tensor->src[0];
    }
    return tensor;
}

// the gate of the selector, once per predecessor row
static bool is_repeated_gate(const ggml_tensor * node) {
    const ggml_tensor * product = node->op == GGML_OP_REPEAT ? origin(node->src[0]) : nullptr;
    return product != nullptr && product->op == GGML_OP_MUL_MAT && weight_name(product->src[0]) == GATE_WEIGHT;
}

// Codebooks of a product of successor rows with gated predecessor rows; both null for other nodes.
struct codebooks {
    const ggml_tensor * successor   = nullptr;
    const ggml_tensor * predecessor = nullptr;
};

static codebooks codebooks_of(const ggml_tensor * node) {
    if (node->op != GGML_OP_MUL_MAT || node->src[1]->op != GGML_OP_MUL || !is_repeated_gate(node->src[1]->src[1])) {
        return {};
    }
    const ggml_tensor * left  = origin(node->src[0]);
    const ggml_tensor * right = origin(node->src[1]->src[0]);
    if (left->op != GGML_OP_GET_ROWS || right->op != GGML_OP_GET_ROWS) {
        return {};
    }
    return { left->src[0], right->src[0] };
}

// Values of a float32 tensor, row after row, from whatever memory.
static std::vector<float> values_of(const ggml_tensor * tensor) {
    std::vector<char> bytes(ggml_nbytes(tensor));
    ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());

    std::vector<float> values(ggml_nelements(tensor));
    size_t             at = 0;
    for (int64_t i3 = 0; i3 < tensor->ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < tensor->ne[2]; ++i2) {
            for (int64_t i1 = 0; i1 < tensor->ne[1]; ++i1) {
                const char * row = bytes.data() + i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3];
                std::memcpy(values.data() + at, row, tensor->ne[0] * sizeof(float));
                at += tensor->ne[0];
            }
        }
    }
    return values;
}

bool dflash2_recorder::owns(const ggml_tensor * weight) const {
    return weight != nullptr && dflash2_llama_has_tensor(draft_, weight_name(weight).c_str());
}

bool dflash2_recorder::wants(const ggml_tensor * node) const {
    return is_repeated_gate(node) || (node->op == GGML_OP_MUL_MAT && owns(node->src[0])) ||
           owns(codebooks_of(node).successor);
}

bool dflash2_recorder::on_node(ggml_tensor * node, bool ask, void * recorder) {
    auto * self = static_cast<dflash2_recorder *>(recorder);
    if (ask) {
        return self->wants(node);
    }
    self->see(node);
    return true;
}

void dflash2_recorder::see(const ggml_tensor * node) {
    if (is_repeated_gate(node)) {
        gate_ = values_of(node);
        return;
    }
    if (codebooks_of(node).successor != nullptr) {
        see_scores(node);
        return;
    }
    const ggml_tensor * rows = node->src[1];
    const std::string   name = weight_name(node->src[0]);
    if (rows->type != GGML_TYPE_F32 || rows->nb[0] != sizeof(float)) {
        problem_ = problem_.empty() ? dflash2_format("%s is multiplied with %s, expected rows of f32", name.c_str(),
                                                     ggml_type_name(rows->type)) :
                                      problem_;
        return;
    }
    add(name, values_of(rows), rows->ne[0]);
}

// scores = successor rows [rank, K] times (predecessor rows x gate) [rank, n], per position and block
void dflash2_recorder::see_scores(const ggml_tensor * scores) {
    const codebooks          books     = codebooks_of(scores);
    const ggml_tensor *      successor = scores->src[0];
    const ggml_tensor *      gated     = scores->src[1];
    const int64_t            rank      = gated->ne[0];
    const int64_t            n_before  = gated->ne[1];
    const int64_t            n_after   = successor->ne[1];
    const int64_t            n_runs    = gated->ne[2] * gated->ne[3];
    const std::vector<float> after     = values_of(successor);
    std::vector<float>       products(after.size());

    if ((int64_t) gate_.size() != rank * n_before * n_runs || ggml_nelements(successor) != rank * n_after * n_runs) {
        problem_ = "the selector's graph has a shape that is not known";
        return;
    }
    for (int64_t run = 0; run < n_runs; ++run) {
        const float * gate = gate_.data() + run * n_before * rank;
        for (int64_t i = 0; i < n_after * rank; ++i) {
            products[run * n_after * rank + i] = after[run * n_after * rank + i] * gate[i % rank];
        }
    }
    add(weight_name(books.successor), values_of(gated), rank);
    add(weight_name(books.predecessor), products, rank);
}

void dflash2_recorder::add(const std::string & name, const std::vector<float> & rows, int64_t n_cols) {
    entry & e = entries_[name];
    e.sums.resize(n_cols);
    for (size_t i = 0; i < rows.size(); ++i) {
        e.sums[i % n_cols] += (double) rows[i] * rows[i];
    }
    e.n_rows += (int64_t) rows.size() / n_cols;
    for (const double sum : e.sums) {
        if (!std::isfinite(sum) && problem_.empty()) {
            problem_ = dflash2_format("%s is multiplied with values that are not finite", name.c_str());
        }
    }
}

const std::map<std::string, dflash2_recorder::entry> & dflash2_recorder::entries() const {
    if (!problem_.empty()) {
        throw dflash2_error(DFLASH2_ERROR_COMPUTE, problem_);
    }
    return entries_;
}
