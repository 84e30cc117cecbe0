// Every interleaving of a run of two ranks with a few deaths. The daemons are real (rank_machine.h), and so is what the
// trainers make of each other's reports (client/src/agreement.h); trainers, process groups and what is on its way
// between them are modelled here.
//
// A trainer reports, waits for all reports, resolves what it has prepared, attaches, and trains: it fills the slot and
// submits the step; once that is prepared it contributes its sum to the group's gathering, and ends the step with the
// total. Anybody may die at any moment, a daemon between any two stores of its record. After a death all trainers start
// anew, in a new group, at any moment; an END_STEP of a dead trainer may be delivered as late as it likes.
#ifndef SUPEROFFLOAD_TESTS_FAULT_AGREEMENT_EXPLORATION_H_
#define SUPEROFFLOAD_TESTS_FAULT_AGREEMENT_EXPLORATION_H_

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "superoffload/superoffload.h"
#include "tests/fault/agreement/rank_machine.h"

namespace superoffload::faults {

inline constexpr uint32_t kRanks = 2;
inline constexpr uint64_t kMaxSteps = 3;

struct ExplorationOptions {
  uint64_t steps = 2;
  uint32_t deaths = 2;
  bool infinite = false;       // the first gradient of rank 1, so that the first attempt is skipped
  bool other_lineage = false;  // rank 1 begins from another checkpoint, of the same step

  // Rules of trainers and groups that are broken.
  bool planted = false;          // some rule is, here or in the engine
  size_t shallow = 0;            // and so many events are enough to find it; 0: any number
  bool decide_early = false;     // without the reports of all
  bool mix_generations = false;  // what an older group has gathered counts
  bool fill_before_agreement = false;
  bool report_attached = false;  // while the dead trainer's attachment is not over
};

class Exploration {
 public:
  explicit Exploration(const ExplorationOptions& options) : options_(options) {}

  // The first violation, with the events that led to it; empty: there is none.
  std::string Run();

  uint64_t states() const { return seen_.size(); }
  const RankMachines& machines() const { return machines_; }

 private:
  enum class Phase : uint8_t { kDead, kReport, kReported, kAttach, kNext, kStepping, kGathering, kEnding, kDone };

  struct End {
    bool there = false;
    engine::RunTotal total;
  };
  struct Contribution {
    bool there = false;
    double sum = 0;
    uint64_t step = 0;
  };
  struct Rank {
    bool daemon = true;      // alive; `node` is an image otherwise
    bool attached = false;   // somebody is, dead or alive
    bool stale = false;      // that is a trainer of an older group
    bool submitted = false;  // BEGIN_STEP to PREPARE are on their way
    bool filled = false;     // early, with fill_before_agreement
    Phase phase = Phase::kReport;
    uint8_t round = 0;
    uint8_t batches = 0;
    uint32_t node = 0;
    End end, late;  // on its way; of a dead trainer
    std::optional<engine::RunTotal> prepared;
    std::optional<superoffload_run_report> report;
  };
  struct Committed {  // what is known of a step
    bool there = false;
    double total = 0;
    std::array<double, kRanks> gradient{};  // 0: not yet known
  };
  struct State {
    std::array<Rank, kRanks> ranks;
    std::vector<std::array<Contribution, kRanks>> rounds;
    std::array<Committed, kMaxSteps> committed{};
    uint32_t deaths = 0;  // left
    bool disturbed = false;
  };

  static std::string Key(const State& state);
  void Explore(const State& state);
  void Branch(const State& from, const std::string& event, const std::function<bool(State&)>& act);
  // Calls the daemon of `rank`, once for each way in which that may end, and goes on with `then`.
  using Then = std::function<bool(State&, const MachineOutcome&)>;
  void BranchCall(const State& from, uint32_t rank, const std::string& event, const MachineCall& call,
                  const Then& then);
  bool TakeOutcome(State& state, uint32_t rank, const MachineCall* call, const MachineOutcome& outcome);
  void NoteCommit(State& state, uint32_t rank, uint64_t step, double total);
  MachineOutcome Quietly(State& state, uint32_t rank, MachineCall::Kind kind, double value = 0);

  void DaemonEvents(const State& state, uint32_t rank);
  void TrainerEvents(const State& state, uint32_t rank);
  void AgreementEvents(const State& state, uint32_t rank);
  void StepEvents(const State& state, uint32_t rank);
  void Deaths(const State& state, uint32_t rank);
  void Restart(const State& state);
  void Resolve(const State& state, uint32_t rank);
  void KillTrainer(State& state, uint32_t rank);
  void CheckEnd(const State& state);
  uint64_t CommittedOf(const Rank& rank);
  double Value(uint32_t rank, uint8_t batch) const;
  void Violated(const std::string& what);

  const ExplorationOptions options_;
  RankMachines machines_;
  std::unordered_set<std::string> seen_;
  std::vector<std::string> path_;
  std::string violation_;
  bool moved_ = false;  // the state under exploration has a successor
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_AGREEMENT_EXPLORATION_H_
