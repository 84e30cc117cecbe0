#include "server/plan/tuning.h"

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/engine/layout.h"
#include "server/plan/memory_plan.h"
#include "server/simulator/model_layout.h"
#include "server/simulator/ours.h"

namespace superoffload::plan {
namespace {

constexpr double kWorthwhile = 0.99;  // of the step's time
constexpr uint64_t kBucketMiB[] = {32, 64, 128, 256};
constexpr uint32_t kResidents[] = {0, 16, 64, 128, 192};
constexpr size_t kMostBuckets = 5000;

uint64_t BucketBytes(const Question& question) {
  return question.spec.bucket_bytes == 0 ? engine::kDefaultBucketBytes : question.spec.bucket_bytes;
}

// The best so far, and how to try another.
class Search {
 public:
  Search(const Question& question, const simulator::Workload& workload, const simulator::RunOptions& options,
         double seconds)
      : workload_(workload), options_(options), best_(question), seconds_(seconds) {}

  void Try(Question changed) {
    const engine::OptimizerSpec share = simulator::ShardOf(changed.spec, 0, changed.ranks);
    const absl::StatusOr<engine::Layout> layout = engine::PlanLayout(share);
    if (!layout.ok() || layout->buckets.size() > kMostBuckets ||
        changed.gpu.resident_buckets > layout->buckets.size()) {
      return;
    }
    if (simulator::TotalBytes(GpuMemoryOf(changed, *layout)) > changed.gpu_bytes()) return;
    if (simulator::TotalBytes(HostMemory(share, *layout)) > HostBudgetBytes(changed.machine)) return;
    const double seconds = SimulateOurs(changed, workload_, options_).step_seconds;
    if (seconds >= seconds_ * kWorthwhile) return;
    best_ = std::move(changed);
    seconds_ = seconds;
  }

  const Question& best() const { return best_; }
  double seconds() const { return seconds_; }

 private:
  const simulator::Workload& workload_;
  const simulator::RunOptions options_;
  Question best_;
  double seconds_;
};

}  // namespace

simulator::Outcome SimulateOurs(const Question& question, const simulator::Workload& workload,
                                const simulator::RunOptions& options) {
  const simulator::Ours ours({.algorithm = question.spec.algorithm,
                              .speculation = question.speculation,
                              .bucket_bytes = question.spec.bucket_bytes,
                              .device_slots = question.gpu.device_slots,
                              .resident_buckets = question.gpu.resident_buckets,
                              .log_slots = question.spec.log_slots});
  return ours.Run(question.machine, workload, options);
}

void RecommendBuckets(const Question& question, const simulator::Workload& workload, simulator::RunOptions options,
                      double step_seconds, v1::Recommendation& recommendation) {
  options.timeline = false;
  Search search(question, workload, options, step_seconds);
  for (const uint64_t mib : kBucketMiB) {
    Question changed = question;
    changed.spec.bucket_bytes = mib << 20;
    if (BucketBytes(changed) != BucketBytes(question)) search.Try(std::move(changed));
  }
  const Question base = search.best();
  const bool may_be_resident = question.spec.algorithm->resident_kernel != nullptr;
  for (const uint32_t count : may_be_resident ? std::span(kResidents) : std::span<const uint32_t>()) {
    Question changed = base;
    changed.SetResidents(count);
    if (count != base.gpu.resident_buckets) search.Try(std::move(changed));
  }
  recommendation.set_bucket_bytes(BucketBytes(search.best()));
  recommendation.set_resident_buckets(search.best().gpu.resident_buckets);
  if (search.seconds() == step_seconds) return;
  std::string settings;
  if (BucketBytes(search.best()) != BucketBytes(question)) {
    settings =
        absl::StrCat("bucket_bytes=", BucketBytes(search.best()), " (", BucketBytes(search.best()) >> 20, " MiB)");
  }
  if (search.best().gpu.resident_buckets != question.gpu.resident_buckets) {
    absl::StrAppend(&settings, settings.empty() ? "" : " and ", search.best().gpu.resident_buckets,
                    " resident buckets (GpuOptions)");
  }
  recommendation.add_sentences(
      absl::StrFormat("With %s a step takes %.3f s instead of %.3f s.", settings, search.seconds(), step_seconds));
}

}  // namespace superoffload::plan
