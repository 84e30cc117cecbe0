#include "server/optimizer/step_report_hub.h"

#include <gtest/gtest.h>

#include <memory>

namespace superoffload::optimizer {
namespace {

const OptimizerId kMine{1001, "mine"}, kOther{1001, "other"};

bool All(const OptimizerId&) { return true; }

engine::StepReport Step(uint64_t step) {
  engine::StepReport report;
  report.verdict.step = step;
  return report;
}

TEST(StepReportHubTest, AWatchGetsWhatPassesItsFilterInOrder) {
  StepReportHub hub;
  const auto watch = hub.Add([](const OptimizerId& id) { return id == kMine; }, [] {});
  hub.OnStep(kMine, Step(1));
  hub.OnStep(kOther, Step(7));
  hub.OnStep(kMine, Step(2));
  EXPECT_EQ(watch->Next()->report.verdict.step, 1u);
  EXPECT_EQ(watch->Next()->report.verdict.step, 2u);
  EXPECT_FALSE(watch->Next().has_value());
}

TEST(StepReportHubTest, AWatcherThatFoundNothingIsToldOnce) {
  StepReportHub hub;
  int told = 0;
  const auto watch = hub.Add(All, [&told] { ++told; });
  hub.OnStep(kMine, Step(1));
  EXPECT_EQ(told, 0) << "nobody has looked yet";
  EXPECT_TRUE(watch->Next().has_value());
  EXPECT_FALSE(watch->Next().has_value());
  hub.OnStep(kMine, Step(2));
  hub.OnStep(kMine, Step(3));
  EXPECT_EQ(told, 1);
}

TEST(StepReportHubTest, ASlowWatcherLosesTheOldestReportsAndLearnsHowMany) {
  StepReportHub hub;
  const auto slow = hub.Add(All, [] {});
  for (uint64_t step = 1; step <= 1030; ++step) hub.OnStep(kMine, Step(step));
  const std::optional<WatchedStep> first = slow->Next();
  EXPECT_EQ(first->report.verdict.step, 7u);
  EXPECT_EQ(first->dropped_reports, 6u);
}

TEST(StepReportHubTest, AWatchThatIsGoneGetsNothing) {
  StepReportHub hub;
  int told = 0;
  auto watch = hub.Add(All, [&told] { ++told; });
  EXPECT_FALSE(watch->Next().has_value());
  watch.reset();
  hub.OnStep(kMine, Step(1));
  EXPECT_EQ(told, 0);
}

}  // namespace
}  // namespace superoffload::optimizer
