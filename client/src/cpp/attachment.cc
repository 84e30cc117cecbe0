#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/cpp/attachment_stream.h"
#include "client/src/cpp/calls.h"
#include "superoffload/client.hpp"

namespace superoffload {
namespace {

using Stub = v1::OptimizerService::Stub;

// A daemon that hangs must not hang its trainer's exit.
constexpr std::chrono::seconds kDetachTimeout{30};

}  // namespace

Attachment::Attachment(v1::OptimizerService::Stub* stub, std::string token, v1::AttachOptimizerResponse response,
                       std::unique_ptr<Stream> stream)
    : stub_(stub),
      token_(std::move(token)),
      optimizer_(std::move(*response.mutable_optimizer())),
      stream_(std::move(stream)),
      slot_(response.next_slot()),
      bucket_parameters_(optimizer_.layout().buckets_size()) {
  for (const v1::Parameter& parameter : optimizer_.parameters()) {
    size_t elements = 1;
    for (uint64_t extent : parameter.shape()) elements *= extent;
    elements_.push_back(elements);
  }
  for (const v1::Placement& place : optimizer_.layout().placements()) {
    for (uint32_t i = 0; i < place.bucket_count(); ++i) ++bucket_parameters_[place.first_bucket() + i];
  }
}

Attachment::~Attachment() {
  if (handle_ == nullptr) return;  // the attach failed; the end of the stream cleans up
  CallContext context(token_);
  context.set_deadline(std::chrono::system_clock::now() + kDetachTimeout);
  v1::DetachOptimizerResponse response;
  stub_->DetachOptimizer(&context, Named<v1::DetachOptimizerRequest>(optimizer_.name()),
                         &response);  // fails when the daemon has ended it already
  superoffload_detach(handle_);
}

absl::Status Attachment::Map(superoffload_connection* connection, const v1::AttachOptimizerResponse& response) {
  const int code = superoffload_attach(connection, response.attachment_epoch(), optimizer_.step(),
                                       static_cast<uint32_t>(bucket_parameters_.size()), &handle_);
  if (code != 0) return FromC(code);
  parameters_ = static_cast<std::byte*>(superoffload_parameters(handle_, nullptr));
  gradients_ = static_cast<std::byte*>(superoffload_gradients(handle_, nullptr));
  return absl::OkStatus();
}

const v1::Placement& Attachment::Place(size_t index) const {
  return optimizer_.layout().placements(static_cast<int>(index));
}

absl::Status Attachment::SetGroup(uint32_t group, const v1::ParameterGroup& h) {
  return FromC(superoffload_set_group(handle_, group, h.lr(), h.beta1(), h.beta2(), h.eps(), h.weight_decay()));
}

absl::Status Attachment::BeginStep(double gradient_scale) {
  if (int code = superoffload_begin_step(handle_, gradient_scale); code != 0) return FromC(code);
  outstanding_ = bucket_parameters_;
  ready_.assign(elements_.size(), false);
  return absl::OkStatus();
}

absl::Status Attachment::GradientReady(size_t parameter) {
  if (parameter >= elements_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", parameter, " does not exist; the optimizer has ", elements_.size(), " parameters"));
  }
  if (ready_.empty()) return absl::FailedPreconditionError("GradientReady without an open step; call BeginStep first");
  if (ready_[parameter]) {
    return absl::AlreadyExistsError(absl::StrCat("the gradient of parameter \"",
                                                 optimizer_.parameters(static_cast<int>(parameter)).name(),
                                                 "\" was already ready in this step; say so once per step"));
  }
  ready_[parameter] = true;
  const v1::Placement& place = Place(parameter);
  for (uint32_t bucket = place.first_bucket(); bucket < place.first_bucket() + place.bucket_count(); ++bucket) {
    if (--outstanding_[bucket] > 0) continue;
    if (int code = superoffload_gradient_ready(handle_, bucket); code != 0) return FromC(code);
  }
  return absl::OkStatus();
}

absl::StatusOr<double> Attachment::WaitNorm(double gradient_scale) {
  if (int code = superoffload_measure_norm(handle_, gradient_scale); code != 0) return FromC(code);
  double norm = 0;
  if (int code = superoffload_wait_norm(handle_, -1, &norm); code != 0) return FromC(code);
  return norm;
}

absl::Status Attachment::EndStep(double gradient_scale, double max_grad_norm) {
  return FromC(superoffload_end_step(handle_, gradient_scale, max_grad_norm));
}

absl::Status Attachment::AbandonStep() { return FromC(superoffload_abandon_step(handle_)); }

absl::StatusOr<superoffload_verdict> Attachment::WaitStep(absl::Duration timeout) {
  const int64_t milliseconds =
      timeout == absl::InfiniteDuration() ? -1 : absl::ToInt64Milliseconds(absl::Ceil(timeout, absl::Milliseconds(1)));
  superoffload_verdict verdict;
  if (int code = superoffload_wait_step(handle_, milliseconds, &verdict); code != 0) return FromC(code);
  slot_ = verdict.next_slot;
  ready_.clear();
  return verdict;
}

absl::StatusOr<superoffload_gpu_report> Attachment::AttachGpu(int ordinal, uint32_t max_bucket_tensors,
                                                              superoffload_mover mover) {
  const v1::Layout& layout = optimizer_.layout();
  std::vector<superoffload_bucket> buckets;
  for (const v1::Bucket& bucket : layout.buckets()) {
    buckets.push_back({.elements = bucket.elements(),
                       .parameters_offset = bucket.parameters_offset(),
                       .gradient_offsets = {bucket.gradient_offsets(0), bucket.gradient_offsets(1)},
                       .state_offset = bucket.state_offset(),
                       .dtype = static_cast<uint32_t>(bucket.dtype()),
                       .gradient_dtype = static_cast<uint32_t>(bucket.gradient_dtype()),
                       .group = bucket.group(),
                       .reserved = 0});
  }
  std::vector<superoffload_group> groups;
  for (const v1::ParameterGroup& group : optimizer_.groups()) {
    groups.push_back({group.lr(), group.beta1(), group.beta2(), group.eps(), group.weight_decay()});
  }
  const superoffload_gpu_options options{
      .ordinal = ordinal,
      .mover = mover,
      .sharing = 0,
      .slots = 0,
      .max_bucket_tensors = max_bucket_tensors,
      .next_slot = slot_,
      .algorithm = static_cast<uint32_t>(optimizer_.algorithm()),
      .bucket_count = static_cast<uint32_t>(buckets.size()),
      .group_count = static_cast<uint32_t>(groups.size()),
      .reserved = 0,
      .buckets = buckets.data(),
      .groups = groups.data(),
      .state_offsets = {layout.master_offset(), layout.exp_avg_offset(), layout.exp_avg_sq_offset()},
      .previous = nullptr};
  superoffload_gpu_report report;
  if (int code = superoffload_gpu_attach(handle_, &options, &report); code != 0) return FromC(code);
  return report;
}

absl::Status Attachment::PushParameters() {
  return Call(*stub_, &Stub::PushParameters, token_, Named<v1::PushParametersRequest>(optimizer_.name())).status();
}

absl::Status Attachment::PullParameters() {
  return Call(*stub_, &Stub::PullParameters, token_, Named<v1::PullParametersRequest>(optimizer_.name())).status();
}

}  // namespace superoffload
