// Steps of runs of several ranks: prepared, then committed with the total of all ranks, whoever is there to do it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/engine/step_engine.h"
#include "server/engine/worker_threads.h"
#include "tests/support/engine_parameters.h"
#include "tests/support/scalars.h"
#include "tests/support/sequential_optimizer.h"

namespace superoffload::engine {
namespace {

using ::testing::HasSubstr;

constexpr double kThreshold = 1;

class RunSink final : public CompletionSink {
 public:
  void SlotFree(uint64_t, uint32_t, uint32_t) override {}
  void ParametersReady(uint64_t, uint32_t, bool) override {}
  void NormMeasured(uint64_t, double, double) override {}
  void Prepared(uint64_t, uint64_t attempt, double sum) override {
    absl::MutexLock lock(&mu_);
    prepared_ = {sum, attempt};
  }
  void VerdictReached(const VerdictReport& report) override {
    absl::MutexLock lock(&mu_);
    verdict_ = report;
  }
  RunTotal WaitPrepared() { return WaitFor(prepared_); }
  VerdictReport WaitVerdict() { return WaitFor(verdict_); }

 private:
  template <typename T>
  T WaitFor(std::optional<T>& what) {
    absl::MutexLock lock(&mu_);
    const auto there = [&what] { return what.has_value(); };
    mu_.Await(absl::Condition(&there));
    return *std::exchange(what, std::nullopt);
  }

  absl::Mutex mu_;
  std::optional<RunTotal> prepared_ ABSL_GUARDED_BY(mu_);
  std::optional<VerdictReport> verdict_ ABSL_GUARDED_BY(mu_);
};

class LastReport final : public StepObserver {
 public:
  void OnPass(const PassReport&) override {}
  void OnStep(const StepReport& report) override {
    absl::MutexLock lock(&mu_);
    last_ = report;
    ++count_;
  }
  StepReport last() const {
    absl::MutexLock lock(&mu_);
    return last_;
  }
  int count() const {
    absl::MutexLock lock(&mu_);
    return count_;
  }

 private:
  mutable absl::Mutex mu_;
  StepReport last_ ABSL_GUARDED_BY(mu_);
  int count_ ABSL_GUARDED_BY(mu_) = 0;
};

OptimizerSpec RunSpec() {
  OptimizerSpec spec;
  spec.groups = {test::ScalarsWith(*spec.algorithm, {{"lr", 1e-2}})};
  spec.parameters = {{.name = "a", .shape = {3000}}, {.name = "b", .shape = {70000}}};
  spec.bucket_bytes = 16 << 10;
  return spec;
}

class StepRunTest : public ::testing::TestWithParam<SpeculationPolicy> {
 protected:
  StepRunTest() : spec_(RunSpec()), layout_(*PlanLayout(spec_)), memory_(layout_) { Start(); }
  ~StepRunTest() override { engine_.reset(); }

  // A daemon that finds what the last one has left.
  void Start() {
    engine_.reset();
    engine_.emplace(&layout_, spec_.groups, memory_.view(), GetParam(), &pool_, &observer_);
    engine_->RequireTotals();
    engine_->Attach(&sink_);
  }

  void Submit(float gradient) {
    const StepStatistics now = engine_->statistics();
    for (const BucketLayout& bucket : layout_.buckets) {
      for (size_t i = 0; i < bucket.elements; ++i) {
        test::StoreElement(memory_.gradients.data() + bucket.gradient_offsets[now.next_slot()], i,
                           bucket.gradient_dtype, gradient * static_cast<float>(1 + i % 5));
      }
    }
    ASSERT_TRUE(engine_->BeginStep(now.step + 1, 1).ok());
    for (uint32_t i = 0; i < layout_.buckets.size(); ++i) {
      ASSERT_TRUE(engine_->GradientReady(now.step + 1, i, std::nullopt).ok());
    }
  }
  RunTotal Prepare(float gradient) {
    Submit(gradient);
    EXPECT_TRUE(engine_->PrepareStep(step(), 1, kThreshold).ok());
    return sink_.WaitPrepared();
  }
  absl::Status End(const RunTotal& total) { return engine_->EndPreparedStep(step(), 1, kThreshold, total); }
  VerdictReport Finish() {
    VerdictReport report = sink_.WaitVerdict();
    engine_->Detach();  // waits for the end of the step
    engine_->Attach(&sink_);
    return report;
  }
  uint64_t step() const { return engine_->statistics().step; }

  std::string Settled() {
    engine_->Detach();
    EXPECT_TRUE(engine_->WaitSettled().ok());
    EXPECT_TRUE(engine_->WaitPulled().ok());
    std::string bytes(reinterpret_cast<const char*>(memory_.state.data()), layout_.state_bytes);
    bytes.append(reinterpret_cast<const char*>(memory_.parameters.data()), memory_.parameters.size());
    engine_->Attach(&sink_);
    return bytes;
  }

  const OptimizerSpec spec_;
  const Layout layout_;
  test::Memory memory_;
  WorkerThreads pool_{2};
  LastReport observer_;
  RunSink sink_;
  std::optional<StepEngine> engine_;
};

TEST_P(StepRunTest, TheTotalDecides) {
  const RunTotal own = Prepare(0.01f);
  EXPECT_GT(own.sum_of_squares, 0);
  ASSERT_TRUE(End({own.sum_of_squares * 100, own.attempt}).ok());
  VerdictReport verdict = Finish();
  EXPECT_EQ(verdict.verdict, Verdict::kClip);
  EXPECT_DOUBLE_EQ(verdict.global_norm, std::sqrt(own.sum_of_squares * 100));
  const std::string clipped = Settled();

  // The same, by a rank that trains alone with that coefficient as its scale.
  test::Memory plain(layout_);
  std::memcpy(plain.gradients.data(), memory_.gradients.data(), plain.gradients.size());
  test::SequentialOptimizer reference(layout_, plain.view(), spec_.groups);
  reference.Step(plain.gradients.data(), 0, verdict.clip_coefficient, 0);
  EXPECT_EQ(std::memcmp(clipped.data(), reference.memory().state.data(), layout_.state_bytes), 0);

  const RunTotal next = Prepare(0.02f);
  ASSERT_TRUE(End({std::numeric_limits<double>::quiet_NaN(), next.attempt}).ok());  // another rank's
  EXPECT_EQ(Finish().verdict, Verdict::kSkipNonFinite);
  EXPECT_EQ(Settled(), clipped);
  EXPECT_EQ(Prepare(0.02f).attempt, next.attempt + 1);
}

TEST_P(StepRunTest, APreparedStepOutlivesTrainerAndDaemon) {
  RunTotal own = Prepare(0.01f);
  ASSERT_TRUE(End({own.sum_of_squares * 2, own.attempt}).ok());
  Finish();
  own = Prepare(0.03f);
  const double total = own.sum_of_squares * 3;
  ASSERT_TRUE(End({total, own.attempt}).ok());
  Finish();
  const std::string lived = Settled();

  engine_.reset();
  memory_ = test::Memory(layout_);  // once more, but both die
  Start();
  own = Prepare(0.01f);
  ASSERT_TRUE(End({own.sum_of_squares * 2, own.attempt}).ok());
  Finish();
  own = Prepare(0.03f);
  engine_->Detach();
  Start();
  engine_->Detach();
  const absl::StatusOr<RunReport> report = engine_->WaitReported();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->committed_steps, 1);
  ASSERT_TRUE(report->prepared);
  EXPECT_EQ(report->prepared->step, 2);
  EXPECT_EQ(report->prepared->attempt, own.attempt);
  EXPECT_EQ(report->prepared->terms.max_grad_norm, kThreshold);
  EXPECT_EQ(engine_->WaitPreparedCommitted(own.attempt + 1, {total, 1, kThreshold}).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine_->WaitPreparedCommitted(own.attempt, {total, 0.5, kThreshold}).code(),
            absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(engine_->WaitPreparedCommitted(own.attempt, {total, 1, kThreshold}).ok());
  EXPECT_EQ(Settled(), lived);
  EXPECT_EQ(engine_->WaitReported()->last.sum_of_squares, total);
  EXPECT_FALSE(engine_->WaitReported()->prepared);
}

TEST_P(StepRunTest, AnAbandonedStepLeavesNothing) {
  RunTotal own = Prepare(0.01f);
  ASSERT_TRUE(End({own.sum_of_squares * 2, own.attempt}).ok());
  Finish();
  const std::string before = Settled();
  own = Prepare(0.03f);
  engine_->Detach();
  ASSERT_TRUE(engine_->WaitPreparedAbandoned(own.attempt).ok());
  EXPECT_EQ(engine_->WaitPreparedAbandoned(own.attempt).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Settled(), before);
  EXPECT_GT(Prepare(0.02f).attempt, own.attempt);
}

TEST_P(StepRunTest, AStepThatEndsWithoutItsTrainerIsReported) {
  RunTotal own = Prepare(0.01f);
  engine_->Detach();
  ASSERT_TRUE(engine_->WaitPreparedAbandoned(own.attempt).ok());
  EXPECT_EQ(observer_.count(), 1);
  EXPECT_EQ(observer_.last().verdict.verdict, Verdict::kSkipAbandoned);
  EXPECT_TRUE(std::isnan(observer_.last().verdict.global_norm));
  EXPECT_TRUE(observer_.last().by_agreement);

  engine_->Attach(&sink_);
  own = Prepare(0.02f);
  const double total = own.sum_of_squares * 1e6;
  Start();  // the daemon dies
  engine_->Detach();
  ASSERT_TRUE(engine_->WaitPreparedCommitted(own.attempt, {total, 1, kThreshold}).ok());
  EXPECT_EQ(observer_.count(), 2);
  const StepReport report = observer_.last();
  EXPECT_EQ(report.verdict.verdict, Verdict::kClip);
  EXPECT_DOUBLE_EQ(report.verdict.global_norm, std::sqrt(total));
  EXPECT_EQ(report.verdict.committed_steps, 1);
  EXPECT_EQ(report.verdict.step, 1);
  EXPECT_GT(report.gradient_bytes, 0);
  EXPECT_GT(report.published_bytes, 0);
  EXPECT_GE(engine_->statistics().step, engine_->statistics().committed_steps);
}

TEST_P(StepRunTest, NothingElseHappensWhileAStepIsPrepared) {
  const auto refused = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(status.message(), HasSubstr("step 1 is prepared"));
  };
  Submit(0.01f);
  EXPECT_THAT(engine_->EndStep(step(), 1, kThreshold).message(), HasSubstr("without a total"));
  EXPECT_THAT(End({1, 1}).message(), HasSubstr("not prepared"));
  ASSERT_TRUE(engine_->PrepareStep(step(), 1, kThreshold).ok());
  const RunTotal own = sink_.WaitPrepared();
  refused(engine_->AbandonStep(step()));
  refused(engine_->SetScalars(0, 0, std::vector<double>{1e-3}));
  EXPECT_EQ(engine_->PrepareStep(step(), 1, kThreshold).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(End({1, own.attempt + 1}).message(), HasSubstr("attempt 2"));
  EXPECT_EQ(engine_->EndPreparedStep(step(), 1, 2 * kThreshold, own).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(engine_->WaitReported().status().message(), HasSubstr("open"));
  engine_->Detach();
  refused(engine_->BeginStep(step() + 1, 1));
  refused(engine_->WaitPushed());
  refused(engine_->WaitRestored({}, [] { return absl::OkStatus(); }));
  refused(engine_->WaitSnapshot(0, false).status());
  refused(engine_->CheckNotPrepared("deleting"));
  EXPECT_TRUE(engine_->WaitSettled().ok());
  EXPECT_TRUE(engine_->WaitReported()->prepared);
}

// Ranks that do not talk to each other write checkpoints of the same steps.
TEST_P(StepRunTest, AnExactSnapshotIsOfItsStepAndHoldsTheNextOne) {
  ASSERT_TRUE(engine_->WaitPushed().ok());
  const std::atomic<bool> never = false;
  std::optional<StepEngine::Moment> first;
  std::thread saver([&] { first = *engine_->WaitSnapshot({.committed_steps = 1, .exact = true, .next = 2}, never); });
  const auto commit = [this] {
    const RunTotal own = Prepare(0.01F);
    ASSERT_TRUE(End(own).ok());
    Finish();
  };
  commit();
  saver.join();  // what it has taken is not written yet
  EXPECT_EQ(first->statistics.committed_steps, 1u);
  commit();
  std::thread trainer(commit);
  while (engine_->ClaimSnapshotBucket()) {
  }
  engine_->EndSnapshot();
  const absl::StatusOr<StepEngine::Moment> second =
      engine_->WaitSnapshot({.committed_steps = 2, .exact = true, .next = 4}, never);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->statistics.committed_steps, 2u);
  EXPECT_EQ(second->statistics.step, 2u) << "the third has not begun";
  engine_->EndSnapshot();
  trainer.join();
  EXPECT_EQ(engine_->statistics().committed_steps, 3u);
  EXPECT_EQ(engine_->WaitSnapshot({.committed_steps = 2, .exact = true}, never).status().code(),
            absl::StatusCode::kOutOfRange);
  commit();
  std::thread held(commit);
  engine_->ForgetNextSnapshot();
  held.join();
  EXPECT_EQ(engine_->statistics().committed_steps, 5u);
}

INSTANTIATE_TEST_SUITE_P(All, StepRunTest, kEveryPolicy, [](const ::testing::TestParamInfo<SpeculationPolicy>& info) {
  return std::string(info.param == SpeculationPolicy::kAlways  ? "Always"
                     : info.param == SpeculationPolicy::kNever ? "Never"
                                                               : "Adaptive");
});

}  // namespace
}  // namespace superoffload::engine
