#include "server/simulator/sharded_units.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace superoffload::simulator {

ShardedUnits::ShardedUnits(VirtualTime* time, Timeline* timeline, GpuStream* compute, const NetworkModel& network,
                           const Workload& workload)
    : time_(time), compute_(compute), network_(time, timeline, Lane::kNetwork), units_(workload.units.size()) {
  std::vector<double> parameters(units_.size()), gradients(units_.size());  // bytes
  for (const engine::ParameterSpec& parameter : workload.model.parameters) {
    const double elements = static_cast<double>(engine::ElementCount(parameter));
    parameters[parameter.unit] += elements * static_cast<double>(kernels::DTypeBytes(parameter.dtype));
    gradients[parameter.unit] += elements * static_cast<double>(kernels::DTypeBytes(parameter.gradient_dtype));
  }
  for (size_t i = 0; i < units_.size(); ++i) {
    units_[i].gather = CollectiveSeconds(network, workload.ranks, parameters[i]);
    units_[i].reduce = CollectiveSeconds(network, workload.ranks, gradients[i]);
  }
}

void ShardedUnits::Gather(size_t index, const std::function<void()>& read) {
  Unit& unit = units_[index];
  network_.Wait(begun_);
  network_.HostCall([this, &unit] { unit.reading = time_->now(); });
  read();
  network_.HostCall([this, &unit] { unit.gathering = time_->now(); });
  network_.Kernel(unit.gather, absl::StrCat("gather ", index));
  network_.Record(&unit.gathered);
}

void ShardedUnits::Begin(size_t index) {
  compute_->HostCall([this, index] { units_[index].lacked = time_->now(); });
  compute_->Wait(units_[index].gathered);
  compute_->Record(&begun_);
}

void ShardedUnits::Reduce(size_t index, std::function<void()> reduced) {
  GpuEvent computed;
  compute_->Record(&computed);
  network_.Wait(computed);
  network_.Kernel(units_[index].reduce, absl::StrCat("reduce ", index));
  network_.HostCall(std::move(reduced));
  network_.Record(&units_[index].reduced);
}

}  // namespace superoffload::simulator
