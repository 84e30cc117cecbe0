// Exactness of the step engine: whatever the policy, the number of threads, the order of arrival and the verdicts,
// parameters and state equal those of a plain sequential optimizer, bit for bit.
#include "server/engine/step_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <thread>

#include "server/engine/worker_threads.h"
#include "tests/support/algorithm_kinds.h"
#include "tests/support/counting_observer.h"
#include "tests/support/engine_parameters.h"
#include "tests/support/random_elements.h"
#include "tests/support/scalars.h"
#include "tests/support/sequential_optimizer.h"

namespace superoffload::engine {
namespace {

using kernels::DType;
using test::FillNearlyNormal;
using test::Memory;
using test::SequentialOptimizer;
using test::StoreElement;
using ::testing::HasSubstr;

OptimizerSpec TestSpec(DType dtype, DType gradient_dtype,
                       const kernels::Algorithm& algorithm = *kernels::Algorithms().front()) {
  OptimizerSpec spec;
  spec.algorithm = &algorithm;
  spec.groups = {test::ScalarsWith(algorithm, {{"lr", 1e-2}, {"weight_decay", 0.1}}),
                 test::ScalarsWith(algorithm, {{"lr", 3e-3}, {"beta2", 0.95}, {"weight_decay", 0}})};
  const std::vector<std::vector<uint64_t>> shapes = {{37, 19}, {37}, {5000}, {64, 64}, {3}, {200, 700}};
  for (size_t i = 0; i < shapes.size(); ++i) {
    spec.parameters.push_back({.name = "layer" + std::to_string(i),
                               .shape = shapes[i],
                               .dtype = dtype,
                               .gradient_dtype = gradient_dtype,
                               .group = static_cast<uint32_t>(i % 2)});
  }
  spec.bucket_bytes = 8192;
  test::KeepSomeInFp32(spec);
  return spec;
}

// Collects completions and lets the test wait until a step is final.
class RecordingSink final : public CompletionSink {
 public:
  void SlotFree(uint64_t, uint32_t, uint32_t) override {}
  void ParametersReady(uint64_t, uint32_t bucket, bool speculative) override {
    absl::MutexLock lock(&mu_);
    if (speculative) {
      EXPECT_FALSE(verdict_) << "a speculative publication after the verdict";
    } else {
      EXPECT_TRUE(verdict_) << "a final publication before the verdict";
      ++final_;
      finals_.push_back(bucket);
    }
  }
  void Prepared(uint64_t, uint64_t, double) override {}
  void NormMeasured(uint64_t, double global_norm, double) override {
    absl::MutexLock lock(&mu_);
    EXPECT_FALSE(norm_);
    norm_ = global_norm;
  }
  void VerdictReached(const VerdictReport& report) override {
    absl::MutexLock lock(&mu_);
    verdict_ = report;
  }

  std::vector<uint32_t> TakeFinals() {
    absl::MutexLock lock(&mu_);
    return std::exchange(finals_, {});
  }

  double WaitNorm() {
    absl::MutexLock lock(&mu_);
    auto measured = [&] {
      mu_.AssertHeld();
      return norm_.has_value();
    };
    mu_.Await(absl::Condition(&measured));
    return *std::exchange(norm_, std::nullopt);
  }

  VerdictReport WaitFinal(uint32_t buckets) {
    absl::MutexLock lock(&mu_);
    auto finished = [&] {
      mu_.AssertHeld();
      if (!verdict_) return false;
      if (IsSkip(verdict_->verdict)) return final_ == verdict_->republished_buckets;
      return final_ == buckets - (verdict_->speculation_stands ? verdict_->speculated_buckets : 0);
    };
    mu_.Await(absl::Condition(&finished));
    const VerdictReport report = *verdict_;
    verdict_.reset();
    final_ = 0;
    return report;
  }

 private:
  absl::Mutex mu_;
  std::optional<double> norm_ ABSL_GUARDED_BY(mu_);
  std::optional<VerdictReport> verdict_ ABSL_GUARDED_BY(mu_);
  uint32_t final_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<uint32_t> finals_ ABSL_GUARDED_BY(mu_);  // in the order in which they came
};

struct Scenario {
  SpeculationPolicy policy = SpeculationPolicy::kAlways;
  size_t threads = 2;
  DType dtype = DType::kBFloat16;
  DType gradient_dtype = DType::kBFloat16;
  double max_grad_norm = 0;  // against norms of around 1
  double scale = 1;
  int bad_steps_percent = 0;
  bool abandon_some = false;
  bool measure = false;    // the trainer asks for the norm on some steps before it ends them
  bool snapshots = false;  // somebody saves the state now and then, slowly
  bool revise = false;     // hyper-parameters and scale change between BEGIN_STEP and END_STEP
  int absent_percent = 0;  // of parameters, per step
  int sums_percent = 30;   // of gradients that come with their sum of squares
  const kernels::Algorithm* algorithm = kernels::Algorithms().front();
};

class TrainingRun {
 public:
  explicit TrainingRun(const Scenario& scenario, uint64_t seed)
      : scenario_(scenario),
        random_(seed),
        spec_(TestSpec(scenario.dtype, scenario.gradient_dtype, *scenario.algorithm)),
        layout_(*PlanLayout(spec_)),
        memory_(layout_),
        pool_(scenario.threads, scenario.threads % 2 == 1 ? std::vector<int>{0, 1} : std::vector<int>{}),
        engine_(&layout_, spec_.groups, memory_.view(), scenario.policy, &pool_, &observer_) {
    for (const ParameterSpec& parameter : spec_.parameters) {
      const Placement& placement = layout_.placements[&parameter - spec_.parameters.data()];
      FillNearlyNormal(ElementCount(parameter), 1,
                       {memory_.parameters.data() + placement.parameters_offset, parameter.dtype}, random_);
    }
    EXPECT_TRUE(engine_.WaitPushed().ok());
    reference_ =
        std::make_unique<SequentialOptimizer>(layout_, memory_.view(), spec_.groups, &kernels::Algorithm::best);
    engine_.Attach(&sink_);
  }

  void Train(int steps) {
    std::thread saver;
    if (scenario_.snapshots) saver = std::thread([this] { TakeSnapshots(); });
    KeepReferenceHash();
    for (int i = 0; i < steps && !::testing::Test::HasFailure(); ++i) {
      SCOPED_TRACE("iteration " + std::to_string(i));
      OneStep();
      KeepReferenceHash();
    }
    stop_saving_ = true;
    engine_.WakeSnapshot();
    if (saver.joinable()) saver.join();
    ASSERT_TRUE(engine_.WaitSettled().ok());
    CompareSnapshots();
    const StepStatistics statistics = engine_.statistics();
    EXPECT_EQ(statistics.step, step_);
    EXPECT_EQ(engine_.parameter_steps(), reference_->steps());
    EXPECT_EQ(Hashes(memory_.state), Hashes(reference_->memory().state));
    engine_.Detach();
  }

  StepStatistics statistics() const { return engine_.statistics(); }
  size_t snapshots() const { return snapshots_.size(); }

 private:
  // Of the arrays of the state.
  std::vector<size_t> Hashes(const std::vector<std::byte>& state) const {
    std::vector<size_t> hashes;
    test::ForEachArray(layout_, [&](const StateFormat& format, size_t array) {
      hashes.push_back(
          std::hash<std::string_view>()({reinterpret_cast<const char*>(state.data() + format.Byte(array, 0)),
                                         format.arrays[array].array.Bytes(format.elements)}));
    });
    return hashes;
  }

  void KeepReferenceHash() {
    reference_hashes_[engine_.statistics().committed_steps] = Hashes(reference_->memory().state);
  }

  void TakeSnapshots() {
    std::minstd_rand random(1);
    while (!stop_saving_) {
      const uint64_t due = engine_.statistics().committed_steps + random() % 3;
      const absl::StatusOr<StepEngine::Moment> moment = engine_.WaitSnapshot(due, stop_saving_);
      if (!moment.ok()) continue;
      EXPECT_GE(moment->statistics.committed_steps, due);
      const std::atomic<bool> cancelled = true;  // else it would wait for the end of this one
      EXPECT_EQ(engine_.WaitSnapshot(0, cancelled).status().code(), absl::StatusCode::kCancelled);
      std::vector<std::byte> saved(memory_.state.size());
      while (const std::optional<uint32_t> bucket = engine_.ClaimSnapshotBucket()) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
        const BucketLayout& b = layout_.buckets[*bucket];
        const StateFormat& format = layout_.FormatOf(b);
        for (size_t array = 0; array < format.arrays.size(); ++array) {
          const uint64_t at = format.Byte(array, b.state_offset);
          std::memcpy(saved.data() + at, memory_.state.data() + at, format.arrays[array].array.Bytes(b.elements));
        }
        engine_.BucketSaved(*bucket);
      }
      engine_.EndSnapshot();
      snapshots_.emplace_back(moment->statistics.committed_steps, std::move(saved));
      if (snapshots_.size() == 64) return;
    }
  }

  void CompareSnapshots() const {
    for (const auto& [committed_steps, saved] : snapshots_) {
      EXPECT_EQ(Hashes(saved), reference_hashes_.at(committed_steps)) << "snapshot of step " << committed_steps;
    }
  }

  bool Chance(int percent) { return static_cast<int>(random_() % 100) < percent; }

  void FillGradients(uint32_t slot) {
    const float size = 1e-3f * static_cast<float>(1 + random_() % 8) / static_cast<float>(scenario_.scale);
    for (size_t p = 0; p < spec_.parameters.size(); ++p) {
      std::byte* data = memory_.gradients.data() + layout_.placements[p].gradient_offsets[slot];
      FillNearlyNormal(ElementCount(spec_.parameters[p]), size, {data, scenario_.gradient_dtype}, random_);
    }
    if (Chance(scenario_.bad_steps_percent)) {
      const size_t p = random_() % spec_.parameters.size();
      const float bad[] = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN()};
      StoreElement(memory_.gradients.data() + layout_.placements[p].gradient_offsets[slot],
                   random_() % ElementCount(spec_.parameters[p]), scenario_.gradient_dtype, bad[random_() % 3]);
    }
  }

  void ReviseGroup(uint32_t group) {
    Scalars& scalars = reference_->groups()[group];
    *test::FindScalar(*spec_.algorithm, scalars, "lr") *= 0.9;
    ASSERT_TRUE(engine_.SetScalars(group, 0, scalars).ok());
  }

  // As a GPU computes it: chunk by chunk.
  double SumOfSquares(uint32_t index, uint32_t slot) const {
    const BucketLayout& bucket = layout_.buckets[index];
    double sum = 0;
    for (uint64_t first = 0; first < bucket.elements; first += kernels::kChunkElements) {
      const std::byte* data =
          memory_.gradients.data() + bucket.gradient_offsets[slot] + first * kernels::DTypeBytes(bucket.gradient_dtype);
      sum += kernels::SumOfSquares(std::min<uint64_t>(kernels::kChunkElements, bucket.elements - first),
                                   {data, bucket.gradient_dtype});
    }
    return sum;
  }

  // Parameters without gradients in this step; what their part of the slot holds is nobody's business.
  std::vector<bool> ChooseAbsent(uint32_t slot) {
    std::vector<bool> absent(spec_.parameters.size());
    for (size_t p = 0; p < absent.size(); ++p) {
      absent[p] = Chance(scenario_.absent_percent);
      if (!absent[p]) continue;
      const size_t bytes = ElementCount(spec_.parameters[p]) * kernels::DTypeBytes(scenario_.gradient_dtype);
      std::memset(memory_.gradients.data() + layout_.placements[p].gradient_offsets[slot], Chance(50) ? 0xff : 0,
                  bytes);
    }
    return absent;
  }
  bool HoldsAbsent(uint32_t bucket, const std::vector<bool>& absent) const {
    const std::span<const Part> parts = layout_.PartsOf(layout_.buckets[bucket]);
    return std::any_of(parts.begin(), parts.end(), [&](const Part& part) { return absent[part.parameter]; });
  }

  void OneStep() {
    const uint32_t slot = engine_.statistics().next_slot();
    FillGradients(slot);
    std::vector<uint32_t> order(layout_.buckets.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    const double expected_scale = scenario_.revise && Chance(30) ? 2 * scenario_.scale : scenario_.scale;
    ++step_;
    ASSERT_TRUE(engine_.BeginStep(step_, expected_scale).ok());
    const std::vector<bool> absent = ChooseAbsent(slot);
    for (uint32_t p = 0; p < absent.size(); ++p) {
      if (absent[p]) {
        ASSERT_TRUE(engine_.ParametersAbsent(step_, p, 1).ok());
      }
    }
    const bool abandon = scenario_.abandon_some && Chance(30);
    const size_t submitted = abandon ? random_() % (order.size() + 1) : order.size();
    for (size_t i = 0; i < submitted; ++i) {
      const std::optional<double> sum = Chance(scenario_.sums_percent) && !HoldsAbsent(order[i], absent)
                                            ? std::optional(SumOfSquares(order[i], slot))
                                            : std::nullopt;
      ASSERT_TRUE(engine_.GradientReady(step_, order[i], sum).ok());
      if (Chance(20)) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
    }
    if (abandon) {
      ASSERT_TRUE(engine_.AbandonStep(step_).ok());
      EXPECT_EQ(sink_.WaitFinal(layout_.buckets.size()).verdict, Verdict::kSkipAbandoned);
    } else {
      double measured = std::numeric_limits<double>::quiet_NaN();
      if (scenario_.measure && Chance(50)) {
        ASSERT_TRUE(engine_.MeasureNorm(step_, scenario_.scale).ok());
        measured = sink_.WaitNorm();
      }
      if (scenario_.revise && Chance(30)) ReviseGroup(random_() % 2);
      ASSERT_TRUE(engine_.EndStep(step_, scenario_.scale, scenario_.max_grad_norm).ok());
      const VerdictReport report = sink_.WaitFinal(layout_.buckets.size());
      EXPECT_EQ(report.verdict,
                reference_->Step(memory_.gradients.data(), slot, scenario_.scale, scenario_.max_grad_norm, absent));
      if (std::isfinite(reference_->norm())) {
        EXPECT_EQ(report.global_norm, reference_->norm());
        if (!std::isnan(measured)) {
          EXPECT_EQ(measured, reference_->norm());
        }
      }
    }
    EXPECT_EQ(std::memcmp(memory_.parameters.data(), reference_->memory().parameters.data(), layout_.parameters_bytes),
              0)
        << "parameters differ after step " << step_;
  }

  const Scenario scenario_;
  std::mt19937_64 random_;
  OptimizerSpec spec_;
  const Layout layout_;
  Memory memory_;
  WorkerThreads pool_;
  test::CountingObserver observer_;
  RecordingSink sink_;
  StepEngine engine_;
  std::unique_ptr<SequentialOptimizer> reference_;
  uint64_t step_ = 0;
  std::atomic<bool> stop_saving_{false};
  std::map<uint64_t, std::vector<size_t>> reference_hashes_;  // of the state, by committed steps
  std::vector<std::pair<uint64_t, std::vector<std::byte>>> snapshots_;
};

class ExactnessTest : public ::testing::TestWithParam<EngineParameters> {
 protected:
  void Run(Scenario scenario, int steps = 60) {
    std::tie(scenario.policy, scenario.threads) = GetParam();
    const uint64_t seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    TrainingRun run(scenario, seed);
    run.Train(steps);
    statistics_ = run.statistics();
    snapshots_ = run.snapshots();
  }

  bool always() const { return std::get<0>(GetParam()) == SpeculationPolicy::kAlways; }
  StepStatistics statistics_;
  size_t snapshots_ = 0;
};

TEST_P(ExactnessTest, EveryStepCommits) { Run({}, 200); }

TEST_P(ExactnessTest, MostStepsAreClipped) {
  Run({.max_grad_norm = 0.8}, 200);
  EXPECT_GT(statistics_.clips, 100u);
}

TEST_P(ExactnessTest, NonFiniteGradientsAreSkipped) {
  Run({.max_grad_norm = 1.5, .bad_steps_percent = 25}, 100);
  EXPECT_GT(statistics_.skips_non_finite, 0u);
}

TEST_P(ExactnessTest, VerdictsThatWaitForNoPass) {
  Run({.max_grad_norm = 1, .bad_steps_percent = 20, .abandon_some = true, .snapshots = true, .sums_percent = 100});
}

TEST_P(ExactnessTest, AbandonedStepsLeaveNoTrace) {
  Run({.bad_steps_percent = 10, .abandon_some = true}, 100);
  EXPECT_GT(statistics_.skips_abandoned, 0u);
}

TEST_P(ExactnessTest, NormsMeasuredBeforeTheEndChangeNothing) {
  Run({.max_grad_norm = 1, .bad_steps_percent = 10, .measure = true}, 100);
}

TEST_P(ExactnessTest, HyperparametersAndScaleRevisedInsideTheStep) { Run({.max_grad_norm = 2, .revise = true}, 100); }

TEST_P(ExactnessTest, ScaledHalfPrecisionGradients) {
  Run({.dtype = DType::kFloat16,
       .gradient_dtype = DType::kFloat16,
       .max_grad_norm = 1,
       .scale = 1.0 / 1024,
       .bad_steps_percent = 10});
}

TEST_P(ExactnessTest, SinglePrecisionThroughout) {
  Run({.dtype = DType::kFloat32, .gradient_dtype = DType::kFloat32, .max_grad_norm = 1, .revise = true});
}

TEST_P(ExactnessTest, MaximizingByANegativeScale) { Run({.max_grad_norm = 1, .scale = -1}); }

TEST_P(ExactnessTest, EveryKindOfAlgorithm) {
  for (const kernels::Algorithm* algorithm : test::EveryKindOfAlgorithm()) {
    SCOPED_TRACE(algorithm->name);
    Run({.max_grad_norm = 1, .bad_steps_percent = 10, .revise = true, .absent_percent = 10, .algorithm = algorithm});
  }
}

TEST_P(ExactnessTest, ParametersWithoutGradientsAreLeftAlone) {
  Run({.max_grad_norm = 1, .bad_steps_percent = 10, .abandon_some = true, .measure = true, .absent_percent = 40}, 150);
}

TEST_P(ExactnessTest, StepsInWhichHardlyAnyParameterHasAGradient) { Run({.absent_percent = 90}, 150); }

TEST_P(ExactnessTest, SnapshotsAreOfOneMomentAndChangeNothing) {
  Run({.max_grad_norm = 1, .bad_steps_percent = 15, .abandon_some = true, .snapshots = true, .absent_percent = 15},
      100);
  EXPECT_GT(snapshots_, 2u);
}

INSTANTIATE_TEST_SUITE_P(All, ExactnessTest, ::testing::Combine(kEveryPolicy, ::testing::Values(1, 2, 3, 4)),
                         EngineParametersName);

class StepEngineTest : public ::testing::Test {
 protected:
  StepEngineTest() { engine_.Attach(&sink_); }

  uint32_t buckets() const { return static_cast<uint32_t>(layout_.buckets.size()); }
  void SubmitAll(uint64_t step) {
    for (uint32_t i = 0; i < buckets(); ++i) ASSERT_TRUE(engine_.GradientReady(step, i, std::nullopt).ok());
  }
  static void ExpectError(const absl::Status& status, absl::StatusCode code, const char* part) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }

  OptimizerSpec spec_ = TestSpec(DType::kBFloat16, DType::kBFloat16);
  Layout layout_ = *PlanLayout(spec_);
  Memory memory_{layout_};
  WorkerThreads pool_{2};
  test::CountingObserver observer_;
  RecordingSink sink_;
  StepEngine engine_{&layout_, spec_.groups, memory_.view(), SpeculationPolicy::kAdaptive, &pool_, &observer_};
};

TEST_F(StepEngineTest, SubmissionsOutsideAStepAreRefused) {
  ExpectError(engine_.GradientReady(1, 0, std::nullopt), absl::StatusCode::kFailedPrecondition, "without an open step");
  ExpectError(engine_.EndStep(1, 1, 0), absl::StatusCode::kFailedPrecondition, "without an open step");
  ExpectError(engine_.AbandonStep(1), absl::StatusCode::kFailedPrecondition, "without an open step");
  ExpectError(engine_.MeasureNorm(1, 1), absl::StatusCode::kFailedPrecondition, "without an open step");
}

TEST_F(StepEngineTest, StepsComeInOrder) {
  ExpectError(engine_.BeginStep(2, 1), absl::StatusCode::kFailedPrecondition, "next step is 1");
  ASSERT_TRUE(engine_.BeginStep(1, 1).ok());
  ExpectError(engine_.BeginStep(2, 1), absl::StatusCode::kFailedPrecondition, "step 1 is open");
  ExpectError(engine_.GradientReady(2, 0, std::nullopt), absl::StatusCode::kFailedPrecondition, "step 1 is open");
}

TEST_F(StepEngineTest, ABucketIsSubmittedOnce) {
  ASSERT_TRUE(engine_.BeginStep(1, 1).ok());
  ExpectError(engine_.GradientReady(1, buckets(), std::nullopt), absl::StatusCode::kInvalidArgument, "does not exist");
  ASSERT_TRUE(engine_.GradientReady(1, 3, std::nullopt).ok());
  ExpectError(engine_.GradientReady(1, 3, std::nullopt), absl::StatusCode::kAlreadyExists, "bucket 3");
}

TEST_F(StepEngineTest, AbsentParametersAreNamedBeforeTheirBuckets) {
  const uint32_t parameters = static_cast<uint32_t>(spec_.parameters.size());
  ExpectError(engine_.ParametersAbsent(1, 0, 1), absl::StatusCode::kFailedPrecondition, "without an open step");
  ASSERT_TRUE(engine_.BeginStep(1, 1).ok());
  ExpectError(engine_.ParametersAbsent(1, parameters, 1), absl::StatusCode::kInvalidArgument, "do not all exist");
  ExpectError(engine_.ParametersAbsent(1, 1, 0xffffffff), absl::StatusCode::kInvalidArgument, "do not all exist");
  ASSERT_TRUE(engine_.GradientReady(1, layout_.placements[2].first_bucket, std::nullopt).ok());
  ExpectError(engine_.ParametersAbsent(1, 0, parameters), absl::StatusCode::kFailedPrecondition, "was submitted");
  EXPECT_TRUE(engine_.ParametersAbsent(1, 0, 0).ok());
}

TEST_F(StepEngineTest, AMissingBucketIsNamedAndTheStepGoesOn) {
  ASSERT_TRUE(engine_.BeginStep(1, 1).ok());
  ASSERT_TRUE(engine_.GradientReady(1, 0, std::nullopt).ok());
  ExpectError(engine_.EndStep(1, 1, 0), absl::StatusCode::kFailedPrecondition, "first being bucket 1");
  ExpectError(engine_.MeasureNorm(1, 1), absl::StatusCode::kFailedPrecondition, "first being bucket 1");
  for (uint32_t i = 1; i < buckets(); ++i) ASSERT_TRUE(engine_.GradientReady(1, i, std::nullopt).ok());
  ASSERT_TRUE(engine_.EndStep(1, 1, 0).ok());
  EXPECT_EQ(sink_.WaitFinal(buckets()).verdict, Verdict::kCommit);
}

TEST_F(StepEngineTest, BadNumbersAreRefused) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  ExpectError(engine_.BeginStep(1, 0), absl::StatusCode::kInvalidArgument, "scale");
  ExpectError(engine_.BeginStep(1, nan), absl::StatusCode::kInvalidArgument, "scale");
  const double ones[] = {1, 1, 1, 1, 1, 1};
  ExpectError(engine_.SetScalars(2, 0, {}), absl::StatusCode::kInvalidArgument, "group 2");
  ExpectError(engine_.SetScalars(0, 0, std::span(ones, 2)), absl::StatusCode::kInvalidArgument, "beta1");
  ExpectError(engine_.SetScalars(0, 0, ones), absl::StatusCode::kInvalidArgument, "do not all exist");
  ExpectError(engine_.SetScalars(0, 0xffffffff, std::span(ones, 1)), absl::StatusCode::kInvalidArgument, "exist");
  EXPECT_EQ(engine_.groups(), spec_.groups) << "what was refused left a trace";
  ASSERT_TRUE(engine_.BeginStep(1, 1).ok());
  SubmitAll(1);
  ExpectError(engine_.EndStep(1, nan, 0), absl::StatusCode::kInvalidArgument, "scale");
  ExpectError(engine_.EndStep(1, 1, -1), absl::StatusCode::kInvalidArgument, "max_grad_norm");
  ExpectError(engine_.EndStep(1, 1, nan), absl::StatusCode::kInvalidArgument, "max_grad_norm");
  EXPECT_TRUE(engine_.EndStep(1, 1, 0).ok());
}

TEST_F(StepEngineTest, TheLastBucketsAreSettledWithoutTheOthers) {
  ASSERT_TRUE(engine_.BeginStep(1, 1).ok());
  SubmitAll(1);
  ASSERT_TRUE(engine_.EndStep(1, 1, 0).ok());
  engine_.Detach();  // the step is over
  const uint32_t first = buckets() - 2;
  ASSERT_TRUE(engine_.WaitSettled(first).ok());
  const Record record(memory_.view().record, layout_);
  for (uint32_t i = 0; i < buckets(); ++i) {
    EXPECT_EQ(record.absorbed(layout_.buckets[i].first_stretch), i < first ? 0u : 1u) << "bucket " << i;
  }
  EXPECT_TRUE(engine_.WaitSettled(buckets()).ok()) << "there is none";
}

TEST_F(StepEngineTest, MaintenanceWaitsForTheStepToBeClosed) {
  ASSERT_TRUE(engine_.BeginStep(1, 1).ok());
  ExpectError(engine_.WaitSettled(), absl::StatusCode::kFailedPrecondition, "step 1 is open");
  ExpectError(engine_.WaitPushed(), absl::StatusCode::kFailedPrecondition, "step 1 is open");
  ExpectError(engine_.WaitPulled(), absl::StatusCode::kFailedPrecondition, "step 1 is open");
}

TEST_F(StepEngineTest, ANormThatWouldOverflowTheSecondMomentSkips) {
  const OptimizerSpec spec = TestSpec(DType::kFloat32, DType::kFloat32);
  const Layout layout = *PlanLayout(spec);
  const auto buckets = static_cast<uint32_t>(layout.buckets.size());
  Memory memory(layout);
  StepEngine engine(&layout, spec.groups, memory.view(), SpeculationPolicy::kAlways, &pool_, &observer_);
  engine.Attach(&sink_);
  const float huge = 1e30f;
  std::memcpy(memory.gradients.data() + layout.placements[0].gradient_offsets[0], &huge, sizeof(huge));
  ASSERT_TRUE(engine.BeginStep(1, 1).ok());
  for (uint32_t i = 0; i < buckets; ++i) ASSERT_TRUE(engine.GradientReady(1, i, std::nullopt).ok());
  ASSERT_TRUE(engine.EndStep(1, 1, 1).ok());
  EXPECT_EQ(sink_.WaitFinal(buckets).verdict, Verdict::kSkipOverflow);
  ASSERT_TRUE(engine.WaitSettled().ok());
  EXPECT_TRUE(std::all_of(memory.state.begin(), memory.state.end(), [](std::byte b) { return b == std::byte{}; }));
}

TEST_F(StepEngineTest, ARestoredStateIsPublishedAndACutOffOneIsKnown) {
  engine_.Detach();
  StepEngine::Moment moment{.statistics = {}, .groups = engine_.groups(), .parameter_steps = {}};
  moment.parameter_steps.assign(spec_.parameters.size(), 41);
  moment.parameter_steps[2] = 7;  // it lacked gradients in the others
  moment.statistics.committed_steps = 41;
  moment.groups[1][0] = 0.25;
  ExpectError(engine_.WaitRestored(moment, [] { return absl::DataLossError("torn"); }), absl::StatusCode::kDataLoss,
              "torn");
  ExpectError(engine_.CheckComplete(), absl::StatusCode::kDataLoss, "cut off");
  const std::atomic<bool> cancelled{false};
  ExpectError(engine_.WaitSnapshot(0, cancelled).status(), absl::StatusCode::kDataLoss, "cut off");
  {
    StepEngine successor(&layout_, spec_.groups, memory_.view(), SpeculationPolicy::kAlways, &pool_, &observer_);
    ExpectError(successor.CheckComplete(), absl::StatusCode::kDataLoss, "cut off");
  }
  const auto load = [this] {
    float* const masters = reinterpret_cast<float*>(memory_.state.data() + layout_.formats[0].Byte(0, 0));
    std::fill_n(masters, layout_.state_elements(), 0.5f);
    return absl::OkStatus();
  };
  ASSERT_TRUE(engine_.WaitRestored(moment, load).ok());
  EXPECT_TRUE(engine_.CheckComplete().ok());
  EXPECT_EQ(engine_.statistics().committed_steps, 41u);
  EXPECT_EQ(engine_.groups()[1][0], 0.25);
  EXPECT_EQ(engine_.parameter_steps(), moment.parameter_steps);
  uint16_t first;
  std::memcpy(&first, memory_.parameters.data(), sizeof(first));
  EXPECT_EQ(first, 0x3f00);  // 0.5 in bf16
  engine_.Attach(&sink_);
  ASSERT_TRUE(engine_.BeginStep(42, 1).ok());
  SubmitAll(42);
  ASSERT_TRUE(engine_.EndStep(42, 1, 0).ok());
  EXPECT_EQ(sink_.WaitFinal(buckets()).committed_steps, 42u);
}

// The next forward pass reads them first. With one worker passes end in the order in which they start.
TEST_F(StepEngineTest, AfterTheVerdictTheLastBucketsComeFirst) {
  WorkerThreads one(1);
  Memory memory(layout_);
  StepEngine engine(&layout_, spec_.groups, memory.view(), SpeculationPolicy::kNever, &one, &observer_);
  engine.Attach(&sink_);
  ASSERT_TRUE(engine.BeginStep(1, 1).ok());
  for (uint32_t i = 0; i < buckets(); ++i) ASSERT_TRUE(engine.GradientReady(1, i, std::nullopt).ok());
  ASSERT_TRUE(engine.EndStep(1, 1, 0).ok());
  sink_.WaitFinal(buckets());
  std::vector<uint32_t> descending(buckets());
  std::iota(descending.rbegin(), descending.rend(), 0u);
  EXPECT_EQ(sink_.TakeFinals(), descending);
}

TEST_F(StepEngineTest, NothingButAPushOrARestoreFillsANewOptimizer) {
  const std::atomic<bool> cancelled{false};
  engine_.AwaitFirstFill();
  ExpectError(engine_.CheckComplete(), absl::StatusCode::kDataLoss, "push_params");
  ExpectError(engine_.BeginStep(1, 1), absl::StatusCode::kDataLoss, "push_params");
  ExpectError(engine_.WaitPulled(), absl::StatusCode::kDataLoss, "push_params");
  ExpectError(engine_.WaitSnapshot(0, cancelled).status(), absl::StatusCode::kDataLoss, "push_params");
  {
    StepEngine successor(&layout_, spec_.groups, memory_.view(), SpeculationPolicy::kAlways, &pool_, &observer_);
    ExpectError(successor.BeginStep(1, 1), absl::StatusCode::kDataLoss, "push_params");
  }
  EXPECT_TRUE(engine_.CheckComplete(/*before_push=*/true).ok());
  EXPECT_TRUE(engine_.WaitPushed().ok());
  EXPECT_TRUE(engine_.BeginStep(1, 1).ok());
}

TEST_F(StepEngineTest, APushThatWasCutOffIsFinishedAndChangesNoParameter) {
  std::fill(memory_.parameters.begin(), memory_.parameters.end(), std::byte{0x3f});
  ASSERT_TRUE(engine_.WaitPushed().ok());
  engine_.Detach();
  float* const masters = reinterpret_cast<float*>(memory_.state.data() + layout_.formats[0].Byte(0, 0));
  const std::vector<float> pushed(masters, masters + layout_.state_elements());
  std::fill_n(masters, layout_.state_elements() / 2, 0.0f);  // those that the push had not come to
  Record(memory_.view().record, layout_).BeginPush();
  StepEngine successor(&layout_, spec_.groups, memory_.view(), SpeculationPolicy::kAlways, &pool_, &observer_);
  EXPECT_TRUE(successor.CheckComplete().ok());
  EXPECT_TRUE(std::equal(pushed.begin(), pushed.end(), masters));
  EXPECT_TRUE(std::all_of(memory_.parameters.begin(), memory_.parameters.end(),
                          [](std::byte b) { return b == std::byte{0x3f}; }));
}

TEST_F(StepEngineTest, ASuccessorLeavesParametersToTheTrainer) {
  ASSERT_TRUE(engine_.BeginStep(1, 1).ok());
  SubmitAll(1);
  ASSERT_TRUE(engine_.EndStep(1, 1, 0).ok());
  engine_.Detach();
  std::fill(memory_.parameters.begin(), memory_.parameters.end(), std::byte{0x3f});  // an edit that is not yet pushed
  StepEngine successor(&layout_, spec_.groups, memory_.view(), SpeculationPolicy::kAlways, &pool_, &observer_);
  EXPECT_EQ(successor.statistics().committed_steps, 1u);
  EXPECT_TRUE(std::all_of(memory_.parameters.begin(), memory_.parameters.end(),
                          [](std::byte b) { return b == std::byte{0x3f}; }));
}

TEST_F(StepEngineTest, DetachingInsideAStepAbandonsIt) {
  const std::vector<std::byte> before = memory_.parameters;
  std::fill(memory_.gradients.begin(), memory_.gradients.end(), std::byte{0x3f});
  ASSERT_TRUE(engine_.BeginStep(1, 1).ok());
  ASSERT_TRUE(engine_.GradientReady(1, 0, std::nullopt).ok());
  engine_.Detach();
  EXPECT_EQ(engine_.statistics().skips_abandoned, 1u);
  EXPECT_EQ(engine_.statistics().committed_steps, 0u);
  EXPECT_EQ(memory_.parameters, before);
}

TEST_F(StepEngineTest, DetachingAfterTheEndOfAStepFinishesIt) {
  ASSERT_TRUE(engine_.BeginStep(1, 1).ok());
  SubmitAll(1);
  ASSERT_TRUE(engine_.EndStep(1, 1, 0).ok());
  engine_.Detach();
  EXPECT_EQ(engine_.statistics().committed_steps, 1u);
}

TEST_F(StepEngineTest, AdaptiveStopsSpeculatingWhileMostStepsClip) {
  std::fill(memory_.gradients.begin(), memory_.gradients.end(), std::byte{0x3f});
  for (uint64_t step = 1; step <= 20; ++step) {
    ASSERT_TRUE(engine_.BeginStep(step, 1).ok());
    SubmitAll(step);
    ASSERT_TRUE(engine_.EndStep(step, 1, /*max_grad_norm=*/1e-3).ok());
    const VerdictReport report = sink_.WaitFinal(buckets());
    EXPECT_EQ(report.verdict, Verdict::kClip);
    if (step > 3) {
      EXPECT_EQ(report.speculated_buckets, 0u);
    }
  }
  engine_.Detach();  // the trainer may know of the end before the observer
  EXPECT_EQ(observer_.steps, 20);
}

}  // namespace
}  // namespace superoffload::engine
