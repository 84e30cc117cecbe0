// GPU memory for an attachment of a C++ trainer.
#include <vector>

#include "client/src/cpp/calls.h"
#include "superoffload/client.hpp"

namespace superoffload {

absl::StatusOr<superoffload_gpu_report> Attachment::AttachGpu(int ordinal, superoffload_mover mover) {
  if (gpu_) return absl::FailedPreconditionError("the attachment has a GPU already; attach anew");
  superoffload_open_step_state step;
  if (int code = superoffload_look(trainer_, &step, nullptr); code != 0) return FromC(code);
  if (step.begun) return absl::FailedPreconditionError("a step is open; end or abandon it first");
  if (int code = superoffload_use_attachment(trainer_, nullptr, 0, 0, 0, nullptr); code != 0) return FromC(code);
  gpu_ = GpuWish{ordinal, mover};
  const absl::Status given = GiveGpu(optimizer_, step.next_slot, nullptr);
  if (!given.ok()) gpu_.reset();
  uint32_t resumed = 0;
  const absl::Status used = Use(step.next_slot, step.committed_steps, &resumed);
  if (!given.ok()) return given;
  if (!used.ok()) return used;
  return gpu_report_;
}

absl::Status Attachment::GiveGpu(const v1::Optimizer& optimizer, uint32_t next_slot,
                                 superoffload_attachment* previous) {
  std::vector<double> scalars;
  for (const v1::ParameterGroup& group : optimizer_.groups()) {  // as this process has set them
    for (const v1::Scalar& scalar : group.scalars()) scalars.push_back(scalar.value());
  }
  std::vector<uint64_t> array_offsets;
  for (const v1::StateArray& array : optimizer.layout().arrays()) array_offsets.push_back(array.offset());
  std::vector<superoffload_shard> shards;
  for (const v1::Parameter& parameter : optimizer.parameters()) {
    shards.push_back({.dimensions = static_cast<uint32_t>(parameter.shape_size()),
                      .global_dimensions = static_cast<uint32_t>(parameter.global_shape_size()),
                      .shape = parameter.shape().data(),
                      .global_shape = parameter.global_shape().data(),
                      .global_offset = parameter.global_offset().data()});
  }
  const superoffload_gpu_options options{
      .ordinal = gpu_->ordinal,
      .mover = gpu_->mover,
      .share = 0,
      .device_slots = 0,
      .next_slot = next_slot,
      .array_count = static_cast<uint32_t>(array_offsets.size()),
      .algorithm = optimizer.algorithm().c_str(),
      .scalars = scalars.data(),
      .array_offsets = array_offsets.data(),
      .parameter_steps = optimizer.parameter_steps_size() == 0 ? nullptr : optimizer.parameter_steps().data(),
      .committed_steps = optimizer.committed_steps(),
      .seed = optimizer.seed(),
      .shards = shards.data(),
      .previous = previous,
      .memory = nullptr,
      .push = 0,
      .stream_slots = stream_slots_,
      .push_stream = 0};
  int code = superoffload_gpu_attach(trainer_, handles_.back(), &options, &gpu_report_);
  if (code == 0 && previous != nullptr) code = superoffload_gpu_copy(handles_.back(), SUPEROFFLOAD_TO_GPU, 0);
  return FromC(code);
}

}  // namespace superoffload
