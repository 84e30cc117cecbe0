#include "server/plan/narrower_state.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/plan/memory_plan.h"
#include "server/plan/tuning.h"
#include "server/simulator/model_layout.h"

namespace superoffload::plan {
namespace {

constexpr double kWorthwhile = 0.99;  // of the step's time

uint64_t BytesPerElement(const kernels::Algorithm& algorithm) {
  uint64_t bytes = 0;
  for (const kernels::StateArray& array : algorithm.arrays) bytes += array.Bytes(algorithm.block_elements);
  return bytes / algorithm.block_elements;
}

// With the formula of `algorithm`, the widest first, one of each size.
std::vector<const kernels::Algorithm*> NarrowerThan(const kernels::Algorithm& algorithm) {
  std::vector<const kernels::Algorithm*> found;
  for (const kernels::Algorithm* other : kernels::Algorithms()) {
    const auto same_bytes = [&](const auto* known) { return BytesPerElement(*known) == BytesPerElement(*other); };
    if (other->in_fp32 == &algorithm && std::ranges::none_of(found, same_bytes)) found.push_back(other);
  }
  std::ranges::sort(found, std::ranges::greater(), [](const auto* other) { return BytesPerElement(*other); });
  return found;
}

// "moments in 8 bits and masters in 16 bits (--algorithm=...)", without what is in 32.
std::string Words(const kernels::Algorithm& algorithm) {
  std::vector<std::string> narrower;
  const auto add = [&](const char* what, const kernels::StateArray& array) {
    const size_t bits = 8 * kernels::DTypeBytes(array.dtype);
    if (bits < 32) narrower.push_back(absl::StrCat(what, " in ", bits, " bits"));
  };
  add("moments", algorithm.arrays[1]);
  add("masters", algorithm.arrays[0]);
  return absl::StrCat(absl::StrJoin(narrower, " and "), " (--algorithm=", std::string(algorithm.name), ")");
}

Question With(Question question, const kernels::Algorithm& algorithm) {
  question.spec.algorithm = &algorithm;
  if (algorithm.resident_kernel == nullptr) question.SetResidents(0);
  simulator::KeepSomeInFp32(algorithm, question.spec.parameters);
  question.model.parameters = question.spec.parameters;
  return question;
}

constexpr char kTheyChange[] = "They change results; the optimizers' documentation says how to ask for them.";

}  // namespace

std::optional<std::string> NarrowerStateThatFits(const Question& question) {
  for (const kernels::Algorithm* const algorithm : NarrowerThan(*question.spec.algorithm)) {
    const Question changed = With(question, *algorithm);
    const engine::OptimizerSpec share = simulator::ShardOf(changed.spec, 0, changed.ranks);
    const absl::StatusOr<engine::Layout> layout = engine::PlanLayout(share);
    if (!layout.ok()) continue;
    const uint64_t bytes = simulator::TotalBytes(HostMemory(changed, share, *layout));
    if (bytes > HostBudgetBytes(changed.machine)) continue;
    return absl::StrFormat("With %s it takes %.1f GiB, which fits. %s", Words(*algorithm),
                           static_cast<double>(bytes) / (1 << 30), kTheyChange);
  }
  return std::nullopt;
}

std::optional<std::string> GainOfNarrowerState(const Question& question, const simulator::Workload& workload,
                                               simulator::RunOptions options, double step_seconds) {
  options.timeline = false;
  std::vector<std::string> gains;
  for (const kernels::Algorithm* const algorithm : NarrowerThan(*question.spec.algorithm)) {
    const Question changed = With(question, *algorithm);
    simulator::Workload same = workload;
    same.model = changed.model;
    const double seconds = SimulateOurs(changed, same, options).step_seconds;
    if (seconds > step_seconds * kWorthwhile) continue;
    gains.push_back(absl::StrFormat("%.3f s with %s", seconds, Words(*algorithm)));
  }
  if (gains.empty()) return std::nullopt;
  return absl::StrCat("A step would take ", absl::StrJoin(gains, ", "), " instead of ",
                      absl::StrFormat("%.3f s. ", step_seconds), kTheyChange);
}

}  // namespace superoffload::plan
