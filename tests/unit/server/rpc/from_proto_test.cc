#include "server/rpc/from_proto.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/rpc/durable.h"
#include "tests/unit/server/rpc/requests.h"

namespace superoffload::rpc {
namespace {

using ::testing::HasSubstr;

void AddScalar(v1::ParameterGroup* group, const std::string& name, double value) {
  v1::Scalar* const scalar = group->add_scalars();
  scalar->set_name(name);
  scalar->set_value(value);
}

TEST(FromProtoTest, ScalarsAreTakenByNameAndTheOthersHaveTheirDefaults) {
  for (const kernels::Algorithm* algorithm : kernels::Algorithms()) {
    v1::CreateOptimizerRequest request = OneParameter(std::string(algorithm->name));
    AddScalar(request.add_groups(), std::string(algorithm->scalars.back().name), 0.25);
    const absl::StatusOr<engine::OptimizerSpec> spec = ToSpec(request);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->algorithm, algorithm);
    std::vector<double> expected = algorithm->DefaultScalars();
    expected.back() = 0.25;
    EXPECT_EQ(spec->groups, std::vector<engine::Scalars>{expected});
  }
}

TEST(FromProtoTest, WhatTheDaemonDoesNotHaveIsNamedWithWhatItHas) {
  EXPECT_THAT(ToSpec(OneParameter("sgd")).status().message(), HasSubstr("adamw"));
  EXPECT_THAT(ToSpec(OneParameter("")).status().message(), HasSubstr("adamw"));
  v1::CreateOptimizerRequest request = OneParameter("adamw");
  AddScalar(request.add_groups(), "momentum", 0.9);
  EXPECT_THAT(ToSpec(request).status().message(), HasSubstr("momentum"));
}

TEST(FromProtoTest, WhatIsLeftOutIsTheDefault) {
  const absl::StatusOr<Policies> policies = ToPolicies({});
  ASSERT_TRUE(policies.ok());
  EXPECT_EQ(policies->speculation, engine::SpeculationPolicy::kAdaptive);
  EXPECT_EQ(policies->schedule, checkpoint::Schedule{});
  EXPECT_EQ(policies->lease, absl::InfiniteDuration());
  EXPECT_EQ(*ToSync(v1::SYNC_UNSPECIFIED), optimizer::Sync::kCheck);
}

TEST(FromProtoTest, EnumeratorsOfALaterVersionAreNamed) {
  EXPECT_THAT(ToSync(static_cast<v1::Sync>(99)).status().message(), HasSubstr("sync"));
  v1::Policies policies;
  policies.set_speculation(static_cast<v1::Speculation>(99));
  EXPECT_THAT(ToPolicies(policies).status().message(), HasSubstr("policies.speculation"));
}

TEST(FromProtoTest, ALeaseIsPositive) {
  EXPECT_EQ(*ToLease(WithLease(1, 500'000'000)), absl::Milliseconds(1500));
  for (const auto& [seconds, nanos] : {std::pair{0, 0}, {-1, 0}, {0, -1}}) {
    EXPECT_EQ(ToLease(WithLease(seconds, nanos)).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(FromProtoTest, AScheduleNamesAnAbsoluteDirectory) {
  v1::Policies policies;
  policies.mutable_checkpoint()->set_every_steps(100);
  policies.mutable_checkpoint()->set_keep(3);
  EXPECT_THAT(ToSchedule(policies).status().message(), HasSubstr("policies.checkpoint.directory"));
  policies.mutable_checkpoint()->set_directory("/checkpoints");
  EXPECT_EQ(*ToSchedule(policies), (checkpoint::Schedule{100, 3, "/checkpoints"}));
}

TEST(FromProtoTest, WhatATrainerTellsOfItsGpuIsBounded) {
  v1::GpuUse use;
  use.set_gpu("GH200");
  (*use.mutable_mover_seconds())["daemon"] = 0.25;
  EXPECT_EQ(ToGpuUse(use)->mover_seconds.at("daemon"), 0.25);
  use.set_notes(std::string(1 << 20, 'x'));
  EXPECT_EQ(ToGpuUse(use).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace superoffload::rpc
