#include "tests/fault/simulated/simulated_device.h"

#include <utility>

namespace superoffload::faults {

SimulatedDevice::SimulatedDevice(Ground* ground, std::shared_ptr<SimulatedGpuMemory> gpu,
                                 std::shared_ptr<SimulatedRings> rings, engine::StepMachine* machine,
                                 std::function<void(std::function<void()>)> after)
    : ground_(*ground),
      gpu_(std::move(gpu)),
      rings_(std::move(rings)),
      machine_(machine),
      cuda_(
          &ground->time,
          [this](simulator::Clock* clock) {
            return gpu_->MakeProcess(clock, [this] { return !cuda_.killed(); }, [] { return false; });
          },
          std::move(after)) {
  const client::GpuLayout& layout = gpu_->layout();
  superoffload_device_request request{};
  request.slots = static_cast<uint32_t>(layout.slots.count);
  request.slots_offset = layout.slots.offset;
  request.slot_bytes = layout.slots.bytes;
  request.sums_offset = layout.slots.sums_offset;
  request.sums_bytes = layout.slots.sums_bytes;
  request.memory_bytes = layout.bytes;
  absl::StatusOr<std::unique_ptr<transport::DeviceMover>> mover = transport::DeviceMover::OpenMapped(
      request, cuda_.device(), gpu_->base(),
      {.gradients = ground->memory.gradients,
       .parameters = ground->published(),
       .buckets = gpu_->MovedBuckets(),
       .committed_steps = [machine] { return machine->statistics().committed_steps; }},
      this, [this](const auto&, const char*) { return cuda_.MakeQueue(); });
  if (!mover.ok()) Fail(mover.status());
  mover_ = *std::move(mover);
}

SimulatedDevice::~SimulatedDevice() { Kill(); }

void SimulatedDevice::Kill() {
  cuda_.Kill();
  mover_.reset();
}

void SimulatedDevice::ParametersReady(uint64_t step, uint32_t bucket, bool speculative) {
  rings_->ParametersReady(step, bucket, speculative);
  mover_->Published(step, bucket, speculative);
}

void SimulatedDevice::VerdictReached(const engine::VerdictReport& report) {
  rings_->VerdictReached(report);
  mover_->VerdictReached(report.step, !IsSkip(report.verdict), report.speculation_stands);
}

absl::Status SimulatedDevice::Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares) {
  ground_.log.Add("daemon", "is handed", entry.opcode, entry.index);
  return transport::DeliverEntry(entry, rings_->epoch(), sum_of_squares, *machine_);
}

void SimulatedDevice::Reject(const superoffload_ring_entry& entry, const absl::Status& status) {
  faults::Fail("submission ", entry.opcode, " is rejected: ", status.message());
}

void SimulatedDevice::Fail(const absl::Status& status) { faults::Fail("the daemon's mover: ", status.message()); }

}  // namespace superoffload::faults
