// libdflash2: block drafting and lossless verification on top of llama.cpp.
//
// A session owns a target context, a draft context and the state of up to n_seq_max sequences. Models are
// loaded and freed by the caller (llama_model_load_from_file) and must outlive the session.
//
// Life of a sequence: dflash2_session_seq_begin() takes the whole prompt and keeps what the caches already
// hold of it; every dflash2_session_step() then advances active sequences, by a chunk of their prompt or
// by one draft-verify round; dflash2_session_seq_end() keeps the caches for the next begin. The drafter only
// ever changes how many tokens a step yields, never which.
//
// A row evaluated among others differs by rounding from the same row evaluated alone, and where two tokens are that
// close either may come first. Exact mode removes this: a decision that rounding could turn is taken again from rows
// evaluated alone, in the order in which plain decoding evaluates them, so that the tokens are those of a session
// without drafter that serves one sequence from empty caches.
//
// Conventions: functions return 0 or a count on success and a negative dflash2_status on failure, with the
// reason in dflash2_last_error(). No exception crosses this boundary. Units are tokens, bytes and
// microseconds. One thread at a time per session, except dflash2_session_abort(), which any thread may call.

#pragma once

#include "llama.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && !defined(__MINGW32__)
#    ifdef DFLASH2_BUILD
#        define DFLASH2_API __declspec(dllexport)
#    else
#        define DFLASH2_API __declspec(dllimport)
#    endif
#else
#    define DFLASH2_API __attribute__((visibility("default")))
#endif

// raised whenever a struct or a function of this header changes
#define DFLASH2_ABI_VERSION 4

// positions counted one by one in the statistics; later ones are added to the last
#define DFLASH2_MAX_DRAFT 32

#ifdef __cplusplus
extern "C" {
#endif

struct dflash2_session;
struct dflash2_replay;

enum dflash2_status {
    DFLASH2_OK             = 0,
    DFLASH2_ERROR_ARGUMENT = -1,  // an argument is out of range, or the call is not valid now
    DFLASH2_ERROR_PAIR     = -2,  // target and drafter do not belong together, or the target cannot feed it
    DFLASH2_ERROR_MEMORY   = -3,  // an allocation failed
    DFLASH2_ERROR_CONTEXT  = -4,  // the context is full
    DFLASH2_ERROR_COMPUTE  = -5,  // llama.cpp could not evaluate a batch
    DFLASH2_ERROR_ABORTED  = -6,  // dflash2_session_abort() was called; the sequences are intact
    DFLASH2_ERROR_STATE    = -7,  // a saved state is damaged, or of another model, build or kind of cache
};

// How drafted tokens are accepted. All are lossless: the tokens have the law of plain decoding. greedy, match and
// coupled give the very same tokens as plain decoding with the same seed. See verify.h.
enum dflash2_verifier {
    DFLASH2_VERIFIER_AUTO    = 0,  // greedy at temperature <= 0; coupled with a seed or a grammar; else block
    DFLASH2_VERIFIER_GREEDY  = 1,  // equality with the most likely token of the target
    DFLASH2_VERIFIER_MATCH   = 2,  // best drafted path, equality with the target's sample (upstream's rule)
    DFLASH2_VERIFIER_COUPLED = 3,  // draft and target sample with the same noise, equality
    DFLASH2_VERIFIER_REJECT  = 4,  // sampled path, speculative rejection sampling token by token
    DFLASH2_VERIFIER_BLOCK   = 5,  // sampled path, rejection of whole prefixes; accepts at least as much as reject
};

enum dflash2_finish {
    DFLASH2_FINISH_NONE    = 0,  // still going
    DFLASH2_FINISH_STOP    = 1,  // an end-of-generation or stop token was produced (it is the last token)
    DFLASH2_FINISH_LENGTH  = 2,  // n_predict tokens were produced
    DFLASH2_FINISH_CONTEXT = 3,  // the context is full
};

// why a step had to be decoded without a draft
enum dflash2_draft_failure {
    DFLASH2_DRAFT_FAILURE_CACHE   = 0,  // no room in the draft cache
    DFLASH2_DRAFT_FAILURE_COMPUTE = 1,  // the draft pass or the injection failed
    DFLASH2_DRAFT_FAILURE_VALUES  = 2,  // the drafter returned NaN or token ids out of range
    DFLASH2_DRAFT_FAILURE_COUNT   = 3,
};

// why a round drafted, or did not, where the width is automatic
enum dflash2_width_reason {
    DFLASH2_WIDTH_DRAFTS       = 0,  // drafting pays
    DFLASH2_WIDTH_EXPLORES     = 1,  // nothing is known yet
    DFLASH2_WIDTH_PROBES       = 2,  // does it pay again?
    DFLASH2_WIDTH_PLAIN        = 3,  // it does not
    DFLASH2_WIDTH_REFRESHES    = 4,  // measuring again what a plain step costs
    DFLASH2_WIDTH_REASON_COUNT = 5,
};

struct dflash2_session_params {
    uint32_t n_ctx;            // target context in tokens; 0 = what the model was trained with
    uint32_t n_batch;          // prompt tokens per step
    uint32_t n_batch_shared;   // the same while other sequences generate, so that a long prompt does not hold them up;
                               // 0 = n_batch
    uint32_t n_ubatch;         // target micro-batch
    uint32_t n_seq_max;        // sequences that can be held at once
    int32_t  n_draft_max;      // most drafted tokens per round; < 0 = block size - 1, 0 = no drafting
    int32_t  n_threads;        // <= 0 = all usable CPUs
    int32_t  n_threads_batch;  // <= 0 = n_threads
    int32_t  type_k;           // ggml_type of the K caches; the drafter's is F16 where this is quantized
    int32_t  type_v;           // same for V
    int32_t  flash_attn;       // enum llama_flash_attn_type
    bool     offload_kqv;      // keep the KV caches on the device
    bool     exact;            // the very tokens of plain decoding; not with the verifiers reject and block
    bool     calibrate;        // record what the drafter's weights are multiplied with; slower
    float    noise_min;        // exact mode: rounding moves logits by at least this, if measuring it shows less
};

struct dflash2_seq_params {
    int32_t             verifier;     // enum dflash2_verifier
    int32_t             n_predict;    // tokens to produce; < 0 = until stop or context is full
    int32_t             n_draft_max;  // drafted tokens per round; < 0 = as many as pay, 0 = never draft
    bool                ignore_eos;   // end-of-generation tokens do not stop the sequence
    const llama_token * stop;         // further tokens that stop it, may be NULL
    size_t              n_stop;

    // samplers, applied in this order: logit bias, grammar, penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p,
    // XTC, temperature
    uint32_t                 seed;             // LLAMA_DEFAULT_SEED = random
    float                    temp;             // <= 0 = greedy
    int32_t                  top_k;            // <= 0 = off
    float                    top_p;            // 1.0 = off
    float                    min_p;            // 0.0 = off
    int32_t                  penalty_last_n;   // 0 = off, -1 = context size
    float                    penalty_repeat;   // 1.0 = off
    float                    penalty_freq;     // 0.0 = off
    float                    penalty_present;  // 0.0 = off
    float                    typical_p;        // 1.0 = off
    float                    top_n_sigma;      // <= 0 = off
    float                    xtc_probability;  // 0.0 = off
    float                    xtc_threshold;
    float                    dry_multiplier;   // 0.0 = off
    float                    dry_base;
    int32_t                  dry_allowed_length;
    int32_t                  dry_penalty_last_n;  // 0 = off, -1 = context size
    const llama_logit_bias * logit_bias;          // may be NULL
    size_t                   n_logit_bias;
    const char *             grammar;             // GBNF with a rule "root", NULL = none
};

struct dflash2_step_result {
    llama_seq_id        seq_id;
    int32_t             n_tokens;       // tokens produced in this step; 0 while the prompt is read
    const llama_token * tokens;         // valid until the next call on the session
    int32_t             n_drafted;      // tokens the drafter proposed in this step
    int32_t             n_accepted;     // the first n_accepted of tokens came from the drafter
    int32_t             n_prompt_left;  // prompt tokens not evaluated yet
    int32_t             finish;         // enum dflash2_finish
};

// counters of the session since init or dflash2_session_stats_reset()
struct dflash2_stats {
    uint64_t n_prompt;                        // prompt tokens evaluated by the target
    uint64_t n_prompt_reused;                 // prompt tokens that were in the cache already
    uint64_t n_injected;                      // feature rows written into the draft cache
    uint64_t n_generated;                     // tokens produced
    uint64_t n_steps;                         // verification steps: evaluations of an anchor, with or without a draft
    uint64_t n_draft_passes;                  // evaluations of the drafter
    uint64_t n_drafted;                       // tokens proposed
    uint64_t n_accepted;                      // tokens accepted
    uint64_t accepted_at[DFLASH2_MAX_DRAFT];  // rounds in which the draft at this position was accepted
    uint64_t drafted_at[DFLASH2_MAX_DRAFT];   // rounds in which this position was drafted
    uint64_t draft_failures[DFLASH2_DRAFT_FAILURE_COUNT];
    uint64_t t_prompt_us;                     // target evaluation of prompts
    uint64_t t_inject_us;
    uint64_t t_draft_us;
    uint64_t t_verify_us;
    uint64_t t_sample_us;
    uint64_t n_prompt_sampled;  // tokens produced by the evaluation of a prompt, not by a verification step
    uint64_t verified_width[DFLASH2_MAX_DRAFT + 1];  // verification steps by how many drafted tokens they verified
    uint64_t rounds_by_reason[DFLASH2_WIDTH_REASON_COUNT];  // rounds in which the width was automatic
    uint64_t n_doubts;                                      // exact mode: decisions that rounding could have turned
    uint64_t n_replayed;                                    // exact mode: tokens evaluated again, alone, to take them
    double   noise;  // exact mode: by how much evaluating rows together was seen to change a logit
};

// bytes, per part; measured on a model without weights (llama_model_params.no_alloc) it is a plan
struct dflash2_memory {
    uint64_t target_weights;
    uint64_t target_cache;      // KV cache and recurrent state, without snapshots
    uint64_t target_snapshots;  // recurrent states kept for rollback
    uint64_t target_compute;
    uint64_t draft_weights;
    uint64_t draft_cache;
    uint64_t draft_compute;
    uint64_t device;  // of all these, what lies in the memory of GPUs; the rest is the host's
};

// What the drafter proposed last for a sequence: the lattice of candidates and the path through it.
struct dflash2_draft_view {
    int32_t             n_drafted;   // positions
    int32_t             top_k;       // candidates per position, K
    const llama_token * path;        // [n_drafted]
    const llama_token * candidates;  // [n_drafted][K], unordered
    const float *       scores;      // [n_drafted][K][K], [t][a][b]: candidate b of t after candidate a of t-1;
                                     // all a are equal for t = 0, whose predecessor is the anchor
};

// What a weight of the drafter was multiplied with since the session exists. A row of a selector codebook counts as
// multiplied with what the score multiplies it with: the gate times the other codebook's row.
struct dflash2_importance {
    const char *   name;    // of the weight in the drafter's file
    const double * sums;    // [n_cols] of the squares of what met a column
    int64_t        n_cols;
    int64_t        n_rows;  // summed: feature rows, rows of blocks or, for a codebook, rows of the other one
};

//
// library
//

DFLASH2_API int32_t dflash2_abi_version(void);

// "<llama.cpp commit>+<hash of the patch stack>", fixed at compile time
DFLASH2_API const char * dflash2_build_info(void);

// reason of the calling thread's last failure, "" if there was none
DFLASH2_API const char * dflash2_last_error(void);

//
// pairs
//

// Do target and drafter belong together, and can the target's graph publish the layers the drafter reads?
// Works on models without weights, so that a wrong pair is found before hundreds of GB are read.
// 0, DFLASH2_ERROR_PAIR with the reason in dflash2_last_error(), or DFLASH2_ERROR_ARGUMENT.
DFLASH2_API int32_t dflash2_check_pair(struct llama_model * target, const struct llama_model * draft);

// Does the graph of the target publish the input of layer lid (the output of layer lid - 1) for every token?
// 1 = yes, 0 = no with the reason in dflash2_last_error(), or a negative dflash2_status.
DFLASH2_API int32_t dflash2_target_publishes(struct llama_model * target, int32_t lid);

// Memory that a session with these parameters takes. draft may be NULL.
DFLASH2_API int32_t dflash2_plan(struct llama_model *                  target,
                                 struct llama_model *                  draft,
                                 const struct dflash2_session_params * params,
                                 struct dflash2_memory *               memory);

//
// session
//

DFLASH2_API struct dflash2_session_params dflash2_session_default_params(void);
DFLASH2_API struct dflash2_seq_params     dflash2_seq_default_params(void);

// draft may be NULL: the session then decodes plainly. NULL on failure; *status (may be NULL) says which kind.
DFLASH2_API struct dflash2_session * dflash2_session_init(struct llama_model *                  target,
                                                          struct llama_model *                  draft,
                                                          const struct dflash2_session_params * params,
                                                          int32_t *                             status);

DFLASH2_API void dflash2_session_free(struct dflash2_session * session);

// Start (or continue) sequence seq_id with this whole prompt. The longest common prefix with what the caches
// hold is kept. Evaluates nothing. Returns the number of reused tokens or a negative status.
DFLASH2_API int32_t dflash2_session_seq_begin(struct dflash2_session *          session,
                                              llama_seq_id                      seq_id,
                                              const llama_token *               tokens,
                                              size_t                            n_tokens,
                                              const struct dflash2_seq_params * params);

// Stop producing for seq_id; its caches stay for the next begin.
DFLASH2_API int32_t dflash2_session_seq_end(struct dflash2_session * session, llama_seq_id seq_id);

// Forget seq_id altogether.
DFLASH2_API int32_t dflash2_session_seq_clear(struct dflash2_session * session, llama_seq_id seq_id);

// One evaluation of the target, for all active sequences or, in exact mode, for one that must be alone; a sequence
// that waits gets the next step. results must hold n_seq_max entries. Returns how many were filled, 0 when no sequence
// is active, or a negative status; DFLASH2_ERROR_ABORTED leaves all sequences as they were.
DFLASH2_API int32_t dflash2_session_step(struct dflash2_session * session, struct dflash2_step_result * results);

// Make the step in progress (or the next one) return DFLASH2_ERROR_ABORTED soon. Any thread.
DFLASH2_API void dflash2_session_abort(struct dflash2_session * session);

// Last draft of seq_id; pointers are valid until the next call on the session.
DFLASH2_API int32_t dflash2_session_draft_view(const struct dflash2_session * session,
                                               llama_seq_id                   seq_id,
                                               struct dflash2_draft_view *    view);

DFLASH2_API uint32_t dflash2_session_n_ctx(const struct dflash2_session * session);
DFLASH2_API int32_t  dflash2_session_n_draft_max(const struct dflash2_session * session);

// Everything of seq_id: tokens, both caches, samplers, and where a generation stands. *data holds *size bytes until
// the next call on the session.
DFLASH2_API int32_t dflash2_session_seq_save(struct dflash2_session * session,
                                             llama_seq_id             seq_id,
                                             const uint8_t **         data,
                                             size_t *                 size);

// Replaces seq_id by a saved sequence, which goes on where it was. Returns its number of tokens, or
// DFLASH2_ERROR_STATE for data that is damaged or of another model, build or kind of cache, or
// DFLASH2_ERROR_CONTEXT where it does not fit. seq_id is untouched after a failure, but empty where only llama.cpp
// could find it.
DFLASH2_API int32_t dflash2_session_seq_restore(struct dflash2_session * session,
                                                llama_seq_id             seq_id,
                                                const uint8_t *          data,
                                                size_t                   size);

// 1 while seq_id produces tokens, else 0
DFLASH2_API int32_t dflash2_session_seq_is_active(const struct dflash2_session * session, llama_seq_id seq_id);

// All tokens of seq_id, known to the session until the next call on it. Returns their number.
DFLASH2_API int32_t dflash2_session_seq_tokens(const struct dflash2_session * session,
                                               llama_seq_id                   seq_id,
                                               const llama_token **           tokens);

// tokens of seq_id that the target has evaluated
DFLASH2_API int32_t dflash2_session_seq_n_past(const struct dflash2_session * session, llama_seq_id seq_id);

// Logits [n_vocab] that the last token of seq_id was chosen from in the last step, until the next call on the session.
DFLASH2_API int32_t dflash2_session_seq_logits(const struct dflash2_session * session,
                                               llama_seq_id                   seq_id,
                                               const float **                 logits);

// The counters of seq_id alone, since its begin. It has its share of the time that sequences spend together.
DFLASH2_API int32_t dflash2_session_seq_stats(const struct dflash2_session * session,
                                              llama_seq_id                   seq_id,
                                              struct dflash2_stats *         stats);

// Weights that a session with params.calibrate has recorded something for, in the order of their names. Weights that the
// target lends are not among them. DFLASH2_ERROR_COMPUTE where the drafter computed values that cannot be summed.
DFLASH2_API int32_t dflash2_session_importance_size(const struct dflash2_session * session);

// The i-th of them; pointers are valid until the next call on the session.
DFLASH2_API int32_t dflash2_session_importance(const struct dflash2_session * session,
                                               int32_t                        i,
                                               struct dflash2_importance *    importance);

DFLASH2_API void dflash2_session_stats(const struct dflash2_session * session, struct dflash2_stats * stats);
DFLASH2_API void dflash2_session_stats_reset(struct dflash2_session * session);
DFLASH2_API void dflash2_session_memory(const struct dflash2_session * session, struct dflash2_memory * memory);

//
// replay: several drafters on the same rows of target features
//

// The drafters must read the same layers of the target. Models must outlive the replay. params as for a session of one
// sequence. NULL on failure; *status (may be NULL) says which kind.
DFLASH2_API struct dflash2_replay * dflash2_replay_init(struct llama_model *                  target,
                                                        struct llama_model * const *          drafts,
                                                        int32_t                               n_drafts,
                                                        const struct dflash2_session_params * params,
                                                        int32_t *                             status);

DFLASH2_API void dflash2_replay_free(struct dflash2_replay * replay);

// floats of a feature row
DFLASH2_API int32_t dflash2_replay_n_features(const struct dflash2_replay * replay);

// tokens that every one of the drafters can draft
DFLASH2_API int32_t dflash2_replay_n_draft_max(const struct dflash2_replay * replay);

// The target evaluates a text from an empty cache, in batches as decoding has them: its first n_prompt tokens as a
// prompt, the others in blocks. Fills rows [n_tokens - 1][n_features], the features of all tokens but the last, and
// log_p [n_tokens - n_prompt], the log-probability at temperature 1 of each token behind the prompt.
DFLASH2_API int32_t dflash2_replay_read(struct dflash2_replay * replay,
                                        const llama_token *     tokens,
                                        int32_t                 n_tokens,
                                        int32_t                 n_prompt,
                                        float *                 rows,
                                        float *                 log_p);

// Rows for the cache of a drafter, from position pos on; rows that do not continue what is there replace it.
DFLASH2_API int32_t dflash2_replay_inject(struct dflash2_replay * replay,
                                          int32_t                 drafter,
                                          llama_pos               pos,
                                          const float *           rows,
                                          int32_t                 n_rows);

// What a drafter proposes for n tokens after anchor, which follows the injected rows. view has no path; its pointers are
// valid until the next call on the replay.
DFLASH2_API int32_t dflash2_replay_draft(struct dflash2_replay *     replay,
                                         int32_t                     drafter,
                                         llama_token                 anchor,
                                         int32_t                     n,
                                         struct dflash2_draft_view * view);

#ifdef __cplusplus
}
#endif
