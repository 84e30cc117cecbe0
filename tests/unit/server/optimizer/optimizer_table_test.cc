#include "server/optimizer/optimizer_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/synchronization/notification.h"
#include "tests/unit/server/optimizer/fake_house.h"

namespace superoffload::optimizer {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uid_t kAnna = 1001, kBert = 1002;

TEST(OptimizerTableTest, AUsersNameIsTakenOnceAndOthersMayHaveItAsWell) {
  FakeHouse house;
  ASSERT_TRUE(house.Create(kAnna, "model").ok());
  EXPECT_EQ(house.Create(kAnna, "model").status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(house.Create(kBert, "model").ok());
  EXPECT_EQ(house.table.size(), 2u);
}

TEST(OptimizerTableTest, RefusesNamesThatAreNoneAndFurtherOnesOfAUser) {
  FakeHouse house({.per_user = 1});
  for (const std::string name : {"", "a/b", "a b", "\n"}) {
    EXPECT_EQ(house.Create(kAnna, name).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_EQ(house.Create(kAnna, std::string(129, 'a')).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(house.Create(kAnna, "one").ok());
  EXPECT_THAT(house.Create(kAnna, "two").status().message(), HasSubstr("raise max_optimizers_per_user"));
  EXPECT_TRUE(house.Create(kBert, "two").ok());
}

TEST(OptimizerTableTest, RefusesFurtherOnesThanItsOpenFilesAreEnoughFor) {
  FakeHouse house({.total = 2});
  ASSERT_TRUE(house.Create(kAnna, "one").ok());
  ASSERT_TRUE(house.Create(kBert, "one").ok());
  const absl::Status refused = house.Create(kBert, "two").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.message(), HasSubstr("LimitNOFILE="));
  ASSERT_TRUE(house.table.Delete(FakeHouse::User(kAnna), "one").ok());
  EXPECT_TRUE(house.Create(kBert, "two").ok());
}

TEST(OptimizerTableTest, ACreationThatFailsLeavesTheNameFree) {
  FakeHouse house({}, /*budget_bytes=*/1);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(house.Create(kAnna, "model").status().code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(house.table.Get(FakeHouse::User(kAnna), "model").status().code(), absl::StatusCode::kNotFound);
}

TEST(OptimizerTableTest, WhoComesWhileAnOptimizerIsBeingMadeIsToldToComeAgain) {
  FakeHouse house;
  std::vector<absl::StatusCode> codes;
  house.store.on_keep = [&] {
    house.store.on_keep = nullptr;
    const transport::Peer anna = FakeHouse::User(kAnna);
    codes = {house.table.Get(anna, "model").status().code(), house.Create(kAnna, "model").status().code(),
             house.table.Delete(anna, "model").code(), house.table.Get(FakeHouse::User(kBert), "model").status().code(),
             house.table.Get(anna, "other").status().code()};
  };
  ASSERT_TRUE(house.Create(kAnna, "model").ok());
  EXPECT_THAT(codes, ElementsAre(absl::StatusCode::kAborted, absl::StatusCode::kAborted, absl::StatusCode::kAborted,
                                 absl::StatusCode::kNotFound, absl::StatusCode::kNotFound));
  EXPECT_TRUE(house.table.Get(FakeHouse::User(kAnna), "model").ok());
}

TEST(OptimizerTableTest, WhatWouldNotOutliveTheDaemonIsRefused) {
  FakeHouse house;
  house.store.full = true;
  EXPECT_EQ(house.Create(kAnna, "model").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(house.budget.used().total_bytes(), 0u);
  house.store.full = false;
  EXPECT_TRUE(house.Create(kAnna, "model").ok());
}

TEST(OptimizerTableTest, APlanIsWhatIsCreatedAndCreatesNothing) {
  FakeHouse house;
  const engine::OptimizerSpec spec = (*house.Create(kAnna, "model"))->spec();
  const absl::StatusOr<OptimizerTable::Preview> plan = house.table.Plan(FakeHouse::User(kBert), "model", spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(plan->room.ok());
  EXPECT_EQ(house.table.size(), 1u);
  EXPECT_EQ(plan->use.total_bytes(), (*house.Create(kBert, "model"))->memory_bytes());
  EXPECT_EQ(house.table.Plan(FakeHouse::User(kAnna), "model", spec).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(house.table.Plan(FakeHouse::User(kAnna), "a/b", spec).status().code(), absl::StatusCode::kInvalidArgument);
  FakeHouse small({}, /*budget_bytes=*/1);
  EXPECT_EQ(small.table.Plan(FakeHouse::User(kAnna), "model", spec)->room.code(), absl::StatusCode::kResourceExhausted);
}

TEST(OptimizerTableTest, UsersSeeTheirOwnAndOperatorsEverybodys) {
  FakeHouse house;
  const OptimizerPtr annas = *house.Create(kAnna, "model");
  EXPECT_EQ(*house.table.Get(FakeHouse::User(kAnna), "model"), annas);
  EXPECT_EQ(house.table.Get(FakeHouse::User(kBert), "model").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(house.table.Get(FakeHouse::User(kBert), "1001/model").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(*house.table.Get(FakeHouse::Operator(), "model"), annas);
  const OptimizerPtr berts = *house.Create(kBert, "model");
  EXPECT_EQ(house.table.Get(FakeHouse::Operator(), "model").status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(*house.table.Get(FakeHouse::Operator(), "1002/model"), berts);
  EXPECT_THAT(house.table.List(FakeHouse::User(kBert)), ElementsAre(berts));
  EXPECT_THAT(house.table.List(FakeHouse::Operator()), ElementsAre(annas, berts));
}

TEST(OptimizerTableTest, DeletingGivesBackMemoryAndName) {
  FakeHouse house;
  ASSERT_TRUE(house.Create(kAnna, "model").ok());
  EXPECT_GT(house.budget.used().total_bytes(), 0u);
  EXPECT_THAT(house.store.kept(), ElementsAre(testing::Pair("optimizer-1001-model", 5)));
  ASSERT_TRUE(house.table.Delete(FakeHouse::User(kAnna), "model").ok());
  EXPECT_EQ(house.budget.used().total_bytes(), 0u);
  EXPECT_THAT(house.store.kept(), IsEmpty());
  EXPECT_THAT(house.observer.deleted(), ElementsAre(OptimizerId{kAnna, "model"}));
  EXPECT_EQ(house.table.Delete(FakeHouse::User(kAnna), "model").code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(house.Create(kAnna, "model").ok());
}

TEST(OptimizerTableTest, DamagedMemoryKeepsItsNameUntilItIsDeleted) {
  FakeHouse house;
  house.table.HoldDamaged({kAnna, "model"}, absl::DataLossError("its record is torn"), {});
  EXPECT_EQ(house.table.Get(FakeHouse::User(kAnna), "model").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(house.Create(kAnna, "model").status().code(), absl::StatusCode::kAlreadyExists);
  ASSERT_EQ(house.table.ListDamaged(FakeHouse::User(kAnna)).size(), 1u);
  EXPECT_THAT(house.table.ListDamaged(FakeHouse::User(kBert)), IsEmpty());
  EXPECT_TRUE(house.table.Delete(FakeHouse::User(kAnna), "model").ok());
  EXPECT_TRUE(house.Create(kAnna, "model").ok());
}

TEST(OptimizerTableTest, NamesInTheStoreAreReadBackAndNoOthers) {
  const absl::StatusOr<OptimizerId> id = OptimizerTable::IdInStore("optimizer-1001-llama-8.b_1");
  ASSERT_TRUE(id.ok());
  EXPECT_EQ(*id, (OptimizerId{kAnna, "llama-8.b_1"}));
  for (const char* name : {"", "optimizer-", "optimizer-1001", "optimizer-x-model", "optimizer-1-a/b", "socket-1-a"}) {
    EXPECT_EQ(OptimizerTable::IdInStore(name).status().code(), absl::StatusCode::kNotFound) << name;
  }
}

TEST(OptimizerTableTest, AnOptimizerThatNobodyUsesGoesWithItsLease) {
  FakeHouse house;
  const OptimizerPtr optimizer = *house.Create(kAnna, "model");
  house.table.SetLease(optimizer, absl::ZeroDuration());
  EXPECT_THAT(house.observer.WaitDeleted(1), ElementsAre(OptimizerId{kAnna, "model"}));
}

class PreparedSink final : public engine::CompletionSink {
 public:
  void SlotFree(uint64_t, uint32_t, uint32_t) override {}
  void ParametersReady(uint64_t, uint32_t, bool) override {}
  void NormMeasured(uint64_t, double, double) override {}
  void Prepared(uint64_t, uint64_t, double) override { prepared_.Notify(); }
  void VerdictReached(const engine::VerdictReport&) override {}
  void WaitPrepared() const { prepared_.WaitForNotification(); }

 private:
  absl::Notification prepared_;
};

// Its trainer is killed then.
void PrepareStep(HostedOptimizer& optimizer) {
  engine::StepEngine& engine = optimizer.engine();
  PreparedSink sink;
  engine.Attach(&sink);
  engine.RequireTotals();
  ASSERT_TRUE(engine.WaitPushed().ok());
  ASSERT_TRUE(engine.BeginStep(1, 1).ok());
  ASSERT_TRUE(engine.GradientReady(1, 0, 1.0).ok());
  ASSERT_TRUE(engine.PrepareStep(1, 1, 0).ok());
  sink.WaitPrepared();
  engine.Detach();
  ASSERT_TRUE(engine.prepared());
}

TEST(OptimizerTableTest, ALeaseEndsAPreparedStepOnlyWhereNoTrainerCanComeBack) {
  FakeHouse house;
  const OptimizerPtr named = *house.Create(kAnna, "named"), anonymous = *house.Create(kAnna, "anonymous");
  PrepareStep(*named);
  PrepareStep(*anonymous);
  anonymous->SetUnreachable();
  EXPECT_EQ(house.table.Delete(FakeHouse::User(kAnna), "anonymous").code(), absl::StatusCode::kFailedPrecondition);
  house.table.SetLease(named, absl::Milliseconds(5));
  house.table.SetLease(anonymous, absl::Milliseconds(50));
  EXPECT_THAT(house.observer.WaitDeleted(1), ElementsAre(OptimizerId{kAnna, "anonymous"}));
  EXPECT_TRUE(house.table.Hosts(*named));
}

TEST(OptimizerTableTest, TheLeaseOfADeletedOptimizerIsNotItsNamesakes) {
  FakeHouse house;
  const OptimizerPtr first = *house.Create(kAnna, "model");
  ASSERT_TRUE(house.table.Delete(FakeHouse::User(kAnna), "model").ok());
  const OptimizerPtr second = *house.Create(kAnna, "model");
  EXPECT_FALSE(house.table.Hosts(*first));
  EXPECT_TRUE(house.table.Hosts(*second));
  house.table.SetLease(first, absl::ZeroDuration());
  house.table.SetLease(*house.Create(kBert, "other"), absl::ZeroDuration());  // runs out later
  EXPECT_THAT(house.observer.WaitDeleted(2), ElementsAre(OptimizerId{kAnna, "model"}, OptimizerId{kBert, "other"}));
  EXPECT_TRUE(house.table.Hosts(*second));
}

TEST(OptimizerTableTest, AfterShutdownNothingIsCreatedOrAttached) {
  FakeHouse house;
  house.table.Shutdown();
  EXPECT_EQ(house.Create(kAnna, "model").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(house.table.NewEpoch().status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace superoffload::optimizer
