// A daemon with one optimizer: the real step machine on simulated workers. It may die at any event, between two stores
// of the record, and inside a kernel; another one starts over the same memory.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_DAEMON_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_DAEMON_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/engine/step_machine.h"
#include "tests/fault/simulated/checkpoint_writer.h"
#include "tests/fault/simulated/ground.h"
#include "tests/fault/simulated/simulated_device.h"
#include "tests/fault/simulated/simulated_rings.h"
#include "tests/fault/simulated/simulated_workers.h"

namespace superoffload::faults {

// What a trainer learns when it attaches.
struct Welcome {
  uint64_t step = 0;
  uint64_t committed_steps = 0;
  uint32_t next_slot = 0;
  std::vector<uint64_t> parameter_steps;
  std::vector<engine::Scalars> groups;
};

class SimulatedDaemon final : public engine::StepObserver {
 public:
  // `on_death` is called at each death, in the event in which it dies.
  SimulatedDaemon(Ground* ground, std::function<void()> on_death);
  ~SimulatedDaemon() override;

  // The first daemon of the run creates the optimizer; the others recover it.
  void Start();

  // `event` happens in this process some time from now, or never when the process dies first.
  void After(std::function<void()> event);

  // A trainer wants in: waits for its turn, has a checkpoint restored and the parameters pushed or pulled, and answers.
  // It hands over rings for what then follows.
  struct Wish {
    std::optional<std::vector<std::byte>> push;  // the trainer's parameters; nothing: it pulls
    std::shared_ptr<const Checkpoint> restore;   // null: none
    bool restore_anyway = true;                  // else only when the optimizer is incomplete without it
    std::shared_ptr<SimulatedRings> rings;
    std::shared_ptr<SimulatedGpuMemory> gpu;  // that the daemon copies from and to; null: none
    // Of a run: with which total another rank has committed what this one has prepared; nothing: none has.
    std::function<std::optional<double>(uint64_t attempt)> committed_elsewhere;
    std::function<void(const Welcome&)> attached;
  };
  void Attach(const Wish& wish);

  // The trainer of these rings is gone.
  void Detach(const std::shared_ptr<SimulatedRings>& rings);

  // An entry was added to the rings' submissions.
  void Submitted(const std::shared_ptr<SimulatedRings>& rings);

  // SettleOptimizer of the trainer of these rings, between its steps: `settled` is called when nothing is left to
  // absorb of the buckets from `first_bucket` on.
  void Settle(const std::shared_ptr<SimulatedRings>& rings, uint32_t first_bucket, std::function<void()> settled);

  // Once nobody is attached: no checkpoint is begun from here, and `settled` is called when the state is that of the
  // last committed step.
  void Settle(std::function<void()> settled);

  uint64_t lives() const { return lives_; }
  bool alive() const { return machine_ != nullptr; }
  // As StepEngine is made: nobody gets its memory before it has recovered.
  bool serving() const { return alive() && recovered_; }
  engine::StepMachine* machine() { return machine_.get(); }
  const SimulatedWorkers& workers() const { return *workers_; }
  CheckpointWriter& checkpoints() { return checkpoints_; }

  // What goes on, for who wonders why nothing does.
  std::string Describe() const;

 private:
  void Create();
  void Die();
  void RetireDevice();
  void TryAttach(const Wish& wish);
  void Agree(const Wish& wish);
  void Load(const Wish& wish, uint32_t bucket);
  void Push(const Wish& wish, std::function<void()> done);
  void Admit(const Wish& wish);
  void TakeSubmission(const std::shared_ptr<SimulatedRings>& rings);
  void TrySettle(std::function<void()> settled);

  void OnPass(const engine::PassReport&) override {}
  void OnStep(const engine::StepReport&) override {}

  Ground& ground_;
  const std::function<void()> on_death_;
  engine::OptimizerMemory memory_;
  uint64_t life_ = 0;   // of which events may happen: changes with each start and each death
  uint64_t lives_ = 0;  // starts
  bool created_ = false;
  bool recovered_ = false;
  std::unique_ptr<SimulatedWorkers> workers_;
  std::unique_ptr<engine::StepMachine> machine_;
  CheckpointWriter checkpoints_;
  std::shared_ptr<SimulatedRings> wanted_;                         // of the trainer that waits for its turn
  std::shared_ptr<SimulatedRings> attached_;                       // of the trainer that is attached
  std::unique_ptr<SimulatedDevice> device_;                        // its GPU, where this process copies
  std::vector<std::unique_ptr<SimulatedDevice>> retired_devices_;  // killed; events may still be on their way
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_DAEMON_H_
