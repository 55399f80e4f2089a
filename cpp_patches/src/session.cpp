#include "session.h"

#include "error.h"
#include "memory.h"

#include <algorithm>
#include <thread>

static int64_t now_us() {
    return llama_time_us();
}

// adds the time it lives to a counter
struct scoped_timer {
    explicit scoped_timer(uint64_t & counter) : total(counter), start(now_us()) {}

    ~scoped_timer() { total += now_us() - start; }

    uint64_t & total;
    int64_t    start;
};

dflash2_session::dflash2_session(llama_model * target, llama_model * draft, const dflash2_session_params & params) :
    params_(dflash2_resolve_params(target, params)),
    vocab_(llama_model_get_vocab(target)),
    model_(target),
    costs_(1),
    width_(0) {
    const bool drafts = draft != nullptr && params_.n_draft_max != 0;
    if (drafts) {
        dflash2_require_pair(target, draft);
    }

    const int32_t n_draft_max = drafts ? dflash2_draft_max(draft, params_) : 0;
    target_                   = std::make_unique<dflash2_target>(target, params_, n_draft_max, abort_);
    if (drafts) {
        draft_ = std::make_unique<dflash2_draft>(draft, target_->context(), params_);
        target_->enable_features(draft_->info().layer_inputs);
    }
    costs_ = dflash2_costs(params_.n_seq_max * (n_draft_max + 1));
    width_ = dflash2_width(n_draft_max);
    sequences_.resize(params_.n_seq_max);
}

dflash2_session::sequence & dflash2_session::checked(llama_seq_id seq_id) {
    if (seq_id < 0 || seq_id >= (llama_seq_id) sequences_.size()) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT, dflash2_format("sequence %d does not exist, the session has %zu",
                                                                   seq_id, sequences_.size()));
    }
    return sequences_[seq_id];
}

const dflash2_session::sequence & dflash2_session::checked(llama_seq_id seq_id) const {
    return const_cast<dflash2_session *>(this)->checked(seq_id);
}

//
// sequences
//

// Cuts both caches to what they share with the new prompt. Returns how many tokens stay evaluated; at least the
// last prompt token does not, because its logits are wanted.
int32_t dflash2_session::reuse_prefix(llama_seq_id        seq_id,
                                      sequence &          seq,
                                      const llama_token * tokens,
                                      int32_t             n_tokens) {
    const int32_t n_old = std::min(seq.n_past, n_tokens - 1);

    int32_t n_keep = 0;
    while (n_keep < n_old && seq.tokens[n_keep] == tokens[n_keep]) {
        ++n_keep;
    }
    if (draft_) {
        inject(seq);
    }
    if (draft_ && n_keep > 0) {
        // what a block after the prompt reads: if the old part of it is lost, evaluate that part again
        const llama_pos begin = draft_->window_begin(n_tokens);
        if (begin < n_keep) {
            draft_->truncate(seq_id, n_keep);
            if (!draft_->has_window(seq_id, n_keep)) {
                n_keep = begin;
            }
        }
    }
    if (n_keep > 0 && !target_->can_continue_at(seq_id, n_keep)) {
        n_keep = 0;
    }
    if (!target_->truncate(seq_id, n_keep)) {
        n_keep = 0;
    }
    if (draft_) {
        draft_->truncate(seq_id, n_keep);
    }
    return n_keep;
}

int32_t dflash2_session::seq_begin(llama_seq_id               seq_id,
                                   const llama_token *        tokens,
                                   size_t                     n_tokens,
                                   const dflash2_seq_params & params) {
    sequence & seq = checked(seq_id);
    if (tokens == nullptr || n_tokens == 0) {
        throw dflash2_error(DFLASH2_ERROR_ARGUMENT, "the prompt is empty");
    }
    if (n_tokens > n_ctx()) {
        throw dflash2_error(DFLASH2_ERROR_CONTEXT,
                            dflash2_format("the prompt has %zu tokens, the context holds %u", n_tokens, n_ctx()));
    }
    const int32_t n_vocab = llama_vocab_n_tokens(vocab_);
    for (size_t i = 0; i < n_tokens; ++i) {
        if (tokens[i] < 0 || tokens[i] >= n_vocab) {
            throw dflash2_error(DFLASH2_ERROR_ARGUMENT,
                                dflash2_format("prompt token %zu is %d, the vocabulary has %d", i, tokens[i], n_vocab));
        }
    }
    auto rule = dflash2_make_rule(model_, params);
    rule->prime(tokens, n_tokens);

    abort_.store(false);  // meant for an earlier step
    seq.n_past = reuse_prefix(seq_id, seq, tokens, (int32_t) n_tokens);
    seq.tokens.assign(tokens, tokens + n_tokens);
    seq.stop.assign(params.stop, params.stop + (params.stop ? params.n_stop : 0));
    seq.params            = params;
    seq.params.stop       = nullptr;  // the caller's
    seq.params.logit_bias = nullptr;
    seq.params.grammar    = nullptr;
    seq.rule              = std::move(rule);
    seq.n_predicted       = 0;
    seq.active            = params.n_predict != 0;
    stats.n_prompt_reused += seq.n_past;
    return seq.n_past;
}

void dflash2_session::seq_end(llama_seq_id seq_id) {
    checked(seq_id).active = false;
}

void dflash2_session::seq_clear(llama_seq_id seq_id) {
    checked(seq_id) = sequence();
    target_->truncate(seq_id, 0);
    if (draft_) {
        draft_->truncate(seq_id, 0);
    }
}

bool dflash2_session::is_stop(const sequence & seq, llama_token token) const {
    if (!seq.params.ignore_eos && llama_vocab_is_eog(vocab_, token)) {
        return true;
    }
    return std::find(seq.stop.begin(), seq.stop.end(), token) != seq.stop.end();
}

//
// step
//

// Drafted tokens that the sequence can use: never more than can still be produced or stored.
int32_t dflash2_session::width_limit(const sequence & seq) const {
    if (!draft_ || !seq.generates()) {
        return 0;
    }
    int32_t width = n_draft_max();
    if (seq.params.n_draft_max >= 0) {
        width = std::min(width, seq.params.n_draft_max);
    }
    if (seq.params.n_predict > 0) {
        width = std::min(width, seq.params.n_predict - seq.n_predicted - 1);
    }
    return std::max(0, std::min(width, (int32_t) n_ctx() - (int32_t) seq.tokens.size()));
}

// Looks at what there is to do; returns the width for the sequences that leave it to us.
int32_t dflash2_session::plan_round() {
    round_         = round();
    int32_t n_past = 0, n_generating = 0;
    for (const sequence & seq : sequences_) {
        n_generating += seq.generates();
        round_.n_auto += seq.generates() && seq.params.n_draft_max < 0;
        round_.mixed |= seq.active && !seq.generates();
        n_past = std::max(n_past, seq.generates() ? seq.n_past : 0);
    }
    if (!draft_ || round_.n_auto == 0) {
        return 0;
    }
    const int32_t width = width_.plan(costs_, n_past, n_generating);
    ++stats.rounds_by_reason[width_.last_reason()];
    return width;
}

// One pass over the blocks of all drafting sequences. Blocks of a pass have one length; a sequence that can use
// fewer tokens drops the rest.
void dflash2_session::draft_all() {
    const int32_t n_auto = plan_round();

    std::vector<dflash2_block> blocks;
    int32_t                    n = 0;
    for (size_t s = 0; s < sequences_.size(); ++s) {
        sequence & seq = sequences_[s];
        seq.path.clear();
        const int32_t limit = width_limit(seq);
        const int32_t width = seq.params.n_draft_max < 0 ? std::min(n_auto, limit) : limit;
        if (width > 0) {
            blocks.push_back({ (llama_seq_id) s, seq.tokens.back(), seq.n_past });
            n = std::max(n, width);
        }
    }
    if (blocks.empty()) {
        return;
    }

    const int64_t start = now_us();
    for (const auto & block : blocks) {
        inject(sequences_[block.seq_id]);
    }
    std::vector<dflash2_lattice> lattices;
    dflash2_draft_failure        failure;
    bool                         ok;
    {
        scoped_timer timer(stats.t_draft_us);
        ok = draft_->draft(blocks, n, lattices, failure);
    }
    if (!ok) {
        stats.draft_failures[failure] += blocks.size();
        return;
    }
    ++stats.n_draft_passes;
    for (size_t i = 0; i < blocks.size(); ++i) {
        sequence & seq = sequences_[blocks[i].seq_id];
        seq.lattice    = std::move(lattices[i]);
        seq.rule->walk(seq.lattice, std::min(n, width_limit(seq)), (llama_pos) seq.tokens.size(), seq.path);
    }
    round_.n_blocks = (int32_t) blocks.size();
    round_.us_draft = (double) (now_us() - start);
    choose_widths();
}

// Cuts the paths of automatic sequences to what is worth verifying.
void dflash2_session::choose_widths() {
    int32_t n_rows = 0;
    for (const sequence & seq : sequences_) {
        n_rows += seq.generates() ? 1 + (seq.params.n_draft_max >= 0 ? (int32_t) seq.path.tokens.size() : 0) : 0;
    }
    for (sequence & seq : sequences_) {
        if (seq.path.tokens.empty() || seq.params.n_draft_max >= 0) {
            continue;
        }
        const int32_t width = width_.choose(costs_, seq.calibration, seq.n_past, n_rows - 1, seq.path.sure);
        seq.path.truncate(width);
        n_rows += width;
    }
}

// Costs and acceptance of the round just verified.
void dflash2_session::learn(double target_us) {
    if (!draft_ || round_.mixed) {
        return;
    }
    int32_t n_past = 0, n_rows = 0, n_produced = 0;
    for (sequence & seq : sequences_) {
        if (seq.n_rows > 0) {
            n_past = std::max(n_past, seq.n_past);
            n_rows += seq.n_rows;
            n_produced += (int32_t) seq.produced.size();
        }
    }
    costs_.observe_target(n_past, n_rows, target_us);
    if (round_.n_blocks > 0) {
        costs_.observe_draft(round_.n_blocks, round_.us_draft);
    }
    if (round_.n_auto > 0) {
        width_.observe(n_produced, round_.us_draft + target_us);
    }
}

// Rows of generating sequences first, then as much of the prompts as fits.
void dflash2_session::fill_batch() {
    target_->clear_batch();
    for (size_t s = 0; s < sequences_.size(); ++s) {
        sequence & seq = sequences_[s];
        seq.n_rows     = 0;
        seq.judged     = false;
        seq.produced.clear();
        if (!seq.generates()) {
            continue;
        }
        seq.row    = target_->add((llama_seq_id) s, seq.tokens.back(), seq.n_past, true);
        seq.judged = true;
        for (size_t i = 0; i < seq.path.tokens.size(); ++i) {
            target_->add((llama_seq_id) s, seq.path.tokens[i], seq.n_past + 1 + (llama_pos) i, true);
        }
        seq.n_rows = target_->n_rows() - seq.row;
    }
    for (size_t s = 0; s < sequences_.size(); ++s) {
        sequence &    seq = sequences_[s];
        const int32_t n   = std::min(seq.n_pending(), target_->n_batch() - target_->n_rows());
        if (!seq.active || seq.judged || n <= 0) {
            continue;
        }
        seq.row    = target_->n_rows();
        seq.n_rows = n;
        seq.judged = n == seq.n_pending();
        for (int32_t i = 0; i < n; ++i) {
            target_->add((llama_seq_id) s, seq.tokens[seq.n_past + i], seq.n_past + i, seq.judged && i == n - 1);
        }
    }
}

void dflash2_session::evaluate() {
    const bool   reads_prompt = std::any_of(sequences_.begin(), sequences_.end(),
                                            [](const sequence & seq) { return seq.n_rows > 0 && seq.n_pending() > 1; });
    scoped_timer timer(reads_prompt ? stats.t_prompt_us : stats.t_verify_us);
    target_->evaluate();
    llama_synchronize(target_->context());
}

// After a failed evaluation: a target that lost its place evaluates the sequence anew.
void dflash2_session::recover() {
    for (size_t s = 0; s < sequences_.size(); ++s) {
        sequence & seq = sequences_[s];
        if (seq.n_rows == 0) {
            continue;
        }
        if (!target_->truncate((llama_seq_id) s, seq.n_past)) {
            seq.n_past = 0;
        }
        if (draft_) {
            inject(seq);
            draft_->truncate((llama_seq_id) s, seq.n_past);
        }
        seq.n_rows = 0;
    }
}

// Keeps the features of the first n_keep rows of this step, as far as later blocks can read them. They reach the
// draft cache when the sequence drafts next, or many at once: a plain step must not pay for a drafter it does not use.
void dflash2_session::keep_features(sequence & seq, int32_t n_keep) {
    const llama_pos end   = seq.n_past + n_keep;
    const llama_pos begin = std::max(seq.n_past, draft_->window_begin(std::max(end, (int32_t) seq.tokens.size())));
    if (begin >= end) {
        return;
    }
    if (seq.pending.n_rows > 0 && seq.pending.pos + seq.pending.n_rows != begin) {
        seq.pending.clear();
    }
    if (seq.pending.n_rows == 0) {
        seq.pending.pos = begin;
    }
    seq.pending.n_rows += end - begin;
    target_->append_features(seq.row + (begin - seq.n_past), end - begin, seq.pending.rows);
    if (seq.pending.n_rows >= dflash2_draft::N_INJECT_ROWS) {
        inject(seq);
    }
}

void dflash2_session::inject(sequence & seq) {
    if (seq.pending.n_rows == 0) {
        return;
    }
    scoped_timer timer(stats.t_inject_us);
    seq.pending.seq_id = (llama_seq_id) (&seq - sequences_.data());
    if (draft_->inject(seq.pending)) {
        stats.n_injected += seq.pending.n_rows;
    } else {
        ++stats.draft_failures[DFLASH2_DRAFT_FAILURE_COMPUTE];
    }
    seq.pending.clear();
}

void dflash2_session::accept(llama_seq_id seq_id, sequence & seq, dflash2_step_result & result) {
    const int32_t n_drafted = (int32_t) seq.path.tokens.size();
    const int32_t row       = seq.row + seq.n_rows - 1 - n_drafted;  // judges the first draft
    {
        scoped_timer timer(stats.t_sample_us);
        result.n_accepted =
            seq.rule->accept([&](int32_t i) { return target_->logits(row + i); }, (llama_pos) seq.tokens.size(),
                             seq.path, [&](llama_token token) { return is_stop(seq, token); }, seq.produced);
    }
    const int32_t n_evaluated = seq.n_rows - n_drafted + result.n_accepted;

    for (int32_t i = 0; i < std::min(n_drafted, DFLASH2_MAX_DRAFT); ++i) {
        ++stats.drafted_at[i];
        stats.accepted_at[i] += i < result.n_accepted;
    }
    const bool is_round = seq.n_pending() == 1;
    stats.n_steps += is_round;
    stats.verified_width[std::min(n_drafted, DFLASH2_MAX_DRAFT)] += is_round;
    stats.n_prompt_sampled += is_round ? 0 : seq.produced.size();
    stats.n_drafted += n_drafted;
    stats.n_accepted += result.n_accepted;
    stats.n_generated += seq.produced.size();

    if (draft_) {
        keep_features(seq, n_evaluated);
        if (seq.params.n_draft_max < 0) {
            seq.calibration.observe(seq.path.sure, n_drafted, result.n_accepted);
        }
    }
    seq.tokens.insert(seq.tokens.end(), seq.produced.begin(), seq.produced.end());
    seq.n_predicted += (int32_t) seq.produced.size();
    seq.n_past += n_evaluated;

    // the last produced token can be a drafted one (a stop inside the block): it then is evaluated already
    const int32_t n_known = (int32_t) seq.tokens.size();
    seq.n_past            = std::min(seq.n_past, n_known);
    if (n_evaluated < seq.n_rows && !target_->truncate(seq_id, seq.n_past)) {
        seq.n_past = 0;
    }

    if (is_stop(seq, seq.produced.back())) {
        result.finish = DFLASH2_FINISH_STOP;
    } else if (seq.params.n_predict > 0 && seq.n_predicted >= seq.params.n_predict) {
        result.finish = DFLASH2_FINISH_LENGTH;
    } else if (n_known > (int32_t) n_ctx()) {
        result.finish = DFLASH2_FINISH_CONTEXT;
    }
    seq.active = result.finish == DFLASH2_FINISH_NONE;
}

int32_t dflash2_session::step(dflash2_step_result * results) {
    draft_all();
    fill_batch();
    if (target_->n_rows() == 0) {
        return 0;
    }
    const int64_t start = now_us();
    try {
        if (abort_.load()) {
            throw dflash2_error(DFLASH2_ERROR_ABORTED, "aborted");
        }
        evaluate();
    } catch (...) {
        abort_.store(false);
        recover();
        throw;
    }

    const double target_us = (double) (now_us() - start);
    int32_t      n_results = 0;
    for (size_t s = 0; s < sequences_.size(); ++s) {
        sequence & seq = sequences_[s];
        if (seq.n_rows == 0) {
            continue;
        }
        dflash2_step_result & result = results[n_results++];
        result                       = {};
        result.seq_id                = (llama_seq_id) s;
        result.n_drafted             = (int32_t) seq.path.tokens.size();
        if (seq.n_pending() > 1) {
            stats.n_prompt += seq.n_rows;
        }
        if (seq.judged) {
            accept((llama_seq_id) s, seq, result);
        } else {
            if (draft_) {
                keep_features(seq, seq.n_rows);
            }
            seq.n_past += seq.n_rows;
        }
        result.n_tokens      = (int32_t) seq.produced.size();
        result.tokens        = seq.produced.data();
        result.n_prompt_left = seq.judged ? 0 : seq.n_pending();
    }
    learn(target_us);
    return n_results;
}

void dflash2_session::draft_view(llama_seq_id seq_id, dflash2_draft_view & view) const {
    const sequence & seq = checked(seq_id);
    view.n_drafted       = (int32_t) seq.path.tokens.size();
    view.top_k           = seq.lattice.top_k;
    view.path            = seq.path.tokens.data();
    view.candidates      = seq.lattice.candidates.data();
    view.scores          = seq.lattice.scores.data();
}

void dflash2_session::memory(dflash2_memory & memory) const {
    memory = dflash2_measure_memory(target_->context(), draft_ ? draft_->context() : nullptr);
}
