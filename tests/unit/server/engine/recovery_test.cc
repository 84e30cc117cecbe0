// What an engine leaves in memory when its process is killed, a new engine brings to the last committed step: training
// goes on as if nothing had happened, bit for bit.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <random>
#include <tuple>
#include <vector>

#include "server/engine/step_engine.h"
#include "server/engine/worker_threads.h"
#include "tests/support/algorithm_kinds.h"
#include "tests/support/counting_observer.h"
#include "tests/support/engine_parameters.h"
#include "tests/support/mortal_engine.h"
#include "tests/support/scalars.h"
#include "tests/support/sequential_optimizer.h"

namespace superoffload::engine {
namespace {

constexpr uint64_t kSteps = 120;
constexpr size_t kKills = 60;
constexpr double kMaxGradNorm = 0.4;

OptimizerSpec Spec(const kernels::Algorithm& algorithm = *kernels::Algorithms().front()) {
  OptimizerSpec spec;
  spec.algorithm = &algorithm;
  spec.groups = {test::ScalarsWith(algorithm, {{"lr", 1e-2}, {"weight_decay", 0.1}}),
                 test::ScalarsWith(algorithm, {{"lr", 3e-3}, {"weight_decay", 0}})};
  const std::vector<std::vector<uint64_t>> shapes = {{37, 19}, {37}, {70000}, {64, 64}, {300, 700}};
  for (size_t i = 0; i < shapes.size(); ++i) {
    spec.parameters.push_back(
        {.name = "layer" + std::to_string(i), .shape = shapes[i], .group = static_cast<uint32_t>(i % 2)});
  }
  spec.bucket_bytes = 1 << 18;
  test::KeepSomeInFp32(spec);
  return spec;
}

// The same gradients for a step in every life of the trainer.
void FillGradients(const Layout& layout, std::byte* gradients, uint32_t slot, uint64_t t, bool bad) {
  std::minstd_rand random(static_cast<uint32_t>(t));
  const float size = 1e-3f * static_cast<float>(1 + t % 3);
  for (const BucketLayout& bucket : layout.buckets) {
    std::vector<float> values(bucket.elements);
    for (float& value : values) value = size * (static_cast<float>(random() % 2001) / 1000 - 1);
    kernels::Narrow(values.size(), values.data(), {gradients + bucket.gradient_offsets[slot], bucket.gradient_dtype});
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (bad) test::StoreElement(gradients + layout.buckets[1].gradient_offsets[slot], 5, kernels::DType::kBFloat16, nan);
}

using RecoveryParameters = std::tuple<SpeculationPolicy, size_t, const kernels::Algorithm*>;

class RecoveryTest : public ::testing::TestWithParam<RecoveryParameters> {
 protected:
  RecoveryTest() : spec_(Spec(*std::get<2>(GetParam()))), layout_(*PlanLayout(spec_)) {}

  // A life of daemon and trainer: recovers, then trains to the end.
  void Live() {
    const auto& [policy, threads, algorithm] = GetParam();
    test::CountingObserver observer;
    WorkerThreads pool(threads);
    StepEngine engine(&layout_, spec_.groups, memory_, policy, &pool, &observer);
    const uint32_t buckets = static_cast<uint32_t>(layout_.buckets.size());
    test::FinalSink sink(buckets);
    engine.Attach(&sink);
    bool bad_tried = false;
    while (engine.statistics().committed_steps < kSteps) {
      const StepStatistics now = engine.statistics();
      const uint64_t t = now.committed_steps + 1;
      const bool bad = t % 7 == 0 && !std::exchange(bad_tried, t % 7 == 0 && !bad_tried);
      FillGradients(layout_, memory_.gradients, now.next_slot(), t, bad);
      if (!engine.BeginStep(now.step + 1, 1).ok()) ::_exit(2);
      const std::vector<bool> absent = test::AbsentInStep(spec_.parameters.size(), t);
      for (uint32_t p = 0; p < absent.size(); ++p) {
        if (absent[p] && !engine.ParametersAbsent(now.step + 1, p, 1).ok()) ::_exit(6);
      }
      for (uint32_t i = 0; i < buckets; ++i) {
        if (!engine.GradientReady(now.step + 1, (i + t) % buckets, std::nullopt).ok()) ::_exit(3);
      }
      if (!engine.EndStep(now.step + 1, 1, kMaxGradNorm).ok()) ::_exit(4);
      sink.WaitFinal();
    }
    if (!engine.WaitPulled().ok()) ::_exit(5);  // settles; the successor of one that was killed has published nothing
  }

  const OptimizerSpec spec_;
  const Layout layout_;
  const test::MemoryOfProcesses processes_{layout_};
  const OptimizerMemory memory_ = processes_.view();
};

TEST_P(RecoveryTest, KilledAgainAndAgainTrainsTheSameBits) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  test::SequentialOptimizer reference(layout_, memory_, spec_.groups, &kernels::Algorithm::best);

  ASSERT_NO_FATAL_FAILURE(
      test::KillAgainAndAgain(kKills, std::chrono::microseconds(20000), random, [this] { Live(); }));

  test::Memory gradients(layout_);
  for (uint64_t t = 1; t <= kSteps; ++t) {
    FillGradients(layout_, gradients.gradients.data(), 0, t, false);
    reference.Step(gradients.gradients.data(), 0, 1, kMaxGradNorm, test::AbsentInStep(spec_.parameters.size(), t));
  }
  EXPECT_EQ(std::memcmp(memory_.parameters, reference.memory().parameters.data(), layout_.parameters_bytes), 0);
  test::ForEachArray(layout_, [&](const StateFormat& format, size_t array) {
    const uint64_t at = format.Byte(array, 0);
    EXPECT_EQ(std::memcmp(memory_.state + at, reference.memory().state.data() + at,
                          format.arrays[array].array.Bytes(format.elements)),
              0);
  });
}

std::string RecoveryParametersName(const ::testing::TestParamInfo<RecoveryParameters>& info) {
  const auto [policy, threads, algorithm] = info.param;
  return EngineParametersName({{policy, threads}, info.index}) + "_" + std::string(algorithm->name);
}

INSTANTIATE_TEST_SUITE_P(All, RecoveryTest,
                         ::testing::Combine(kEveryPolicy, ::testing::Values(1, 3),
                                            ::testing::ValuesIn(test::EveryKindOfAlgorithm())),
                         RecoveryParametersName);

TEST(RecordTest, AnotherVersionAndDamageAreRefusedAndLeftAsTheyAre) {
  const Layout layout = *PlanLayout(Spec());
  Layout other = layout;
  ++other.stretches;
  std::vector<kernels::UndoSlot> memory(Record::Bytes(other) / sizeof(kernels::UndoSlot) + 1);
  std::byte* const bytes = reinterpret_cast<std::byte*>(memory.data());
  ASSERT_TRUE(Record(bytes, layout).Check().ok());
  EXPECT_EQ(Record(bytes, other).Check().code(), absl::StatusCode::kFailedPrecondition);
  const auto refused = [&](size_t offset, absl::StatusCode code) {
    bytes[offset] ^= std::byte{0x40};
    const std::vector<std::byte> before(bytes, bytes + Record::Bytes(layout));
    EXPECT_EQ(Record(bytes, layout).Check().code(), code) << "byte " << offset;
    EXPECT_TRUE(std::equal(before.begin(), before.end(), bytes));
    bytes[offset] ^= std::byte{0x40};
    EXPECT_TRUE(Record(bytes, layout).Check().ok());
  };
  Layout older = layout;
  --older.version;
  EXPECT_EQ(Record(bytes, older).Check().code(), absl::StatusCode::kDataLoss);
  refused(0, absl::StatusCode::kFailedPrecondition);  // the magic
  refused(8, absl::StatusCode::kFailedPrecondition);  // the version
  refused(12, absl::StatusCode::kDataLoss);           // the number of groups
  refused(24, absl::StatusCode::kDataLoss);           // the number of parameters
  refused(40, absl::StatusCode::kDataLoss);           // the algorithm's name
  refused(64, absl::StatusCode::kDataLoss);           // the checksum itself
  refused(72, absl::StatusCode::kDataLoss);           // committed, far from what the chunks have absorbed
  refused(168, absl::StatusCode::kDataLoss);          // prepared, neither none nor the next step
  refused(176, absl::StatusCode::kDataLoss);          // of an attempt that never was
}

}  // namespace
}  // namespace superoffload::engine
