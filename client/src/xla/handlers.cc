// What XLA calls on the CPU, through its foreign function interface. Operands and results are those that
// superoffload/jax/ffi.py gives. A handler returns when the daemon's memory has what it brought, so that XLA may use
// its buffers for something else.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "client/src/xla/call_arguments.h"
#include "client/src/xla/step_call.h"

namespace superoffload::client {
namespace {

namespace ffi = xla::ffi;

// Operands: the number of the slice that the gradients are of their parameters, unless they are `whole`; what passes
// through unchanged (a result each); gradients of `parameters`.
ffi::Error HandOver(int64_t number, CallNumbers parameters, int64_t whole, ffi::RemainingArgs operands,
                    ffi::RemainingRets results) {
  return Handled(number, [&](Trainer& trainer) -> Status {
    const HandOverCall call{parameters, operands, results.size()};
    const int32_t* index = nullptr;
    std::vector<GradientPiece> pieces;
    Status status = call.Index(&index);
    if (status.ok()) status = call.Pieces(trainer, whole != 0 ? -1 : *index, &pieces);
    if (status.ok()) status = HandOverFromXla(trainer, pieces, {});
    if (!status.ok()) return trainer.Fail(std::move(status));
    return PassThrough(call, results, [](void* to, const void* from, size_t bytes) {
      std::memcpy(to, from, bytes);
      return Status{};
    });
  });
}

// Operands: the number of the slice that the values are of their parameters, unless they are `whole`; values of
// `parameters`, those of an offloaded `layer` or of a whole step. Result: that number. FAILED_PRECONDITION: a value is
// another than the step that was ended last has left; of a layer's samples are compared, of a step's every byte.
ffi::Error Compare(int64_t number, CallNumbers parameters, int64_t whole, int64_t layer, ffi::RemainingArgs operands,
                   ffi::Result<ffi::Buffer<ffi::DataType::S32>> passed) {
  return Handled(number, [&](Trainer& trainer) -> Status {
    const HandOverCall call{parameters, operands, 0};
    const int32_t* index = nullptr;
    std::vector<GradientPiece> values;
    Status status = call.Index(&index);
    if (status.ok()) status = call.Pieces(trainer, whole != 0 ? -1 : *index, &values);
    if (!status.ok()) return status;
    passed->typed_data()[0] = *index;
    const std::optional<uint32_t> changed =
        layer != 0 ? trainer.FindChangedInSamples(values) : trainer.FindChanged(values);
    if (!changed.has_value()) return {};
    const std::string& name = trainer.layout().parameter(*changed).name;
    if (layer == 0) {
      return Error(Code::kFailedPrecondition, "parameter ", name,
                   " was changed by somebody else than the optimizer, and nothing was committed; call "
                   "push_params(params) to make these the masters, or params = pull_params() to undo the change, and "
                   "then do the step again");
    }
    return trainer.Fail(Error(
        Code::kFailedPrecondition, "the offloaded layer of ", name,
        " was called with other values than the optimizer has for it: in offloaded(layer_fn, optimizer, name) give the "
        "name of the parameters that the layer is called with, change them inside of layer_fn only, and call "
        "push_params(params) after the loop has changed them; gradients at other values go to finish(gradients)"));
  });
}

// What comes from, and goes to, the host's memory: see StepCall.
ffi::Error StepOnHost(int64_t number, CallNumbers parameters, CallNumbers absent, CallNumbers scheduled,
                      double max_grad_norm, ffi::Buffer<ffi::DataType::S32> count,
                      ffi::Buffer<ffi::DataType::F32> gradient_scale, ffi::Buffer<ffi::DataType::F32> scalars,
                      ffi::RemainingArgs gradients, ffi::Result<ffi::Buffer<ffi::DataType::S32>> numbers,
                      ffi::Result<ffi::Buffer<ffi::DataType::F32>> reals, ffi::RemainingRets published) {
  return Handled(number, [&](Trainer& trainer) -> Status {
    const StepCall call{parameters, absent,    scheduled, max_grad_norm, count,    gradient_scale,
                        scalars,    gradients, numbers,   reals,         published};
    if (Status status = call.Check(); !status.ok()) return status;
    const float* const values = scalars.typed_data();
    const StepNumbers given{count.typed_data()[0], gradient_scale.typed_data()[0],
                            std::vector<float>(values, values + scalars.element_count())};
    StepReport report;
    if (Status status = call.Run(trainer, given, std::nullopt, &report); !status.ok()) return status;
    std::copy(std::begin(report.numbers), std::end(report.numbers), numbers->typed_data());
    std::copy(std::begin(report.reals), std::end(report.reals), reals->typed_data());
    return {};
  });
}

ffi::Error Count(int64_t number, ffi::RemainingArgs, ffi::Result<ffi::Buffer<ffi::DataType::S32>> count) {
  return Handled(number, [&](Trainer& trainer) -> Status {
    count->typed_data()[0] = Saturated(trainer.committed_steps());
    return {};
  });
}

XLA_FFI_DEFINE_HANDLER(kHandOver, HandOver,
                       ffi::Ffi::Bind()
                           .Attr<int64_t>("submitter")
                           .Attr<CallNumbers>("parameters")
                           .Attr<int64_t>("whole")
                           .RemainingArgs()
                           .RemainingRets());
XLA_FFI_DEFINE_HANDLER(kCompare, Compare,
                       ffi::Ffi::Bind()
                           .Attr<int64_t>("submitter")
                           .Attr<CallNumbers>("parameters")
                           .Attr<int64_t>("whole")
                           .Attr<int64_t>("layer")
                           .RemainingArgs()
                           .Ret<ffi::Buffer<ffi::DataType::S32>>());
XLA_FFI_DEFINE_HANDLER(kStep, StepOnHost, BindStep(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kCount, Count, BindCount(ffi::Ffi::Bind()));

}  // namespace

void* FindHandler(const char* name, const char* platform) {
  if (std::string_view(platform) == "cuda") return FindCudaHandler(name);
  if (std::string_view(platform) != "cpu") return nullptr;
  if (std::string_view(name) == "hand_over") return reinterpret_cast<void*>(kHandOver);
  if (std::string_view(name) == "compare") return reinterpret_cast<void*>(kCompare);
  if (std::string_view(name) == "step") return reinterpret_cast<void*>(kStep);
  if (std::string_view(name) == "count") return reinterpret_cast<void*>(kCount);
  return nullptr;
}

bool HasHandlers() { return true; }

}  // namespace superoffload::client
