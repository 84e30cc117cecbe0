#include "server/rpc/durable.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/record.h"
#include "server/rpc/from_proto.h"
#include "superoffload/v1/durable.pb.h"
#include "tests/unit/server/optimizer/fake_house.h"
#include "tests/unit/server/rpc/requests.h"

namespace superoffload::rpc {
namespace {

using ::testing::HasSubstr;

TEST(DurableTest, WhatADaemonOfAnotherRecordVersionLeftIsKeptAndNamed) {
  const v1::CreateOptimizerRequest request = [] {
    v1::CreateOptimizerRequest made = OneParameter("adamw");
    made.add_groups();
    return made;
  }();
  const engine::Layout layout = *engine::PlanLayout(*ToSpec(request));
  for (const uint32_t version : {0u, engine::Record::kOldestVersion - 1, engine::Record::kVersion + 1}) {
    v1::DurableOptimizer durable;
    durable.set_uid(1001);
    *durable.mutable_request() = request;
    durable.set_record_version(version);
    const optimizer::HostedMemory memory = *optimizer::HostedMemory::Create(layout, durable.SerializeAsString(), {});
    std::vector<memory::FileDescriptor> fds;
    for (const int fd : memory.fds()) fds.emplace_back(::dup(fd));
    optimizer::FakeHouse house;
    checkpoint::Scheduler scheduler(&house.observer);
    const absl::Status adopted = Adopt(house.table, scheduler, {1001, "o"}, std::move(fds));
    EXPECT_EQ(adopted.code(), absl::StatusCode::kFailedPrecondition) << adopted;
    EXPECT_THAT(adopted.message(), HasSubstr("go back to that release"));
    EXPECT_EQ(house.table.Get(optimizer::FakeHouse::User(1001), "o").status().code(), absl::StatusCode::kDataLoss);
    scheduler.Shutdown();
  }
}

// Of a daemon whose layouts were of version 3: addresses in its memory stay what they are.
TEST(DurableTest, AnOptimizerKeepsTheLayoutOfTheDaemonThatMadeIt) {
  v1::CreateOptimizerRequest request = OneParameter("adamw");
  request.add_groups();
  *request.add_parameters() = request.parameters(0);
  request.mutable_parameters(1)->set_name("v");
  engine::OptimizerSpec spec = *ToSpec(request);
  const uint64_t present = engine::PlanLayout(spec)->state_elements();
  spec.layout_version = 3;
  const engine::Layout layout = *engine::PlanLayout(spec);
  ASSERT_LT(layout.state_elements(), present);
  v1::DurableOptimizer durable;
  durable.set_uid(1001);
  *durable.mutable_request() = request;
  durable.set_record_version(3);
  const optimizer::HostedMemory memory = *optimizer::HostedMemory::Create(layout, durable.SerializeAsString(), {});
  const engine::Record record(memory.record.data(), layout);
  std::vector<memory::FileDescriptor> fds;
  for (const int fd : memory.fds()) fds.emplace_back(::dup(fd));
  optimizer::FakeHouse house;
  checkpoint::Scheduler scheduler(&house.observer);
  const absl::Status status = Adopt(house.table, scheduler, {1001, "o"}, std::move(fds));
  ASSERT_TRUE(status.ok()) << status;
  const optimizer::OptimizerPtr adopted = *house.table.Get(optimizer::FakeHouse::User(1001), "o");
  EXPECT_EQ(adopted->layout().state_elements(), layout.state_elements());
  EXPECT_EQ(adopted->record_version(), 3u);
  ASSERT_TRUE(RememberPolicies(*adopted, WithLease(60, 0)).ok());
  EXPECT_EQ(ReadDurable(adopted->memory())->record_version(), 3u);
  scheduler.Shutdown();
}

TEST(DurableTest, ASuccessorReadsTheRequestAndTheLatestPolicies) {
  optimizer::FakeHouse house;
  v1::CreateOptimizerRequest request;
  request.set_name("model");
  const optimizer::OptimizerPtr hosted = *house.table.Create(optimizer::FakeHouse::User(1001), "model",
                                                             optimizer::SmallSpec(), {}, Describe(1001, request));
  ASSERT_TRUE(RememberPolicies(*hosted, WithLease(60, 0)).ok());
  const absl::StatusOr<v1::DurableOptimizer> durable = ReadDurable(hosted->memory());
  ASSERT_TRUE(durable.ok());
  EXPECT_EQ(durable->uid(), 1001u);
  EXPECT_EQ(durable->request().name(), "model");
  EXPECT_EQ(durable->request().policies().lease().seconds(), 60);
  ASSERT_TRUE(hosted->memory().Describe("\xff").ok());
  EXPECT_EQ(ReadDurable(hosted->memory()).status().code(), absl::StatusCode::kDataLoss);
}

TEST(DurableTest, PoliciesThatAreRememberedAtOnceAreThoseOfOneCaller) {
  optimizer::FakeHouse house;
  v1::CreateOptimizerRequest request;
  request.set_name("model");
  const optimizer::OptimizerPtr hosted = *house.table.Create(optimizer::FakeHouse::User(1001), "model",
                                                             optimizer::SmallSpec(), {}, Describe(1001, request));
  for (int64_t round = 1; round <= 50; ++round) {
    std::vector<std::thread> callers;
    for (const int64_t caller : {round, -round}) {
      callers.emplace_back([&hosted, caller] {
        v1::Policies policies = WithLease(caller, 0);
        policies.mutable_checkpoint()->set_directory(std::string(10'000, caller > 0 ? 'a' : 'b'));
        for (int i = 0; i < 20; ++i) EXPECT_TRUE(RememberPolicies(*hosted, policies).ok());
      });
    }
    for (std::thread& caller : callers) caller.join();
    const absl::StatusOr<v1::DurableOptimizer> durable = ReadDurable(hosted->memory());
    ASSERT_TRUE(durable.ok()) << durable.status();
    EXPECT_EQ(std::abs(durable->request().policies().lease().seconds()), round);
  }
}

TEST(DurableTest, PoliciesOfAnOptimizerThatWasDeletedHoldNothing) {
  optimizer::FakeHouse house;
  checkpoint::Scheduler scheduler(&house.observer);
  const optimizer::OptimizerPtr hosted = *house.Create(1001, "model");
  ASSERT_TRUE(house.table.Delete(optimizer::FakeHouse::User(1001), "model").ok());
  ApplyPolicies(house.table, scheduler, hosted, {.speculation = {}, .schedule = {100, 0, "/checkpoints"}, .lease = {}},
                absl::ZeroDuration())
      .IgnoreError();
  EXPECT_EQ(scheduler.Get(hosted->id()), checkpoint::Schedule{});
  EXPECT_EQ(hosted.use_count(), 1);
}

}  // namespace
}  // namespace superoffload::rpc
