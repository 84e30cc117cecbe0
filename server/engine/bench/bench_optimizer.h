// An optimizer with memory of its own, of matrices of 4 Mi elements, whose gradients are all 0.001.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_BENCH_BENCH_OPTIMIZER_H_
#define SUPEROFFLOAD_SERVER_ENGINE_BENCH_BENCH_OPTIMIZER_H_

#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/check.h"
#include "server/engine/chunk_view.h"
#include "server/engine/layout.h"
#include "server/engine/record.h"
#include "server/engine/step_contract.h"

namespace superoffload::engine {

class Nobody final : public CompletionSink {
 public:
  void SlotFree(uint64_t, uint32_t, uint32_t) override {}
  void ParametersReady(uint64_t, uint32_t, bool) override {}
  void NormMeasured(uint64_t, double, double) override {}
  void Prepared(uint64_t, uint64_t, double) override {}
  void VerdictReached(const VerdictReport&) override {}
};

// Those that this process may use, at most so many.
inline std::vector<int> Cores(size_t most) {
  cpu_set_t set;
  SUPEROFFLOAD_CHECK(sched_getaffinity(0, sizeof(set), &set) == 0);
  std::vector<int> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE && cores.size() < most; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cores.push_back(cpu);
  }
  return cores;
}

class BenchOptimizer {
 public:
  // `log_slots`: of the logs of all buckets; 0: none has one.
  explicit BenchOptimizer(uint64_t elements, uint32_t log_slots = 0)
      : layout_(MakeLayout(elements, log_slots)),
        parameters_(layout_.parameters_bytes),
        gradients_(layout_.gradients_bytes / sizeof(uint16_t), kGradient),
        state_(layout_.state_bytes + kernels::kChunkElements),
        record_(Record::Bytes(layout_) / sizeof(kernels::UndoSlot) + 1) {}

  const Layout& layout() const { return layout_; }
  OptimizerMemory memory() {
    return {parameters_.data(), reinterpret_cast<std::byte*>(gradients_.data()), state_.data(),
            reinterpret_cast<std::byte*>(record_.data())};
  }

  // The first gradients are those of the last layers: one of the last ones is infinite, or none.
  void MakeFinite(bool finite) {
    for (const uint64_t offset : layout_.buckets.back().gradient_offsets) {
      gradients_[offset / sizeof(uint16_t)] = finite ? kGradient : 0x7f80;
    }
  }

 private:
  static constexpr uint16_t kGradient = 0x3a83;  // 0.001 in bf16

  static Layout MakeLayout(uint64_t elements, uint32_t log_slots) {
    constexpr uint64_t kMatrix = 4 << 20;
    OptimizerSpec spec;
    spec.groups = {spec.algorithm->DefaultScalars()};
    for (uint64_t i = 0; i * kMatrix < elements; ++i) {
      ParameterSpec& parameter = spec.parameters.emplace_back();
      parameter.name = std::to_string(i);
      parameter.shape = {std::min(kMatrix, elements - i * kMatrix)};
    }
    spec.log_slots = log_slots;
    spec.logged_buckets = log_slots == 0 ? 0 : static_cast<uint32_t>(kMaxBuckets);
    absl::StatusOr<Layout> layout = PlanLayout(spec);
    SUPEROFFLOAD_CHECK(layout.ok(), "at least one element");
    return *std::move(layout);
  }

  const Layout layout_;
  std::vector<std::byte> parameters_;
  std::vector<uint16_t> gradients_;
  std::vector<std::byte> state_;
  std::vector<kernels::UndoSlot> record_;  // aligned as a record is
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_BENCH_BENCH_OPTIMIZER_H_
