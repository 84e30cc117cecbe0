#include "server/partition/partition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/server/partition/fake_resctrl_files.h"

namespace superoffload::partition {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kTrainer[] = "superoffloadd-0-trainer";
constexpr char kOptimizer[] = "superoffloadd-0-optimizer";

class PartitionTest : public ::testing::Test {
 protected:
  Partition On(const FakeMachine& machine, unsigned node = 0, std::vector<int> cache_ids = {0}) {
    return Partition(std::make_unique<FakeResctrlFiles>(machine, &groups_),
                     {.memory_node = node, .trainer_cpus = {0, 1, 2}, .cache_ids = cache_ids, .daemon_uid = 990});
  }
  std::map<std::string, FakeGroup> groups_;
};

TEST_F(PartitionTest, ThePublishedSharesOnGrace) {
  ASSERT_TRUE(On({}).Prepare({}).ok());
  EXPECT_EQ(groups_[kOptimizer].masks[0], 0xfu);
  EXPECT_EQ(groups_[kTrainer].masks[0], 0xff0u);
  EXPECT_EQ(groups_[kOptimizer].bandwidths[0], 20u);
  EXPECT_EQ(groups_[kTrainer].bandwidths[0], 100u);
  EXPECT_THAT(groups_[kTrainer].cpus, ElementsAre(0, 1, 2));
  EXPECT_EQ(groups_[kOptimizer].tasks_owner, 990u);
}

TEST_F(PartitionTest, MasksAreDisjointContiguousAndLargeEnoughOnEveryMachine) {
  for (unsigned ways = 2; ways <= 32; ++ways) {
    for (unsigned least = 1; least <= 4; ++least) {
      for (const uint32_t percent : {0u, 1u, 33u, 50u, 99u, 100u}) {
        groups_.clear();
        const uint64_t all = (uint64_t{1} << ways) - 1;
        FakeMachine machine{.cbm_mask = all, .min_cbm_bits = least, .min_bandwidth = 10, .bandwidth_gran = 10};
        const absl::Status status = On(machine).Prepare({.optimizer_cache_percent = percent});
        ASSERT_TRUE(status.ok()) << status << " ways " << ways << " least " << least << " percent " << percent;
        if (ways < 2 * least) continue;
        const uint64_t optimizer = groups_[kOptimizer].masks[0], trainer = groups_[kTrainer].masks[0];
        EXPECT_EQ(optimizer & trainer, 0u);
        EXPECT_EQ(optimizer | trainer, all);
      }
    }
  }
}

TEST_F(PartitionTest, OnlyItsOwnDomainAndOnlyWhatItKnows) {
  FakeMachine machine{.domains = {0, 5, 9}, .other_schemata = "L3_MAX:0=fff;5=fff;9=fff\n   MB_HLIM:0=1\n"};
  ASSERT_TRUE(On(machine, 5, {7, 5}).Prepare({}).ok());
  FakeGroup& optimizer = groups_["superoffloadd-5-optimizer"];
  EXPECT_EQ(optimizer.masks[5], 0xfu);
  EXPECT_EQ(optimizer.masks[0], 0xfffu);
  EXPECT_EQ(optimizer.masks[9], 0xfffu);
  EXPECT_EQ(optimizer.bandwidths[9], 100u);
}

TEST_F(PartitionTest, AMachineWithBandwidthOrCacheAlone) {
  ASSERT_TRUE(On({.has_l3 = false}).Prepare({}).ok());
  EXPECT_EQ(groups_[kOptimizer].bandwidths[0], 20u);
  groups_.clear();
  ASSERT_TRUE(On({.has_mb = false}).Prepare({}).ok());
  EXPECT_EQ(groups_[kOptimizer].masks[0], 0xfu);
  groups_.clear();
  EXPECT_EQ(On({.has_l3 = false, .has_mb = false}).Prepare({}).code(), absl::StatusCode::kUnavailable);
}

TEST_F(PartitionTest, ThreadsJoinAndAnEndedOneIsNoError) {
  Partition partition = On({});
  ASSERT_TRUE(partition.Prepare({}).ok());
  ASSERT_TRUE(partition.Join({100, FakeResctrlFiles::kEndedTask, 101}).ok());
  EXPECT_THAT(groups_[kOptimizer].tasks, ElementsAre(100, 101));
  ASSERT_TRUE(partition.Remove().ok());
  EXPECT_FALSE(groups_.contains(kOptimizer));
  EXPECT_FALSE(groups_.contains(kTrainer));
  EXPECT_THAT(groups_[""].tasks, ElementsAre(100, 101));
  EXPECT_TRUE(partition.Remove().ok());  // twice is as good
}

TEST_F(PartitionTest, WhatACrashedPredecessorLeftIsTakenOver) {
  ASSERT_TRUE(On({}).Prepare({.optimizer_cache_percent = 80}).ok());
  ASSERT_TRUE(On({.num_closids = 3}).Prepare({}).ok());
  EXPECT_EQ(groups_[kOptimizer].masks[0], 0xfu);
}

TEST_F(PartitionTest, ErrorsCarryWhatTheKernelSays) {
  const absl::Status full = On({.num_closids = 2}).Prepare({});
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("Out of CLOSIDs"));
  groups_.clear();
  const absl::Status absent = On({.mounted = false}).Prepare({});
  EXPECT_EQ(absent.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(absent.message()), HasSubstr("sys-fs-resctrl.mount"));
  EXPECT_EQ(On({.is_root = false}).Prepare({}).code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(PartitionTest, TheDaemonsUserMovesItsThreadsIntoGroupsThatRootMade) {
  ASSERT_TRUE(On({}).Prepare({}).ok());
  ASSERT_TRUE(On({.is_root = false}).Join({7}).ok());
  EXPECT_THAT(groups_[kOptimizer].tasks, ElementsAre(7));
}

TEST_F(PartitionTest, CountersThatAreNotToldAreLeftOut) {
  const FakeMachine machine{.domains = {0, 1}};
  Partition partition = On(machine);
  ASSERT_TRUE(partition.Prepare({}).ok());
  std::vector<std::string> told;
  for (const Reading& r : partition.Read()) told.push_back(absl::StrCat(r.group, " ", r.counter, " ", r.value));
  EXPECT_THAT(told, ElementsAre("trainer llc_occupancy 8192", "trainer mbm_total_bytes 1000",
                                "optimizer llc_occupancy 8192", "optimizer mbm_total_bytes 1000"));
}

}  // namespace
}  // namespace superoffload::partition
