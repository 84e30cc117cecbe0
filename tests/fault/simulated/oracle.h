// What the optimizer must be: a sequential one that takes every committed step once.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_ORACLE_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_ORACLE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "kernels/elements/elements.h"
#include "tests/fault/simulated/attempt.h"
#include "tests/fault/simulated/checkpoint_writer.h"
#include "tests/fault/simulated/ground.h"
#include "tests/support/sequential_optimizer.h"

namespace superoffload::faults {

class Oracle {
 public:
  // `parameters`: the masters are widened from them.
  Oracle(Ground* ground, const std::vector<std::byte>& parameters);

  uint64_t committed_steps() const { return committed_steps_; }
  double norm() const { return optimizer_->norm(); }
  const std::vector<std::byte>& parameters() const { return optimizer_->memory().parameters; }
  const std::vector<engine::Scalars>& groups() const { return groups_; }

  // What is to become of an attempt that was ended; takes the step when that is to commit it.
  engine::Verdict Resolve(const Attempt& attempt);

  // It was restored.
  void Restore(const Checkpoint& checkpoint);
  // They became the masters.
  void Push(const std::vector<std::byte>& parameters);

  // They fail when a bit differs.
  bool HasParameters(const std::vector<std::byte>& parameters) const;
  void CheckParameters(const std::vector<std::byte>& parameters, const char* when,
                       const std::function<bool(uint32_t bucket)>& checked = nullptr) const;  // null: all are
  void CheckState(const std::vector<std::byte>& state, const std::vector<uint64_t>& parameter_steps) const;
  void CheckCheckpoint(const Checkpoint& checkpoint) const;

 private:
  struct Moment {
    std::vector<std::byte> state;
    std::vector<uint64_t> parameter_steps;
  };

  void Reset(test::Memory& initial, std::vector<uint64_t> steps);
  void Keep();
  // What differs; null: nothing.
  const char* Compare(const Moment& moment, const std::vector<std::byte>& state,
                      const std::vector<uint64_t>& parameter_steps) const;
  kernels::MutableElements Masters(test::Memory& memory, const engine::BucketLayout& bucket) const;

  Ground& ground_;
  uint64_t committed_steps_ = 0;
  std::vector<engine::Scalars> groups_;
  std::optional<test::SequentialOptimizer> optimizer_;
  std::map<uint64_t, std::vector<Moment>> history_;  // by committed steps; several where parameters were pushed
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_ORACLE_H_
