// What the machine is made of, as far as a daemon must know: which cores, which memory and which GPUs belong together.
#ifndef SUPEROFFLOAD_SERVER_TOPOLOGY_TOPOLOGY_H_
#define SUPEROFFLOAD_SERVER_TOPOLOGY_TOPOLOGY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace superoffload::topology {

// A Grace package with its memory and GPUs; on other machines any NUMA node that has cores.
struct Superchip {
  unsigned memory_node = 0;
  uint64_t memory_bytes = 0;
  std::vector<std::vector<int>> cores;  // the hardware threads of each, as the kernel numbers them
  std::vector<std::string> gpus;        // PCI addresses, "0009:01:00.0"
};

struct Topology {
  std::vector<Superchip> superchips;         // by memory node
  std::vector<unsigned> nodes_without_cpus;  // GPUs' memory, or memory far from all cores: never used
  uint64_t page_bytes = 0;
};

// Of this machine, restricted to the processors and memory nodes of the process's cgroup (not to its affinity), or of
// the machine that $HWLOC_FSROOT or $HWLOC_XMLFILE describes. GPU memory is no memory of a Superchip, whether or not it
// shows up as NUMA nodes. UNAVAILABLE: hwloc cannot tell.
absl::StatusOr<Topology> Discover();

// How the cores of a Superchip are shared: trainers get the first ones.
struct CoreShares {
  std::vector<int> trainer;    // hardware threads
  std::vector<int> optimizer;  // one hardware thread per core, for one worker each
};

// A tenth of the cores, at least one: 7 of Grace's 72 (SuperOffload, section 5: cores 0 to 6).
size_t DefaultTrainerCores(const Superchip& superchip);

// Workers of a daemon that is not bound to a Superchip, on so many cores: a tenth stays with trainers here, too. Where
// that is less than a core, trainers and workers take turns on all of them.
uint32_t DefaultWorkers(uint32_t cores);

// INVALID_ARGUMENT: nothing would be left for the optimizer. With a single core both share it.
absl::StatusOr<CoreShares> ShareCores(const Superchip& superchip, size_t trainer_cores);

// INVALID_ARGUMENT: there is none of that index; the message lists those that are.
absl::StatusOr<Superchip> FindSuperchip(const Topology& topology, size_t index);

}  // namespace superoffload::topology

#endif  // SUPEROFFLOAD_SERVER_TOPOLOGY_TOPOLOGY_H_
