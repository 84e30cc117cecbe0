/* superoffload_gpu.h: the C interface of a trainer whose model is on an NVIDIA GPU.
 *
 * After superoffload_open_trainer and superoffload_attach (superoffload.h) the trainer gives the attachment GPU memory:
 * a copy of the parameters, of which the model's tensors become views, and a ring of device slots through which
 * gradients leave. Then, in every step, in place of writing gradient memory and reading parameter memory:
 *
 *   superoffload_hand_over of each gradient, as backward completes it      (packs on a side stream)
 *   superoffload_end, superoffload_wait for the verdict
 *   superoffload_wait for each bucket on the GPU, just before the next forward reads it  (the stream waits)
 *
 * Parameters in GPU memory change when a step commits and at no other time: after superoffload_end, and after
 * everything that was launched before it on the streams that the step's calls named, which must live until then. Those
 * that the next forward reads first, of the buckets with the highest numbers, come first.
 *
 * No call but superoffload_gpu_attach, _copy, _end_landings, _set_resident and the end of an attachment's use waits for
 * the GPU. No stream may be captured into a CUDA graph: FAILED_PRECONDITION. Streams are CUstream or cudaStream_t as
 * integers, 0 the default stream; pointers are device pointers of this process. CUDA is loaded at run time; without a
 * driver the answer is UNAVAILABLE and the host's interface still works.
 */
#ifndef SUPEROFFLOAD_SUPEROFFLOAD_GPU_H_
#define SUPEROFFLOAD_SUPEROFFLOAD_GPU_H_

#include "superoffload/superoffload.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Who copies between the GPU's and the daemon's memory. */
enum superoffload_mover {
  SUPEROFFLOAD_MOVER_AUTO = 0,    /* TRAINER, unless another slows the trainer's kernels down less, as
                                      measured at attach; DIRECT only where the GPU uses the host's page tables */
  SUPEROFFLOAD_MOVER_DAEMON = 1,  /* the daemon, from and to the trainer's GPU memory */
  SUPEROFFLOAD_MOVER_TRAINER = 2, /* this process, from and to the daemon's host memory */
  SUPEROFFLOAD_MOVER_DIRECT = 3   /* this process; its packing kernel stores straight into the daemon's host memory */
};

/* GPU memory for an attachment, reserved before it is used (superoffload_gpu_reserve). */
typedef struct superoffload_gpu_memory superoffload_gpu_memory;

/* Parameter of optimizer.proto: its shape, and where that lies in the tensor that it is a shard of. */
typedef struct superoffload_shard {
  uint32_t dimensions;
  uint32_t global_dimensions; /* as many, or 0: it is the whole tensor */
  const uint64_t* shape;
  const uint64_t* global_shape;
  const uint64_t* global_offset;
} superoffload_shard;

typedef struct superoffload_gpu_options {
  int32_t ordinal;       /* of the GPU, as this process counts them (CUDA_VISIBLE_DEVICES) */
  uint32_t mover;        /* enum superoffload_mover */
  uint32_t share;        /* 1: the daemon must map the GPU memory, whoever copies; 0: where it may have to copy */
  uint32_t device_slots; /* gradients in flight, at most 16; 0: 16 if free memory is ample, else 8 */
  uint32_t next_slot;    /* AttachOptimizerResponse.next_slot */
  /* What resident buckets are updated with: Optimizer.algorithm; the scalars of all groups as of the attach, which
   * superoffload_set_scalars changes; Layout.arrays, of each format in turn; Optimizer.parameter_steps, NULL where it
   * is empty; and, where state is rounded stochastically, Optimizer.seed and which part of its tensor each parameter
   * is. */
  uint32_t array_count;
  const char* algorithm;
  const double* scalars;
  const uint64_t* array_offsets;
  const uint64_t* parameter_steps;
  uint64_t committed_steps; /* Optimizer.committed_steps */
  uint64_t seed;
  const superoffload_shard* shards; /* by parameter; NULL: each is its whole tensor */
  /* An attachment to the same optimizer that has ended, whose GPU memory is taken over: views of it stay valid. It can
   * only be detached afterwards. NULL: the memory is new. */
  superoffload_attachment* previous;
  /* What superoffload_gpu_reserve has made with the same options; it stays the caller's. NULL: allocated, or that of
   * `previous`. */
  const superoffload_gpu_memory* memory;
  /* 1: `memory` holds the parameters once `push_stream` has done what was launched on it so far. They are copied to the
   * daemon's memory first, as superoffload_gpu_copy does; else what is measured leaves them undefined. */
  uint32_t push;
  uint32_t stream_slots; /* that units share (superoffload_bucket.unit); 0 where none streams */
  uint64_t push_stream;
} superoffload_gpu_options;

/* What the attach found out, and chose. Seconds are those that kernels as the trainer's (matrix
 * products) took longer for one gradient that was copied out beside them, and its parameters back; 0: not measured. */
typedef struct superoffload_gpu_report {
  uint32_t mover;    /* not AUTO */
  uint32_t shared;   /* 1: the daemon maps the GPU memory */
  uint32_t coherent; /* the GPU uses the host's page tables: memory that cannot be registered does as well */
  uint32_t staged;   /* registering host memory failed: copies pass through the driver's buffers, which is slow */
  double seconds[4]; /* by enum superoffload_mover */
  uint64_t gpu_bytes;
  uint64_t slot_bytes;  /* of these: of a slot for units that stream */
  uint64_t parameters;  /* device pointer; offsets from it are those of the host's */
  uint64_t pack_stream; /* the side stream on which gradients are packed */
  char gpu[64];         /* its name */
  char notes[512];      /* why something that was asked for, or would be better, was not done; NUL-ended */
} superoffload_gpu_report;

/* Gives an attachment GPU memory, before the trainer uses it. UNAVAILABLE: no driver, or no GPU. RESOURCE_EXHAUSTED:
 * out of GPU memory. FAILED_PRECONDITION: an explicit mover, or `share`, cannot work (the sentence says why); with AUTO
 * it falls back. */
SUPEROFFLOAD_API int superoffload_gpu_attach(int64_t trainer, superoffload_attachment* attachment,
                                             const superoffload_gpu_options* options, superoffload_gpu_report* report);

/* Weights that stream. The parameters of a unit, such as a block of the model, have addresses of their own in GPU
 * memory, for ever, and units take turns at a few slots of memory: what changes is whose parameters are there. A unit's
 * buckets hold parameters of no other unit (Parameter.unit).
 *
 * Where each bucket's parameters lie then: `gpu_offsets`, of all buckets, become what superoffload_bucket.gpu_offset
 * must be, and *bytes what memory they take together. `buckets` have their units, and gpu_offset as if nothing
 * streamed. Units take turns at the slots in the order of their numbers, which should be that of the forward pass.
 * INVALID_ARGUMENT: a unit's buckets do not lie beside each other, or there are no slots. */
SUPEROFFLOAD_API int superoffload_gpu_lay_out(const superoffload_bucket* buckets, uint32_t bucket_count,
                                              uint32_t stream_slots, uint64_t* gpu_offsets, uint64_t* bytes);

/* `stream`'s next kernels read the parameters of a unit, or may: in a forward pass, in a backward pass, or beside
 * both. They are in the unit's slot when the stream gets there: those of the last committed step, also after the
 * gradients of the open step have left. They stay until another unit of the slot is read, which waits for what was
 * launched until then on the streams that have read. Units that followed the last time are copied ahead.
 *
 * The call waits only until the daemon has published them. A step's end waits for the stream as for those of
 * gradients; the stream must live until then, or until the attachment is not used any more. Any thread.
 * FAILED_PRECONDITION: the stream is being captured into a CUDA graph. INVALID_ARGUMENT: there is no such unit. */
SUPEROFFLOAD_API int superoffload_gpu_read_unit(superoffload_attachment* attachment, uint32_t unit, uint64_t stream);

/* Whether the unit's slot holds it (1): what reads the unit now without having said so does not read another one. 2: it
 * also stays, whether or not that was asked for (superoffload_gpu_keep_units). */
SUPEROFFLOAD_API int superoffload_gpu_has_unit(superoffload_attachment* attachment, uint32_t unit, uint32_t* has);

/* These units stay from now on: each has a slot for itself, and is copied there when a step has changed it only, so
 * that the daemon may publish it ahead of the verdict. All others take turns at `stream_slots`. A later attachment that
 * takes the memory over has the same units that stay. No step may be open, and nobody may read units meanwhile; the
 * call waits for streams that have. RESOURCE_EXHAUSTED: out of GPU memory; all stays as it was. INVALID_ARGUMENT: there
 * is no such unit. */
SUPEROFFLOAD_API int superoffload_gpu_keep_units(superoffload_attachment* attachment, const uint32_t* units,
                                                 uint32_t unit_count);

/* Gives all GPU memory of the attachment back, while the daemon keeps everything: parameters, slots, and the state of
 * resident buckets, of which there are none afterwards. Addresses stay, and nobody may use what was there. No step may
 * be open, and the GPU must have done what reads parameters; resident buckets were settled. Suspended twice is once.
 * FAILED_PRECONDITION: the daemon has mapped the memory (mover DAEMON). UNIMPLEMENTED: the driver cannot map memory.
 *
 * After resume the parameters are those of the last step again, at the same addresses, and no unit stays.
 * RESOURCE_EXHAUSTED: out of GPU memory; it is suspended as before. Meanwhile a gradient, a unit to read and a copy of
 * parameters are FAILED_PRECONDITION. A later attachment that takes the memory over has it all again. */
SUPEROFFLOAD_API int superoffload_gpu_suspend(superoffload_attachment* attachment);
SUPEROFFLOAD_API int superoffload_gpu_resume(superoffload_attachment* attachment);

/* Weights that stream and never change, as the frozen base of a low-rank adaptation: without an attachment, from memory
 * of the caller's. Unit i is the unit_bytes[i] of `host` from the end of unit i - 1 on, up to the next multiple of
 * 4096, and `addresses`[i] becomes its device pointer. `host` must stay, and must not change while units are read.
 * RESOURCE_EXHAUSTED: out of GPU memory. UNIMPLEMENTED: the driver cannot map this GPU's memory. */
typedef struct superoffload_frozen_units superoffload_frozen_units;
SUPEROFFLOAD_API int superoffload_frozen_open(int32_t ordinal, void* host, uint64_t host_bytes,
                                              const uint64_t* unit_bytes, uint32_t unit_count, uint32_t slots,
                                              superoffload_frozen_units** units, uint64_t* addresses,
                                              uint64_t* slot_bytes);

/* As superoffload_gpu_read_unit, superoffload_gpu_has_unit and superoffload_gpu_keep_units; units are counted from 0.
 */
SUPEROFFLOAD_API int superoffload_frozen_read(superoffload_frozen_units* units, uint32_t unit, uint64_t stream);
SUPEROFFLOAD_API int superoffload_frozen_has(superoffload_frozen_units* units, uint32_t unit, uint32_t* has);
SUPEROFFLOAD_API int superoffload_frozen_keep(superoffload_frozen_units* units, const uint32_t* kept, uint32_t count);
SUPEROFFLOAD_API void superoffload_frozen_close(superoffload_frozen_units* units); /* NULL is allowed */

/* The GPU memory that superoffload_gpu_attach would allocate with these options, so that a model's parameters, which
 * are in GPU memory already, need not exist twice: addresses for all of it, and memory only as far as
 * superoffload_gpu_back asks for it. Copy the parameters that lie before that, free the originals, go on, and attach
 * with it; the attach allocates the rest. `parameters` becomes the device pointer of the parameters; offsets from it
 * are those of the host's. It lives until superoffload_gpu_release was called and the attachments that use it were
 * detached. */
SUPEROFFLOAD_API int superoffload_gpu_reserve(int64_t trainer, const superoffload_attachment* attachment,
                                              const superoffload_gpu_options* options, superoffload_gpu_memory** memory,
                                              uint64_t* parameters);

/* Memory for the first `bytes`, in whole pieces of *piece_bytes (8 MiB, or 1/128 of all if that is more); the first
 * *backed_bytes have some then. RESOURCE_EXHAUSTED: out of GPU memory; what is backed stays. */
SUPEROFFLOAD_API int superoffload_gpu_back(superoffload_gpu_memory* memory, uint64_t bytes, uint64_t* piece_bytes,
                                           uint64_t* backed_bytes);

/* Memory for units that stream, which take turns at `slots`, unless they have some. It may be asked for before the
 * attach, as that of the others. RESOURCE_EXHAUSTED: out of GPU memory. */
SUPEROFFLOAD_API int superoffload_gpu_back_units(superoffload_gpu_memory* memory, uint32_t slots);

/* Piece `index` of it is not needed any more: it has no memory afterwards, and its addresses stay taken. The
 * attachments that use it must not be used any more (superoffload_use_attachment). Waits for what `stream` (a CUstream)
 * has been given; what other streams do with the piece must be over, or `stream` wait for it. FAILED_PRECONDITION: the
 * stream is being captured into a CUDA graph, and the piece keeps its memory. Thread-safe; it may be called again. */
SUPEROFFLOAD_API int superoffload_gpu_give_back(superoffload_gpu_memory* memory, uint64_t index, uint64_t stream);

/* The same of all memory of units that stream. */
SUPEROFFLOAD_API int superoffload_gpu_give_units_back(superoffload_gpu_memory* memory, uint64_t stream);
SUPEROFFLOAD_API void superoffload_gpu_release(superoffload_gpu_memory* memory); /* NULL is allowed */

/* Seconds to pack a gradient of `elements` of `dtype` (DataType of optimizer.proto) and to copy it off the GPU: as it
 * is, and cast to fp32 on the GPU. For choosing gradient_dtype before the optimizer is created. Waits for the GPU. */
SUPEROFFLOAD_API int superoffload_gpu_measure_cast(int32_t ordinal, uint32_t dtype, uint64_t elements,
                                                   double* fused_seconds, double* gpu_fp32_seconds);

/* Which way superoffload_gpu_copy goes. */
enum superoffload_gpu_direction {
  SUPEROFFLOAD_TO_GPU = 0,  /* from the daemon's memory */
  SUPEROFFLOAD_FROM_GPU = 1 /* after what `stream` has done, to the daemon's memory (follow it with PushParameters) */
};

/* Copies all parameters, but for those that stream: they change in the daemon's memory only, and slots are empty
 * afterwards. No step may be open. It waits. */
SUPEROFFLOAD_API int superoffload_gpu_copy(superoffload_attachment* attachment, uint32_t direction, uint64_t stream);

/* No gradient lands in the daemon's memory any more, and the open step does not go on: before a successor of a daemon
 * that died is attached to, which may publish parameters there (Layout.in_place). It waits. */
SUPEROFFLOAD_API int superoffload_gpu_end_landings(superoffload_attachment* attachment);

/* Keeps the last `count` buckets resident: their state is on the GPU, too, where a kernel updates them, with the same
 * bits as the daemon, as soon as the verdict is known; the daemon follows, and nobody waits for it. No step may be
 * open, and SettleOptimizer must have been called since the last one, for those that become resident and for those
 * that no longer are. After PushParameters the state of those that are is another: call it with 0, too.
 * RESOURCE_EXHAUSTED: out of GPU memory; fewer stay resident. FAILED_PRECONDITION: one of them streams. */
SUPEROFFLOAD_API int superoffload_gpu_set_resident(superoffload_attachment* attachment, uint32_t count);

/* Where the masters of a resident bucket are on the GPU. Of one with a log they are what its parameters are
 * narrowed from, while those in the daemon's memory stay behind. They change as its parameters do.
 * FAILED_PRECONDITION: it is not resident. */
SUPEROFFLOAD_API int superoffload_gpu_resident_masters(superoffload_attachment* attachment, uint32_t bucket,
                                                       uint64_t* pointer);

/* Collectives, for data-parallel trainers without their own: each rank has an optimizer of its shard of every
 * parameter, reduces and scatters a gradient before it submits its share, and gathers the parameters that it
 * awaited. Over NCCL, which is loaded when it is needed: UNAVAILABLE without it. */
typedef struct superoffload_collective superoffload_collective;
typedef struct superoffload_collective_id {
  char bytes[128];
} superoffload_collective_id;

/* A name for a new communicator; one rank makes it and sends it to the others. */
SUPEROFFLOAD_API int superoffload_make_collective_id(superoffload_collective_id* id);

/* Joins rank `rank` of `ranks` with GPU `ordinal`, and waits for the others. */
SUPEROFFLOAD_API int superoffload_join_collective(int32_t ordinal, const superoffload_collective_id* id, uint32_t ranks,
                                                  uint32_t rank, superoffload_collective** collective);
SUPEROFFLOAD_API void superoffload_leave_collective(superoffload_collective* collective); /* NULL is allowed */

/* `from` holds ranks * elements of every rank; rank r gets in `to` the sums, or with `average` the means, of elements
 * r * elements and on. In the order of the stream, as below. */
SUPEROFFLOAD_API int superoffload_reduce_scatter(superoffload_collective* collective, uint64_t from, uint64_t to,
                                                 uint64_t elements, uint32_t dtype, int average, uint64_t stream);

/* `to` gets every rank's `from`, in the order of ranks. */
SUPEROFFLOAD_API int superoffload_all_gather(superoffload_collective* collective, uint64_t from, uint64_t to,
                                             uint64_t elements, uint32_t dtype, uint64_t stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SUPEROFFLOAD_SUPEROFFLOAD_GPU_H_ */
