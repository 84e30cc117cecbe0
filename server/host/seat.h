// The daemon's seat in the machine: which memory, which cores. Found once, at the start.
#ifndef SUPEROFFLOAD_SERVER_HOST_SEAT_H_
#define SUPEROFFLOAD_SERVER_HOST_SEAT_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "server/memory/binding.h"
#include "server/partition/partition.h"
#include "server/topology/topology.h"
#include "superoffload/v1/config.pb.h"

namespace superoffload::host {

struct Seat {
  absl::StatusOr<topology::Topology> topology;
  std::optional<unsigned> superchip;  // index into it
  topology::CoreShares shares;        // empty without one
  memory::Binding binding;

  // Where its cache and bandwidth are partitioned; only with a Superchip.
  partition::Place partition_place() const;
};

// INVALID_ARGUMENT: the configured Superchip or share of cores does not exist. UNAVAILABLE: one is configured, and
// hwloc cannot describe the machine.
absl::StatusOr<Seat> FindSeat(const v1::DaemonConfig& config);

// All memory that the daemon can use: its Superchip's, where one is configured and found, and what the machine and the
// control group have.
uint64_t SeatMemoryBytes(const v1::DaemonConfig& config);

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_SEAT_H_
