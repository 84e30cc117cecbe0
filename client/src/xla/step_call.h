// What "step" and "count" do on all platforms. Operands and results are those that superoffload/jax/ffi.py gives.
#ifndef SUPEROFFLOAD_CLIENT_SRC_XLA_STEP_CALL_H_
#define SUPEROFFLOAD_CLIENT_SRC_XLA_STEP_CALL_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "client/src/xla/call_arguments.h"

namespace superoffload::client {

inline int32_t Saturated(uint64_t number) {
  return static_cast<int32_t>(std::min<uint64_t>(number, std::numeric_limits<int32_t>::max()));
}

// Operands of "step" on the host.
struct StepNumbers {
  int32_t count = 0;  // committed steps before this one
  float gradient_scale = 1;
  std::vector<float> scalars;  // scheduled
};

// Results of it.
struct StepReport {
  int32_t numbers[6];
  float reals[2];
};

// Operands: count, gradient scale, scheduled scalars, gradients of `parameters`. Results: numbers and reals of the
// report, then all parameters.
struct StepCall {
  CallNumbers parameters;
  CallNumbers absent;
  CallNumbers scheduled;
  double max_grad_norm;
  xla::ffi::Buffer<xla::ffi::DataType::S32> count;
  xla::ffi::Buffer<xla::ffi::DataType::F32> gradient_scale;
  xla::ffi::Buffer<xla::ffi::DataType::F32> scalars;
  xla::ffi::RemainingArgs gradients;
  xla::ffi::Result<xla::ffi::Buffer<xla::ffi::DataType::S32>> numbers;
  xla::ffi::Result<xla::ffi::Buffer<xla::ffi::DataType::F32>> reals;
  xla::ffi::RemainingRets published;

  // Whether the results have room for a report.
  Status Check() const;

  // `given`: operands 0 to 2. FAILED_PRECONDITION: this is not the step after `given.count` others.
  Status Run(Trainer& trainer, const StepNumbers& given, std::optional<StreamNumber> stream, StepReport* report) const;
};

template <typename Binding>
auto BindStep(Binding binding) {
  namespace ffi = xla::ffi;
  return std::move(binding)
      .template Attr<int64_t>("submitter")
      .template Attr<CallNumbers>("parameters")
      .template Attr<CallNumbers>("absent")
      .template Attr<CallNumbers>("scheduled")
      .template Attr<double>("max_grad_norm")
      .template Arg<ffi::Buffer<ffi::DataType::S32>>()
      .template Arg<ffi::Buffer<ffi::DataType::F32>>()
      .template Arg<ffi::Buffer<ffi::DataType::F32>>()
      .RemainingArgs()
      .template Ret<ffi::Buffer<ffi::DataType::S32>>()
      .template Ret<ffi::Buffer<ffi::DataType::F32>>()
      .RemainingRets();
}

// Operands of "count": whatever must be there first. Result: committed steps.
template <typename Binding>
auto BindCount(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("submitter")
      .RemainingArgs()
      .template Ret<xla::ffi::Buffer<xla::ffi::DataType::S32>>();
}

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_XLA_STEP_CALL_H_
