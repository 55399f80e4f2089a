// A grammar as a sampler, which remembers what it allowed. Compiled into libllama.
//
// Which tokens a GBNF grammar allows follows from where in its rules the text is, and texts come to the same places
// again: inside a string, between two elements, in the next answer by the same schema. Looking at a whole vocabulary
// costs more than a step of a small target, so what came out is kept by that place.

#pragma once

#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

// Allowed tokens by state, of one grammar text and one vocabulary. Not for several threads at once.
class dflash2_grammar_masks {
  public:
    using mask = std::vector<uint64_t>;  // a bit per token

    // NULL when the state is new
    const mask * find(const std::string & state);

    // The mask stays valid until the next add().
    const mask & add(std::string state, mask allowed);

    uint64_t n_found() const { return n_found_; }

    uint64_t n_added() const { return n_added_; }

  private:
    static constexpr size_t MAX_BYTES = 16u << 20;

    std::unordered_map<std::string, mask> masks_;

    size_t   n_bytes_ = 0;
    uint64_t n_found_ = 0;
    uint64_t n_added_ = 0;
};

// A sampler that sets the logits of forbidden tokens to -INFINITY: what llama_sampler_init_grammar(vocab, text, "root")
// does. Its clones share the masks. NULL for a text that does not parse.
LLAMA_API struct llama_sampler * dflash2_llama_grammar(const struct llama_vocab *             vocab,
                                                       const char *                           text,
                                                       std::shared_ptr<dflash2_grammar_masks> masks);
