// GPU memory for an attachment of a C++ trainer.
#include <vector>

#include "client/src/cpp/calls.h"
#include "client/src/cpp/layout.h"
#include "superoffload/client.hpp"

namespace superoffload {
absl::StatusOr<superoffload_gpu_report> Attachment::AttachGpu(int ordinal, superoffload_mover mover) {
  superoffload_open_step_state step;
  if (int code = superoffload_look(trainer_, &step); code != 0) return FromC(code);
  if (step.begun) return absl::FailedPreconditionError("a step is open; end or abandon it first");
  if (int code = superoffload_use_attachment(trainer_, nullptr, 0, 0, 0, nullptr); code != 0) return FromC(code);
  gpu_ = GpuWish{ordinal, mover};
  absl::StatusOr<superoffload_gpu_report> report = GiveGpu(optimizer_, step.next_slot, nullptr);
  if (!report.ok()) gpu_.reset();
  uint32_t resumed = 0;
  const absl::Status used = Use(step.next_slot, step.committed_steps, &resumed);
  if (report.ok() && !used.ok()) return used;
  return report;
}

absl::StatusOr<superoffload_gpu_report> Attachment::GiveGpu(const v1::Optimizer& optimizer, uint32_t next_slot,
                                                            superoffload_attachment* previous) {
  const v1::Layout& layout = optimizer.layout();
  const std::vector<superoffload_bucket> buckets = ToC(layout);
  std::vector<double> scalars;
  for (const v1::ParameterGroup& group : optimizer_.groups()) {  // as this process has set them
    for (const v1::Scalar& scalar : group.scalars()) scalars.push_back(scalar.value());
  }
  std::vector<uint64_t> array_offsets;
  for (const v1::StateArray& array : layout.arrays()) array_offsets.push_back(array.offset());
  std::vector<uint64_t> parameter_offsets;
  for (const v1::Placement& place : layout.placements()) parameter_offsets.push_back(place.state_offset());
  const superoffload_gpu_options options{
      .ordinal = gpu_->ordinal,
      .mover = gpu_->mover,
      .share = 0,
      .device_slots = 0,
      .next_slot = next_slot,
      .bucket_count = static_cast<uint32_t>(buckets.size()),
      .group_count = static_cast<uint32_t>(optimizer.groups_size()),
      .scalar_count = static_cast<uint32_t>(scalars.size() / optimizer.groups_size()),
      .array_count = static_cast<uint32_t>(array_offsets.size()),
      .parameter_count = static_cast<uint32_t>(optimizer.parameters_size()),
      .buckets = buckets.data(),
      .algorithm = optimizer.algorithm().c_str(),
      .scalars = scalars.data(),
      .array_offsets = array_offsets.data(),
      .parameter_offsets = parameter_offsets.data(),
      .parameter_steps = optimizer.parameter_steps_size() == 0 ? nullptr : optimizer.parameter_steps().data(),
      .committed_steps = optimizer.committed_steps(),
      .previous = previous,
      .memory = nullptr,
      .push = 0,
      .reserved = 0,
      .push_stream = 0};
  superoffload_gpu_report report;
  if (int code = superoffload_gpu_attach(handles_.back(), &options, &report); code != 0) return FromC(code);
  if (previous != nullptr) {
    if (int code = superoffload_gpu_pull(handles_.back()); code != 0) return FromC(code);
  }
  return report;
}

}  // namespace superoffload
