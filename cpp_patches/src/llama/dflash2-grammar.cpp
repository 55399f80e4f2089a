#include "dflash2-grammar.h"

#include "llama-grammar.h"
#include "llama-vocab.h"

#include <cmath>
#include <utility>

//
// masks
//

const dflash2_grammar_masks::mask * dflash2_grammar_masks::find(const std::string & state) {
    const auto it = masks_.find(state);
    if (it == masks_.end()) {
        return nullptr;
    }
    ++n_found_;
    return &it->second;
}

const dflash2_grammar_masks::mask & dflash2_grammar_masks::add(std::string state, mask allowed) {
    const size_t size = state.size() + allowed.size() * sizeof(allowed[0]);
    if (n_bytes_ + size > MAX_BYTES) {
        masks_.clear();
        n_bytes_ = 0;
    }
    n_bytes_ += size;
    ++n_added_;
    return masks_.insert_or_assign(std::move(state), std::move(allowed)).first->second;
}

//
// sampler
//

namespace {

struct grammar_deleter {
    void operator()(llama_grammar * grammar) const { llama_grammar_free_impl(grammar); }
};

struct grammar_sampler {
    const llama_vocab *                             vocab;
    std::unique_ptr<llama_grammar, grammar_deleter> grammar;
    std::shared_ptr<dflash2_grammar_masks>          masks;
};

void append(std::string & out, uint32_t value) {
    out.append(reinterpret_cast<const char *>(&value), sizeof(value));
}

// Rule and place in it of an element. A clone of a grammar has rules of its own, at other addresses.
void append_place(std::string & out, const llama_grammar_rules & rules, const llama_grammar_element * element) {
    for (size_t i = 0; i < rules.size(); ++i) {
        const llama_grammar_element * begin = rules[i].data();
        if (element >= begin && element < begin + rules[i].size()) {
            append(out, (uint32_t) i);
            append(out, (uint32_t) (element - begin));
            return;
        }
    }
}

// All that llama_grammar_apply_impl() looks at besides rules and vocabulary.
std::string state_of(const llama_grammar & grammar) {
    std::string key;
    append(key, grammar.partial_utf8.value);
    append(key, (uint32_t) grammar.partial_utf8.n_remain);
    for (const llama_grammar_stack & stack : grammar.stacks) {
        append(key, (uint32_t) stack.size());
        for (const llama_grammar_element * element : stack) {
            append_place(key, grammar.rules, element);
        }
    }
    return key;
}

dflash2_grammar_masks::mask look(const llama_grammar & grammar, int32_t n_vocab) {
    std::vector<llama_token_data> all(n_vocab);
    for (llama_token id = 0; id < n_vocab; ++id) {
        all[id] = { id, 0.0f, 0.0f };
    }
    llama_token_data_array array = { all.data(), all.size(), -1, false };
    llama_grammar_apply_impl(grammar, &array);

    dflash2_grammar_masks::mask allowed((n_vocab + 63) / 64, 0);
    for (const llama_token_data & entry : all) {
        allowed[entry.id / 64] |= (uint64_t) (entry.logit > -INFINITY) << (entry.id % 64);
    }
    return allowed;
}

const char * grammar_name(const llama_sampler * /*sampler*/) {
    return "dflash2-grammar";
}

void grammar_accept(llama_sampler * sampler, llama_token token) {
    llama_grammar_accept_impl(*static_cast<grammar_sampler *>(sampler->ctx)->grammar, token);
}

void grammar_apply(llama_sampler * sampler, llama_token_data_array * cur) {
    auto &        ctx     = *static_cast<grammar_sampler *>(sampler->ctx);
    const int32_t n_vocab = (int32_t) ctx.vocab->n_tokens();

    std::string                         state   = state_of(*ctx.grammar);
    const dflash2_grammar_masks::mask * allowed = ctx.masks->find(state);
    if (allowed == nullptr && cur->size < (size_t) n_vocab) {
        // a few candidates are sooner looked at than everything
        llama_grammar_apply_impl(*ctx.grammar, cur);
        return;
    }
    if (allowed == nullptr) {
        allowed = &ctx.masks->add(std::move(state), look(*ctx.grammar, n_vocab));
    }
    for (size_t i = 0; i < cur->size; ++i) {
        const llama_token id = cur->data[i].id;
        if (((*allowed)[id / 64] >> (id % 64) & 1) == 0) {
            cur->data[i].logit = -INFINITY;
        }
    }
}

void grammar_free(llama_sampler * sampler) {
    delete static_cast<grammar_sampler *>(sampler->ctx);
}

llama_sampler * make(grammar_sampler * ctx);

llama_sampler * grammar_clone(const llama_sampler * sampler) {
    const auto & ctx = *static_cast<const grammar_sampler *>(sampler->ctx);
    auto         own = std::make_unique<grammar_sampler>();
    own->vocab       = ctx.vocab;
    own->masks       = ctx.masks;
    own->grammar.reset(llama_grammar_clone_impl(*ctx.grammar));
    return make(own.release());
}

llama_sampler_i make_interface() {
    llama_sampler_i iface = {};
    iface.name            = grammar_name;
    iface.accept          = grammar_accept;
    iface.apply           = grammar_apply;
    iface.clone           = grammar_clone;
    iface.free            = grammar_free;
    return iface;
}

llama_sampler * make(grammar_sampler * ctx) {
    static llama_sampler_i iface = make_interface();
    return llama_sampler_init(&iface, ctx);
}

}  // namespace

llama_sampler * dflash2_llama_grammar(const llama_vocab *                    vocab,
                                      const char *                           text,
                                      std::shared_ptr<dflash2_grammar_masks> masks) {
    auto ctx   = std::make_unique<grammar_sampler>();
    ctx->vocab = vocab;
    ctx->masks = std::move(masks);
    ctx->grammar.reset(llama_grammar_init_impl(vocab, text, "root", false, nullptr, 0, nullptr, 0));
    return ctx->grammar ? make(ctx.release()) : nullptr;
}
