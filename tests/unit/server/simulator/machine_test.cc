#include "server/simulator/machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace superoffload::simulator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

TEST(MachineTest, NamedMachinesAreValid) {
  EXPECT_THAT(MachineNames(), ElementsAre("gh200-96-480", "gh200-144", "gb200", "gb300", "h100-pcie", "h100-sxm",
                                          "h200-sxm", "rtx-5090", "dgx-spark", "laptop"));
  for (const std::string_view name : MachineNames()) {
    const absl::StatusOr<Machine> machine = FindMachine(name);
    ASSERT_TRUE(machine.ok());
    EXPECT_TRUE(ValidateMachine(*machine).ok()) << ValidateMachine(*machine);
    EXPECT_TRUE(ValidateNetwork(*machine).ok()) << ValidateNetwork(*machine);
  }
}

TEST(MachineTest, EveryNumberOfANamedMachineHasOneSource) {
  for (const std::string_view name : MachineNames()) {
    std::vector<std::string_view> fields;
    const absl::StatusOr<std::span<const Source>> sources = SourcesOf(name);
    ASSERT_TRUE(sources.ok());
    for (const Source& source : *sources) {
      fields.push_back(source.field);
      EXPECT_THAT(std::string(source.text), Not(IsEmpty()));
    }
    EXPECT_THAT(fields,
                UnorderedElementsAre("gpu.peak_flops", "gpu.matmul_efficiency", "gpu.attention_efficiency",
                                     "gpu.memory_bytes", "gpu.memory_bandwidth", "gpu.block_traffic",
                                     "gpu.block_overhead", "host.memory_bytes", "host.cores", "host.bandwidth",
                                     "host.core_bandwidth", "passes.absorb", "passes.publish", "passes.publish_masters",
                                     "h2d", "d2h", "network.node_ranks", "network.node_bandwidth", "network.bandwidth",
                                     "network.collective_seconds", "network.agreement_seconds", "trainer_cores"))
        << name;
  }
}

// Data sheets count in units that are neither GB nor GiB of what a program gets.
TEST(MachineTest, MemoryIsWhatCudaAndLinuxReport) {
  constexpr double kGiB = 1024.0 * 1024 * 1024;
  const Machine gh200 = *FindMachine("gh200-96-480");
  EXPECT_DOUBLE_EQ(gh200.gpu.memory_bytes, 95.0 * kGiB);
  EXPECT_DOUBLE_EQ(gh200.host.memory_bytes, 478.6 * kGiB);
  EXPECT_DOUBLE_EQ(FindMachine("gh200-144")->gpu.memory_bytes, 142.5 * kGiB);
  EXPECT_DOUBLE_EQ(FindMachine("gb200")->gpu.memory_bytes, 184.3 * kGiB);
}

TEST(MachineTest, WhereSourcesDisagreeTheNumberLiesBetweenThem) {
  for (const std::string_view name : MachineNames()) {
    const Machine machine = *FindMachine(name);
    const Machine least = AtEndOfRanges(machine, name, false).machine,
                  most = AtEndOfRanges(machine, name, true).machine;
    EXPECT_LE(least.host.bandwidth, machine.host.bandwidth) << name;
    EXPECT_LE(machine.host.bandwidth, most.host.bandwidth) << name;
    EXPECT_LE(least.gpu.peak_flops, machine.gpu.peak_flops) << name;
    EXPECT_LE(machine.gpu.peak_flops, most.gpu.peak_flops) << name;
    for (LinkCurve Machine::* link : {&Machine::h2d, &Machine::d2h}) {
      const auto reached = [&](const Machine& m) { return (m.*link).points.back().bytes_per_second; };
      EXPECT_LE(reached(least), reached(machine) * 1.000001) << name;
      EXPECT_LE(reached(machine), reached(most) * 1.000001) << name;
    }
  }
}

TEST(MachineTest, ARangeIsNamedAndANumberThatWasGivenHasNone) {
  Machine machine = *FindMachine("gh200-96-480");
  const RangeEnd end = AtEndOfRanges(machine, "gh200-96-480", false);
  EXPECT_EQ(end.machine.host.bandwidth, 288e9);
  EXPECT_THAT(end.changes, ElementsAre("host.bandwidth 288 GB/s", "h2d 375 GB/s", "d2h 170 GB/s"));
  machine.host.bandwidth = 300e9;
  EXPECT_THAT(AtEndOfRanges(machine, "gh200-96-480", true).changes, ElementsAre("h2d 421 GB/s", "d2h 388 GB/s"));
  EXPECT_THAT(AtEndOfRanges(machine, "", true).changes, IsEmpty());
}

TEST(MachineTest, AnUnknownNameIsAnsweredWithThoseThatAreKnown) {
  const absl::Status status = FindMachine("gh300").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("gh200-96-480, gh200-144, gb200, gb300, h100-pcie, h100-sxm, h200-sxm"));
}

TEST(MachineTest, WhatNoMachineCanHaveIsRefused) {
  const auto refused = [](auto change) {
    Machine machine = *FindMachine("laptop");
    change(machine);
    return std::string(ValidateMachine(machine).message());
  };
  EXPECT_THAT(refused([](Machine& m) { m.host.bandwidth = 0; }), HasSubstr("host.bandwidth"));
  EXPECT_THAT(refused([](Machine& m) { m.gpu.peak_flops = 0.0 / 0.0; }), HasSubstr("gpu.peak_flops"));
  EXPECT_THAT(refused([](Machine& m) { m.gpu.matmul_efficiency = 1.5; }), HasSubstr("must be 1e-06 to 1"));
  EXPECT_THAT(refused([](Machine& m) { m.trainer_cores = m.host.cores; }), HasSubstr("leave at least one"));
  EXPECT_THAT(refused([](Machine& m) { m.h2d.points.clear(); }), HasSubstr("h2d"));
  EXPECT_THAT(refused([](Machine& m) { m.d2h.points[1].bytes = m.d2h.points[0].bytes; }), HasSubstr("sizes must grow"));
}

TEST(MachineTest, ACollectiveIsAsFastAsItsSlowestHop) {
  const NetworkModel network{.node_ranks = 4,
                             .node_bandwidth = 300e9,
                             .bandwidth = 25e9,
                             .collective_seconds = 1e-6,
                             .agreement_seconds = 1e-6};
  EXPECT_EQ(CollectiveSeconds(network, 1, 1e9), 0);
  EXPECT_DOUBLE_EQ(CollectiveSeconds(network, 4, 1e9), 1e-6 + 0.75e9 / 300e9);   // each lacks three quarters
  EXPECT_DOUBLE_EQ(CollectiveSeconds(network, 8, 1e9), 1e-6 + 0.875e9 / 100e9);  // a node's four adapters
  NetworkModel fast = network;
  fast.bandwidth = 100e9;
  EXPECT_DOUBLE_EQ(CollectiveSeconds(fast, 8, 1e9), 1e-6 + 0.875e9 / 300e9);
}

}  // namespace
}  // namespace superoffload::simulator
