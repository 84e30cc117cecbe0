// Takes checkpoints of a daemon's optimizer at random times and slowly, as the real writer does: asks for a snapshot,
// claims bucket after bucket, copies and releases each. Some are cancelled, some given up in the middle.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_CHECKPOINT_WRITER_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_CHECKPOINT_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "server/engine/step_machine.h"
#include "tests/fault/simulated/ground.h"

namespace superoffload::faults {

class SimulatedDaemon;

struct Checkpoint {
  engine::StepMachine::Moment moment;
  std::vector<std::byte> state;
};

class CheckpointWriter {
 public:
  CheckpointWriter(Ground* ground, SimulatedDaemon* daemon) : ground_(*ground), daemon_(*daemon) {}

  // Again and again, as long as the daemon lives.
  void Start();
  // No other is begun, and one that still waits for its moment is cancelled.
  void Stop();
  // With its daemon.
  void Die();

  bool busy() const { return writing_.has_value(); }
  const std::vector<Checkpoint>& whole() const { return whole_; }
  void Forget() { whole_.clear(); }

 private:
  void Request();
  void Taken(engine::StepMachine::Moment moment);
  void Claim(uint64_t number);
  void Save(uint64_t number, uint32_t bucket);
  void End();

  Ground& ground_;
  SimulatedDaemon& daemon_;
  bool stopped_ = false;
  std::optional<uint64_t> request_;  // that waits for its moment
  std::optional<Checkpoint> writing_;
  uint64_t number_ = 0;   // of `writing_`
  uint32_t saved_ = 0;    // buckets
  uint32_t claimed_ = 0;  // buckets that are being saved
  bool given_up_ = false;
  std::vector<Checkpoint> whole_;
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_CHECKPOINT_WRITER_H_
