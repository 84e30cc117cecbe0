#include "tests/fault/simulated/simulation.h"

#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/undo_slot.h"
#include "tests/fault/simulated/ground.h"
#include "tests/fault/simulated/oracle.h"
#include "tests/fault/simulated/simulated_daemon.h"
#include "tests/fault/simulated/simulated_trainer.h"

namespace superoffload::faults {
namespace {

// Runs of thousands of seeds have a few thousand events, the longest some ten thousand.
constexpr uint64_t kMostEvents = 200'000;

class Run {
 public:
  Run(uint64_t seed, const SimulationOptions& options)
      : ground_(seed, options.gpu, options.verbose),
        daemon_(&ground_, [this] { DaemonDied(); }),
        trainer_(&ground_, &daemon_, [this] { Settle(); }) {}

  SimulationResult Simulate() {
    SimulationResult result;
    try {
      daemon_.Start();
      trainer_.Start();
      while (!judged_) {
        if (!ground_.time.Step()) Fail("nothing happens any more: ", Describe());
        if (++result.events > kMostEvents) Fail("the run does not end: ", Describe());
      }
    } catch (const SimulationFailed& failed) {
      result.failure = failed.what;
    }
    Mix(ground_.published());
    Mix(ground_.memory.state);
    result.hash = ground_.log.hash();
    result.daemon_lives = daemon_.lives();
    result.checkpoints = daemon_.checkpoints().whole().size();
    return result;
  }

 private:
  void DaemonDied() {
    trainer_.DaemonDied();
    if (trainer_.finished()) Settle();
  }

  // Asks whichever daemon there is. One that dies of it is followed by another one, which is asked again.
  void Settle() {
    if (!daemon_.alive()) {
      ground_.time.After(1, [this] { Settle(); });
      return;
    }
    daemon_.Settle([this] { Judge(); });
  }

  void Judge() {
    engine::StepMachine& machine = *daemon_.machine();
    trainer_.oracle().CheckParameters(ground_.published(), "in memory once settled");
    trainer_.oracle().CheckState(ground_.memory.state, machine.parameter_steps());
    for (const Checkpoint& checkpoint : daemon_.checkpoints().whole()) trainer_.oracle().CheckCheckpoint(checkpoint);
    CheckNothingLeaks(machine);
    judged_ = true;
  }

  void CheckNothingLeaks(engine::StepMachine& machine) {
    if (!daemon_.workers().idle()) Fail("a pass is in flight");
    if (!machine.BetweenSteps() || !machine.MayBegin()) Fail("a step could not begin");
    if (machine.ClaimSnapshotBucket()) Fail("a snapshot is left open");
    const std::vector<kernels::UndoSlot>& record = ground_.memory.record_bytes;
    const engine::Record view(ground_.memory.view().record, ground_.layout);
    if (absl::Status status = view.Check(); !status.ok()) Fail(status.message());
    // The slots are the record's end.
    const size_t slots = engine::Record::Bytes(ground_.layout) - engine::Record::UndoBytes(ground_.layout);
    const std::byte* const first = reinterpret_cast<const std::byte*>(record.data()) + slots;
    const size_t bytes = kernels::UndoSlotBytes(*ground_.layout.algorithm);
    for (size_t worker = 0; worker < ground_.scenario.workers; ++worker) {
      if (reinterpret_cast<const kernels::UndoSlot*>(first + worker * bytes)->claim != 0) {
        Fail("the undo slot of worker ", worker, " is still claimed");
      }
    }
  }

  std::string Describe() const { return absl::StrCat(trainer_.Describe(), "; ", daemon_.Describe()); }

  void Mix(const std::vector<std::byte>& bytes) {
    ground_.log.Mix({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }

  Ground ground_;
  SimulatedDaemon daemon_;
  SimulatedTrainer trainer_;
  bool judged_ = false;
};

}  // namespace

SimulationResult Simulate(uint64_t seed, const SimulationOptions& options) { return Run(seed, options).Simulate(); }

}  // namespace superoffload::faults
