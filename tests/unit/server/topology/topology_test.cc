#include "server/topology/topology.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

namespace superoffload::topology {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Superchip WithCores(size_t cores, size_t threads = 1) {
  Superchip superchip;
  for (size_t i = 0; i < cores; ++i) {
    std::vector<int>& core = superchip.cores.emplace_back();
    for (size_t t = 0; t < threads; ++t) core.push_back(static_cast<int>(i + t * cores));
  }
  return superchip;
}

TEST(TopologyTest, ATrainerGetsATenthOfTheCoresAndAtLeastOne) {
  EXPECT_EQ(DefaultTrainerCores(WithCores(72)), 7u);
  EXPECT_EQ(DefaultTrainerCores(WithCores(9)), 1u);
  EXPECT_EQ(DefaultTrainerCores(WithCores(1)), 1u);
}

TEST(TopologyTest, OutsideOfASuperchipATenthOfManyCoresIsLeftAndFewAreShared) {
  EXPECT_EQ(DefaultWorkers(1), 1u);
  EXPECT_EQ(DefaultWorkers(9), 9u);
  EXPECT_EQ(DefaultWorkers(10), 9u);
  EXPECT_EQ(DefaultWorkers(72), 65u);
}

TEST(TopologyTest, TrainersGetAllThreadsOfTheFirstCoresAndWorkersOneOfEachOther) {
  const absl::StatusOr<CoreShares> shares = ShareCores(WithCores(4, /*threads=*/2), 1);
  ASSERT_TRUE(shares.ok());
  EXPECT_THAT(shares->trainer, ElementsAre(0, 4));
  EXPECT_THAT(shares->optimizer, ElementsAre(1, 2, 3));
}

TEST(TopologyTest, ASingleCoreIsShared) {
  const absl::StatusOr<CoreShares> shares = ShareCores(WithCores(1, /*threads=*/2), 1);
  ASSERT_TRUE(shares.ok());
  EXPECT_THAT(shares->trainer, ElementsAre(0, 1));
  EXPECT_THAT(shares->optimizer, ElementsAre(0));
}

TEST(TopologyTest, TheOptimizerKeepsACore) {
  const absl::Status status = ShareCores(WithCores(4), 4).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("leave at least one"));
}

TEST(TopologyTest, ASuperchipThatIsNotThereIsNamed) {
  const Topology topology{.superchips = {WithCores(2)}, .nodes_without_cpus = {}, .page_bytes = 0};
  EXPECT_EQ(FindSuperchip(topology, 0)->cores.size(), 2u);
  const absl::Status status = FindSuperchip(topology, 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("superchip is 1 but this machine has 1"));
}

TEST(TopologyTest, EveryMemoryNodeWithCoresIsASuperchip) {
  ::setenv("HWLOC_SYNTHETIC", "numa:2(memory=1073741824) core:3 pu:2", 1);
  const absl::StatusOr<Topology> topology = Discover();
  ::unsetenv("HWLOC_SYNTHETIC");
  ASSERT_TRUE(topology.ok());
  ASSERT_EQ(topology->superchips.size(), 2u);
  EXPECT_EQ(topology->superchips[1].memory_node, 1u);
  EXPECT_EQ(topology->superchips[1].memory_bytes, uint64_t{1} << 30);
  EXPECT_THAT(topology->superchips[1].cores, ElementsAre(ElementsAre(6, 7), ElementsAre(8, 9), ElementsAre(10, 11)));
  EXPECT_THAT(topology->nodes_without_cpus, IsEmpty());
}

}  // namespace
}  // namespace superoffload::topology
