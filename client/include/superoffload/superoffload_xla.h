/* superoffload_xla.h: the C interface of a trainer whose gradients come in pieces, from calls that XLA makes.
 *
 * XLA calls foreign functions (FFI handlers) while a compiled program runs, from threads of its own. The handlers of
 * this library hand a layer's gradients over as backward computes them. Which optimizer they mean is the number of a
 * submitter, an attribute of the call. A submitter copies pieces of gradients to the slot of the open step, begins the
 * step with the first of them, and submits each bucket when all its pieces are there. The order of calls:
 *
 *   superoffload_attach                  (superoffload.h)
 *   superoffload_xla_open, superoffload_xla_attach
 *   superoffload_xla_set_scalars         for the step that begins next
 *   per step: superoffload_xla_hand_over..., from here or by handlers; superoffload_xla_take;
 *             superoffload_end_step, superoffload_wait_step; superoffload_xla_step_over
 *   superoffload_xla_close               before superoffload_detach
 *
 * Any thread may call any of these at any time. Errors are as in superoffload.h.
 *
 * An attachment that was given GPU memory (superoffload_gpu_attach, before superoffload_xla_attach) takes gradients from
 * handlers for "cuda" only: they lie in GPU memory, and belong to XLA's stream again when it has gone past the call.
 * "publish" fills XLA's buffers with the parameters of the step that was ended last, "step" with those of the step that
 * it makes, for which it waits. max_bucket_tensors of the attach
 * is the most parameters that have elements in one bucket.
 */
#ifndef SUPEROFFLOAD_SUPEROFFLOAD_XLA_H_
#define SUPEROFFLOAD_SUPEROFFLOAD_XLA_H_

#include "superoffload/superoffload.h"
#include "superoffload/superoffload_gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A parameter of the optimizer, in the order of creation; Placement of optimizer.proto. Its gradient has its dtype. */
typedef struct superoffload_xla_parameter {
  uint64_t elements;
  uint64_t parameters_offset;
  uint64_t gradient_offsets[2];
  uint32_t first_bucket;
  uint32_t bucket_count;
  uint32_t dtype; /* DataType of optimizer.proto */
  uint32_t reserved;
} superoffload_xla_parameter;

typedef struct superoffload_xla_options {
  const superoffload_xla_parameter* parameters;
  const char* const* names;          /* of the parameters, for errors */
  const superoffload_bucket* buckets; /* as of the attach response */
  uint32_t parameter_count, bucket_count, group_count, scalar_count;
  uint32_t threads; /* that a copy may use; at least 1 */
  uint32_t reserved;
} superoffload_xla_options;

SUPEROFFLOAD_API int superoffload_xla_open(const superoffload_xla_options* options, int64_t* submitter);

/* Handlers that run meanwhile end first; later ones fail. A number is never used again. */
SUPEROFFLOAD_API void superoffload_xla_close(int64_t submitter);

/* What the submitter submits through from now on; NULL: nothing, which comes before the detach of what it used, and
 * before superoffload_gpu_end. The step that was open, if any, is the caller's. */
SUPEROFFLOAD_API int superoffload_xla_attach(int64_t submitter, superoffload_attachment* attachment);

/* Hyper-parameters of a group, all `count` of the algorithm's, for the steps that begin later. */
SUPEROFFLOAD_API int superoffload_xla_set_scalars(int64_t submitter, uint32_t group, const double* scalars,
                                                  uint32_t count);

/* No step is open; the next one fills `next_slot`, follows `committed_steps` and begins with `gradient_scale`. */
SUPEROFFLOAD_API int superoffload_xla_step_over(int64_t submitter, uint32_t next_slot, uint64_t committed_steps,
                                                double gradient_scale);

/* Elements [first, first + elements) of the gradient of a parameter, in the host's memory. A piece that has come before in this step is
 * FAILED_PRECONDITION. A daemon that is gone is no error: the piece is in its slot, and `gone` of superoffload_xla_take
 * tells. */
SUPEROFFLOAD_API int superoffload_xla_hand_over(int64_t submitter, uint32_t parameter, uint64_t first,
                                                uint64_t elements, const void* data);

/* The parameter has no gradient in the open step, as superoffload_parameters_absent. */
SUPEROFFLOAD_API int superoffload_xla_absent(int64_t submitter, uint32_t parameter);

/* Elements of each parameter that have come in the open step. An error is that of a handler in this step; `elements` are
 * filled in all the same. */
SUPEROFFLOAD_API int superoffload_xla_arrived(int64_t submitter, uint64_t* elements);

typedef struct superoffload_xla_open_step {
  uint32_t begun;        /* superoffload_begin_step has been called, with `gradient_scale` and the scalars set before */
  uint32_t bucket_count; /* buckets that were submitted */
  uint32_t gone;         /* submitting failed, because the daemon is */
  uint32_t lost;         /* a handler's whole step was cut off by the daemon's death, and nothing was attached since */
  uint32_t next_slot;
  uint32_t reserved;
  uint64_t committed_steps;
  uint64_t steps;    /* that handlers have ended by themselves */
  uint64_t skips[6]; /* of them, by verdict.kind */
  double gradient_scale;
  superoffload_verdict verdict; /* on the last of them */
} superoffload_xla_open_step;

SUPEROFFLOAD_API int superoffload_xla_look(int64_t submitter, superoffload_xla_open_step* step);

/* From now until superoffload_xla_step_over or _attach the open step is the caller's, and nobody else hands over.
 * `buckets`: those submitted, in their order; room for all. An error is that of a handler in this step; `step` is
 * filled in all the same. */
SUPEROFFLOAD_API int superoffload_xla_take(int64_t submitter, superoffload_xla_open_step* step, uint32_t* buckets);

/* The FFI handler for a platform: "hand_over", "step" and "count" for "cpu" and "cuda", "compare" for "cpu",
 * and "publish" for "cuda"; superoffload/jax/ffi.py has their operands. UNIMPLEMENTED: this library was built without XLA's headers, or there is
 * none for the platform. */
SUPEROFFLOAD_API int superoffload_xla_handler(const char* name, const char* platform, void** handler);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SUPEROFFLOAD_SUPEROFFLOAD_XLA_H_ */
