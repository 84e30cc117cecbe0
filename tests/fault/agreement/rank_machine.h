// The daemon's part of one rank: the real StepMachine over real memory, as a graph. A node is what a daemon may be: the
// memory that it began with and the calls it has had since. An edge is a call, to its end or to a death between two
// stores of the record. Each edge is run once, however often the exploration takes it.
#ifndef SUPEROFFLOAD_TESTS_FAULT_AGREEMENT_RANK_MACHINE_H_
#define SUPEROFFLOAD_TESTS_FAULT_AGREEMENT_RANK_MACHINE_H_

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "server/engine/step_machine.h"
#include "tests/support/sequential_optimizer.h"

namespace superoffload::faults {

inline constexpr double kMaxGradNorm = 5;  // less than every norm here, so that the state tells which total it was

struct MachineCall {
  enum Kind : uint8_t { kAttach, kFill, kBegin, kReady, kPrepare, kEnd, kAbandon, kDetach, kReport, kCommit, kDrop };
  Kind kind = kAttach;
  uint64_t attempt = 0;  // kEnd, kCommit, kDrop
  double value = 0;      // kFill: of all elements of the gradient; kEnd, kCommit: the total

  auto operator<=>(const MachineCall&) const = default;
};

struct MachineOutcome {
  uint32_t node = 0;  // of the daemon that lives on; after a death, an image
  bool accepted = false;
  bool died = false;
  uint32_t stores = 0;  // places where it might have died
  // What was told before the end or the death.
  std::optional<engine::RunTotal> prepared;
  std::optional<engine::Verdict> verdict;
  std::optional<engine::RunReport> report;
  uint64_t committed = 0;  // by then
};

class RankMachines {
 public:
  RankMachines();

  // Memory of an optimizer that has trained these steps alone.
  struct PlainStep {
    double gradient;
    double coefficient;
  };
  uint32_t Image(const std::vector<PlainStep>& steps, uint64_t lineage);

  // A daemon that recovers what is in the image. `death`: counted from 1; 0 for none.
  MachineOutcome Recover(uint32_t image, uint32_t death);
  MachineOutcome Call(uint32_t node, const MachineCall& call, uint32_t death);

  // What a killed daemon leaves.
  uint32_t ImageOf(uint32_t node) const { return nodes_[node].now; }

  uint64_t Committed(uint32_t image);
  double Gradient(uint32_t image, uint64_t step);  // what its slot holds
  std::string SettledState(uint32_t image);

  uint64_t edges() const { return outcomes_.size(); }

 private:
  struct Node {
    uint32_t began = 0;  // image
    std::vector<MachineCall> calls;
    uint32_t now = 0;  // image

    auto Key() const { return std::tie(began, calls); }
  };

  MachineOutcome Run(const Node& from, const MachineCall* call, uint32_t death);
  uint32_t Intern(std::string image);
  uint32_t Intern(Node node);
  void Load(uint32_t image);
  std::string Save() const;

  engine::OptimizerSpec spec_;
  engine::Layout layout_;
  test::Memory memory_;
  size_t record_bytes_;  // that are used: one worker
  std::vector<std::string> images_;
  std::map<std::string, uint32_t> image_ids_;
  std::vector<Node> nodes_;
  std::map<std::pair<uint32_t, std::vector<MachineCall>>, uint32_t> node_ids_;
  std::map<std::tuple<uint32_t, bool, MachineCall, uint32_t>, MachineOutcome> outcomes_;
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_AGREEMENT_RANK_MACHINE_H_
