"""The structures of superoffload.h and superoffload_gpu.h, for ctypes."""

import ctypes


class Verdict(ctypes.Structure):
    """superoffload_verdict."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("speculated_buckets", ctypes.c_uint32),
        ("republished_buckets", ctypes.c_uint32),
        ("next_slot", ctypes.c_uint32),
        ("consecutive_skips", ctypes.c_uint32),
        ("step", ctypes.c_uint64),
        ("committed_steps", ctypes.c_uint64),
        ("global_norm", ctypes.c_double),
        ("clip_coefficient", ctypes.c_double),
    ]


class Bucket(ctypes.Structure):
    """superoffload_bucket."""

    _fields_ = [
        ("elements", ctypes.c_uint64),
        ("parameters_offset", ctypes.c_uint64),
        ("gpu_offset", ctypes.c_uint64),
        ("gradient_offsets", ctypes.c_uint64 * 2),
        ("state_offset", ctypes.c_uint64),
        ("dtype", ctypes.c_uint32),
        ("gradient_dtype", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("log_slots", ctypes.c_uint32),
        ("log_offset", ctypes.c_uint64),
        ("format", ctypes.c_uint32),
        ("unit", ctypes.c_uint32),
    ]


class Shard(ctypes.Structure):
    """superoffload_shard."""

    _fields_ = [
        ("dimensions", ctypes.c_uint32),
        ("global_dimensions", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_uint64)),
        ("global_shape", ctypes.POINTER(ctypes.c_uint64)),
        ("global_offset", ctypes.POINTER(ctypes.c_uint64)),
    ]


class GpuOptions(ctypes.Structure):
    """superoffload_gpu_options."""

    _fields_ = [
        ("ordinal", ctypes.c_int32),
        ("mover", ctypes.c_uint32),
        ("share", ctypes.c_uint32),
        ("device_slots", ctypes.c_uint32),
        ("next_slot", ctypes.c_uint32),
        ("array_count", ctypes.c_uint32),
        ("algorithm", ctypes.c_char_p),
        ("scalars", ctypes.POINTER(ctypes.c_double)),
        ("array_offsets", ctypes.POINTER(ctypes.c_uint64)),
        ("parameter_steps", ctypes.POINTER(ctypes.c_uint64)),
        ("committed_steps", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("shards", ctypes.POINTER(Shard)),
        ("previous", ctypes.c_void_p),
        ("memory", ctypes.c_void_p),
        ("push", ctypes.c_uint32),
        ("stream_slots", ctypes.c_uint32),
        ("push_stream", ctypes.c_uint64),
    ]


class GpuReport(ctypes.Structure):
    """superoffload_gpu_report."""

    _fields_ = [
        ("mover", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("coherent", ctypes.c_uint32),
        ("staged", ctypes.c_uint32),
        ("seconds", ctypes.c_double * 4),
        ("gpu_bytes", ctypes.c_uint64),
        ("slot_bytes", ctypes.c_uint64),
        ("parameters", ctypes.c_uint64),
        ("pack_stream", ctypes.c_uint64),
        ("gpu", ctypes.c_char * 64),
        ("notes", ctypes.c_char * 512),
    ]


class Range(ctypes.Structure):
    """superoffload_range."""

    _fields_ = [("origin", ctypes.c_void_p), ("to", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class Parameter(ctypes.Structure):
    """superoffload_parameter."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("elements", ctypes.c_uint64),
        ("parameters_offset", ctypes.c_uint64),
        ("gpu_offset", ctypes.c_uint64),
        ("gradient_offsets", ctypes.c_uint64 * 2),
        ("state_offset", ctypes.c_uint64),
        ("first_bucket", ctypes.c_uint32),
        ("bucket_count", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("gradient_dtype", ctypes.c_uint32),
    ]


class TrainerOptions(ctypes.Structure):
    """superoffload_trainer_options."""

    _fields_ = [
        ("parameters", ctypes.POINTER(Parameter)),
        ("buckets", ctypes.POINTER(Bucket)),
        ("parameter_count", ctypes.c_uint32),
        ("bucket_count", ctypes.c_uint32),
        ("group_count", ctypes.c_uint32),
        ("scalar_count", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class Piece(ctypes.Structure):
    """superoffload_piece."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("elements", ctypes.c_uint64),
        ("parameter", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
    ]


class Gradients(ctypes.Structure):
    """superoffload_gradients."""

    _fields_ = [
        ("pieces", ctypes.POINTER(Piece)),
        ("absent", ctypes.POINTER(ctypes.c_uint32)),
        ("piece_count", ctypes.c_uint32),
        ("absent_count", ctypes.c_uint32),
        ("gradient_scale", ctypes.c_double),
        ("stream", ctypes.c_uint64),
        ("on_gpu", ctypes.c_uint32),
        ("stays", ctypes.c_uint32),
        ("digests", ctypes.POINTER(ctypes.c_uint64)),
        ("left", ctypes.POINTER(ctypes.c_uint32)),
        ("left_count", ctypes.c_uint32),
        ("more_follow", ctypes.c_uint32),
    ]


class StepEnd(ctypes.Structure):
    """superoffload_step_end."""

    _fields_ = [
        ("gradient_scale", ctypes.c_double),
        ("max_grad_norm", ctypes.c_double),
        ("total_sum_of_squares", ctypes.c_double),
        ("kind", ctypes.c_uint32),
        ("stream_count", ctypes.c_uint32),
        ("streams", ctypes.POINTER(ctypes.c_uint64)),
    ]


class Awaited(ctypes.Structure):
    """superoffload_awaited."""

    _fields_ = [("kind", ctypes.c_uint32), ("bucket", ctypes.c_uint32), ("stream", ctypes.c_uint64)]


class Answer(ctypes.Structure):
    """superoffload_answer."""

    _fields_ = [("norm", ctypes.c_double), ("sum_of_squares", ctypes.c_double), ("verdict", Verdict)]


class OpenStep(ctypes.Structure):
    """superoffload_open_step_state."""

    _fields_ = [
        ("begun", ctypes.c_uint32),
        ("prepared", ctypes.c_uint32),
        ("ended", ctypes.c_uint32),
        ("gone", ctypes.c_uint32),
        ("lost", ctypes.c_uint32),
        ("next_slot", ctypes.c_uint32),
        ("committed_steps", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),
        ("skips", ctypes.c_uint64 * 6),
        ("verdict", Verdict),
        ("stall_seconds", ctypes.c_double),
    ]


class RunTerms(ctypes.Structure):
    """superoffload_run_terms."""

    _fields_ = [
        ("sum_of_squares", ctypes.c_double),
        ("gradient_scale", ctypes.c_double),
        ("max_grad_norm", ctypes.c_double),
    ]


class RunReport(ctypes.Structure):
    """superoffload_run_report."""

    _fields_ = [
        ("lineage", ctypes.c_uint64),
        ("committed_steps", ctypes.c_uint64),
        ("last", RunTerms),
        ("prepared_step", ctypes.c_uint64),
        ("prepared_attempt", ctypes.c_uint64),
        ("prepared", RunTerms),
    ]


class RunDecision(ctypes.Structure):
    """superoffload_run_decision."""

    _fields_ = [("action", ctypes.c_uint32), ("attempt", ctypes.c_uint64), ("commit", RunTerms)]


BY_NAME = {
    "superoffload_answer": Answer,
    "superoffload_awaited": Awaited,
    "superoffload_bucket": Bucket,
    "superoffload_shard": Shard,
    "superoffload_gpu_options": GpuOptions,
    "superoffload_gpu_report": GpuReport,
    "superoffload_gradients": Gradients,
    "superoffload_open_step_state": OpenStep,
    "superoffload_parameter": Parameter,
    "superoffload_piece": Piece,
    "superoffload_range": Range,
    "superoffload_run_decision": RunDecision,
    "superoffload_run_report": RunReport,
    "superoffload_run_terms": RunTerms,
    "superoffload_step_end": StepEnd,
    "superoffload_trainer_options": TrainerOptions,
    "superoffload_verdict": Verdict,
}
