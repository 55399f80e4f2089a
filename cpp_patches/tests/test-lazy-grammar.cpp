// A grammar that is shown the likeliest tokens first gives the distribution of one that is shown the whole vocabulary.
//
// usage: test-lazy-grammar MODEL.gguf   (only its vocabulary is read)

#include "dflash2.h"
#include "random.h"
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

using law = std::map<llama_token, double>;

// llama.cpp's own samplers over the whole vocabulary, in the documented order
static law expected(const llama_model * model, const dflash2_seq_params & p, const std::vector<float> & logits) {
    const llama_vocab * vocab   = llama_model_get_vocab(model);
    const int32_t       n_vocab = llama_vocab_n_tokens(vocab);
    llama_sampler *     chain   = llama_sampler_chain_init(llama_sampler_chain_default_params());
    if (p.n_logit_bias > 0) {
        llama_sampler_chain_add(chain, llama_sampler_init_logit_bias(n_vocab, (int32_t) p.n_logit_bias, p.logit_bias));
    }
    llama_sampler_chain_add(chain, llama_sampler_init_grammar(vocab, p.grammar, "root"));
    if (p.temp > 0.0f) {
        llama_sampler_chain_add(chain, llama_sampler_init_top_k(p.top_k));
        llama_sampler_chain_add(chain, llama_sampler_init_top_p(p.top_p, 1));
        llama_sampler_chain_add(chain, llama_sampler_init_temp(p.temp));
    } else {
        llama_sampler_chain_add(chain, llama_sampler_init_top_k(1));
    }
    std::vector<llama_token_data> data;
    for (llama_token id = 0; id < n_vocab; ++id) {
        data.push_back({ id, logits[id], 0.0f });
    }
    llama_token_data_array array = { data.data(), data.size(), -1, false };
    llama_sampler_apply(chain, &array);
    llama_sampler_free(chain);

    law    result;
    double sum = 0.0;
    for (size_t i = 0; i < array.size; ++i) {
        sum += result[array.data[i].id] = std::exp(array.data[i].logit - array.data[0].logit);
    }
    for (auto & [id, value] : result) {
        value /= sum;
    }
    return result;
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
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    // from one that allows most tokens to one that allows five of 49152
    const std::vector<const char *> grammars = { "root ::= [^\\n]+", "root ::= [a-z]+", "root ::= [0-4]",
                                                 "root ::= \"q\"" };
    const llama_logit_bias          bias[]   = {
        { 30, 9.0f      },
        { 31, -INFINITY },
        { 50, 5.0f      }
    };

    int failures = 0, n = 0;
    for (size_t g = 0; g < grammars.size(); ++g) {
        for (const float temp : { 0.0f, 0.8f }) {
            for (const bool biased : { false, true }) {
                for (uint64_t draw = 0; draw < 3; ++draw) {
                    auto p         = dflash2_seq_default_params();
                    p.temp         = temp;
                    p.top_k        = 20;
                    p.top_p        = 0.9f;
                    p.grammar      = grammars[g];
                    p.logit_bias   = bias;
                    p.n_logit_bias = biased ? 3 : 0;
                    std::vector<float> logits(n_vocab);
                    for (int32_t id = 0; id < n_vocab; ++id) {
                        logits[id] = (float) (8.0 * dflash2_uniform(dflash2_mix(draw * 1000 + g), id));
                    }
                    dflash2_distribution found;
                    dflash2_sampler(model, p).apply(logits.data(), 0, found);
                    const law wanted = expected(model, p, logits);
                    double    worst  = found.data.size() == wanted.size() ? 0.0 : 1.0;
                    for (const auto & entry : found.data) {
                        const auto it = wanted.find(entry.id);
                        worst         = std::max(worst, it == wanted.end() ? 1.0 : std::fabs(entry.p - it->second));
                    }
                    ++n;
                    failures += worst > 1e-5;
                    if (worst > 1e-5) {
                        printf("%s at %g: %zu tokens, expected %zu, off by %g\n", grammars[g], temp, found.data.size(),
                               wanted.size(), worst);
                    }
                }
            }
        }
    }
    llama_model_free(model);
    printf("%d distributions, %d wrong\n", n, failures);
    return failures == 0 ? 0 : 1;
}
