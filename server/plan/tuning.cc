#include "server/plan/tuning.h"

#include <algorithm>
#include <optional>
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

// Of the share of rank 0, with its residents; nothing where the GPU's memory or the host's does not hold it.
std::optional<engine::Layout> LayoutThatFits(const Question& question) {
  const engine::OptimizerSpec share = simulator::ShardOf(question.spec, 0, question.ranks);
  absl::StatusOr<engine::Layout> layout = engine::PlanLayout(share);
  const bool fits = layout.ok() && question.gpu.resident_buckets <= layout->buckets.size() &&
                    simulator::TotalBytes(GpuMemoryOf(question, *layout)) <= question.gpu_bytes() &&
                    simulator::TotalBytes(HostMemory(question, share, *layout)) <= HostBudgetBytes(question.machine);
  return fits ? std::optional(*std::move(layout)) : std::nullopt;
}

// The best so far, and how to try another.
class Search {
 public:
  Search(const Question& question, const simulator::Workload& workload, const simulator::RunOptions& options,
         double seconds)
      : workload_(workload), options_(options), best_(question), seconds_(seconds) {}

  void Try(Question changed) {
    const std::optional<engine::Layout> layout = LayoutThatFits(changed);
    if (!layout || layout->buckets.size() > kMostBuckets) return;
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
                              .log_slots = question.spec.log_slots,
                              .gradient_slots = question.spec.gradient_slots,
                              .in_place = question.spec.in_place,
                              .streamed_weights = question.gpu.streamed_weights,
                              .stream_slots = question.gpu.stream_slots,
                              .sums_on_host = question.gpu.sums_on_host});
  return ours.Run(question.machine, workload, options);
}

namespace {

// As in client/python/superoffload/torch/gpu: options.py and residents.py.
constexpr double kResidentShare = 0.92, kMostWaiting = 0.01;
constexpr uint32_t kFirstResidents = 8;
constexpr uint32_t kShortLogSteps = 2;

bool WaitsForParameters(const simulator::Outcome& outcome) {
  double seconds = 0;
  for (const simulator::Exposed& part : outcome.exposed) {
    if (part.cause != simulator::kDeviceSlots) seconds += part.seconds;
  }
  return seconds > kMostWaiting * outcome.step_seconds;
}

bool ResidentsFit(Question question) {
  question.gpu.allocator_reserve = std::max(question.gpu.allocator_reserve, 1 - kResidentShare);
  return LayoutThatFits(question).has_value();
}

// The most that fit, from none on.
uint32_t MostResidents(Question question) {
  uint32_t fit = 0, too_many = engine::kMaxBuckets + 1;
  while (too_many - fit > 1) {
    const uint32_t count = fit + (too_many - fit) / 2;
    question.SetResidents(count);
    (ResidentsFit(question) ? fit : too_many) = count;
  }
  return fit;
}

}  // namespace

std::optional<Question> WithAutoResidents(const Question& question, const simulator::Workload& workload,
                                          simulator::RunOptions options, const simulator::Outcome& without) {
  options.timeline = false;
  if (!question.auto_residents || question.machine.one_memory || question.spec.algorithm->resident_kernel == nullptr ||
      !WaitsForParameters(without)) {
    return std::nullopt;
  }
  Question with = question;
  with.resident_steps = 1;
  const uint32_t most = MostResidents(with);
  for (const uint32_t steps : {kShortLogSteps, question.resident_steps}) {  // logs, where the host has room for them
    Question logged = with;
    logged.resident_steps = steps;
    logged.SetResidents(most);
    if (ResidentsFit(logged)) with.resident_steps = steps;
  }
  std::vector<uint32_t> counts;
  for (uint32_t count = kFirstResidents; count < most; count *= 2) counts.push_back(count);
  const auto enough = std::ranges::partition_point(counts, [&](uint32_t count) {
    with.SetResidents(count);
    return WaitsForParameters(SimulateOurs(with, workload, options));
  });
  with.SetResidents(enough == counts.end() ? most : *enough);
  return with;
}

std::string PriceOfLessRoom(const Question& question, const simulator::Workload& workload,
                            const simulator::RunOptions& options, double step_seconds) {
  Question more = question;
  more.spec.gradient_slots = 2;
  more.spec.in_place = false;
  const auto host_bytes = [](const Question& of) {
    const engine::OptimizerSpec share = simulator::ShardOf(of.spec, 0, of.ranks);
    return simulator::TotalBytes(HostMemory(of, share, *engine::PlanLayout(share)));
  };
  return absl::StrFormat(
      "Each bucket has one gradient slot%s, as trainers on a GPU take where the daemon has no memory for more. Two "
      "slots%s would take %.1f GiB more of the host's memory, and a step %.3f s instead of %.3f s.",
      question.spec.in_place ? ", into which parameters are published" : "",
      question.spec.in_place ? " and parameters of their own" : "",
      static_cast<double>(host_bytes(more) - host_bytes(question)) / (uint64_t{1} << 30),
      SimulateOurs(more, workload, options).step_seconds, step_seconds);
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
  const bool may_be_resident = !question.auto_residents && question.gpu.streamed_weights == 0 &&
                               question.spec.algorithm->resident_kernel != nullptr;
  for (const uint32_t count : may_be_resident ? std::span(kResidents) : std::span<const uint32_t>()) {
    Question changed = base;
    changed.SetResidents(count);
    if (count != base.gpu.resident_buckets) search.Try(std::move(changed));
  }
  for (const Question& less : WithLessRoom(search.best())) search.Try(less);  // a pass in place moves fewer bytes
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
  if (search.best().spec.gradient_slots != question.spec.gradient_slots ||
      search.best().spec.in_place != question.spec.in_place) {
    absl::StrAppend(
        &settings, settings.empty() ? "" : " and ",
        search.best().spec.in_place ? "gradient_slots=\"in_place\" (GpuOptions)" : "gradient_slots=1 (GpuOptions)");
  }
  recommendation.add_sentences(
      absl::StrFormat("With %s a step takes %.3f s instead of %.3f s.", settings, search.seconds(), step_seconds));
}

}  // namespace superoffload::plan
