// One step: choose widths, draft, fill the target's batch, evaluate, judge.

#include "error.h"
#include "session.h"

#include <algorithm>

static int64_t now_us() {
    return llama_time_us();
}

// adds the time it lives to a counter of the session and to one of a sequence
struct scoped_timer {
    scoped_timer(uint64_t & a, uint64_t & b) : a_(a), b_(b), start_(now_us()) {}

    ~scoped_timer() {
        const uint64_t us = now_us() - start_;
        a_ += us;
        b_ += us;
    }

  private:
    uint64_t & a_;
    uint64_t & b_;
    int64_t    start_;
};

//
// drafting
//

// Drafted tokens that the sequence can use: never more than can still be produced or stored.
int32_t dflash2_session::width_limit(const sequence & seq) const {
    if (!draft_ || !seq.generates()) {
        return 0;
    }
    int32_t width = n_draft_max();
    if (seq.request.params.n_draft_max >= 0) {
        width = std::min(width, seq.request.params.n_draft_max);
    }
    if (seq.request.params.n_predict > 0) {
        width = std::min(width, seq.request.params.n_predict - seq.n_predicted - 1);
    }
    return std::max(0, std::min(width, (int32_t) n_ctx() - (int32_t) seq.tokens.size()));
}

// Looks at what there is to do; returns the width for the sequences that leave it to us.
int32_t dflash2_session::plan_round() {
    int32_t n_past = 0, n_generating = 0;
    for (const sequence & seq : sequences_) {
        n_generating += seq.generates();
        round_.n_auto += seq.generates() && seq.request.params.n_draft_max < 0;
        round_.mixed |= seq.reads() && !params_.exact;
        n_past = std::max(n_past, seq.generates() ? seq.n_past : 0);
    }
    if (!draft_ || round_.n_auto == 0) {
        return 0;
    }
    const int32_t width = width_.plan(costs_, n_past, n_generating);
    ++stats.rounds_by_reason[width_.last_reason()];
    for (sequence & seq : sequences_) {
        seq.stats.rounds_by_reason[width_.last_reason()] += seq.generates() && seq.request.params.n_draft_max < 0;
    }
    return width;
}

// One pass over the blocks of all drafting sequences. Blocks of a pass have one length; a sequence that can use
// fewer tokens drops the rest.
void dflash2_session::draft_all() {
    const int32_t n_auto = plan_round();

    std::vector<dflash2_block> blocks;
    int32_t                    n = 0;
    for (size_t s = 0; s < sequences_.size(); ++s) {
        sequence &    seq   = sequences_[s];
        const int32_t limit = width_limit(seq);
        const int32_t width = seq.request.params.n_draft_max < 0 ? std::min(n_auto, limit) : limit;
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
    const int64_t                start_draft = now_us();
    const bool                   ok          = draft_->draft(blocks, n, lattices, failure);
    const uint64_t               us          = now_us() - start_draft;
    stats.t_draft_us += us;
    stats.n_draft_passes += ok;
    for (size_t i = 0; i < blocks.size(); ++i) {
        sequence & seq = sequences_[blocks[i].seq_id];
        seq.stats.t_draft_us += us / blocks.size();
        seq.stats.n_draft_passes += ok;
        if (!ok) {
            ++stats.draft_failures[failure];
            ++seq.stats.draft_failures[failure];
            continue;
        }
        seq.lattice = std::move(lattices[i]);
        seq.rule->walk(seq.lattice, std::min(n, width_limit(seq)), (llama_pos) seq.tokens.size(), seq.path);
    }
    if (!ok) {
        return;
    }
    round_.n_blocks = (int32_t) blocks.size();
    round_.us_draft = (double) (now_us() - start);
    choose_widths();
}

// Cuts the paths of automatic sequences to what is worth verifying.
void dflash2_session::choose_widths() {
    int32_t n_rows = 0;
    for (const sequence & seq : sequences_) {
        n_rows +=
            seq.generates() ? 1 + (seq.request.params.n_draft_max >= 0 ? (int32_t) seq.path.tokens.size() : 0) : 0;
    }
    for (sequence & seq : sequences_) {
        if (seq.path.tokens.empty() || seq.request.params.n_draft_max >= 0) {
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

//
// the target's batch
//

// Exact mode: a sequence that reads does so by itself, in the chunks of plain decoding. Whose turn that is, the oldest
// first; -1 where it is the turn of those that generate.
llama_seq_id dflash2_session::next_alone() {
    if (!params_.exact) {
        return -1;
    }
    const sequence * oldest    = nullptr;
    bool             generates = false;
    for (const sequence & seq : sequences_) {
        generates |= seq.generates();
        if (seq.reads() && (oldest == nullptr || seq.arrival < oldest->arrival)) {
            oldest = &seq;
        }
    }
    alone_last_ = oldest != nullptr && (!generates || !alone_last_);
    return alone_last_ ? (llama_seq_id) (oldest - sequences_.data()) : -1;
}

// rows that plain decoding would evaluate next
int32_t dflash2_session::plain_chunk(const sequence & seq) const {
    if (seq.n_past >= seq.n_prompt) {
        return 1;
    }
    return std::min(seq.n_prompt, (seq.n_past / n_chunk_ + 1) * n_chunk_) - seq.n_past;
}

// Are the rows of this step those of plain decoding, and is all that they attend to?
bool dflash2_session::is_plain(const sequence & seq) const {
    return round_.n_sequences == 1 && seq.n_plain == seq.n_past && seq.n_rows == plain_chunk(seq);
}

// n pending tokens of a sequence that reads
void dflash2_session::add_rows(llama_seq_id seq_id, sequence & seq, int32_t n) {
    seq.row    = target_->n_rows();
    seq.n_rows = n;
    seq.judged = n == seq.n_pending();
    round_.reads |= seq.n_pending() > 1 && !seq.replays;
    for (int32_t i = 0; i < n; ++i) {
        target_->add(seq_id, seq.tokens[seq.n_past + i], seq.n_past + i, seq.judged && i == n - 1);
    }
    ++round_.n_sequences;
}

// Rows of generating sequences first, then as much of the prompts as fits, the oldest first.
void dflash2_session::fill_shared_batch() {
    std::vector<llama_seq_id> readers;
    for (size_t s = 0; s < sequences_.size(); ++s) {
        sequence & seq = sequences_[s];
        if (seq.reads() && !params_.exact) {
            readers.push_back((llama_seq_id) s);
        }
        if (!seq.generates()) {
            continue;
        }
        seq.row    = target_->add((llama_seq_id) s, seq.tokens.back(), seq.n_past, true);
        seq.judged = true;
        for (size_t i = 0; i < seq.path.tokens.size(); ++i) {
            target_->add((llama_seq_id) s, seq.path.tokens[i], seq.n_past + 1 + (llama_pos) i, true);
        }
        seq.n_rows = target_->n_rows() - seq.row;
        ++round_.n_sequences;
    }
    int32_t n_left = target_->n_batch() - target_->n_rows();
    if (round_.n_sequences > 0 && params_.n_batch_shared > 0) {
        n_left = std::min(n_left, (int32_t) params_.n_batch_shared);
    }
    std::sort(readers.begin(), readers.end(),
              [&](llama_seq_id a, llama_seq_id b) { return sequences_[a].arrival < sequences_[b].arrival; });
    for (const llama_seq_id s : readers) {
        const int32_t n = std::min(sequences_[s].n_pending(), n_left);
        if (n > 0) {
            add_rows(s, sequences_[s], n);
            n_left -= n;
        }
    }
}

void dflash2_session::evaluate() {
    const int64_t start = now_us();
    target_->evaluate();
    llama_synchronize(target_->context());

    // sequences share the time of a batch by their rows
    const uint64_t us     = now_us() - start;
    const int32_t  n_rows = target_->n_rows();
    (round_.reads ? stats.t_prompt_us : stats.t_verify_us) += us;
    for (sequence & seq : sequences_) {
        const bool reads = seq.n_pending() > 1 && !seq.replays;
        (reads ? seq.stats.t_prompt_us : seq.stats.t_verify_us) += us * seq.n_rows / n_rows;
    }
}

// After a failed evaluation: a target that lost its place evaluates the sequence anew.
void dflash2_session::recover() {
    for (size_t s = 0; s < sequences_.size(); ++s) {
        sequence & seq = sequences_[s];
        if (seq.n_rows == 0) {
            continue;
        }
        const int32_t n_past = seq.n_past;
        rewind((llama_seq_id) s, seq, n_past);
        if (draft_ && !seq.replays) {
            inject(seq);
            draft_->truncate((llama_seq_id) s, seq.n_past);
        }
        seq.n_rows = 0;
    }
}

//
// what comes of it
//

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
    scoped_timer timer(stats.t_inject_us, seq.stats.t_inject_us);
    seq.pending.seq_id = (llama_seq_id) (&seq - sequences_.data());
    const bool ok      = draft_->inject(seq.pending);
    for (dflash2_stats * counters : { &stats, &seq.stats }) {
        counters->n_injected += ok ? seq.pending.n_rows : 0;
        counters->draft_failures[DFLASH2_DRAFT_FAILURE_COMPUTE] += !ok;
    }
    seq.pending.clear();
}

// A judged sequence: n_drafted tokens were proposed, n_accepted kept, n_produced came out.
static void count(dflash2_stats & stats, bool is_round, int32_t n_drafted, int32_t n_accepted, size_t n_produced) {
    for (int32_t i = 0; i < std::min(n_drafted, DFLASH2_MAX_DRAFT); ++i) {
        ++stats.drafted_at[i];
        stats.accepted_at[i] += i < n_accepted;
    }
    stats.n_steps += is_round;
    stats.verified_width[std::min(n_drafted, DFLASH2_MAX_DRAFT)] += is_round;
    stats.n_prompt_sampled += is_round ? 0 : n_produced;
    stats.n_drafted += n_drafted;
    stats.n_accepted += n_accepted;
    stats.n_generated += n_produced;
}

// Goes back to where the target's cache is that of plain decoding, to evaluate from there what is known. The drafter's
// rows stay: they only decide what is proposed.
void dflash2_session::replay(llama_seq_id seq_id, sequence & seq, const float * doubted) {
    seq.doubted.assign(doubted, doubted + llama_vocab_n_tokens(vocab_));
    if (draft_) {
        inject(seq);
    }
    rewind(seq_id, seq, target_->can_continue_at(seq_id, seq.n_plain) ? seq.n_plain : 0);
    seq.replays = true;
    ++stats.n_doubts;
    ++seq.stats.n_doubts;
}

void dflash2_session::accept(llama_seq_id seq_id, sequence & seq, dflash2_step_result & result) {
    const int32_t n_drafted = (int32_t) seq.path.tokens.size();
    const int32_t row       = seq.row + seq.n_rows - 1 - n_drafted;  // judges the first draft
    const bool    replayed  = seq.replays;
    const bool    plain     = is_plain(seq);
    if (!plain) {
        seq.n_company = std::max(seq.n_company, target_->n_rows());
    }
    if (replayed) {
        noise_.observe(seq.n_company, target_->logits(row), seq.doubted.data(), seq.doubted.size());
        stats.noise = noise_.largest();
        seq.replays = false;
    }
    dflash2_verdict verdict;
    {
        scoped_timer timer(stats.t_sample_us, seq.stats.t_sample_us);
        verdict = seq.rule->accept([&](int32_t i) { return target_->logits(row + i); }, (llama_pos) seq.tokens.size(),
                                   seq.path, [&](llama_token token) { return is_stop(seq, token); },
                                   params_.exact && !plain ? noise_.bound(seq.n_company) : 0.0, seq.produced);
    }
    result.n_accepted         = verdict.n_accepted;
    const int32_t n_evaluated = seq.n_rows - n_drafted + result.n_accepted;
    seq.chosen                = row + result.n_accepted;
    for (dflash2_stats * counters : { &stats, &seq.stats }) {
        count(*counters, seq.n_pending() == 1, n_drafted, result.n_accepted, seq.produced.size());
    }

    if (draft_ && !replayed) {
        keep_features(seq, n_evaluated);
        if (seq.request.params.n_draft_max < 0) {
            seq.calibration.observe(seq.path.sure, n_drafted, result.n_accepted);
        }
    }
    seq.tokens.insert(seq.tokens.end(), seq.produced.begin(), seq.produced.end());
    seq.n_predicted += (int32_t) seq.produced.size();
    seq.n_past += n_evaluated;
    if (plain) {
        seq.n_plain   = seq.n_past;
        seq.n_company = 0;
    }

    // the last produced token can be a drafted one (a stop inside the block): it then is evaluated already
    const int32_t n_known = (int32_t) seq.tokens.size();
    seq.n_past            = std::min(seq.n_past, n_known);
    if (n_evaluated < seq.n_rows) {
        rewind(seq_id, seq, seq.n_past);
    }
    if (verdict.doubtful) {
        replay(seq_id, seq, target_->logits(row + verdict.n_accepted));
        return;
    }
    if (is_stop(seq, seq.produced.back())) {
        result.finish = DFLASH2_FINISH_STOP;
    } else if (seq.request.params.n_predict > 0 && seq.n_predicted >= seq.request.params.n_predict) {
        result.finish = DFLASH2_FINISH_LENGTH;
    } else if (n_known > (int32_t) n_ctx()) {
        result.finish = DFLASH2_FINISH_CONTEXT;
    }
    seq.active = result.finish == DFLASH2_FINISH_NONE;
}

// A sequence after the evaluation of its rows.
void dflash2_session::advance(llama_seq_id seq_id, sequence & seq, dflash2_step_result & result) {
    result           = {};
    result.seq_id    = seq_id;
    result.n_drafted = (int32_t) seq.path.tokens.size();
    for (dflash2_stats * counters : { &stats, &seq.stats }) {
        counters->n_replayed += seq.replays ? seq.n_rows : 0;
        counters->n_prompt += !seq.replays && seq.n_pending() > 1 ? seq.n_rows : 0;
    }
    if (seq.judged) {
        accept(seq_id, seq, result);
    } else {
        if (draft_ && !seq.replays) {
            keep_features(seq, seq.n_rows);
        }
        const bool plain = is_plain(seq);
        seq.n_past += seq.n_rows;
        seq.n_plain = plain ? seq.n_past : seq.n_plain;
    }
    result.n_tokens      = (int32_t) seq.produced.size();
    result.tokens        = seq.produced.data();
    result.n_prompt_left = seq.judged ? 0 : seq.n_pending();
}

int32_t dflash2_session::step(dflash2_step_result * results) {
    round_ = round();
    target_->clear_batch();
    for (sequence & seq : sequences_) {
        seq.n_rows = 0;
        seq.judged = false;
        seq.chosen = -1;
        seq.path.clear();
        seq.produced.clear();
    }
    const llama_seq_id alone   = next_alone();
    const bool         replays = alone >= 0 && sequences_[alone].replays;
    if (alone >= 0) {
        add_rows(alone, sequences_[alone], plain_chunk(sequences_[alone]));
    } else {
        draft_all();
        fill_shared_batch();
    }
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
        if (sequences_[s].n_rows > 0) {
            advance((llama_seq_id) s, sequences_[s], results[n_results++]);
        }
    }
    if (alone < 0) {
        learn(target_us);
    } else if (replays) {
        width_.observe(0, target_us);  // drafting is what made it necessary
    }
    return n_results;
}
