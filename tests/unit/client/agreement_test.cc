// What ranks make of each other's reports.
#include "client/src/agreement.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace superoffload::client {
namespace {

superoffload_run_report Report(uint64_t committed, uint64_t attempt = 0, uint64_t lineage = 1) {
  superoffload_run_report report{};
  report.lineage = lineage;
  report.committed_steps = committed;
  report.last = {static_cast<double>(committed), 1, 2};
  if (attempt != 0) {
    report.prepared_step = committed + 1;
    report.prepared_attempt = attempt;
    report.prepared = {0, 1, 2};
  }
  return report;
}

superoffload_run_decision Decide(const std::vector<superoffload_run_report>& reports, uint32_t rank) {
  superoffload_run_decision decision{};
  EXPECT_TRUE(Agree(reports, rank, &decision).ok());
  return decision;
}

std::string Refusal(const std::vector<superoffload_run_report>& reports) {
  superoffload_run_decision decision{};
  const Status status = Agree(reports, 0, &decision);
  EXPECT_EQ(status.code, Code::kDataLoss);
  return status.message;
}

TEST(AgreementTest, WhatSomeRankHasCommittedOthersCommitWithItsTotal) {
  const std::vector<superoffload_run_report> reports{Report(6, 31), Report(7), Report(7, 5)};
  EXPECT_EQ(Decide(reports, 0).action, 1);
  EXPECT_EQ(Decide(reports, 0).attempt, 31);
  EXPECT_EQ(Decide(reports, 0).commit.sum_of_squares, 7);
  EXPECT_EQ(Decide(reports, 1).action, 0);
  EXPECT_EQ(Decide(reports, 2).action, 2);  // step 8, which rank 0 cannot have prepared
}

TEST(AgreementTest, WhatNobodyHasCommittedAllAbandon) {
  const std::vector<superoffload_run_report> reports{Report(6, 31), Report(6)};
  EXPECT_EQ(Decide(reports, 0).action, 2);
  EXPECT_EQ(Decide(reports, 1).action, 0);
}

TEST(AgreementTest, ARankThatCannotFollowIsNamed) {
  EXPECT_NE(Refusal({Report(7), Report(5, 3)}).find("rank 1 is at step 5"), std::string::npos);
  EXPECT_NE(Refusal({Report(7), Report(6)}).find("rank 1 is at step 6"), std::string::npos);
  EXPECT_NE(Refusal({Report(7), Report(7, 0, 2)}).find("rank 1 is of another lineage"), std::string::npos);
  superoffload_run_report other = Report(6, 3);
  other.prepared.max_grad_norm = 1;
  EXPECT_NE(Refusal({Report(7), other}).find("max_grad_norm 1"), std::string::npos);
}

}  // namespace
}  // namespace superoffload::client
