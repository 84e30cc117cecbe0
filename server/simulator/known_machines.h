// What known_machines.cc and the files with the machines share.
//
// Sizes of memory are those that CUDA and Linux report: a data sheet's "96 GB" are 95 GiB of them, "480 GB" 478.6 GiB.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_KNOWN_MACHINES_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_KNOWN_MACHINES_H_

#include <vector>

#include "server/simulator/machine.h"

namespace superoffload::simulator {

inline constexpr double kGiga = 1e9, kTera = 1e12, kGiB = 1024.0 * 1024 * 1024, kMB = 1e6;

// Of Grace's cores, Neoverse V2: a pipeline model of the kernels gives 2.45 cycles per element for one update and 4.7
// for two.
inline constexpr double kGraceHertz = 3.1e9;
inline constexpr PassCosts kGracePasses{
    .absorb = 2.45 / kGraceHertz, .publish = 2.25 / kGraceHertz, .publish_masters = 0.3 / kGraceHertz};

struct KnownMachine {
  Machine machine;
  std::vector<Source> sources;  // one for each number
};

// Those of Grace, and the others.
std::vector<KnownMachine> KnownSuperchips();
std::vector<KnownMachine> KnownServersAndDesktops();

// `sources` with `changed` in place of those of the same fields.
std::vector<Source> WithSources(std::vector<Source> sources, const std::vector<Source>& changed);

// With the numbers of GPU software that fuses and compiles its small kernels.
GpuModel KnownGpu(double peak_flops, double memory_bytes, double memory_bandwidth);

// Of these numbers, and of others that are the same everywhere.
std::vector<Source> CommonSources();

// Between nodes: an adapter of so many Gb/s for each rank, of which nine tenths arrive.
NetworkModel KnownNetwork(uint32_t node_ranks, double node_bandwidth, double adapter_gigabits);

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_KNOWN_MACHINES_H_
