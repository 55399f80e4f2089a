// A sequence as bytes: save and restore.
//
//   "DF2STATE" | u32 version | u64 hash of all that follows
//   build info | u64 fingerprint of the target | i32 type_k, type_v | u32 n_seq_max (the caches are laid out by it)
//   tokens | n_past, n_prompt, n_predicted, active, drawn | request
//   the target's cache | u64 fingerprint of the drafter, 0 = none | first and last row | the drafter's cache
//
// Numbers as this machine writes them: a state is of one build. Lists are a u64 count and their elements.

#include "error.h"
#include "llama/dflash2-model-info.h"
#include "random.h"
#include "session.h"

#include <cstring>
#include <type_traits>

namespace {

constexpr char     MAGIC[8]    = { 'D', 'F', '2', 'S', 'T', 'A', 'T', 'E' };
constexpr uint32_t VERSION     = 1;
constexpr size_t   HEADER_SIZE = sizeof(MAGIC) + sizeof(VERSION) + sizeof(uint64_t);

uint64_t hash_of(const uint8_t * data, size_t size) {
    uint64_t hash = dflash2_mix(size);
    for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
        uint64_t word = 0;
        std::memcpy(&word, data + i, std::min(sizeof(word), size - i));
        hash = dflash2_mix(hash ^ word);
    }
    return hash;
}

class writer {
  public:
    explicit writer(std::vector<uint8_t> & out) : out_(out) {}

    void bytes(const void * data, size_t size) {
        const auto * begin = static_cast<const uint8_t *>(data);
        out_.insert(out_.end(), begin, begin + size);
    }

    template <typename T> void value(const T & value) {
        static_assert(std::is_trivially_copyable_v<T>);
        bytes(&value, sizeof(value));
    }

    template <typename List> void list(const List & list) {
        value((uint64_t) list.size());
        bytes(list.data(), list.size() * sizeof(*list.data()));
    }

  private:
    std::vector<uint8_t> & out_;
};

class reader {
  public:
    reader(const uint8_t * data, size_t size) : data_(data), left_(size) {}

    const uint8_t * bytes(size_t size) {
        if (size > left_) {
            throw dflash2_error(DFLASH2_ERROR_STATE, "the saved state ends too early");
        }
        const uint8_t * begin = data_;
        data_ += size;
        left_ -= size;
        return begin;
    }

    template <typename T> T value() {
        static_assert(std::is_trivially_copyable_v<T>);
        T value;
        std::memcpy(&value, bytes(sizeof(value)), sizeof(value));
        return value;
    }

    template <typename List> List list() {
        using element        = std::remove_reference_t<decltype(*std::declval<List>().data())>;
        const uint64_t count = value<uint64_t>();
        if (count > left_ / sizeof(element)) {
            throw dflash2_error(DFLASH2_ERROR_STATE, "the saved state ends too early");
        }
        List list((size_t) count, element{});
        if (count > 0) {
            std::memcpy(&list[0], bytes((size_t) count * sizeof(element)), (size_t) count * sizeof(element));
        }
        return list;
    }

  private:
    const uint8_t * data_;
    size_t          left_;
};

std::vector<uint8_t> cache_bytes(llama_context * ctx, llama_seq_id seq_id) {
    std::vector<uint8_t> bytes(llama_state_seq_get_size(ctx, seq_id));
    if (llama_state_seq_get_data(ctx, bytes.data(), bytes.size(), seq_id) != bytes.size()) {
        throw dflash2_error(DFLASH2_ERROR_STATE, "llama.cpp cannot save the cache of this model");
    }
    return bytes;
}

bool set_cache(llama_context * ctx, llama_seq_id seq_id, const std::vector<uint8_t> & bytes) {
    return llama_state_seq_set_data(ctx, bytes.data(), bytes.size(), seq_id) == bytes.size();
}

template <typename T> void require_same(T saved, T own, const char * what) {
    if (saved != own) {
        throw dflash2_error(DFLASH2_ERROR_STATE, std::string("the saved state is of another ") + what);
    }
}

// Positions where a saved sequence stands.
struct progress {
    int32_t n_past;
    int32_t n_prompt;
    int32_t n_predicted;
    int32_t active;  // bool
    int32_t begun;   // bool: has a request
};

bool is_possible(const progress & p, size_t n_tokens) {
    const int32_t n = (int32_t) n_tokens;
    return p.n_past >= 0 && p.n_past <= n && p.n_prompt >= 0 && p.n_prompt <= n && p.n_predicted >= 0 &&
           p.n_prompt + p.n_predicted <= n && (!p.active || (p.begun && p.n_past < n)) && (!p.begun || p.n_prompt > 0);
}

}  // namespace

const std::vector<uint8_t> & dflash2_session::seq_save(llama_seq_id seq_id) {
    sequence & seq = checked(seq_id);
    saved_.clear();
    writer out(saved_);
    out.bytes(MAGIC, sizeof(MAGIC));
    out.value(VERSION);
    out.value(uint64_t(0));

    out.list(std::string(dflash2_build_info()));
    out.value(dflash2_llama_fingerprint(model_));
    out.value(params_.type_k);
    out.value(params_.type_v);
    out.value(params_.n_seq_max);

    out.list(seq.tokens);
    out.value(progress{ seq.n_past, seq.n_prompt, seq.n_predicted, seq.active, seq.rule != nullptr });
    out.value(seq.request.params);
    out.list(seq.request.stop);
    out.list(seq.request.logit_bias);
    out.list(seq.request.grammar);

    out.list(cache_bytes(target_->context(), seq_id));
    if (draft_) {
        inject(seq);
        const auto rows = draft_->only_rows(seq_id);
        out.value(dflash2_llama_fingerprint(draft_model_));
        out.value(rows);
        out.list(cache_bytes(draft_->context(), seq_id));
    } else {
        out.value(uint64_t(0));
    }

    const uint64_t hash = hash_of(saved_.data() + HEADER_SIZE, saved_.size() - HEADER_SIZE);
    std::memcpy(saved_.data() + HEADER_SIZE - sizeof(hash), &hash, sizeof(hash));
    return saved_;
}

static reader open_state(const uint8_t * data, size_t size) {
    reader header(data, size);
    if (size < HEADER_SIZE || std::memcmp(header.bytes(sizeof(MAGIC)), MAGIC, sizeof(MAGIC)) != 0) {
        throw dflash2_error(DFLASH2_ERROR_STATE, "this is no saved state");
    }
    const uint32_t version = header.value<uint32_t>();
    if (version != VERSION) {
        throw dflash2_error(DFLASH2_ERROR_STATE,
                            dflash2_format("the saved state has version %u, this build reads %u", version, VERSION));
    }
    if (header.value<uint64_t>() != hash_of(data + HEADER_SIZE, size - HEADER_SIZE)) {
        throw dflash2_error(DFLASH2_ERROR_STATE, "the saved state is damaged: its checksum is wrong");
    }
    return header;
}

int32_t dflash2_session::seq_restore(llama_seq_id seq_id, const uint8_t * data, size_t size) {
    checked(seq_id);
    reader in = open_state(data, size);
    require_same(in.list<std::string>(), std::string(dflash2_build_info()), "build");
    require_same(in.value<uint64_t>(), dflash2_llama_fingerprint(model_), "target");
    require_same(in.value<int32_t>(), params_.type_k, "K cache type");
    require_same(in.value<int32_t>(), params_.type_v, "V cache type");
    require_same(in.value<uint32_t>(), params_.n_seq_max, "number of sequences (n_parallel)");

    sequence fresh;
    fresh.tokens             = in.list<std::vector<llama_token>>();
    const auto where         = in.value<progress>();
    fresh.active             = where.active != 0;
    fresh.request            = dflash2_request(in.value<dflash2_seq_params>());
    fresh.request.stop       = in.list<std::vector<llama_token>>();
    fresh.request.logit_bias = in.list<std::vector<llama_logit_bias>>();
    fresh.request.grammar    = in.list<std::string>();
    if (!is_possible(where, fresh.tokens.size())) {
        throw dflash2_error(DFLASH2_ERROR_STATE, "the saved state contradicts itself");
    }
    check_tokens(fresh.tokens.data(), fresh.tokens.size(), "saved");
    if (fresh.tokens.size() > n_ctx() + (fresh.active ? 0 : 1)) {
        throw dflash2_error(
            DFLASH2_ERROR_CONTEXT,
            dflash2_format("the saved sequence has %zu tokens, the context holds %u", fresh.tokens.size(), n_ctx()));
    }
    fresh.n_past      = where.n_past;
    fresh.n_prompt    = where.n_prompt;
    fresh.n_predicted = where.n_predicted;
    fresh.arrival     = n_arrivals_++;
    if (where.begun) {
        fresh.rule = make_rule(dflash2_resolve_seq_params(fresh.request.view(), params_.exact));
        fresh.rule->prime(fresh.tokens.data(), fresh.n_prompt);
        fresh.rule->catch_up(fresh.tokens.data() + fresh.n_prompt, fresh.tokens.size() - fresh.n_prompt);
    }
    const auto cache       = in.list<std::vector<uint8_t>>();
    const bool has_rows    = in.value<uint64_t>() == (draft_ ? dflash2_llama_fingerprint(draft_model_) : 0) && draft_;
    const auto rows        = has_rows ? in.value<dflash2_draft::range>() : dflash2_draft::range{};
    const auto draft_cache = has_rows ? in.list<std::vector<uint8_t>>() : std::vector<uint8_t>{};

    seq_clear(seq_id);
    if (fresh.n_past > 0 && !set_cache(target_->context(), seq_id, cache)) {
        seq_clear(seq_id);
        throw dflash2_error(DFLASH2_ERROR_STATE, "llama.cpp cannot read the saved cache of the target");
    }
    checked(seq_id) = std::move(fresh);
    if (has_rows && rows.begin >= 0 && rows.begin <= rows.end && rows.end <= where.n_past &&
        set_cache(draft_->context(), seq_id, draft_cache)) {
        draft_->set_rows(seq_id, rows);
    }
    if (draft_) {
        rebuild_window(seq_id, checked(seq_id));
    }
    if (params_.exact) {
        rewind(seq_id, checked(seq_id), 0);  // who knows in what company these rows were evaluated
    }
    return (int32_t) checked(seq_id).tokens.size();
}

// A sequence that goes on without what the drafter reads evaluates that part again.
void dflash2_session::rebuild_window(llama_seq_id seq_id, sequence & seq) {
    if (draft_->has_window(seq_id, seq.n_past)) {
        return;
    }
    draft_->truncate(seq_id, 0);
    if (seq.active && seq.n_past > 0) {
        const int32_t begin = draft_->window_begin(seq.n_past);
        rewind(seq_id, seq, target_->can_continue_at(seq_id, begin) ? begin : 0);
    }
}
