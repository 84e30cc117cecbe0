// What a daemon has of a trainer's GPU when it copies: the real server/transport/device_mover.h over a simulated
// driver, between the rings and the step machine, as server/transport/transport.h puts it there.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_DEVICE_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_DEVICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "server/engine/step_machine.h"
#include "server/simulator/simulated_cuda.h"
#include "server/transport/device_mover.h"
#include "tests/fault/simulated/simulated_gpu_memory.h"
#include "tests/fault/simulated/simulated_rings.h"

namespace superoffload::faults {

class SimulatedDevice final : public engine::CompletionSink, private transport::Rings {
 public:
  // `after(event)`: an event of the daemon's, some time from now, unless it dies first.
  SimulatedDevice(Ground* ground, std::shared_ptr<SimulatedGpuMemory> gpu, std::shared_ptr<SimulatedRings> rings,
                  engine::StepMachine* machine, std::function<void(std::function<void()>)> after);
  ~SimulatedDevice() override;

  void Submit(const superoffload_ring_entry& entry) { mover_->Submit(entry); }

  // Nothing is under way.
  bool idle() const { return cuda_.idle(); }

  void Kill();

  void SlotFree(uint64_t step, uint32_t bucket, uint32_t slot) override { rings_->SlotFree(step, bucket, slot); }
  void ParametersReady(uint64_t step, uint32_t bucket, bool speculative) override;
  void NormMeasured(uint64_t step, double norm, double sum_of_squares) override {
    rings_->NormMeasured(step, norm, sum_of_squares);
  }
  void Prepared(uint64_t step, uint64_t attempt, double sum_of_squares) override {
    rings_->Prepared(step, attempt, sum_of_squares);
  }
  void VerdictReached(const engine::VerdictReport& report) override;

 private:
  absl::Status Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares) override;
  void Reject(const superoffload_ring_entry& entry, const absl::Status& status) override;
  void GradientTaken(uint64_t step, uint32_t slot) override { rings_->GradientTaken(step, slot); }
  void Landed(uint64_t step, uint32_t bucket) override { rings_->Landed(step, bucket); }
  void Fail(const absl::Status& status) override;

  Ground& ground_;
  const std::shared_ptr<SimulatedGpuMemory> gpu_;
  const std::shared_ptr<SimulatedRings> rings_;
  engine::StepMachine* const machine_;
  simulator::SimulatedCuda cuda_;
  std::unique_ptr<transport::DeviceMover> mover_;
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_DEVICE_H_
