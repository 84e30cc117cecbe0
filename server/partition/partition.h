// Partitions of the last-level cache and the memory bandwidth between trainers and the optimizer of one Superchip, by
// resctrl: MPAM on Grace, RDT on x86.
//
// Two control groups, superoffloadd-N-trainer and superoffloadd-N-optimizer for memory node N. The trainers' group has
// the trainers' CPUs, the optimizer's group the daemon's threads. Their cache ways are disjoint: the kernel does not
// keep them so where masks may be shared (MPAM has no exclusive mode). Bandwidth is a soft limit on MPAM and promises
// nothing.
#ifndef SUPEROFFLOAD_SERVER_PARTITION_PARTITION_H_
#define SUPEROFFLOAD_SERVER_PARTITION_PARTITION_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/partition/resctrl_files.h"

namespace superoffload::partition {

// Defaults of SuperOffload, section 5: the optimizer has L3 mask 00f of fff and MB 20, trainers ff0 and 100.
struct Shares {
  uint32_t optimizer_cache_percent = 33;
  uint32_t optimizer_bandwidth_percent = 20;
  uint32_t trainer_bandwidth_percent = 100;
};

struct Place {
  unsigned memory_node = 0;
  std::vector<int> trainer_cpus;
  std::vector<int> cache_ids;  // that the domain may be called by, the likeliest first
  uid_t daemon_uid = 0;        // who may move its own threads into the optimizer's group
};

// One counter of a group's monitoring.
struct Reading {
  std::string group;    // "trainer", "optimizer"
  std::string counter;  // "llc_occupancy", "mbm_total_bytes", "mbm_local_bytes"
  uint64_t value = 0;
};

// Not thread-safe, except for Read.
class Partition {
 public:
  Partition(std::unique_ptr<ResctrlFiles> files, const Place& place) : files_(std::move(files)), place_(place) {}

  // Makes the groups and sets their masks; takes over what a predecessor left. UNAVAILABLE: the machine has no resctrl,
  // or it is not mounted. PERMISSION_DENIED: only root may. RESOURCE_EXHAUSTED: no control group is free. Every message
  // ends with what the kernel says of the last command.
  absl::Status Prepare(const Shares& shares);

  // Moves threads into the optimizer's group; those that they start follow.
  absl::Status Join(const std::vector<pid_t>& threads);

  // Gives threads and CPUs back to the default group.
  absl::Status Remove();

  // What is being monitored; counters that the machine lacks or does not tell now are left out.
  std::vector<Reading> Read() const;

 private:
  struct Resource;
  std::string Group(const char* role) const;
  absl::Status Failed(int error, const std::string& action) const;
  absl::Status MakeGroup(const char* role);
  absl::Status Set(const char* role, const std::vector<std::string>& lines);
  absl::StatusOr<std::vector<Resource>> Probe() const;
  uint64_t Number(const std::string& path, uint64_t missing, int base) const;
  int Domain(const Resource& resource) const;

  const std::unique_ptr<ResctrlFiles> files_;
  const Place place_;
};

}  // namespace superoffload::partition

#endif  // SUPEROFFLOAD_SERVER_PARTITION_PARTITION_H_
