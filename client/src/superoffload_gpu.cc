// superoffload_gpu.h: opaque handles in, status codes out.
#include "superoffload/superoffload_gpu.h"

#include "client/src/c_border.h"
#include "client/src/gpu/collective.h"
#include "client/src/gpu/measure_cast.h"

struct superoffload_collective {
  std::unique_ptr<superoffload::client::Collective> impl;
};

namespace {

using superoffload::client::Attachment;
using superoffload::client::Code;
using superoffload::client::Collective;
using superoffload::client::DeadlineAfter;
using superoffload::client::Error;
using superoffload::client::GpuPlane;
using superoffload::client::Guarded;
using superoffload::client::Status;
using superoffload::client::ToDType;
using superoffload::client::WithHandle;
using superoffload::kernels::CudaStream;
using superoffload::kernels::DType;

CudaStream Stream(uint64_t stream) { return reinterpret_cast<CudaStream>(stream); }

GpuPlane* Gpu(const superoffload_attachment* attachment) {
  return attachment == nullptr ? nullptr : attachment->impl->gpu();
}

template <typename Call>
int WithGpu(superoffload_attachment* attachment, Call call) {
  return WithHandle(attachment, [&](Attachment& impl) -> Status {
    if (impl.gpu() == nullptr) {
      return Error(Code::kFailedPrecondition, "the attachment has no GPU; call superoffload_gpu_attach first");
    }
    return call(impl);
  });
}

}  // namespace

int superoffload_gpu_attach(superoffload_attachment* attachment, const superoffload_gpu_options* options,
                            superoffload_gpu_report* report) {
  return WithHandle(attachment, [&](Attachment& impl) -> Status {
    if (options == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    return impl.AttachGpu(*options, options->previous == nullptr ? nullptr : options->previous->impl.get(), report);
  });
}

int superoffload_gpu_measure_cast(int32_t ordinal, uint32_t dtype, uint64_t elements, double* fused_seconds,
                                  double* gpu_fp32_seconds) {
  return Guarded([&]() -> Status {
    DType type{};
    if (fused_seconds == nullptr || gpu_fp32_seconds == nullptr || !ToDType(dtype, &type)) {
      return Error(Code::kInvalidArgument, "NULL argument, or unknown dtype ", dtype);
    }
    superoffload::client::CastSeconds seconds;
    Status status = superoffload::client::MeasureCast(ordinal, type, elements, &seconds);
    *fused_seconds = seconds.fused;
    *gpu_fp32_seconds = seconds.gpu_fp32;
    return status;
  });
}

uint64_t superoffload_gpu_parameters(const superoffload_attachment* attachment) {
  const GpuPlane* const gpu = Gpu(attachment);
  return gpu == nullptr ? 0 : gpu->parameters();
}

uint64_t superoffload_gpu_stream(const superoffload_attachment* attachment) {
  const GpuPlane* const gpu = Gpu(attachment);
  return gpu == nullptr ? 0 : reinterpret_cast<uint64_t>(gpu->pack_stream());
}

int superoffload_gpu_pull(superoffload_attachment* attachment) {
  return WithGpu(attachment, [](Attachment& impl) { return impl.gpu()->Pull(); });
}

int superoffload_gpu_push(superoffload_attachment* attachment, uint64_t stream) {
  return WithGpu(attachment, [&](Attachment& impl) { return impl.gpu()->Push(Stream(stream)); });
}

int superoffload_gpu_gradient_ready(superoffload_attachment* attachment, uint32_t bucket,
                                    const superoffload_tensor* tensors, uint32_t count, uint32_t dtype,
                                    uint64_t stream) {
  return WithGpu(attachment, [&](Attachment& impl) -> Status {
    DType type{};
    if ((tensors == nullptr && count > 0) || !ToDType(dtype, &type)) {
      return Error(Code::kInvalidArgument, "no tensors, or unknown dtype ", dtype);
    }
    return impl.GpuGradientReady(bucket, tensors, count, type, Stream(stream));
  });
}

int superoffload_gpu_pack_after(superoffload_attachment* attachment, uint64_t stream) {
  return WithGpu(attachment, [&](Attachment& impl) { return impl.gpu()->PackAfter(Stream(stream)); });
}

int superoffload_gpu_await_parameters(superoffload_attachment* attachment, uint32_t bucket,
                                      int64_t timeout_milliseconds, uint64_t stream) {
  return WithGpu(attachment, [&](Attachment& impl) {
    return impl.AwaitParameters(bucket, DeadlineAfter(timeout_milliseconds), Stream(stream));
  });
}

int superoffload_gpu_set_resident(superoffload_attachment* attachment, uint32_t count) {
  return WithGpu(attachment, [&](Attachment& impl) { return impl.SetResident(count); });
}

double superoffload_gpu_stall(const superoffload_attachment* attachment) {
  return attachment == nullptr ? 0 : attachment->impl->stall_seconds();
}

int superoffload_make_collective_id(superoffload_collective_id* id) {
  return Guarded([&]() -> Status {
    if (id == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    return superoffload::client::MakeCollectiveId(id);
  });
}

int superoffload_join_collective(int32_t ordinal, const superoffload_collective_id* id, uint32_t ranks, uint32_t rank,
                                 superoffload_collective** collective) {
  return Guarded([&]() -> Status {
    if (id == nullptr || collective == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    auto created = std::make_unique<superoffload_collective>();
    Status status = Collective::Create(ordinal, *id, ranks, rank, &created->impl);
    if (status.ok()) *collective = created.release();
    return status;
  });
}

void superoffload_leave_collective(superoffload_collective* collective) { delete collective; }

int superoffload_reduce_scatter(superoffload_collective* collective, uint64_t from, uint64_t to, uint64_t elements,
                                uint32_t dtype, int average, uint64_t stream) {
  return WithHandle(collective, [&](Collective& impl) -> Status {
    DType type{};
    if (!ToDType(dtype, &type)) return Error(Code::kInvalidArgument, "unknown dtype ", dtype);
    return impl.ReduceScatter(from, to, elements, type, average != 0, Stream(stream));
  });
}

int superoffload_all_gather(superoffload_collective* collective, uint64_t from, uint64_t to, uint64_t elements,
                            uint32_t dtype, uint64_t stream) {
  return WithHandle(collective, [&](Collective& impl) -> Status {
    DType type{};
    if (!ToDType(dtype, &type)) return Error(Code::kInvalidArgument, "unknown dtype ", dtype);
    return impl.AllGather(from, to, elements, type, Stream(stream));
  });
}
