// What hosted optimizers need around them.
#ifndef SUPEROFFLOAD_TESTS_UNIT_SERVER_OPTIMIZER_FAKE_HOUSE_H_
#define SUPEROFFLOAD_TESTS_UNIT_SERVER_OPTIMIZER_FAKE_HOUSE_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/engine/worker_threads.h"
#include "server/memory/memory_budget.h"
#include "server/optimizer/optimizer_table.h"

namespace superoffload::optimizer {

// Remembers what it was told.
class FakeObserver final : public OptimizerObserver {
 public:
  void OnPass(const OptimizerId&, const engine::PassReport&) override {}
  void OnStep(const OptimizerId&, const engine::StepReport&) override {}
  void OnCheckpoint(const OptimizerId&, const CheckpointReport& report) override {
    absl::MutexLock lock(&mu_);
    checkpoints_.push_back(report);
  }
  void OnDelete(const OptimizerId& id) override {
    absl::MutexLock lock(&mu_);
    deleted_.push_back(id);
  }

  std::vector<CheckpointReport> checkpoints() const {
    absl::MutexLock lock(&mu_);
    return checkpoints_;
  }
  std::vector<OptimizerId> WaitDeleted(size_t count) const {
    absl::MutexLock lock(&mu_);
    const auto enough = [this, count] {
      mu_.AssertHeld();
      return deleted_.size() >= count;
    };
    mu_.Await(absl::Condition(&enough));
    return deleted_;
  }
  std::vector<OptimizerId> deleted() const { return WaitDeleted(0); }

 private:
  mutable absl::Mutex mu_;
  std::vector<CheckpointReport> checkpoints_;
  std::vector<OptimizerId> deleted_;
};

class FakeStore final : public DescriptorStore {
 public:
  absl::Status Keep(const std::string& name, const std::vector<int>& fds) override {
    if (full) return absl::ResourceExhaustedError("the store is full");
    kept_[name] = fds.size();
    if (on_keep) on_keep();
    return absl::OkStatus();
  }
  void Drop(const std::string& name) override { kept_.erase(name); }

  const std::map<std::string, size_t>& kept() const { return kept_; }

  bool full = false;
  std::function<void()> on_keep;

 private:
  std::map<std::string, size_t> kept_;
};

// One parameter of 16 elements.
inline engine::OptimizerSpec SmallSpec() {
  engine::OptimizerSpec spec;
  spec.groups = {spec.algorithm->DefaultScalars()};
  spec.parameters.push_back({.name = "weight", .shape = {16}});
  return spec;
}

struct FakeHouse {
  explicit FakeHouse(const OptimizerLimits& limits = {}, uint64_t budget_bytes = uint64_t{1} << 30)
      : budget(budget_bytes), table(limits, {}, &budget, &pool, &observer, &store) {}

  absl::StatusOr<OptimizerPtr> Create(uid_t uid, const std::string& name) {
    return table.Create(User(uid), name, SmallSpec(), {}, "description");
  }
  static transport::Peer User(uid_t uid) { return {.session = uid, .uid = uid, .pid = 0, .is_operator = false}; }
  static transport::Peer Operator() { return {.session = 1, .uid = 0, .pid = 0, .is_operator = true}; }

  memory::MemoryBudget budget;
  engine::WorkerThreads pool{1};
  FakeObserver observer;
  FakeStore store;
  OptimizerTable table;
};

}  // namespace superoffload::optimizer

#endif  // SUPEROFFLOAD_TESTS_UNIT_SERVER_OPTIMIZER_FAKE_HOUSE_H_
