#include <algorithm>
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

// Null: the group has none of that name.
v1::Scalar* FindScalar(v1::ParameterGroup* group, const std::string& name) {
  auto* const scalars = group->mutable_scalars();
  const auto named = [&](const v1::Scalar& scalar) { return scalar.name() == name; };
  const auto found = std::find_if(scalars->begin(), scalars->end(), named);
  return found == scalars->end() ? nullptr : &*found;
}

}  // namespace

void SetScalar(v1::ParameterGroup* group, const std::string& name, double value) {
  v1::Scalar* scalar = FindScalar(group, name);
  if (scalar == nullptr) scalar = group->add_scalars();
  scalar->set_name(name);
  scalar->set_value(value);
}

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

absl::Status Attachment::SetGroup(uint32_t group, const v1::ParameterGroup& hyperparameters) {
  if (group >= static_cast<uint32_t>(optimizer_.groups_size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", group, " does not exist; the optimizer has ", optimizer_.groups_size(), " groups"));
  }
  v1::ParameterGroup& known = *optimizer_.mutable_groups(static_cast<int>(group));
  for (const v1::Scalar& given : hyperparameters.scalars()) {
    v1::Scalar* const found = FindScalar(&known, given.name());
    if (found == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(optimizer_.algorithm(), " has no hyper-parameter \"", given.name(), "\""));
    }
    found->set_value(given.value());
  }
  std::vector<double> scalars;
  for (const v1::Scalar& scalar : known.scalars()) scalars.push_back(scalar.value());
  return FromC(superoffload_set_group(handle_, group, scalars.data(), static_cast<uint32_t>(scalars.size())));
}

absl::Status Attachment::BeginStep(double gradient_scale) {
  if (int code = superoffload_begin_step(handle_, gradient_scale); code != 0) return FromC(code);
  outstanding_ = bucket_parameters_;
  ready_.assign(elements_.size(), false);
  return absl::OkStatus();
}

absl::Status Attachment::ParameterAbsent(size_t parameter) {
  if (absl::Status status = CheckNotReady(parameter); !status.ok()) return status;
  if (int code = superoffload_parameters_absent(handle_, static_cast<uint32_t>(parameter), 1); code != 0) {
    return FromC(code);
  }
  return GradientReady(parameter);
}

absl::Status Attachment::CheckNotReady(size_t parameter) const {
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
  return absl::OkStatus();
}

absl::Status Attachment::GradientReady(size_t parameter) {
  if (absl::Status status = CheckNotReady(parameter); !status.ok()) return status;
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
  superoffload_verdict verdict;
  if (int code = superoffload_wait_step(handle_, Milliseconds(timeout), &verdict); code != 0) return FromC(code);
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
  std::vector<double> scalars;
  for (const v1::ParameterGroup& group : optimizer_.groups()) {
    for (const v1::Scalar& scalar : group.scalars()) scalars.push_back(scalar.value());
  }
  std::vector<uint64_t> array_offsets;
  for (const v1::StateArray& array : layout.arrays()) array_offsets.push_back(array.offset());
  std::vector<uint64_t> parameter_offsets;
  for (const v1::Placement& place : layout.placements()) parameter_offsets.push_back(place.state_offset());
  const superoffload_gpu_options options{
      .ordinal = ordinal,
      .mover = mover,
      .share = 0,
      .device_slots = 0,
      .max_bucket_tensors = max_bucket_tensors,
      .next_slot = slot_,
      .bucket_count = static_cast<uint32_t>(buckets.size()),
      .group_count = static_cast<uint32_t>(optimizer_.groups_size()),
      .scalar_count = static_cast<uint32_t>(scalars.size() / optimizer_.groups_size()),
      .array_count = static_cast<uint32_t>(array_offsets.size()),
      .parameter_count = static_cast<uint32_t>(optimizer_.parameters_size()),
      .buckets = buckets.data(),
      .algorithm = optimizer_.algorithm().c_str(),
      .scalars = scalars.data(),
      .array_offsets = array_offsets.data(),
      .parameter_offsets = parameter_offsets.data(),
      .parameter_steps = optimizer_.parameter_steps_size() == 0 ? nullptr : optimizer_.parameter_steps().data(),
      .committed_steps = optimizer_.committed_steps(),
      .previous = nullptr,
      .memory = nullptr,
      .push = 0,
      .reserved = 0,
      .push_stream = 0};
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
