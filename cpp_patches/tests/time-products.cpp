// Measures products of 1 to 512 rows, as a multiple of one row: `time-products [library=FILE | amx=1] [type=q4_1]
// [in=1024] [out=4096] [mib=64 of weights] [threads=1]`.
//
// With library=FILE, the libggml-cpu.so of another build (of the unpatched pin, say), that build takes turns with
// this one, and one row of it is what counts as 1. With amx=1 the weights are packed for AMX, and upstream's kernels
// for them take turns.

#include "products.h"

#include "ggml-alloc.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#ifdef __linux__
#    include <dlfcn.h>
#endif

// One way to compute, to be measured: the graphs are the same for all.
struct contender {
    const char *        name;
    ggml_backend_t      backend;
    bool                use_ref;
    std::vector<double> seconds;
};

static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0.0 : values[values.size() / 2];
}

// a chain of products that does not fit the caches, as a forward pass is
struct workload {
    context_ptr   weights_ctx;
    context_ptr   ctx;
    buffer_ptr    weights;
    buffer_ptr    buffer;
    ggml_cgraph * graph = nullptr;
};

struct time_options {
    const char * library = nullptr;
    bool         amx     = false;
    std::string  type;  // empty: all
    int64_t      n_in      = 1024;
    int64_t      n_out     = 4096;
    double       mib       = 64.0;
    int          n_threads = 1;
};

static workload make_workload(ggml_backend_t backend, ggml_type type, const time_options & options, int64_t n_rows,
                              int64_t n_products) {
    workload load;
    load.weights_ctx   = make_context(size_t(n_products));
    load.ctx           = make_context(size_t(n_products + 1));
    ggml_tensor * rows = ggml_new_tensor_2d(load.ctx.get(), GGML_TYPE_F32, options.n_in, n_rows);
    load.graph         = ggml_new_graph_custom(load.ctx.get(), 4096, false);
    std::vector<ggml_tensor *> weights;
    for (int64_t i = 0; i < n_products; ++i) {
        weights.push_back(ggml_new_tensor_2d(load.weights_ctx.get(), type, options.n_in, options.n_out));
        ggml_build_forward_expand(load.graph, ggml_mul_mat(load.ctx.get(), weights.back(), rows));
    }
    load.weights.reset(ggml_backend_alloc_ctx_tensors_from_buft(
        load.weights_ctx.get(), options.amx ? amx_buffer_type() : ggml_backend_get_default_buffer_type(backend)));
    load.buffer.reset(ggml_backend_alloc_ctx_tensors(load.ctx.get(), backend));

    std::mt19937               engine(1);
    const std::vector<uint8_t> packed = random_weights(type, options.n_in, options.n_out, engine);
    std::vector<float>         values(static_cast<size_t>(ggml_nelements(rows)));
    fill(values, engine);
    for (ggml_tensor * w : weights) {
        ggml_backend_tensor_set(w, packed.data(), 0, packed.size());
    }
    ggml_backend_tensor_set(rows, values.data(), 0, values.size() * sizeof(float));
    return load;
}

// One thread is measured by its CPU time, because what else runs on the machine then disturbs least.
static double now(int n_threads) {
    const std::chrono::duration<double> since = std::chrono::steady_clock::now().time_since_epoch();
    return n_threads == 1 ? double(clock()) / CLOCKS_PER_SEC : since.count();
}

static void measure(std::vector<contender> & contenders, const workload & load, int n_threads, int n_rounds) {
    for (int round = 0; round < n_rounds + 1; ++round) {
        for (size_t i = 0; i < contenders.size(); ++i) {
            contender & c = contenders[round % 2 ? contenders.size() - 1 - i : i];
            if (c.use_ref || c.backend == contenders[0].backend) {
                ggml_backend_cpu_set_use_ref(c.backend, c.use_ref);
            }
            const double begin = now(n_threads);
            ggml_backend_graph_compute(c.backend, load.graph);
            if (round > 0) {
                c.seconds.push_back(now(n_threads) - begin);
            }
        }
    }
}

static ggml_backend_t other_backend(const char * library, int n_threads) {
#if defined(__linux__) && defined(__GLIBC__)
    // its own symbols first, or it would call this build's functions of the same names
    void * handle = dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    void * init   = handle ? dlsym(handle, "ggml_backend_cpu_init") : nullptr;
    void * set    = handle ? dlsym(handle, "ggml_backend_cpu_set_n_threads") : nullptr;
    if (!init || !set) {
        fprintf(stderr, "error: %s\n", dlerror());
        return nullptr;
    }
    ggml_backend_t backend = reinterpret_cast<ggml_backend_t (*)()>(init)();
    reinterpret_cast<void (*)(ggml_backend_t, int)>(set)(backend, n_threads);
    return backend;
#else
    fprintf(stderr, "error: cannot load %s on this system\n", library);
    return nullptr;
#endif
}

static void time_type(std::vector<contender> & contenders, ggml_type type, const time_options & options) {
    const double  size       = double(ggml_row_size(type, options.n_in)) * double(options.n_out);
    const int64_t n_products = std::min<int64_t>(1000, std::max<int64_t>(1, int64_t(options.mib * 1048576.0 / size)));
    double        one        = 0.0;
    for (int64_t n_rows : { 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 512 }) {
        const workload load = make_workload(contenders[0].backend, type, options, n_rows, n_products);
        for (contender & c : contenders) {
            c.seconds.clear();
        }
        measure(contenders, load, options.n_threads, 11);
        const double mine = median(contenders[0].seconds);
        one               = n_rows == 1 ? median(contenders.back().seconds) : one;
        printf("%-6s %2d rows", ggml_type_name(type), int(n_rows));
        for (const contender & c : contenders) {
            printf("  %s %5.2f", c.name, median(c.seconds) / one);
        }
        if (contenders.size() > 1) {
            printf("  other/this %5.2f", median(contenders[1].seconds) / mine);
        }
        printf("  (%.2f ms, %.1f GB/s)\n", mine * 1e3, size * double(n_products) / mine * 1e-9);
        fflush(stdout);
    }
}

static int time_products(ggml_backend_t backend, const time_options & options) {
    ggml_backend_cpu_set_n_threads(backend, options.n_threads);
    std::vector<contender> contenders = { { "this", backend, false, {} } };
    backend_ptr            other(options.library ? other_backend(options.library, options.n_threads) : nullptr);
    if ((options.library && !other) || (options.amx && !amx_buffer_type())) {
        fprintf(stderr, "error: no other library, or no AMX\n");
        return 1;
    }
    if (other) {
        contenders.push_back({ "other", other.get(), false, {} });
    }
    if (options.amx) {
        contenders.push_back({ "upstream's", backend, true, {} });
    }
    printf("products of %d x %d, %.0f MiB of weights, threads: %d, medians, as multiples of one row\n",
           int(options.n_in), int(options.n_out), options.mib, options.n_threads);
    for (ggml_type type : TYPES) {
        const bool packed = type != GGML_TYPE_Q5_0 && type != GGML_TYPE_Q5_1;
        if ((options.type.empty() || options.type == ggml_type_name(type)) && (packed || !options.amx)) {
            time_type(contenders, type, options);
        }
    }
    return 0;
}

static bool parse(int argc, char ** argv, time_options & options) {
    for (int i = 1; i < argc; ++i) {
        const char * value = strchr(argv[i], '=');
        if (!value) {
            return false;
        }
        const std::string name(argv[i], size_t(value++ - argv[i]));
        if (name == "library") {
            options.library = value;
        } else if (name == "type") {
            options.type = value;
        } else if (name == "amx") {
            options.amx = atoi(value) != 0;
        } else if (name == "in") {
            options.n_in = atoi(value);
        } else if (name == "out") {
            options.n_out = atoi(value);
        } else if (name == "mib") {
            options.mib = atof(value);
        } else if (name == "threads") {
            options.n_threads = atoi(value);
        } else {
            return false;
        }
    }
    return !(options.library && options.amx);
}

int main(int argc, char ** argv) {
    backend_ptr  backend(ggml_backend_cpu_init());
    time_options options;
    if (!parse(argc, argv, options)) {
        fprintf(stderr, "error: see the first lines of time-products.cpp\n");
        return 2;
    }
    return time_products(backend.get(), options);
}
