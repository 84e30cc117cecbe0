#include "server/rpc/to_proto.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/server/optimizer/fake_house.h"

namespace superoffload::rpc {
namespace {

using ::testing::ElementsAre;

TEST(ToProtoTest, AnAlgorithmSaysItsScalarsAndArrays) {
  const v1::Algorithm shown = ToProto(*kernels::FindAlgorithm("adamw"));
  ASSERT_EQ(shown.scalars_size(), 5);
  EXPECT_EQ(shown.scalars(1).name(), "beta1");
  EXPECT_EQ(shown.scalars(1).default_value(), 0.9);
  EXPECT_EQ(shown.scalars(1).below(), 1);
  ASSERT_EQ(shown.arrays_size(), 3);
  EXPECT_EQ(shown.arrays(2).name(), "exp_avg_sq");
  EXPECT_EQ(shown.arrays(2).dtype(), v1::DATA_TYPE_FLOAT32);
}

TEST(ToProtoTest, StatusKeepsCodeAndSentence) {
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
  const grpc::Status status = ToGrpc(absl::FailedPreconditionError("detach first"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(status.error_message(), "detach first");
}

TEST(ToProtoTest, ADamagedOptimizerIsShownWithItsReason) {
  const v1::Optimizer shown =
      ToProto(optimizer::OptimizerTable::Damaged{{1001, "model"}, absl::DataLossError("torn"), 4096});
  EXPECT_EQ(shown.state(), v1::OPTIMIZER_STATE_DAMAGED);
  EXPECT_EQ(shown.state_reason(), "torn");
  EXPECT_EQ(shown.memory_bytes(), 4096u);
}

TEST(ToProtoTest, AnOptimizerIsShownWithWhatWasAskedFor) {
  optimizer::FakeHouse house;
  const optimizer::OptimizerPtr hosted = *house.Create(1001, "model");
  hosted->set_lease(absl::Milliseconds(1500));
  const v1::Optimizer shown = ToProto(*hosted, {100, 3, "/checkpoints"});
  EXPECT_EQ(shown.name(), "model");
  EXPECT_EQ(shown.uid(), 1001u);
  EXPECT_EQ(shown.element_count(), 16u);
  EXPECT_EQ(shown.state(), v1::OPTIMIZER_STATE_INCOMPLETE) << "nothing was pushed yet";
  EXPECT_EQ(shown.policies().lease().nanos(), 500'000'000);
  EXPECT_EQ(shown.groups_size(), 0);
  EXPECT_EQ(shown.parameters_size(), 0);
  EXPECT_EQ(shown.policies().checkpoint().every_steps(), 100u);
}

TEST(ToProtoTest, AStepIsReportedWithItsDurationsAndWhatWasLost) {
  optimizer::WatchedStep step{{1001, "model"}, {}, 6};
  step.report.verdict.step = 7;
  step.report.streamed_bytes = 8;
  step.report.receive_duration = absl::Milliseconds(1250);
  step.report.end_time = absl::FromUnixMillis(2500);
  const v1::StepReport report = ToProto(step);
  EXPECT_EQ(report.step(), 7u);
  EXPECT_EQ(report.receive_duration().seconds(), 1);
  EXPECT_EQ(report.receive_duration().nanos(), 250'000'000);
  EXPECT_EQ(report.end_time().seconds(), 2);
  EXPECT_EQ(report.streamed_bytes(), 8u);
  EXPECT_EQ(report.dropped_reports(), 6u);
}

TEST(ToProtoTest, ATopologyIsShownWhole) {
  const v1::Topology shown = ToProto(topology::Topology{
      .superchips = {{.memory_node = 1, .memory_bytes = 4096, .cores = {{0, 1}, {2}}, .gpus = {"0009:01:00.0"}}},
      .nodes_without_cpus = {2},
      .page_bytes = 65536});
  ASSERT_EQ(shown.superchips_size(), 1);
  EXPECT_THAT(shown.superchips(0).cores(0).cpus(), ElementsAre(0, 1));
  EXPECT_THAT(shown.superchips(0).gpus(), ElementsAre("0009:01:00.0"));
  EXPECT_THAT(shown.nodes_without_cpus(), ElementsAre(2));
  EXPECT_EQ(shown.page_bytes(), 65536u);
}

}  // namespace
}  // namespace superoffload::rpc
