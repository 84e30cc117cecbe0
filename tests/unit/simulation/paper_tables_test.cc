#include "tests/simulation/paper_tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <sstream>
#include <string>

#include "server/simulator/catalogue.h"
#include "tests/simulation/peers.h"

namespace superoffload::simulator {
namespace {

using ::testing::HasSubstr;

std::string Readme() {
  std::ifstream file(SUPEROFFLOAD_SIMULATION_README);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(PaperTablesTest, TheReadmeShowsWhatTheProgramPrints) { EXPECT_THAT(Readme(), HasSubstr(PaperTables())); }

TEST(PaperTablesTest, WhatFitsIsWhatThePaperSays) {
  for (const PaperRow& row : SimulateThroughput()) {
    EXPECT_EQ(row.measured == 0, row.simulated == 0) << row.model << " of peer " << static_cast<int>(row.peer);
  }
  for (const LargestRow& row : FindLargest()) EXPECT_EQ(row.measured, row.simulated);
}

TEST(PaperTablesTest, EveryFeatureOfTheAblationHelps) {
  double before = 0;
  for (const AblationRow& row : SimulateAblation()) {
    EXPECT_GT(row.simulated, before) << row.feature;
    before = row.simulated;
  }
}

// The goal that was set for the model.
TEST(PaperTablesTest, MostPredictionsOfThePublishedSystemAreWithinTenPercent) {
  int predicted = 0, within = 0;
  for (const PaperRow& row : SimulateThroughput()) {
    if (row.peer != Peer::kSuperOffload || row.calibrated) continue;
    ++predicted;
    within += std::abs(row.simulated / row.measured - 1) <= 0.1;
  }
  EXPECT_EQ(predicted, 6);
  EXPECT_GT(2 * within, predicted);
}

// So the plan prints it as a range.
TEST(PaperTablesTest, TheRowsOfThePublishedSystemDoNotSettleItsNorm) {
  const Machine machine = PaperMachine();
  for (const PaperRow& row : SimulateThroughput()) {
    if (row.peer != Peer::kSuperOffload) continue;
    const Model model = *FindModel(row.model);
    const MicroBatch micro = *LargestMicroBatch(row.peer, machine, model, kPaperBatch, kPaperSequence);
    const Workload workload = MakeWorkload(machine.gpu, model, micro.pass, micro.accumulation);
    const auto seconds = [&](const PeerCosts& costs) {
      return MakePublishedSuperOffload({}, costs)->Run(machine, workload, {}).step_seconds;
    };
    EXPECT_NEAR(seconds(FastestCosts(machine.host.bandwidth)) / seconds({}), 1, 0.06) << row.model;
  }
}

TEST(PaperTablesTest, PredictionsThatExposeNextToNothingAreMarked) {
  int tests = 0;
  for (const PaperRow& row : SimulateThroughput()) {
    tests += row.peer == Peer::kSuperOffload && !row.calibrated && row.tests_offloading();
  }
  EXPECT_EQ(tests, 2);  // at 20 and 25 billion parameters
  EXPECT_THAT(PaperTables(), HasSubstr("| 0 % | predicted * |"));
}

TEST(PaperTablesTest, ReportedOperationsAreThoseOfTheProductsWithTheWholeSquareOfScores) {
  const Model model = *FindModel("gpt2-1b");
  const Workload workload = MakeWorkload(PaperMachine().gpu, model, {.batch = 1, .sequence = 2048}, 1);
  const double hidden = 2048, other_half = 3 * 20 * 2048 * (4 * hidden * 2048 / 2);
  EXPECT_NEAR(ReportedFlops(model, 2048, 2048) / (workload.flops_per_step + other_half), 1, 1e-3);
}

}  // namespace
}  // namespace superoffload::simulator
