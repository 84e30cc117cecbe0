/* The shared-memory contract of the step plane, version 3.
 *
 * A trainer and the daemon share one sealed memfd, the ring memory, that holds a header page and two
 * single-producer single-consumer rings of 64-byte entries, shaped like io_uring:
 *
 *   0                 superoffload_ring_header (4096 bytes)
 *   submission_offset superoffload_ring_entry[submission_entries]   trainer -> daemon
 *   completion_offset superoffload_ring_entry[completion_entries]   daemon  -> trainer
 *
 * A producer writes the entry at tail & (entries - 1), then stores tail + 1 with release order; a consumer
 * loads tail with acquire order, copies the entry, then stores head + 1 with release order. Indices run
 * freely modulo 2^32. A consumer that finds its ring empty sets its `..._waiting` word, re-reads tail (both
 * sequentially consistent) and sleeps in FUTEX_WAIT on the tail word (shared futex, not private); a producer
 * that sees the word set after publishing calls FUTEX_WAKE on the tail word. Only the consumer clears it, when it is
 * awake.
 *
 * One step, in submission order:
 *
 *   [GROUP ...] BEGIN_STEP [ABSENT ...] [GRADIENT_READY(bucket) ...] [MEASURE_NORM] [GROUP ...] [PREPARE] END_STEP
 *
 * GROUP entries before BEGIN_STEP set the hyper-parameters with which the step speculates; GROUP entries
 * between BEGIN_STEP and END_STEP revise them. They name the algorithm's scalars by their places in Algorithm.scalars
 * of optimizer.proto; a group with more than fit takes several entries. ABSENT names parameters that have no gradient
 * in this step, before any of their buckets is submitted: their weights, state and step counts stay, what their part of
 * the slot holds is not read, and the norm is that of the others. END_STEP is authoritative: the verdict uses its
 * gradient scale and its clipping threshold. ABANDON_STEP in place of END_STEP drops the step, whatever has arrived.
 * MEASURE_NORM, once every bucket has been submitted, asks for the global norm without deciding anything.
 *
 * Completions of one step, in any order among buckets:
 *
 *   SLOT_FREE(bucket)          what gradient slot payload.gradient.slot held of the bucket has been absorbed; it may
 *                              come after the step is over, and names the latest step then
 *   PARAMETERS_READY(bucket)   parameters are published; with SPECULATIVE the verdict decides whether they stand
 *   GRADIENT_NORM              the answer to MEASURE_NORM
 *   PREPARED                   the answer to PREPARE
 *   VERDICT                    global norm, clip coefficient, statistics
 *
 * A rank of a run of several submits PREPARE when every bucket has been submitted. PREPARED answers that the gradients
 * and all else of the step outlive trainer and daemon; only the sum of squares that it carries may be gathered so as to
 * end a step. END_STEP then carries the total of all ranks, the attempt that PREPARED named, and the same gradient
 * scale and threshold. Between them neither GROUP nor ABANDON_STEP is accepted: other ranks may have committed.
 *
 * The parameters of a step are final for a bucket when PARAMETERS_READY without SPECULATIVE arrived, or when
 * it arrived with SPECULATIVE and a VERDICT followed (or preceded it) that carries SPECULATION_STANDS.
 *
 * A trainer on a GPU whose memory the daemon has mapped (superoffload_device_request of descriptor_socket.h) submits
 * gradients that lie in device slots, with DEVICE_SLOT. GRADIENT_TAKEN(slot) tells that the slot may be filled again.
 * A bucket's parameters go to where its gradient said that they lie (`gpu_offset`), and only once the VERDICT is to
 * commit or clip, and only those that are final then: a LANDED(bucket) follows for each bucket, the highest first among
 * those that are published; a step that is skipped has none. END_STEP says that nothing of the trainer's reads the
 * parameters of the step before any more. Either side submits only what its own GPU work has finished: neither's
 * streams ever wait for the other's, which may have died. PROBE has a device slot copied as GRADIENT_READY does and the
 * bucket's parameters copied back, changes nothing, and is for measuring between steps. UNMAP_DEVICE, between steps,
 * says that the trainer copies by itself from now on: the daemon lets go of the GPU and its memory, for the rest of the
 * attachment.
 *
 * A trainer that copies by itself may state the sum of squares (SUM_KNOWN). NO_COPY_BACK asks that the bucket's
 * parameters of this step be published in host memory only, because the trainer copies, or updates its own.
 *
 * The daemon trusts nothing in this memory: it keeps the sizes and offsets for itself, and copies an entry
 * before it validates it. A rejected entry has no effect and is answered by an ERROR completion whose sentence
 * is in the header's error text; the attachment goes on.
 *
 * All integers are little-endian; both sides run on the same machine. Valid C11 and C++20.
 */
#ifndef SUPEROFFLOAD_V1_STEP_RING_H_
#define SUPEROFFLOAD_V1_STEP_RING_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define SUPEROFFLOAD_STATIC_ASSERT(condition, text) static_assert(condition, text)
extern "C" {
#else
#define SUPEROFFLOAD_STATIC_ASSERT(condition, text) _Static_assert(condition, text)
#endif

#define SUPEROFFLOAD_RING_MAGIC UINT64_C(0x31474e5246464f53) /* "SOFFRNG1" */
#define SUPEROFFLOAD_RING_VERSION 3u
#define SUPEROFFLOAD_RING_HEADER_BYTES 4096u
#define SUPEROFFLOAD_ERROR_TEXT_BYTES 1024u

#define SUPEROFFLOAD_GROUP_SCALARS 4u

/* Submissions. `index` is the parameter group for GROUP, the first parameter for ABSENT, the bucket for GRADIENT_READY
 * and PROBE, else 0. */
enum superoffload_submission {
  SUPEROFFLOAD_SUBMIT_GROUP = 1,          /* superoffload_group_payload */
  SUPEROFFLOAD_SUBMIT_BEGIN_STEP = 2,     /* f64: expected gradient scale */
  SUPEROFFLOAD_SUBMIT_GRADIENT_READY = 3, /* the bucket's gradient is complete in the step's slot */
  SUPEROFFLOAD_SUBMIT_END_STEP = 4,       /* superoffload_end_payload */
  SUPEROFFLOAD_SUBMIT_ABANDON_STEP = 5,
  SUPEROFFLOAD_SUBMIT_MEASURE_NORM = 6, /* f64: gradient scale */
  SUPEROFFLOAD_SUBMIT_PROBE = 7,        /* gradient: slot */
  SUPEROFFLOAD_SUBMIT_ABSENT = 8,       /* superoffload_absent_payload */
  SUPEROFFLOAD_SUBMIT_PREPARE = 9,      /* superoffload_end_payload without total and attempt */
  SUPEROFFLOAD_SUBMIT_UNMAP_DEVICE = 10
};

/* Completions. `index` is the bucket for SLOT_FREE, PARAMETERS_READY and LANDED, else 0. */
enum superoffload_completion {
  SUPEROFFLOAD_COMPLETE_SLOT_FREE = 17,
  SUPEROFFLOAD_COMPLETE_PARAMETERS_READY = 18,
  SUPEROFFLOAD_COMPLETE_VERDICT = 19,        /* superoffload_verdict_payload; index: enum superoffload_verdict_kind */
  SUPEROFFLOAD_COMPLETE_ERROR = 20,          /* index: canonical status code; sentence in the header's error text */
  SUPEROFFLOAD_COMPLETE_GRADIENT_NORM = 21,  /* f64: this rank's L2 norm times |gradient scale|, sum of squares */
  SUPEROFFLOAD_COMPLETE_GRADIENT_TAKEN = 22, /* index: device slot */
  SUPEROFFLOAD_COMPLETE_LANDED = 23,
  SUPEROFFLOAD_COMPLETE_PREPARED = 24 /* superoffload_prepared_payload */
};

/* Submission flags of GRADIENT_READY. */
enum {
  SUPEROFFLOAD_FLAG_DEVICE_SLOT = 4, /* the gradient lies in device slot `slot` */
  SUPEROFFLOAD_FLAG_SUM_KNOWN =
      8, /* `sum_of_squares` is that of the gradient, as NormLanes of kernels/elements defines it */
  SUPEROFFLOAD_FLAG_NO_COPY_BACK = 16,
  SUPEROFFLOAD_FLAG_LOGGED =
      32, /* it goes into, or lies in, the bucket's log: slot `committed_steps` mod `log_slots` */
  SUPEROFFLOAD_FLAG_STILL_READ = 64 /* the step may read the bucket's parameters yet: none before the verdict */
};

/* Completion flags. */
enum {
  SUPEROFFLOAD_FLAG_SPECULATIVE = 1,       /* PARAMETERS_READY: published before the verdict */
  SUPEROFFLOAD_FLAG_SPECULATION_STANDS = 2 /* VERDICT: speculative parameters of this step are final */
};

enum superoffload_verdict_kind {
  SUPEROFFLOAD_VERDICT_COMMIT = 1,
  SUPEROFFLOAD_VERDICT_CLIP = 2,
  SUPEROFFLOAD_VERDICT_SKIP_NON_FINITE = 3, /* an infinity or NaN in some gradient */
  SUPEROFFLOAD_VERDICT_SKIP_OVERFLOW = 4,   /* finite, but the unscaled norm is 2^63 or more: v would overflow */
  SUPEROFFLOAD_VERDICT_SKIP_ABANDONED = 5   /* the trainer abandoned the step */
};

typedef struct superoffload_verdict_payload {
  double global_norm;           /* L2 norm of all gradients times |gradient scale|; NaN when abandoned */
  double clip_coefficient;      /* 1 unless CLIP; torch's min(1, max_norm / (norm + 1e-6)) */
  uint64_t committed_steps;     /* optimizer steps applied so far, this one included */
  uint32_t speculated_buckets;  /* buckets published before the verdict */
  uint32_t republished_buckets; /* of those, how many the verdict made publish again */
  uint32_t next_slot;           /* gradient slot, 0 or 1, that the next step must fill */
  uint32_t consecutive_skips;   /* skipped steps in a row, this one included */
} superoffload_verdict_payload;

typedef struct superoffload_end_payload {
  double gradient_scale;
  double max_grad_norm;        /* 0 = no clipping */
  double total_sum_of_squares; /* of a run of several ranks, over all of them; else 0 */
  uint64_t attempt;            /* likewise: of this rank, as PREPARED named it; 0 where it trains alone */
  uint64_t streamed_bytes;     /* of parameters, copied for reads of units since the END_STEP before; for metrics */
} superoffload_end_payload;

typedef struct superoffload_prepared_payload {
  double sum_of_squares; /* of this rank's gradients */
  uint64_t attempt;      /* at this step; never used again */
} superoffload_prepared_payload;

typedef struct superoffload_gradient_payload {
  double sum_of_squares;
  uint32_t slot; /* of the device */
  uint32_t reserved;
  uint64_t gpu_offset; /* bytes into the GPU memory: where the bucket's parameters lie, unless NO_COPY_BACK */
} superoffload_gradient_payload;

/* Scalars [first, first + count) of a parameter group. */
typedef struct superoffload_group_payload {
  uint32_t first;
  uint32_t count; /* 1 to SUPEROFFLOAD_GROUP_SCALARS */
  double values[SUPEROFFLOAD_GROUP_SCALARS];
} superoffload_group_payload;

/* Parameters [index, index + count), in the order of creation. */
typedef struct superoffload_absent_payload {
  uint32_t count;
} superoffload_absent_payload;

typedef struct superoffload_ring_entry {
  uint16_t opcode;
  uint16_t flags;
  uint32_t index;
  uint64_t step;             /* attempts counted from 1; a skipped step uses a number too */
  uint64_t attachment_epoch; /* an entry of another attachment is answered by an ERROR */
  union {
    double f64[5];
    superoffload_verdict_payload verdict;
    superoffload_gradient_payload gradient;
    superoffload_group_payload group;
    superoffload_absent_payload absent;
    superoffload_end_payload end;
    superoffload_prepared_payload prepared;
  } payload;
} superoffload_ring_entry;

typedef struct superoffload_ring_header {
  uint64_t magic;
  uint32_t version;
  uint32_t header_bytes;
  uint32_t submission_entries; /* a power of two */
  uint32_t completion_entries; /* a power of two */
  uint64_t submission_offset;  /* bytes from the start of the mapping */
  uint64_t completion_offset;
  uint64_t attachment_epoch;
  uint8_t reserved0[16];
  uint32_t submission_tail __attribute__((aligned(64)));    /* written by the trainer */
  uint32_t submission_head __attribute__((aligned(64)));    /* written by the daemon */
  uint32_t completion_tail __attribute__((aligned(64)));    /* written by the daemon */
  uint32_t completion_head __attribute__((aligned(64)));    /* written by the trainer */
  uint32_t submission_waiting __attribute__((aligned(64))); /* the daemon sleeps on submission_tail */
  uint32_t completion_waiting __attribute__((aligned(64))); /* the trainer sleeps on completion_tail */
  uint32_t closed __attribute__((aligned(64)));             /* 1 once the daemon has ended the attachment */
  char error_text[SUPEROFFLOAD_ERROR_TEXT_BYTES] __attribute__((aligned(64))); /* of the latest ERROR; NUL-ended */
} superoffload_ring_header;

SUPEROFFLOAD_STATIC_ASSERT(sizeof(superoffload_verdict_payload) == 40, "verdict payload is 40 bytes");
SUPEROFFLOAD_STATIC_ASSERT(sizeof(superoffload_group_payload) == 40, "group payload is 40 bytes");
SUPEROFFLOAD_STATIC_ASSERT(sizeof(superoffload_ring_entry) == 64, "a ring entry is one cache line");
SUPEROFFLOAD_STATIC_ASSERT(offsetof(superoffload_ring_entry, payload) == 24, "payload offset");
SUPEROFFLOAD_STATIC_ASSERT(offsetof(superoffload_ring_header, submission_tail) == 64, "layout");
SUPEROFFLOAD_STATIC_ASSERT(offsetof(superoffload_ring_header, submission_head) == 128, "layout");
SUPEROFFLOAD_STATIC_ASSERT(offsetof(superoffload_ring_header, completion_tail) == 192, "layout");
SUPEROFFLOAD_STATIC_ASSERT(offsetof(superoffload_ring_header, completion_head) == 256, "layout");
SUPEROFFLOAD_STATIC_ASSERT(offsetof(superoffload_ring_header, submission_waiting) == 320, "layout");
SUPEROFFLOAD_STATIC_ASSERT(offsetof(superoffload_ring_header, completion_waiting) == 384, "layout");
SUPEROFFLOAD_STATIC_ASSERT(offsetof(superoffload_ring_header, closed) == 448, "layout");
SUPEROFFLOAD_STATIC_ASSERT(offsetof(superoffload_ring_header, error_text) == 512, "layout");
SUPEROFFLOAD_STATIC_ASSERT(sizeof(superoffload_ring_header) <= SUPEROFFLOAD_RING_HEADER_BYTES, "layout");

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* SUPEROFFLOAD_V1_STEP_RING_H_ */
