/* superoffload.h: the C interface of a trainer to superoffloadd.
 *
 * It covers the descriptor socket, the mappings and the step rings. Creating an optimizer, attaching to it and
 * settling it are gRPC calls (superoffload/v1/optimizer.proto) that the caller makes with the client of its own
 * language, passing the token of superoffload_connect as the metadata "superoffload-token". The order of calls:
 *
 *   superoffload_connect                 -> token
 *   gRPC CreateOptimizer (once), AttachOptimizer (keep the stream) -> attachment_epoch, layout
 *   superoffload_attach                  -> memory and rings
 *   superoffload_open_trainer (once), superoffload_use_attachment
 *   per step: superoffload_hand_over for each gradient, superoffload_end, superoffload_wait
 *   superoffload_close_trainer, superoffload_detach, superoffload_disconnect
 *
 * Every function that can fail returns a canonical status code (0 is OK, the numbers are gRPC's) and leaves a sentence
 * in superoffload_last_error(), which is per thread. Nothing here is fork-safe, and nothing throws or aborts.
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

/* Bytes of a struct of these headers as this library knows it, by its name ("superoffload_verdict"), 0 for one that it
 * does not have: for languages that declare the structs once more. */
SUPEROFFLOAD_API size_t superoffload_size_of(const char* name);

/* The sentence of the last failed call of this thread; empty when there was none. Valid until the next call. */
SUPEROFFLOAD_API const char* superoffload_last_error(void);

/* Connects to the descriptor socket (ServerInfo.descriptor_socket). `token` is filled in with that of the gRPC
 * metadata: 64 hexadecimal characters and a NUL. UNAVAILABLE when nobody listens there. One connection carries all
 * attachments of a process to a daemon, which limits each user's connections; any thread may use it. */
SUPEROFFLOAD_API int superoffload_connect(const char* descriptor_socket, superoffload_connection** connection,
                                          char token[65]);

/* Ends the connection, and with it every attachment made through it: their calls return UNAVAILABLE from then on. NULL
 * is allowed. */
SUPEROFFLOAD_API void superoffload_disconnect(superoffload_connection* connection);

/* Fetches and maps the memory of an attachment whose AttachOptimizer stream is open. `last_step` is Optimizer.step and
 * `bucket_count` the number of Layout.buckets of the attach response. */
SUPEROFFLOAD_API int superoffload_attach(superoffload_connection* connection, uint64_t attachment_epoch,
                                         uint64_t last_step, uint32_t bucket_count,
                                         superoffload_attachment** attachment);

/* Unmaps. The AttachOptimizer stream is the caller's to end. NULL is allowed. */
SUPEROFFLOAD_API void superoffload_detach(superoffload_attachment* attachment);

/* Memory of an attachment; offsets into it are in the Layout message. */
enum superoffload_region {
  SUPEROFFLOAD_REGION_PARAMETERS = 0, /* the gradients' memory where Layout.in_place says so */
  SUPEROFFLOAD_REGION_GRADIENTS = 1,
  /* A private copy-on-write view of masters and moments; what it shows is only consistent after SettleOptimizer. */
  SUPEROFFLOAD_REGION_STATE = 2
};

/* Where a region lies in this process until the detach, and how large it is. RESOURCE_EXHAUSTED: no room to map it. */
SUPEROFFLOAD_API int superoffload_memory(superoffload_attachment* attachment, uint32_t region, void** data,
                                         size_t* bytes);

/* A descriptor of the memory that the gRPC call LendMemory has lent to the attachment as `number`, to be mapped and
 * closed by the caller; a mapping of it may outlive the attachment. NOT_FOUND: there is none. */
SUPEROFFLOAD_API int superoffload_lent_memory(superoffload_attachment* attachment, uint64_t number, int* descriptor,
                                              size_t* bytes);

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

/* What `rank` does with its prepared step, by the reports of all ranks, in rank order: if some rank has committed the
 * step, the others commit it; if none has, all abandon it. Every rank must have the reports of the same gathering.
 * DATA_LOSS: the ranks cannot go on together; the sentence names the rank and the remedy. */
SUPEROFFLOAD_API int superoffload_agree(const superoffload_run_report* reports, uint32_t ranks, uint32_t rank,
                                        superoffload_run_decision* decision);

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

/* As Layout.buckets of the attach response has it. */
typedef struct superoffload_bucket {
  uint64_t elements;
  uint64_t parameters_offset;
  uint64_t gpu_offset; /* of the parameters in GPU memory, where there is some; as parameters_offset if nothing asks for
                          more */
  uint64_t gradient_offsets[2];
  uint64_t state_offset;
  uint32_t dtype; /* DataType of optimizer.proto */
  uint32_t gradient_dtype;
  uint32_t group;
  uint32_t log_slots;  /* of its log of gradients, of which the first two are the slots above; 0: it has none */
  uint64_t log_offset; /* bytes into the gradients: of the other slots, each of whole 4096 bytes */
  uint32_t format;     /* of its state, as Layout.arrays names it */
  uint32_t unit;       /* its parameters stream to the GPU with those of this unit; 0: they stay there */
} superoffload_bucket;

/* A parameter of the optimizer, in the order of creation, with its Placement of optimizer.proto. */
typedef struct superoffload_parameter {
  const char* name; /* what its stochastic rounding depends on, too */
  uint64_t elements;
  uint64_t parameters_offset;
  uint64_t gpu_offset;
  uint64_t gradient_offsets[2];
  uint64_t state_offset;
  uint32_t first_bucket;
  uint32_t bucket_count;
  uint32_t dtype; /* DataType of optimizer.proto */
  uint32_t gradient_dtype;
} superoffload_parameter;

/* The trainer's side of steps, in terms of parameters. It outlives attachments, and so the daemon: whatever a call is
 * for is noted before it is submitted. Where one returns UNAVAILABLE the daemon is gone: attach to its successor, and
 * superoffload_use_attachment submits the open step again, to the end that it was given. Any thread may call any of
 * these at any time; a trainer is a number, which is never used again, and is FAILED_PRECONDITION once it is closed. */
typedef struct superoffload_trainer_options {
  const superoffload_parameter* parameters;
  const superoffload_bucket* buckets;
  uint32_t parameter_count, bucket_count;
  uint32_t group_count, scalar_count; /* parameter groups, and hyper-parameters of each */
  uint32_t threads;                   /* that a copy may use; at least 1 */
  uint32_t reserved;
} superoffload_trainer_options;

SUPEROFFLOAD_API int superoffload_open_trainer(const superoffload_trainer_options* options, int64_t* trainer);

/* Calls that run meanwhile end first. Nothing is submitted for it afterwards: before the detach of what it used, which
 * it leaves as superoffload_use_attachment does. */
SUPEROFFLOAD_API void superoffload_close_trainer(int64_t trainer);

/* What became of a step that was open. */
enum superoffload_resumed {
  SUPEROFFLOAD_RESUMED_NOTHING = 0,   /* none was, or it is dropped */
  SUPEROFFLOAD_RESUMED_SUBMITTED = 1, /* it goes on */
  SUPEROFFLOAD_RESUMED_COMMITTED = 2, /* the former daemon had committed it: it is over */
  SUPEROFFLOAD_RESUMED_LOST = 3       /* some of its gradients were on a GPU, and are gone: it is dropped */
};

/* What is submitted goes to this attachment from now on; after superoffload_gpu_attach, where it has a GPU. `next_slot`
 * is of its attach response, `committed_steps` of the optimizer in it. `resumes` 0: an open step is dropped, and
 * hyper-parameters are those that the optimizer has.
 * NULL: nothing is submitted, and an open step stays noted; before the detach of what was used. That has nothing on a
 * GPU afterwards but its memory: this waits for the parameters of a step that was ended, at most 30 seconds, and then
 * for what the GPU has been given. */
SUPEROFFLOAD_API int superoffload_use_attachment(int64_t trainer, superoffload_attachment* attachment,
                                                 uint32_t next_slot, uint64_t committed_steps, uint32_t resumes,
                                                 uint32_t* resumed);

/* Hyper-parameters of a parameter group: of the open step, and of those that follow. `scalars` are all `count` of the
 * algorithm's, in the order in which Optimizer.groups of the attach response has them. */
SUPEROFFLOAD_API int superoffload_set_scalars(int64_t trainer, uint32_t group, const double* scalars, uint32_t count);

/* Elements [first, first + elements) of the gradient of a parameter, contiguous. */
typedef struct superoffload_piece {
  uint64_t data; /* an address of this process; on a GPU a device pointer */
  uint64_t first;
  uint64_t elements;
  uint32_t parameter;
  uint32_t dtype; /* DataType of optimizer.proto */
} superoffload_piece;

/* Whose memory gradients are afterwards. */
enum superoffload_stays {
  SUPEROFFLOAD_STAYS_NOT = 0,          /* the caller's, when the call returns or the stream has gone past it */
  SUPEROFFLOAD_STAYS_UNTIL_PACKED = 1, /* on a GPU: theirs until superoffload_gpu_stream has done what is on it */
  SUPEROFFLOAD_STAYS_UNTIL_OVER = 2    /* theirs until the step is over, so that a daemon's death loses none */
};

typedef struct superoffload_gradients {
  const superoffload_piece* pieces;
  /* Parameters without a gradient in the open step: their weights, state and step count stay, as in torch.optim. */
  const uint32_t* absent;
  uint32_t piece_count, absent_count;
  /* Not 0: the call opens a step that expects this scale, and is FAILED_PRECONDITION where one is open. 0: it opens one
   * where none is, which expects the scale of the last one, at first 1. */
  double gradient_scale;
  uint64_t stream; /* where `on_gpu`: pieces are there once it has done what was launched on it so far */
  uint32_t on_gpu; /* 1: in GPU memory */
  uint32_t stays;  /* enum superoffload_stays; in the host's memory NOT is best */
  /* Filled in, where not NULL: digests of the pieces, in the host's memory (superoffload_copy_and_digest). */
  uint64_t* digests;
  /* Filled in, where not NULL: parameters whose gradients have left altogether with this call; room for all. */
  uint32_t* left;
  uint32_t left_count;
  /* 1: of a pass after which more come in the same step; on a GPU, and they stay. They are added up in the daemon's
   * memory, in the order in which they come: in fp32, rounded to the parameter's gradient_dtype. A bucket's leave once
   * all of them have come, or some come again. In the last pass each parameter comes without this; with NULL for data
   * if it has none, but had in passes before. A daemon's death loses the step. `left` has room for twice all. */
  uint32_t more_follow;
} superoffload_gradients;

/* Gradients of the open step that are complete; none at all, to open it only. A bucket is submitted with the last piece
 * of it. What has come before in this step is FAILED_PRECONDITION. UNAVAILABLE: the daemon is gone; what was given
 * counts as handed over. A piece may be in its slot already (SUPEROFFLOAD_REGION_GRADIENTS). */
SUPEROFFLOAD_API int superoffload_hand_over(int64_t trainer, superoffload_gradients* gradients);

/* Of gradients in the host's memory that were handed over in the open step: `*index` becomes that of a piece which has
 * other bytes by now, or `count`. */
SUPEROFFLOAD_API int superoffload_find_edited(int64_t trainer, const superoffload_piece* pieces, uint32_t count,
                                              uint32_t* index);

/* How a step ends.
 * MEASURE comes before it: it asks for the norm of the gradients, all of which have come, and decides nothing.
 * PREPARE and PREPARED are of a rank of a run of several, in place of END. The step is prepared when its sum of squares
 * has come (superoffload_wait), and then outlives trainer and daemon. Gather the sums of all ranks, in this process
 * group only, add them in rank order, and end the step with the total and the values that it was prepared with. In
 * between hyper-parameters cannot be changed and the step cannot be abandoned. When the gathering fails, detach, and
 * begin anew with a report (ReportRun of optimizer.proto) and superoffload_agree. */
enum superoffload_end_kind {
  SUPEROFFLOAD_END = 0,
  SUPEROFFLOAD_END_PREPARE = 1,
  SUPEROFFLOAD_END_PREPARED = 2,
  SUPEROFFLOAD_END_ABANDON = 3, /* parameters return to those of the step before; not all gradients need have come */
  SUPEROFFLOAD_END_MEASURE = 4
};

typedef struct superoffload_step_end {
  double gradient_scale;
  double max_grad_norm;        /* 0: no clipping */
  double total_sum_of_squares; /* of PREPARED */
  uint32_t kind;               /* enum superoffload_end_kind */
  uint32_t stream_count;
  /* On a GPU: what was launched on these streams so far reads the parameters as they are. They change after it, and
   * after what the streams of the step's gradients were given. */
  const uint64_t* streams;
} superoffload_step_end;

/* Does not wait. */
SUPEROFFLOAD_API int superoffload_end(int64_t trainer, const superoffload_step_end* end);

/* What can be waited for. */
enum superoffload_await_kind {
  SUPEROFFLOAD_AWAIT_NORM = 0,     /* the answer to MEASURE: norm, sum_of_squares, both this rank's */
  SUPEROFFLOAD_AWAIT_PREPARED = 1, /* sum_of_squares */
  SUPEROFFLOAD_AWAIT_VERDICT = 2,  /* on the step that was ended last, which is over then: verdict */
  SUPEROFFLOAD_AWAIT_STEP = 3,     /* the same, and its parameters are final */
  SUPEROFFLOAD_AWAIT_BUCKET = 4,   /* those in a bucket are, in the host's memory */
  /* `stream` waits for a bucket's, on the GPU. The call waits only until the daemon has published them.
   * FAILED_PRECONDITION: they stream (superoffload_gpu_read_unit). */
  SUPEROFFLOAD_AWAIT_BUCKET_ON_GPU = 5
};

typedef struct superoffload_awaited {
  uint32_t kind; /* enum superoffload_await_kind */
  uint32_t bucket;
  uint64_t stream;
} superoffload_awaited;

typedef struct superoffload_answer {
  double norm;
  double sum_of_squares; /* without the gradient scale */
  superoffload_verdict verdict;
} superoffload_answer;

/* A negative timeout waits for ever, 0 polls. DEADLINE_EXCEEDED: not yet. Errors that the daemon reports for what was
 * submitted surface here, with its code. `answer` may be NULL for what has none. */
SUPEROFFLOAD_API int superoffload_wait(int64_t trainer, const superoffload_awaited* awaited,
                                       int64_t timeout_milliseconds, superoffload_answer* answer);

typedef struct superoffload_open_step_state {
  uint32_t begun;    /* a step is open */
  uint32_t prepared; /* it was asked to be, or was ended as one that is: other ranks may have committed it */
  uint32_t ended;    /* its verdict is to come */
  uint32_t gone;     /* the daemon is */
  uint32_t lost;     /* a whole step of XLA's was cut off by the daemon's death, and nothing was attached since */
  uint32_t next_slot;
  uint64_t committed_steps;
  uint64_t steps;               /* that calls of XLA have made by themselves */
  uint64_t skips[6];            /* of them, by verdict.kind */
  superoffload_verdict verdict; /* on the last of them */
  double stall_seconds;         /* that AWAIT_BUCKET_ON_GPU has waited for the daemon since the step was ended last */
} superoffload_open_step_state;

/* `arrived`, where not NULL, is filled in with the elements of each parameter that have come in the open step; then an
 * error is that of a call of XLA in this step, and everything is filled in all the same. */
SUPEROFFLOAD_API int superoffload_look(int64_t trainer, superoffload_open_step_state* step, uint64_t* arrived);

/* Passes over memory, for trainers whose parameters and gradients are their own: published parameters are copied to
 * them after a step, gradients to slots before it, and what others changed meanwhile is found.
 */
typedef struct superoffload_range {
  const void* from;
  void* to;
  uint64_t bytes;
} superoffload_range;

/* superoffload_copy_and_digest of a range per parameter, each as soon as the parameter of the step that was ended last
 * is final; others may still be published. `received` has a 0 for each before the first call, and a 1 for those that
 * are there: after DEADLINE_EXCEEDED the next call goes on with the rest. */
SUPEROFFLOAD_API int superoffload_receive(int64_t trainer, const superoffload_range* ranges,
                                          int64_t timeout_milliseconds, uint64_t* digests, uint8_t* received);

/* Copies `from` to `to` (not where `to` is NULL) and takes a digest of each range, with up to `threads` threads, which
 * end with the call. It needs no attachment. Equal digests mean equal bytes, but once in 2^64. */
SUPEROFFLOAD_API int superoffload_copy_and_digest(const superoffload_range* ranges, uint32_t count, uint32_t threads,
                                                  uint64_t* digests);

/* XLA calls foreign functions (FFI handlers) while a compiled program runs, from threads of its own: those of this
 * library hand a layer's gradients over as backward computes them, or make a whole step. Which trainer they mean is its
 * number, an attribute of the call. A handler for a platform: "hand_over", "step" and "count" for "cpu" and "cuda",
 * "compare" for "cpu", and "publish" for "cuda"; superoffload/jax/ffi.py has their operands. UNIMPLEMENTED: this
 * library was built without XLA's headers, or there is none for the platform. */
SUPEROFFLOAD_API int superoffload_xla_handler(const char* name, const char* platform, void** handler);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SUPEROFFLOAD_SUPEROFFLOAD_H_ */
