// A record that a predecessor or a bad memory has left: numbers that no optimizer comes to are damage, before anything
// is computed from them.
#include "server/engine/record.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace superoffload::engine {
namespace {

class RecordTest : public ::testing::TestWithParam<uint32_t> {
 protected:
  static OptimizerSpec Spec() {
    OptimizerSpec spec;
    spec.layout_version = GetParam();
    spec.groups = {spec.algorithm->DefaultScalars()};
    spec.parameters = {{.name = "w", .shape = {300}}};
    return spec;
  }
  Record NewRecord() {
    memory_.assign(Record::Bytes(layout_) / sizeof(Line) + 1, Line{});
    Record record(reinterpret_cast<std::byte*>(memory_.data()), layout_);
    record.EndPush();
    return record;
  }
  StepValues Values() const { return {1, Spec().groups[0]}; }

  const Layout layout_ = *PlanLayout(Spec());
  struct alignas(64) Line {
    uint64_t words[8];
  };
  std::vector<Line> memory_;
};

TEST_P(RecordTest, StepsThatNoOptimizerMakesAreDamage) {
  for (const uint64_t steps : {uint64_t{0}, uint64_t{7}, kMaxSteps}) {
    Record record = NewRecord();
    record.EndRestore(steps, std::vector<uint64_t>{steps});
    EXPECT_TRUE(record.Check().ok()) << record.Check();
  }
  for (const uint64_t steps : {kMaxSteps + 1, uint64_t{1} << 62, ~uint64_t{0} >> 1}) {
    Record record = NewRecord();
    record.EndRestore(steps, std::vector<uint64_t>{steps});
    EXPECT_EQ(record.Check().code(), absl::StatusCode::kDataLoss) << steps;
  }
}

TEST_P(RecordTest, HyperparametersOfAStepThatRecoveryMakesAreInTheirRanges) {
  for (const double bad : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    for (size_t i = 0; i < Values().scalars.size(); ++i) {
      Record record = NewRecord();
      StepValues values = Values();
      record.Commit(values, {});
      EXPECT_TRUE(record.Check().ok()) << record.Check();
      values.scalars[i] = bad;
      record.Commit(values, {});
      EXPECT_EQ(record.Check().code(), absl::StatusCode::kDataLoss) << i << " is " << bad;
    }
  }
  Record record = NewRecord();
  StepValues values = Values();
  values.gradient_scale = std::nan("");
  record.Commit(values, {});
  EXPECT_EQ(record.Check().code(), absl::StatusCode::kDataLoss);
}

TEST_P(RecordTest, SoAreThoseOfAStepThatIsPrepared) {
  const auto prepared = [this](const StepValues& values, double max_grad_norm) {
    Record record = NewRecord();
    record.Prepare(values, {}, max_grad_norm);
    return record.Check();
  };
  EXPECT_TRUE(prepared(Values(), 1).ok()) << prepared(Values(), 1);
  for (const double bad : {-1.0, std::nan("")}) {
    EXPECT_EQ(prepared(Values(), bad).code(), absl::StatusCode::kDataLoss) << bad;
    StepValues values = Values();
    values.scalars[1] = bad;
    EXPECT_EQ(prepared(values, 1).code(), absl::StatusCode::kDataLoss) << bad;
  }
}

TEST_P(RecordTest, KeepsTheTermsOfItsLastTwoSteps) {
  Record record = NewRecord();
  for (uint64_t t = 1; t <= 5; ++t) {
    StepValues values = Values();
    values.gradient_scale = static_cast<double>(t);
    values.scalars[0] = 1e-3 * static_cast<double>(t);
    record.Prepare(values, {}, 100.0 * static_cast<double>(t));
    EXPECT_EQ(record.prepared()->terms.max_grad_norm, 100.0 * static_cast<double>(t));
    record.CommitPrepared(10.0 * static_cast<double>(t), 0.5);
    record.EndAbsorb(0, 0, t);
    for (uint64_t kept = t < 2 ? 1 : t - 1; kept <= t; ++kept) {
      EXPECT_EQ(record.Values(kept).gradient_scale, static_cast<double>(kept) / 2);
      EXPECT_EQ(record.Values(kept).scalars[0], 1e-3 * static_cast<double>(kept));
      EXPECT_EQ(record.ParameterSteps(kept, 0), kept);
    }
    const Record::RunTerms expected{10.0 * static_cast<double>(t), static_cast<double>(t),
                                    100.0 * static_cast<double>(t)};
    EXPECT_EQ(record.last_terms(), expected);
    EXPECT_TRUE(record.Check().ok()) << record.Check();
  }
}

TEST_P(RecordTest, OfAnotherNumberOfStepsIsOfAnotherPlan) {
  NewRecord();
  Layout other = layout_;
  other.kept_steps = 4;
  const absl::Status status = Record(reinterpret_cast<std::byte*>(memory_.data()), other).Check();
  if (GetParam() < 5) GTEST_SKIP() << "all of them keep two";
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(std::string(status.message()).find("keeps 2 steps but its plan 4"), std::string::npos) << status;
}

// As many as a plan asks for.
TEST(KeptStepsTest, AreThoseOfThePlan) {
  OptimizerSpec spec;
  spec.groups = {spec.algorithm->DefaultScalars()};
  spec.parameters = {{.name = "w", .shape = {300}}, {.name = "b", .shape = {3}}};
  Layout layout = *PlanLayout(spec);
  layout.kept_steps = 5;
  struct alignas(64) Line {
    uint64_t words[8];
  };
  std::vector<Line> memory(Record::Bytes(layout) / sizeof(Line) + 1);
  Record record(reinterpret_cast<std::byte*>(memory.data()), layout);
  record.EndPush();
  for (uint64_t t = 1; t <= 12; ++t) {
    record.Commit({static_cast<double>(t), spec.groups[0]}, {.absent = {false, t % 3 == 0}});
    record.EndAbsorb(0, 0, t);
    for (uint64_t kept = t < 5 ? 1 : t - 4; kept <= t; ++kept) {
      EXPECT_EQ(record.Values(kept).gradient_scale, static_cast<double>(kept));
      EXPECT_EQ(record.Had(kept, 1), kept % 3 != 0);
      EXPECT_EQ(record.ParameterSteps(kept, 1), kept - kept / 3);
    }
    EXPECT_TRUE(record.Check().ok()) << record.Check();
  }
}

INSTANTIATE_TEST_SUITE_P(Versions, RecordTest, ::testing::Range(Record::kOldestVersion, Record::kVersion + 1));

}  // namespace
}  // namespace superoffload::engine
