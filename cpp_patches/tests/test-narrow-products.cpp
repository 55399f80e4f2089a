// Claim: in a product of quantized weights with 1 to 16 rows of activations, every element has the bits that
// ggml_vec_dot of this CPU gives for that row alone, whatever the shapes, strides, planes and threads; and it is
// the product, by a sum in double precision.
//
// With --time it measures instead: products of 1 to 16 rows, as a multiple of one row. With library=FILE, the
// libggml-cpu.so of another build (of the unpatched pin, say), that build takes turns with this one, and one row
// of it is what counts as 1. For others: type=q4_1, in=1024, out=4096, mib=64 of weights.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>
#include <string>
#include <vector>

#ifdef __linux__
#    include <dlfcn.h>
#endif

static const ggml_type TYPES[] = {
    GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,   GGML_TYPE_Q8_0,
    GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS,
};

// the widest product for which the claim is made
static constexpr int64_t ROWS_MAX = 16;

// How far a result may be from the sum in double precision, as a part of the largest weight times the sum of the
// activations' magnitudes. q8_1 keeps the sum of a block in half precision, and so errs more.
static double error_max(ggml_type type) {
    return ggml_get_type_traits_cpu(type)->vec_dot_type == GGML_TYPE_Q8_1 ? 1e-3 : 1e-5;
}

struct context_deleter {
    void operator()(ggml_context * ctx) const { ggml_free(ctx); }
};

struct buffer_deleter {
    void operator()(ggml_backend_buffer * buffer) const { ggml_backend_buffer_free(buffer); }
};

struct backend_deleter {
    void operator()(ggml_backend * backend) const { ggml_backend_free(backend); }
};

using context_ptr = std::unique_ptr<ggml_context, context_deleter>;
using buffer_ptr  = std::unique_ptr<ggml_backend_buffer, buffer_deleter>;
using backend_ptr = std::unique_ptr<ggml_backend, backend_deleter>;

static context_ptr make_context(size_t n_tensors) {
    const size_t     size   = (n_tensors + 8) * ggml_tensor_overhead() + ggml_graph_overhead_custom(4096, false);
    ggml_init_params params = { size, nullptr, /*.no_alloc =*/true };
    return context_ptr(ggml_init(params));
}

struct shape {
    ggml_type type;
    int64_t   n_in;
    int64_t   n_out;
    int64_t   n_rows;
    int64_t   planes[2];        // of the weights
    int64_t   broadcast[2];     // planes of activations for each of them
    int64_t   weights_gap;      // blocks between the weight rows
    int64_t   rows_gap;         // floats between the activation rows
    int       n_threads;
};

static std::string describe(const shape & s) {
    char text[256];
    snprintf(text, sizeof(text), "%-6s %5d x %4d, %2d rows, planes %dx%d of %dx%d, gaps %d and %d, %d threads",
             ggml_type_name(s.type), int(s.n_in), int(s.n_out), int(s.n_rows), int(s.planes[0]), int(s.planes[1]),
             int(s.broadcast[0]), int(s.broadcast[1]), int(s.weights_gap), int(s.rows_gap), s.n_threads);
    return text;
}

// magnitudes of many sizes, and now and then a run of zeros
static void fill(std::vector<float> & values, std::mt19937 & engine) {
    std::normal_distribution<float>       normal;
    std::uniform_real_distribution<float> exponent(-2.0f, 2.0f);
    for (size_t i = 0; i < values.size(); i += 32) {
        const bool  zero  = engine() % 16 == 0;
        const float scale = zero ? 0.0f : std::pow(10.0f, exponent(engine));
        for (size_t k = i; k < std::min(i + 32, values.size()); ++k) {
            values[k] = scale * normal(engine);
        }
    }
}

static std::vector<uint8_t> random_weights(ggml_type type, int64_t n_in, int64_t n, std::mt19937 & engine) {
    std::vector<float> values(size_t(n_in * n));
    fill(values, engine);
    std::vector<uint8_t> packed(ggml_row_size(type, n_in) * size_t(n));
    ggml_quantize_chunk(type, values.data(), packed.data(), 0, n, n_in, nullptr);
    if (type == GGML_TYPE_Q8_0) {
        // -128 too, which upstream's quantizer does not write
        for (size_t i = 0; i < packed.size(); i += ggml_type_size(type)) {
            for (size_t k = 2; k < ggml_type_size(type); ++k) {
                packed[i + k] = uint8_t(engine());
            }
        }
    }
    return packed;
}

struct difference {
    int64_t n_bits  = 0;    // elements with other bits
    double  largest = 0.0;  // error, as error_max() counts it
};

// what the blocks of q8_0, q8_1 and q8_K say
static std::vector<float> dequantized_row(ggml_type type, const std::vector<char> & packed, int64_t n_in) {
    const int64_t      len  = ggml_blck_size(type);
    const size_t       head = type == GGML_TYPE_Q8_0 ? 2 : 4;
    std::vector<float> values(static_cast<size_t>(n_in));
    for (int64_t k = 0; k < n_in; ++k) {
        const char * block = packed.data() + k / len * int64_t(ggml_type_size(type));
        ggml_fp16_t  half;
        float        scale;
        memcpy(&half, block, sizeof(half));
        memcpy(&scale, block, sizeof(scale));
        values[k] = (type == GGML_TYPE_Q8_K ? scale : ggml_fp16_to_fp32(half)) * float(block[head + k % len]);
    }
    return values;
}

// one row of the result against vec_dot, and against double precision
static void compare_row(const ggml_tensor * weights, const char * plane, const float * row, const float * got,
                        difference & diff) {
    const auto *    traits    = ggml_get_type_traits_cpu(weights->type);
    const ggml_type rows_type = traits->vec_dot_type;
    const int64_t   n_in      = weights->ne[0];

    std::vector<char> packed(ggml_row_size(rows_type, n_in));
    ggml_get_type_traits_cpu(rows_type)->from_float(row, packed.data(), n_in);

    const std::vector<float> r = dequantized_row(rows_type, packed, n_in);
    std::vector<float>       w(static_cast<size_t>(n_in));
    for (int64_t i = 0; i < weights->ne[1]; ++i) {
        const char * weight   = plane + i * weights->nb[1];
        float        expected = 0.0f;
        traits->vec_dot(int(n_in), &expected, 0, weight, 0, packed.data(), 0, 1);
        diff.n_bits += memcmp(&expected, &got[i], sizeof(float)) != 0;

        ggml_get_type_traits(weights->type)->to_float(weight, w.data(), n_in);
        double sum        = 0.0;
        double weight_max = 0.0;
        double magnitude  = 0.0;
        for (int64_t k = 0; k < n_in; ++k) {
            sum += double(w[k]) * double(r[k]);
            weight_max = std::max(weight_max, std::fabs(double(w[k])));
            magnitude += std::fabs(double(r[k]));
        }
        const double error = std::fabs(double(got[i]) - sum);
        if (error > 0.0) {
            diff.largest = std::max(diff.largest, error / (weight_max * magnitude));
        }
    }
}

static difference compare(ggml_backend_t backend, const shape & s, std::mt19937 & engine) {
    const int64_t block  = ggml_blck_size(s.type);
    const int64_t row    = s.n_in + s.weights_gap * block;
    const int64_t ne2    = s.planes[0] * s.broadcast[0];
    const int64_t ne3    = s.planes[1] * s.broadcast[1];
    context_ptr   ctx    = make_context(16);
    ggml_tensor * all_w  = ggml_new_tensor_4d(ctx.get(), s.type, row, s.n_out, s.planes[0], s.planes[1]);
    ggml_tensor * all_r  = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, s.n_in + s.rows_gap, s.n_rows, ne2, ne3);
    ggml_tensor * w      = ggml_view_4d(ctx.get(), all_w, s.n_in, s.n_out, s.planes[0], s.planes[1], all_w->nb[1],
                                        all_w->nb[2], all_w->nb[3], 0);
    ggml_tensor * r      = ggml_view_4d(ctx.get(), all_r, s.n_in, s.n_rows, ne2, ne3, all_r->nb[1], all_r->nb[2],
                                        all_r->nb[3], 0);
    ggml_tensor * out    = ggml_mul_mat(ctx.get(), w, r);
    ggml_cgraph * graph  = ggml_new_graph_custom(ctx.get(), 64, false);
    ggml_build_forward_expand(graph, out);
    buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));

    const std::vector<uint8_t> packed = random_weights(s.type, row, s.n_out * s.planes[0] * s.planes[1], engine);
    std::vector<float>         rows(static_cast<size_t>(ggml_nelements(all_r)));
    fill(rows, engine);
    ggml_backend_tensor_set(all_w, packed.data(), 0, packed.size());
    ggml_backend_tensor_set(all_r, rows.data(), 0, rows.size() * sizeof(float));
    ggml_backend_cpu_set_n_threads(backend, s.n_threads);

    difference diff;
    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
        diff.largest = INFINITY;
        return diff;
    }
    for (int64_t i3 = 0; i3 < ne3; ++i3) {
        for (int64_t i2 = 0; i2 < ne2; ++i2) {
            const char * plane = static_cast<const char *>(w->data) + i2 / s.broadcast[0] * w->nb[2] +
                                 i3 / s.broadcast[1] * w->nb[3];
            for (int64_t i1 = 0; i1 < s.n_rows; ++i1) {
                const char * from = static_cast<const char *>(r->data) + i1 * r->nb[1] + i2 * r->nb[2] + i3 * r->nb[3];
                const char * got  = static_cast<const char *>(out->data) + i1 * out->nb[1] + i2 * out->nb[2] +
                                    i3 * out->nb[3];
                compare_row(w, plane, reinterpret_cast<const float *>(from), reinterpret_cast<const float *>(got),
                            diff);
            }
        }
    }
    return diff;
}

static int64_t pick(std::mt19937 & engine, std::initializer_list<int64_t> values) {
    return values.begin()[engine() % values.size()];
}

static bool check_type(ggml_backend_t backend, ggml_type type, std::mt19937 & engine) {
    const int64_t      block = ggml_blck_size(type);
    std::vector<shape> shapes;
    for (int64_t n_rows = 1; n_rows <= ROWS_MAX; ++n_rows) {
        shapes.push_back({ type, 5 * block, 67, n_rows, { 1, 1 }, { 1, 1 }, 0, 0, 2 });
    }
    for (int64_t n_blocks : { int64_t(1), int64_t(2), 4096 / block }) {
        shapes.push_back({ type, n_blocks * block, 9, 7, { 1, 1 }, { 1, 1 }, 0, 0, 3 });
    }
    for (int i = 0; i < 24; ++i) {
        shapes.push_back({
            type,
            pick(engine, { 1, 3, 576 / block, 1536 / block }) * block,
            pick(engine, { 1, 2, 15, 16, 17, 64, 131 }),
            int64_t(1 + engine() % ROWS_MAX),
            { pick(engine, { 1, 2, 3 }), pick(engine, { 1, 2 }) },
            { pick(engine, { 1, 1, 3 }), pick(engine, { 1, 2 }) },
            pick(engine, { 0, 0, 1, 5 }),
            pick(engine, { 0, 0, 4, 33 }),
            int(pick(engine, { 1, 1, 2, 3 })),
        });
    }

    bool   good    = true;
    double largest = 0.0;
    for (const shape & s : shapes) {
        const difference diff = compare(backend, s, engine);
        largest               = std::max(largest, diff.largest);
        if (diff.n_bits != 0 || !(diff.largest <= error_max(type))) {
            printf("FAIL %s: %d elements with other bits, error %.1e\n", describe(s).c_str(), int(diff.n_bits),
                   diff.largest);
            good = false;
        }
    }
    printf("%s %-6s %d products, error at most %.1e\n", good ? "ok  " : "FAIL", ggml_type_name(type),
           int(shapes.size()), largest);
    return good;
}

// One backend to be measured: the graphs are the same for all.
struct contender {
    const char *         name;
    ggml_backend_t       backend;
    std::vector<double>  seconds;
};

static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0.0 : values[values.size() / 2];
}

// a chain of products that does not fit the caches, as a forward pass is
struct workload {
    context_ptr   ctx;
    buffer_ptr    buffer;
    ggml_cgraph * graph = nullptr;
};

static workload make_workload(ggml_backend_t backend, ggml_type type, int64_t n_in, int64_t n_out, int64_t n_rows,
                              int64_t n_products) {
    workload load;
    load.ctx           = make_context(size_t(2 * n_products + 1));
    ggml_tensor * rows = ggml_new_tensor_2d(load.ctx.get(), GGML_TYPE_F32, n_in, n_rows);
    load.graph         = ggml_new_graph_custom(load.ctx.get(), 4096, false);
    std::vector<ggml_tensor *> weights;
    for (int64_t i = 0; i < n_products; ++i) {
        weights.push_back(ggml_new_tensor_2d(load.ctx.get(), type, n_in, n_out));
        ggml_build_forward_expand(load.graph, ggml_mul_mat(load.ctx.get(), weights.back(), rows));
    }
    load.buffer.reset(ggml_backend_alloc_ctx_tensors(load.ctx.get(), backend));

    std::mt19937               engine(1);
    const std::vector<uint8_t> packed = random_weights(type, n_in, n_out, engine);
    std::vector<float>         values(static_cast<size_t>(ggml_nelements(rows)));
    fill(values, engine);
    for (ggml_tensor * w : weights) {
        ggml_backend_tensor_set(w, packed.data(), 0, packed.size());
    }
    ggml_backend_tensor_set(rows, values.data(), 0, values.size() * sizeof(float));
    return load;
}

// One thread, by its CPU time: what else runs on the machine then disturbs least.
static void measure(std::vector<contender> & contenders, const workload & load, int n_rounds) {
    for (int round = 0; round < n_rounds + 1; ++round) {
        for (size_t i = 0; i < contenders.size(); ++i) {
            contender &   c     = contenders[round % 2 ? contenders.size() - 1 - i : i];
            const clock_t begin = clock();
            ggml_backend_graph_compute(c.backend, load.graph);
            if (round > 0) {
                c.seconds.push_back(double(clock() - begin) / CLOCKS_PER_SEC);
            }
        }
    }
}

static ggml_backend_t other_backend(const char * library) {
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
    reinterpret_cast<void (*)(ggml_backend_t, int)>(set)(backend, 1);
    return backend;
#else
    fprintf(stderr, "error: cannot load %s on this system\n", library);
    return nullptr;
#endif
}

struct time_options {
    const char * library = nullptr;
    std::string  type;  // empty: all
    int64_t      n_in  = 1024;
    int64_t      n_out = 4096;
    double       mib   = 64.0;
};

static void time_type(std::vector<contender> & contenders, ggml_type type, const time_options & options) {
    const double  size       = double(ggml_row_size(type, options.n_in)) * double(options.n_out);
    const int64_t n_products = std::min<int64_t>(1000, std::max<int64_t>(1, int64_t(options.mib * 1048576.0 / size)));
    double        one        = 0.0;
    for (int64_t n_rows : { 1, 2, 3, 4, 6, 8, 12, 16 }) {
        const workload load =
            make_workload(contenders[0].backend, type, options.n_in, options.n_out, n_rows, n_products);
        for (contender & c : contenders) {
            c.seconds.clear();
        }
        measure(contenders, load, 11);
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
    ggml_backend_cpu_set_n_threads(backend, 1);
    std::vector<contender> contenders = { { "this", backend, {} } };
    backend_ptr            other(options.library ? other_backend(options.library) : nullptr);
    if (options.library && !other) {
        return 1;
    }
    if (other) {
        contenders.push_back({ "other", other.get(), {} });
    }
    printf("products of %d x %d, %.0f MiB of weights, one thread, medians, as multiples of one row\n",
           int(options.n_in), int(options.n_out), options.mib);
    for (ggml_type type : TYPES) {
        if (options.type.empty() || options.type == ggml_type_name(type)) {
            time_type(contenders, type, options);
        }
    }
    return 0;
}

// --time [library=FILE] [type=NAME] [in=N] [out=N] [mib=N]
static time_options parse(int argc, char ** argv) {
    time_options options;
    for (int i = 2; i < argc; ++i) {
        const char * value = strchr(argv[i], '=');
        const auto   is    = [&](const char * name) { return strncmp(argv[i], name, size_t(value - argv[i])) == 0; };
        if (!value) {
            continue;
        }
        options.library = is("library") ? value + 1 : options.library;
        options.type    = is("type") ? value + 1 : options.type;
        options.n_in    = is("in") ? atoi(value + 1) : options.n_in;
        options.n_out   = is("out") ? atoi(value + 1) : options.n_out;
        options.mib     = is("mib") ? atof(value + 1) : options.mib;
    }
    return options;
}

int main(int argc, char ** argv) {
    backend_ptr backend(ggml_backend_cpu_init());
    if (argc > 1 && strcmp(argv[1], "--time") == 0) {
        return time_products(backend.get(), parse(argc, argv));
    }

    std::mt19937 engine(7);
    bool         good = true;
    for (ggml_type type : TYPES) {
        good = check_type(backend.get(), type, engine) && good;
    }
    return good ? 0 : 1;
}
