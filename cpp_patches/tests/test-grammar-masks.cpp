// A grammar that remembers what it allowed forbids what llama.cpp's own grammar sampler forbids, at every place of many
// texts, the first time and when the place comes again, and in clones.
//
// usage: test-grammar-masks MODEL.gguf   (only its vocabulary is read)

#include "llama-ptr.h"
#include "llama/dflash2-grammar.h"
#include "random.h"

#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

// from upstream's grammars/json.gbnf, less the nesting
static const char * JSON = R"(root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
)";
static const std::vector<const char *> GRAMMARS = {
    JSON,
    "root ::= [a-z]+ (\" \" [a-z]+)* \".\"",
    "root ::= ([à-ÿ] | [α-ω] | [一-龥] | \" \")+",  // tokens end inside characters
    "root ::= (\"ab\" | \"a\" \"b\" \"c\" | [^\\n]{2,5})+ \"\\n\"",
};

static constexpr int32_t N_TEXTS  = 6;
static constexpr int32_t N_TOKENS = 24;

static llama_token_data_array apply(llama_sampler * sampler, std::vector<llama_token_data> & data, int32_t n) {
    data.resize(n);
    for (llama_token id = 0; id < n; ++id) {
        // an -INFINITY that was there before is not the grammar's
        data[id] = { id, id % 7 == 3 ? -INFINITY : (float) -id, 0.0f };
    }
    llama_token_data_array array = { data.data(), data.size(), -1, false };
    llama_sampler_apply(sampler, &array);
    return array;
}

// Tokens that both allow, -1 where they do not agree.
static int32_t compare(llama_sampler * ours, llama_sampler * theirs, int32_t n, std::vector<llama_token> & allowed) {
    std::vector<llama_token_data> a, b;
    apply(ours, a, n);
    apply(theirs, b, n);
    allowed.clear();
    for (int32_t i = 0; i < n; ++i) {
        if (a[i].logit != b[i].logit) {
            return -1;
        }
        if (a[i].logit > -INFINITY) {
            allowed.push_back(i);
        }
    }
    return (int32_t) allowed.size();
}

// One text, drawn among what is allowed; false where a difference was found.
static bool follow(const llama_vocab * vocab, llama_sampler_ptr & ours, llama_sampler_ptr & theirs, uint64_t seed) {
    const int32_t            n_vocab = llama_vocab_n_tokens(vocab);
    std::vector<llama_token> allowed;
    for (int32_t i = 0; i < N_TOKENS; ++i) {
        // a few candidates, which are not remembered, then all, then all again
        for (const int32_t n : { 64, n_vocab, n_vocab }) {
            if (compare(ours.get(), theirs.get(), n, allowed) < 0) {
                return false;
            }
        }
        if (allowed.empty()) {
            return true;
        }
        const auto token = allowed[(size_t) (dflash2_uniform(dflash2_mix(seed), i) * allowed.size()) % allowed.size()];
        if (llama_vocab_is_eog(vocab, token)) {
            return true;
        }
        ours.reset(llama_sampler_clone(ours.get()));
        llama_sampler_accept(ours.get(), token);
        llama_sampler_accept(theirs.get(), token);
    }
    return true;
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL.gguf\n", argv[0]);
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model_params mparams = llama_model_default_params();
    mparams.vocab_only         = true;
    llama_model * model        = llama_model_load_from_file(argv[1], mparams);
    if (model == nullptr) {
        fprintf(stderr, "error: cannot load %s\n", argv[1]);
        return 1;
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);

    int failures = 0;
    for (size_t g = 0; g < GRAMMARS.size(); ++g) {
        const auto masks = std::make_shared<dflash2_grammar_masks>();
        for (int32_t text = 0; text < N_TEXTS; ++text) {
            llama_sampler_ptr ours(dflash2_llama_grammar(vocab, GRAMMARS[g], masks));
            llama_sampler_ptr theirs(llama_sampler_init_grammar(vocab, GRAMMARS[g], "root"));
            if (!ours || !theirs || !follow(vocab, ours, theirs, 100 * g + text / 2)) {  // every text twice
                printf("grammar %zu, text %d: other tokens are allowed\n", g, text);
                ++failures;
            }
        }
        printf("grammar %zu: %d masks made, %d times found\n", g, (int) masks->n_added(), (int) masks->n_found());
        failures += masks->n_found() < 2 * masks->n_added();
    }
    const bool broken = dflash2_llama_grammar(vocab, "root ::= (", std::make_shared<dflash2_grammar_masks>()) != nullptr;
    printf("%d wrong, a broken grammar %s\n", failures, broken ? "is taken" : "is refused");
    llama_model_free(model);
    return failures == 0 && !broken ? 0 : 1;
}
