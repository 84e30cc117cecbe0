#include "server/optimizer/salvage.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/record.h"

namespace superoffload::optimizer {
namespace {

class NoObserver final : public OptimizerObserver {
 public:
  void OnPass(const OptimizerId&, const engine::PassReport&) override {}
  void OnStep(const OptimizerId&, const engine::StepReport&) override {}
  void OnCheckpoint(const OptimizerId&, const CheckpointReport&) override {}
  void OnDelete(const OptimizerId&) override {}
};

// Whether it may have made the steps that its record says.
bool KnowsSteps(const engine::Record& damaged) {
  return damaged.HeaderWhole() && damaged.committed() <= engine::kMaxSteps;
}

// One that has the state be what it is, of the step that the damaged one names, if that can be believed.
absl::StatusOr<memory::SharedMemory> NewRecord(const engine::Record& damaged, const engine::Layout& layout) {
  absl::StatusOr<memory::SharedMemory> memory =
      memory::SharedMemory::Create("superoffload-record", engine::Record::Bytes(layout));
  if (!memory.ok()) return memory;
  engine::Record record(memory->data(), layout);
  const uint64_t committed = KnowsSteps(damaged) ? damaged.committed() : 0;
  std::vector<uint64_t> steps(layout.placements.size());
  for (uint32_t i = 0; i < steps.size(); ++i) steps[i] = std::min(committed, damaged.ParameterSteps(committed, i));
  record.EndRestore(committed, steps);
  if (damaged.HeaderWhole()) record.SetRun(damaged.run());
  return memory;
}

}  // namespace

absl::StatusOr<Salvaged> Salvage(OptimizerId id, engine::OptimizerSpec spec, HostedMemory memory,
                                 engine::WorkerPool* pool) {
  static NoObserver no_observer;
  absl::StatusOr<engine::Layout> layout = engine::PlanLayout(spec);
  if (!layout.ok()) return layout.status();
  Salvaged salvaged;
  if (absl::Status status = memory.Check(*layout); !status.ok()) {
    if (absl::Status sizes = memory.CheckSizes(*layout); !sizes.ok()) return sizes;
    const engine::Record damaged(memory.record.data(), *layout);
    if (!damaged.KnowsVersion()) return status;
    salvaged.doubts = absl::StrCat(
        status.message(),
        ". Masters and moments are as they stood in memory: parts of them may be up to two steps behind others, and a "
        "part whose update was cut off may be a mixture of two steps. ",
        KnowsSteps(damaged) ? "The number of committed steps is the damaged record's. "
                            : "The number of committed steps is not known, and written as 0. ",
        "Hyper-parameters are those of the creation.");
    absl::StatusOr<memory::SharedMemory> record = NewRecord(damaged, *layout);
    if (!record.ok()) return record.status();
    memory.record = *std::move(record);
  }
  salvaged.budget = std::make_unique<memory::MemoryBudget>(std::numeric_limits<uint64_t>::max());
  absl::StatusOr<std::unique_ptr<HostedOptimizer>> optimizer =
      HostedOptimizer::Adopt(std::move(id), NewUniqueId(), std::move(spec), engine::SpeculationPolicy::kNever, memory,
                             salvaged.budget.get(), pool, &no_observer);
  if (!optimizer.ok()) return optimizer.status();
  salvaged.optimizer = *std::move(optimizer);
  return salvaged;
}

}  // namespace superoffload::optimizer
