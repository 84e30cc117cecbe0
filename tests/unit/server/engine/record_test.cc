// A record that a predecessor or a bad memory has left: numbers that no optimizer comes to are damage, before anything is
// computed from them.
#include "server/engine/record.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace superoffload::engine {
namespace {

class RecordRangesTest : public ::testing::Test {
 protected:
  static OptimizerSpec Spec() {
    OptimizerSpec spec;
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

TEST_F(RecordRangesTest, StepsThatNoOptimizerMakesAreDamage) {
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

TEST_F(RecordRangesTest, HyperparametersOfAStepThatRecoveryMakesAreInTheirRanges) {
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

TEST_F(RecordRangesTest, SoAreThoseOfAStepThatIsPrepared) {
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

}  // namespace
}  // namespace superoffload::engine
