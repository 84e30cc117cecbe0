// What XLA calls on the GPU, through its foreign function interface: on the host, as it gives its stream work. Operands
// and results are in GPU memory, and are there when the stream has got to the call; so a handler gives the stream work,
// too, and returns. It waits for a device slot when all are in flight, and for numbers that only the stream computes:
// that of a layer of a stack, and the hyper-parameters of a step.
//
// "step" waits for the verdict, as XLA's own callbacks of the host wait, in the thread that gives the stream work:
//
//   XLA's stream   backward, numbers of the step -+  nothing: this thread waits       +- copy parameters, forward ...
//   pack stream                       (wait) pack +-> arrivals -> [daemon] -> verdict +
//
// That wait ends without this thread: what it needs of XLA's stream was given to it before the call, the pack stream
// and those that bring parameters wait for events of the past only, and arrivals and completions have threads of their
// own, which also see the daemon's death.
//
// XLA must not record a handler into a CUDA graph (a command buffer), for its work on the host would be done once for
// all launches. It does so only with those whose traits have kCmdBufferCompatible; these have no traits, and refuse a
// stream that is captured.
#include <string_view>
#include <vector>

#include "client/src/gpu/gpu_gradients.h"
#include "client/src/xla/call_arguments.h"
#include "client/src/xla/step_call.h"

namespace superoffload::client {
namespace {

namespace ffi = xla::ffi;

using kernels::CudaStream;

StreamNumber Number(CudaStream stream) { return reinterpret_cast<StreamNumber>(stream); }

Status Read(Trainer& trainer, std::span<const SmallCopy> copies, CudaStream stream) {
  return trainer.OnGpu([&](GpuGradients& gpu) { return gpu.Read(copies, stream); });
}

Status Write(Trainer& trainer, std::span<const SmallCopy> copies, CudaStream stream) {
  return trainer.OnGpu([&](GpuGradients& gpu) { return gpu.Write(copies, stream); });
}

Status HandOverPieces(Trainer& trainer, const HandOverCall& call, bool whole, CudaStream stream) {
  const int32_t* index = nullptr;
  int32_t slice = -1;
  if (Status status = call.Index(&index); !status.ok()) return status;
  if (!whole) {
    const SmallCopy copy{&slice, index, sizeof(slice)};
    if (Status status = Read(trainer, {&copy, 1}, stream); !status.ok()) return status;
  }
  std::vector<GradientPiece> pieces;
  if (Status status = call.Pieces(trainer, slice, &pieces); !status.ok()) return status;
  return HandOverFromXla(trainer, pieces, {.stream = Number(stream)});
}

// As "hand_over" on the CPU.
ffi::Error HandOverOnGpu(CudaStream stream, int64_t number, CallNumbers parameters, int64_t whole,
                         ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return Handled(number, [&](Trainer& trainer) -> Status {
    const HandOverCall call{parameters, operands, results.size()};
    Status status = HandOverPieces(trainer, call, whole != 0, stream);
    if (status.ok()) {
      status = PassThrough(call, results, [&](void* to, const void* from, size_t bytes) {
        return trainer.OnGpu([&](GpuGradients& gpu) {
          return gpu.Copy(to, reinterpret_cast<kernels::CudaPointer>(from), bytes, stream);
        });
      });
    }
    return status.ok() ? status : trainer.Fail(std::move(status));
  });
}

std::span<const int64_t> Numbers(CallNumbers numbers) { return {numbers.begin(), numbers.size()}; }

// Results: these parameters, those of the step that was ended last.
ffi::Error PublishOnGpu(CudaStream stream, int64_t number, CallNumbers parameters, ffi::RemainingRets published) {
  return Handled(number, [&](Trainer& trainer) -> Status {
    std::vector<void*> to;
    if (Status status = ParameterResults(trainer, Numbers(parameters), published, &to); !status.ok()) return status;
    return trainer.Publish(to, Number(stream));
  });
}

// Results: these parameters, which stream. Operands: what the call comes after.
ffi::Error ReadOnGpu(CudaStream stream, int64_t number, CallNumbers parameters, ffi::RemainingArgs,
                     ffi::RemainingRets values) {
  return Handled(number, [&](Trainer& trainer) -> Status {
    std::vector<void*> to;
    if (Status status = ParameterResults(trainer, Numbers(parameters), values, &to); !status.ok()) return status;
    Status status = trainer.OnGpu([&](GpuGradients& gpu) { return gpu.ReadStreamed(Numbers(parameters), to, stream); });
    if (status.code == Code::kUnavailable) {
      status = Error(Code::kAborted, "the daemon has died before parameters that stream were there (", status.message,
                     "); call abandon(), and compute the gradients of this step again");
    }
    return status.ok() ? status : trainer.Fail(std::move(status));
  });
}

// As "step" on the CPU.
ffi::Error StepOnGpu(CudaStream stream, int64_t number, CallNumbers parameters, CallNumbers absent,
                     CallNumbers scheduled, double max_grad_norm, ffi::Buffer<ffi::DataType::S32> count,
                     ffi::Buffer<ffi::DataType::F32> gradient_scale, ffi::Buffer<ffi::DataType::F32> scalars,
                     ffi::RemainingArgs gradients, ffi::Result<ffi::Buffer<ffi::DataType::S32>> numbers,
                     ffi::Result<ffi::Buffer<ffi::DataType::F32>> reals, ffi::RemainingRets published) {
  return Handled(number, [&](Trainer& trainer) -> Status {
    const StepCall call{parameters, absent,    scheduled, max_grad_norm, count,    gradient_scale,
                        scalars,    gradients, numbers,   reals,         published};
    if (Status status = call.Check(); !status.ok()) return status;
    StepNumbers given{.scalars = std::vector<float>(scalars.element_count())};
    const SmallCopy operands[] = {{&given.count, count.untyped_data(), sizeof(given.count)},
                                  {&given.gradient_scale, gradient_scale.untyped_data(), sizeof(given.gradient_scale)},
                                  {given.scalars.data(), scalars.untyped_data(), scalars.size_bytes()}};
    if (Status status = Read(trainer, operands, stream); !status.ok()) return status;
    StepReport report;
    if (Status status = call.Run(trainer, given, Number(stream), &report); !status.ok()) return status;
    const SmallCopy results[] = {{report.numbers, numbers->untyped_data(), sizeof(report.numbers)},
                                 {report.reals, reals->untyped_data(), sizeof(report.reals)}};
    return Write(trainer, results, stream);
  });
}

// Steps end in the thread that gives the stream work: what comes after one is counted after it.
ffi::Error CountOnGpu(CudaStream stream, int64_t number, ffi::RemainingArgs,
                      ffi::Result<ffi::Buffer<ffi::DataType::S32>> count) {
  return Handled(number, [&](Trainer& trainer) -> Status {
    int32_t committed = Saturated(trainer.committed_steps());
    const SmallCopy copy{&committed, count->untyped_data(), sizeof(committed)};
    return Write(trainer, {&copy, 1}, stream);
  });
}

XLA_FFI_DEFINE_HANDLER(kHandOverOnGpu, HandOverOnGpu,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CudaStream>>()
                           .Attr<int64_t>("submitter")
                           .Attr<CallNumbers>("parameters")
                           .Attr<int64_t>("whole")
                           .RemainingArgs()
                           .RemainingRets());
XLA_FFI_DEFINE_HANDLER(kPublishOnGpu, PublishOnGpu,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CudaStream>>()
                           .Attr<int64_t>("submitter")
                           .Attr<CallNumbers>("parameters")
                           .RemainingRets());
XLA_FFI_DEFINE_HANDLER(kReadOnGpu, ReadOnGpu,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<CudaStream>>()
                           .Attr<int64_t>("submitter")
                           .Attr<CallNumbers>("parameters")
                           .RemainingArgs()
                           .RemainingRets());
XLA_FFI_DEFINE_HANDLER(kStepOnGpu, StepOnGpu, BindStep(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CudaStream>>()));
XLA_FFI_DEFINE_HANDLER(kCountOnGpu, CountOnGpu, BindCount(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CudaStream>>()));

}  // namespace

void* FindCudaHandler(const char* name) {
  if (std::string_view(name) == "hand_over") return reinterpret_cast<void*>(kHandOverOnGpu);
  if (std::string_view(name) == "publish") return reinterpret_cast<void*>(kPublishOnGpu);
  if (std::string_view(name) == "read") return reinterpret_cast<void*>(kReadOnGpu);
  if (std::string_view(name) == "step") return reinterpret_cast<void*>(kStepOnGpu);
  if (std::string_view(name) == "count") return reinterpret_cast<void*>(kCountOnGpu);
  return nullptr;
}

}  // namespace superoffload::client
