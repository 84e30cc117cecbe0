// Which daemon of a machine a rank takes: the rules of tests/unit/client/python/test_superchips.py, but for GPUs.
#include "client/src/cpp/superchips.h"

#include <cstdlib>
#include <map>
#include <optional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace superoffload {
namespace {

using Daemons = std::vector<std::pair<std::string, v1::Topology>>;
using Environment = std::map<std::string, std::string>;

const std::set<uint32_t> kAnywhere{0, 1, 2, 3, 4, 5, 6, 7};

// Of a machine of two Superchips with four cores each.
std::pair<std::string, v1::Topology> Daemon(const std::string& endpoint, std::optional<uint32_t> superchip) {
  v1::Topology machine;
  for (uint32_t chip = 0; chip < 2; ++chip) {
    v1::Superchip* const superchip_there = machine.add_superchips();
    for (uint32_t cpu = 4 * chip; cpu < 4 * chip + 4; ++cpu) superchip_there->add_cores()->add_cpus(cpu);
  }
  if (superchip) machine.set_used_superchip(*superchip);
  return {endpoint, machine};
}

Daemons OfBoth() { return {Daemon("of 1", 1), Daemon("of 0", 0)}; }

class SuperchipsTest : public ::testing::Test {
 protected:
  SuperchipsTest() { SetEnvironment({}); }
  ~SuperchipsTest() override { SetEnvironment({}); }

  static void SetEnvironment(const Environment& environment) {
    for (const char* variable : {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE",
                                 "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"}) {
      ::unsetenv(variable);
    }
    for (const auto& [variable, value] : environment) ::setenv(variable.c_str(), value.c_str(), 1);
  }

  static std::string Choose(const Daemons& daemons, const std::set<uint32_t>& cpus, const Environment& environment) {
    SetEnvironment(environment);
    return ChooseEndpoint(daemons, cpus);
  }
};

TEST_F(SuperchipsTest, AProcessTakesTheDaemonOfItsCpusSuperchip) {
  EXPECT_EQ(Choose(OfBoth(), {4, 7}, {{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}}), "of 1");
  EXPECT_EQ(Choose(OfBoth(), {0}, {{"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}}), "of 0");
}

TEST_F(SuperchipsTest, ARankThatMayRunAnywhereTakesTheDaemonOfItsPlace) {
  EXPECT_EQ(Choose(OfBoth(), kAnywhere, {{"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}}), "of 0");
  EXPECT_EQ(Choose(OfBoth(), kAnywhere, {{"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "4"}}), "of 1");
  EXPECT_EQ(Choose(OfBoth(), kAnywhere, {{"LOCAL_RANK", "3"}}), "of 1");
  EXPECT_EQ(Choose(OfBoth(), kAnywhere, {{"SLURM_LOCALID", "1"}, {"SLURM_NTASKS_PER_NODE", "2(x4)"}}), "of 1");
  EXPECT_EQ(Choose(OfBoth(), kAnywhere, {{"LOCAL_RANK", "9"}, {"LOCAL_WORLD_SIZE", "4"}}), "of 1");  // not its job's
  EXPECT_EQ(Choose(OfBoth(), kAnywhere, {}), "of 0");
}

TEST_F(SuperchipsTest, OfTwoDaemonsOfOneSuperchipAllTakeTheSame) {
  EXPECT_EQ(Choose({Daemon("b", 1), Daemon("a", 1)}, {5}, {}), "a");
}

TEST_F(SuperchipsTest, ADaemonThatIsBoundToNoSuperchipStandsBehindThoseThatAre) {
  EXPECT_EQ(Choose({Daemon("of all", std::nullopt), Daemon("of 1", 1)}, kAnywhere, {}), "of 1");
  EXPECT_EQ(Choose({{"silent", {}}, Daemon("of all", std::nullopt)}, {0}, {{"LOCAL_RANK", "1"}}), "silent");
  EXPECT_EQ(Choose({Daemon("of one that is not there", 7), Daemon("of 1", 1)}, {0}, {}), "of 1");
}

TEST_F(SuperchipsTest, AnEndpointIsNamedForEachRank) {
  EXPECT_EQ(FillLocalRank("unix:/here").value_or(""), "unix:/here");
  EXPECT_THAT(std::string(FillLocalRank("unix:/{local_rank}").status().message()),
              ::testing::HasSubstr("none of $LOCAL_RANK"));
  SetEnvironment({{"LOCAL_RANK", "3"}});
  EXPECT_EQ(FillLocalRank("unix:/of-{local_rank}/{local_rank}").value_or(""), "unix:/of-3/3");
}

}  // namespace
}  // namespace superoffload
