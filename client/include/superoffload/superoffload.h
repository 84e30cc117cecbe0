/* superoffload.h: the C interface of a trainer to superoffloadd.
 *
 * It covers the descriptor socket, the mappings and the step rings. Creating an optimizer, attaching to it and
 * settling it are gRPC calls (superoffload/v1/optimizer.proto) that the caller makes with the client of its own
 * language, passing superoffload_token() as the metadata "superoffload-token". The order of calls:
 *
 *   superoffload_connect                 -> token
 *   gRPC CreateOptimizer (once), AttachOptimizer (keep the stream) -> attachment_epoch, layout
 *   superoffload_attach                  -> mappings and rings
 *   per step: superoffload_begin_step, superoffload_gradient_ready..., superoffload_end_step, superoffload_wait_step
 *   superoffload_detach, superoffload_disconnect
 *
 * Every function that can fail returns a canonical status code (0 is OK, the numbers are gRPC's) and leaves a sentence
 * in superoffload_last_error(), which is per thread. One attachment may be used by one thread at a time to
 * submit and by one thread at a time to wait. Handles are not fork-safe. Nothing here throws or aborts.
 */
#ifndef SUPEROFFLOAD_SUPEROFFLOAD_H_
#define SUPEROFFLOAD_SUPEROFFLOAD_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define SUPEROFFLOAD_API __attribute__((visibility("default")))
#else
#define SUPEROFFLOAD_API
#endif

typedef struct superoffload_connection superoffload_connection;
typedef struct superoffload_attachment superoffload_attachment;

/* Version of this library, "MAJOR.MINOR.PATCH". */
SUPEROFFLOAD_API const char* superoffload_version(void);

/* Bytes of a struct of these headers as this library knows it, by its name ("superoffload_verdict"), 0 for one that it
 * does not have: for languages that declare the structs once more. */
SUPEROFFLOAD_API size_t superoffload_size_of(const char* name);

/* The sentence of the last failed call of this thread; empty when there was none. Valid until the next call. */
SUPEROFFLOAD_API const char* superoffload_last_error(void);

/* Connects to the descriptor socket (ServerInfo.descriptor_socket). UNAVAILABLE when nobody listens there. One connection
 * carries all attachments of a process to a daemon, which limits each user's connections; any thread may use it. */
SUPEROFFLOAD_API int superoffload_connect(const char* descriptor_socket, superoffload_connection** connection);

/* The token for gRPC metadata: 64 hexadecimal characters, NUL-ended, owned by the connection. */
SUPEROFFLOAD_API const char* superoffload_token(const superoffload_connection* connection);

/* Ends the connection, and with it every attachment made through it: their calls return UNAVAILABLE from then on. NULL is
 * allowed. */
SUPEROFFLOAD_API void superoffload_disconnect(superoffload_connection* connection);

/* Fetches and maps the memory of an attachment whose AttachOptimizer stream is open. `last_step` is Optimizer.step and
 * `bucket_count` the number of Layout.buckets of the attach response. */
SUPEROFFLOAD_API int superoffload_attach(superoffload_connection* connection, uint64_t attachment_epoch,
                                         uint64_t last_step, uint32_t bucket_count,
                                         superoffload_attachment** attachment);

/* Unmaps. The AttachOptimizer stream is the caller's to end. NULL is allowed. */
SUPEROFFLOAD_API void superoffload_detach(superoffload_attachment* attachment);

/* Base addresses and sizes of the mappings; offsets into them are in the Layout message. */
SUPEROFFLOAD_API void* superoffload_parameters(const superoffload_attachment* attachment, size_t* bytes);
SUPEROFFLOAD_API void* superoffload_gradients(const superoffload_attachment* attachment, size_t* bytes);

/* Private copy-on-write view of masters and moments; what it shows is only consistent after SettleOptimizer. */
SUPEROFFLOAD_API const void* superoffload_state(superoffload_attachment* attachment, size_t* bytes);

/* Sets the hyper-parameters of a parameter group: for the steps that follow, or, inside a step, revised for it. `scalars`
 * are the first `count` of the algorithm's, in the order in which Optimizer.groups of the attach response has them. */
SUPEROFFLOAD_API int superoffload_set_group(superoffload_attachment* attachment, uint32_t group, const double* scalars,
                                            uint32_t count);

/* Opens a step. `gradient_scale` is what the trainer expects to pass to end_step (1 without loss scaling). */
SUPEROFFLOAD_API int superoffload_begin_step(superoffload_attachment* attachment, double gradient_scale);

/* Parameters [first, first + count), in the order of creation, have no gradient in the open step: their weights, state
 * and step counts stay, as in torch.optim. Before any of their buckets is submitted; those are submitted all the same.
 */
SUPEROFFLOAD_API int superoffload_parameters_absent(superoffload_attachment* attachment, uint32_t first,
                                                    uint32_t count);

/* Submits a bucket whose gradient is complete in the current slot. The slot must not be written again. */
SUPEROFFLOAD_API int superoffload_gradient_ready(superoffload_attachment* attachment, uint32_t bucket);

/* Asks for the global norm of the gradients, once every bucket has been submitted; nothing is decided. */
SUPEROFFLOAD_API int superoffload_measure_norm(superoffload_attachment* attachment, double gradient_scale);

/* Closes the step: every bucket has been submitted. `max_grad_norm` 0 means no clipping. Does not wait. */
SUPEROFFLOAD_API int superoffload_end_step(superoffload_attachment* attachment, double gradient_scale,
                                           double max_grad_norm);

/* A rank of a run of several, in place of superoffload_end_step. prepare_step: every bucket has been submitted; the step
 * is prepared when superoffload_wait_prepared returns, and then outlives trainer and daemon. Gather the sums of squares of
 * all ranks, in this process group only, add them in rank order, and end the step with the total and the values that it
 * was prepared with. In between hyper-parameters cannot be changed and the step cannot be abandoned. When the gathering
 * fails, detach, and begin anew with a report (ReportRun of optimizer.proto) and superoffload_agree. */
SUPEROFFLOAD_API int superoffload_prepare_step(superoffload_attachment* attachment, double gradient_scale,
                                               double max_grad_norm);
SUPEROFFLOAD_API int superoffload_wait_prepared(superoffload_attachment* attachment, int64_t timeout_milliseconds,
                                                double* sum_of_squares);
SUPEROFFLOAD_API int superoffload_end_prepared_step(superoffload_attachment* attachment, double gradient_scale,
                                                    double max_grad_norm, double total_sum_of_squares);

/* What all ranks of a run tell each other before they attach: RunReport of optimizer.proto. */
typedef struct superoffload_run_terms {
  double sum_of_squares;
  double gradient_scale;
  double max_grad_norm;
} superoffload_run_terms;

typedef struct superoffload_run_report {
  uint64_t lineage;
  uint64_t committed_steps;
  superoffload_run_terms last;
  uint64_t prepared_step; /* 0: none is prepared */
  uint64_t prepared_attempt;
  superoffload_run_terms prepared;
} superoffload_run_report;

typedef struct superoffload_run_decision {
  uint32_t action;  /* 0: nothing, 1: ResolveStep commits, 2: ResolveStep abandons */
  uint64_t attempt; /* of ResolveStep */
  superoffload_run_terms commit;
} superoffload_run_decision;

/* What `rank` does with its prepared step, by the reports of all ranks, in rank order: if some rank has committed the step,
 * the others commit it; if none has, all abandon it. Every rank must have the reports of the same gathering. DATA_LOSS:
 * the ranks cannot go on together; the sentence names the rank and the remedy. */
SUPEROFFLOAD_API int superoffload_agree(const superoffload_run_report* reports, uint32_t ranks, uint32_t rank,
                                        superoffload_run_decision* decision);

/* Drops the open step; parameters return to those of the step before. Wait as after end_step. */
SUPEROFFLOAD_API int superoffload_abandon_step(superoffload_attachment* attachment);

typedef struct superoffload_verdict {
  uint32_t kind; /* 1 commit, 2 clip, 3 skip: non-finite, 4 skip: overflow, 5 skip: abandoned */
  uint32_t speculated_buckets;
  uint32_t republished_buckets;
  uint32_t next_slot;
  uint32_t consecutive_skips;
  uint64_t step;
  uint64_t committed_steps;
  double global_norm;
  double clip_coefficient;
} superoffload_verdict;

/* Waits for the verdict on the step that was ended last. A negative timeout waits for ever, 0 polls.
 * DEADLINE_EXCEEDED: not yet. UNAVAILABLE: the daemon is gone or has ended the attachment.
 * Errors that the daemon reports for submitted entries surface here and in superoffload_wait_step, with its code. */
SUPEROFFLOAD_API int superoffload_wait_verdict(superoffload_attachment* attachment, int64_t timeout_milliseconds,
                                               superoffload_verdict* verdict);

/* Waits for the answer to superoffload_measure_norm of the open step: the norm, or the sum of the squares, which is
 * without the gradient scale. Both are this rank's. */
SUPEROFFLOAD_API int superoffload_wait_norm(superoffload_attachment* attachment, int64_t timeout_milliseconds,
                                            double* global_norm);
SUPEROFFLOAD_API int superoffload_wait_sum(superoffload_attachment* attachment, int64_t timeout_milliseconds,
                                           double* sum_of_squares);

/* Waits until the parameters of one bucket, or of all buckets, are final for the step that was ended last. */
SUPEROFFLOAD_API int superoffload_wait_parameters(superoffload_attachment* attachment, uint32_t bucket,
                                                  int64_t timeout_milliseconds);
SUPEROFFLOAD_API int superoffload_wait_step(superoffload_attachment* attachment, int64_t timeout_milliseconds,
                                            superoffload_verdict* verdict);

/* Passes over memory, for trainers whose parameters and gradients are their own: published parameters are copied to
 * them after a step, gradients to slots before it, and what others changed meanwhile is found. They need no attachment.
 */
typedef struct superoffload_range {
  const void* from;
  void* to;
  uint64_t bytes;
} superoffload_range;

/* Copies `from` to `to` (not where `to` is NULL) and takes a digest of each range, with up to `threads` threads, which
 * end with the call. Equal digests mean equal bytes, but once in 2^64. */
SUPEROFFLOAD_API int superoffload_copy_and_digest(const superoffload_range* ranges, uint32_t count, uint32_t threads,
                                                  uint64_t* digests);

/* `range` becomes the index of a range whose `from` and `to` differ, or `count`. */
SUPEROFFLOAD_API int superoffload_find_difference(const superoffload_range* ranges, uint32_t count, uint32_t threads,
                                                  uint32_t* range);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SUPEROFFLOAD_SUPEROFFLOAD_H_ */
