// Sequences of ring submissions against a model of the protocol: the engine accepts what the model accepts, refuses the
// rest without effect, and its state is that of a sequential optimizer that saw the accepted steps only.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/engine/step_engine.h"
#include "server/engine/worker_threads.h"
#include "tests/support/algorithm_kinds.h"
#include "tests/support/scalars.h"
#include "tests/support/sequential_optimizer.h"
#include "tests/support/sums_of_squares.h"

using namespace superoffload;

namespace {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return size_ == 0; }
  uint8_t Next() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  // Mostly a number that the protocol allows, now and then one that it does not.
  double Number() {
    constexpr double kNumbers[] = {1, 0.5, 2, -1, 1e-3, 1024, 0, INFINITY, -INFINITY, NAN, 1e300, 5e-324};
    return kNumbers[Next() % std::size(kNumbers)];
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

class Sink final : public engine::CompletionSink {
 public:
  explicit Sink(uint32_t buckets) : buckets_(buckets) {}
  void SlotFree(uint64_t, uint32_t, uint32_t) override {}
  void ParametersReady(uint64_t, uint32_t, bool speculative) override {
    absl::MutexLock lock(&mu_);
    if (!speculative) ++final_;
  }
  void Prepared(uint64_t, uint64_t, double) override {}
  void NormMeasured(uint64_t, double, double) override {
    absl::MutexLock lock(&mu_);
    ++norms_;
  }
  void VerdictReached(const engine::VerdictReport& report) override {
    absl::MutexLock lock(&mu_);
    verdict_ = report;
  }
  engine::VerdictReport WaitFinal() {
    absl::MutexLock lock(&mu_);
    const auto done = [this] {
      mu_.AssertHeld();
      if (!verdict_) return false;
      const bool skip = engine::IsSkip(verdict_->verdict);
      return final_ == (skip ? verdict_->republished_buckets
                             : buckets_ - (verdict_->speculation_stands ? verdict_->speculated_buckets : 0));
    };
    mu_.Await(absl::Condition(&done));
    final_ = 0;
    return *std::exchange(verdict_, std::nullopt);
  }

 private:
  const uint32_t buckets_;
  absl::Mutex mu_;
  uint32_t final_ = 0, norms_ = 0;
  std::optional<engine::VerdictReport> verdict_;
};

class NullObserver final : public engine::StepObserver {
  void OnPass(const engine::PassReport&) override {}
  void OnStep(const engine::StepReport&) override {}
};

engine::OptimizerSpec Spec(uint32_t gradient_slots, bool in_place = false) {
  engine::OptimizerSpec spec;
  spec.groups = {test::ScalarsWith(*spec.algorithm, {{"lr", 1e-2}}),
                 test::ScalarsWith(*spec.algorithm, {{"lr", 1e-3}, {"weight_decay", 0.1}})};
  for (uint32_t i = 0; i < 4; ++i) {
    spec.parameters.push_back({.name = std::string(1, 'a' + i), .shape = {700}, .group = i % 2});
  }
  spec.bucket_bytes = engine::kMinBucketBytes;
  spec.logged_buckets = in_place ? 0 : 2;
  spec.log_slots = in_place ? 0 : 3;
  spec.gradient_slots = gradient_slots;
  spec.in_place = in_place;
  return spec;
}

engine::OptimizerSpec Narrow(engine::OptimizerSpec spec, std::string_view algorithm) {
  spec.algorithm = kernels::FindAlgorithm(algorithm);
  for (engine::ParameterSpec& parameter : spec.parameters) {
    parameter.dtype = parameter.gradient_dtype = kernels::DType::kBFloat16;
  }
  test::KeepSomeInFp32(spec);
  return spec;
}

void Expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "the engine and the model differ: %s\n", what);
  std::abort();
}

bool GoodScale(double scale) { return std::isfinite(scale) && scale != 0; }

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static engine::WorkerThreads pool(2);
  static const engine::OptimizerSpec in_place = Spec(1, /*in_place=*/true);
  static const engine::Layout layouts[] = {*engine::PlanLayout(Spec(1)), *engine::PlanLayout(Spec(2)),
                                           *engine::PlanLayout(in_place),
                                           *engine::PlanLayout(Narrow(Spec(2), "adamw_8bit_bf16_masters")),
                                           *engine::PlanLayout(Narrow(in_place, "adamw_bf16_bf16_masters"))};
  Bytes bytes(data, std::min<size_t>(size, 512));
  const uint8_t choice = bytes.Next();
  const engine::Layout& layout = layouts[choice / 3 % std::size(layouts)];
  const uint32_t buckets = static_cast<uint32_t>(layout.buckets.size());
  test::Memory memory(layout);
  NullObserver observer;
  const auto policy = static_cast<engine::SpeculationPolicy>(choice % 3);
  engine::StepEngine engine(&layout, Spec(2).groups, memory.view(layout), policy, &pool, &observer);
  test::SequentialOptimizer reference(layout, memory.view(), Spec(2).groups, &kernels::Algorithm::best);
  Sink sink(buckets);
  engine.Attach(&sink);

  // The model.
  uint64_t step = 0;
  bool open = false, logs = false;
  std::vector<bool> arrived(buckets), absent(layout.placements.size());
  const auto gradient = [&](const engine::BucketLayout& bucket) {
    const uint64_t t = engine.statistics().committed_steps + 1;
    return memory.gradients.data() + bucket.GradientOffset(bucket.GradientSlot(t, logs && bucket.log_slots > 0));
  };
  std::vector<std::byte> gradients(memory.gradients.size());  // of the open step, all in the first slot
  const auto all = [&] { return std::count(arrived.begin(), arrived.end(), true) == buckets; };
  while (!bytes.empty()) {
    const uint8_t op = bytes.Next() % 9;
    const uint64_t named = step + (bytes.Next() % 8 == 0 ? 1 : 0) + (op == 1 ? 1 : 0);
    const bool right_step = named == step;
    switch (op) {
      case 0: {
        const uint32_t group = bytes.Next() % 3;
        const uint32_t first = bytes.Next() % 7, count = bytes.Next() % 3;
        std::vector<double> values;
        for (uint32_t i = 0; i < count; ++i) values.push_back(bytes.Number());
        const std::span<const kernels::Scalar> scalars = layout.algorithm->scalars;
        bool good = group < 2 && first <= scalars.size() && count <= scalars.size() - first;
        for (uint32_t i = 0; good && i < count; ++i) {
          const kernels::Scalar& scalar = scalars[first + i];
          good = std::isfinite(values[i]) && values[i] >= scalar.least && values[i] < scalar.below;
        }
        Expect(engine.SetScalars(group, first, values).ok() == good, "SetScalars");
        if (good) std::copy(values.begin(), values.end(), reference.groups()[group].begin() + first);
        break;
      }
      case 1: {
        const double scale = bytes.Number();
        const bool good = !open && named == step + 1 && GoodScale(scale);
        // What is pending lies in slots or in logs, never in both.
        const bool logged_before = logs;
        if (!open) logs = bytes.Next() % 4 != 0;
        if (logs != logged_before || (!open && layout.has_one_slot)) Expect(engine.WaitSettled().ok(), "settling");
        Expect(engine.BeginStep(named, scale).ok() == good, "BeginStep");
        if (!good) break;
        ++step;
        open = true;
        arrived.assign(buckets, false);
        absent.assign(layout.placements.size(), false);
        const uint8_t seed = bytes.Next();
        for (const engine::BucketLayout& bucket : layout.buckets) {
          std::byte* const first = gradients.data() + bucket.gradient_offsets[0];
          for (size_t i = 0; i < bucket.elements; ++i) {
            const float value = seed == 13 && i == 5 ? NAN : static_cast<float>((i * seed) % 17) * 1e-3f - 8e-3f;
            test::StoreElement(first, i, bucket.gradient_dtype, value);
          }
          std::copy_n(first, bucket.gradient_bytes(), gradient(bucket));
        }
        break;
      }
      case 2:
      case 3:
      case 4: {
        const uint32_t bucket = bytes.Next() % (buckets + 1);
        const bool exists = bucket < buckets, has_log = exists && layout.buckets[bucket].log_slots > 0;
        const bool wrong = bytes.Next() % 8 == 0;  // a log that it has not, or one without a sum
        const bool logged = exists && (has_log ? logs : wrong);
        std::optional<double> sum;
        if (has_log && logged && !wrong) {
          sum = test::SumOfSquares(layout, layout.buckets[bucket], gradient(layout.buckets[bucket]), absent);
        }
        const bool good = open && right_step && exists && !arrived[bucket] && (!logged || !wrong);
        const bool still_read = bytes.Next() % 4 == 0;
        const engine::Landing landing = logged       ? engine::Landing::kLog
                                        : still_read ? engine::Landing::kSlotStillRead
                                                     : engine::Landing::kSlot;
        Expect(engine.GradientReady(named, bucket, sum, landing).ok() == good, "GradientReady");
        if (good) arrived[bucket] = true;
        break;
      }
      case 5: {
        const double scale = bytes.Number(), max_norm = bytes.Number();
        const bool good = open && right_step && all() && GoodScale(scale) && max_norm >= 0;
        Expect(engine.EndStep(named, scale, max_norm).ok() == good, "EndStep");
        if (!good) break;
        Expect(sink.WaitFinal().verdict == reference.Step(gradients.data(), 0, scale, max_norm, absent), "verdict");
        open = false;
        break;
      }
      case 6: {
        const bool good = open && right_step;
        Expect(engine.AbandonStep(named).ok() == good, "AbandonStep");
        if (!good) break;
        Expect(sink.WaitFinal().verdict == engine::Verdict::kSkipAbandoned, "verdict of an abandoned step");
        open = false;
        break;
      }
      case 7: {
        const uint32_t first = bytes.Next() % 6, count = bytes.Next() % 4;
        bool good = open && right_step && first <= absent.size() && count <= absent.size() - first;
        for (uint32_t i = 0; good && i < count; ++i) {
          const engine::Placement& place = layout.placements[first + i];
          for (uint32_t b = 0; b < place.bucket_count; ++b) good = good && !arrived[place.first_bucket + b];
        }
        Expect(engine.ParametersAbsent(named, first, count).ok() == good, "ParametersAbsent");
        if (good) std::fill_n(absent.begin() + first, count, true);
        break;
      }
      default: {
        const double scale = bytes.Number();
        const bool good = open && right_step && all() && GoodScale(scale);
        Expect(engine.MeasureNorm(named, scale).ok() == good, "MeasureNorm");
      }
    }
  }
  engine.Detach();
  Expect(engine.WaitSettled().ok(), "WaitSettled");
  Expect(engine.parameter_steps() == reference.steps(), "step counts");
  test::ForEachArray(layout, [&](const engine::StateFormat& format, size_t array) {
    const uint64_t at = format.Byte(array, 0);
    Expect(std::memcmp(memory.state.data() + at, reference.memory().state.data() + at,
                       format.arrays[array].array.Bytes(format.elements)) == 0,
           "state");
  });
  return 0;
}
