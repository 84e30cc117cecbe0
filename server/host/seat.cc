#include "server/host/seat.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "server/memory/memory_limit.h"

namespace superoffload::host {

partition::Place Seat::partition_place() const {
  partition::Place place{
      .memory_node = *binding.node, .trainer_cpus = shares.trainer, .cache_ids = {}, .daemon_uid = ::geteuid()};
  std::ifstream file(absl::StrCat("/sys/devices/system/cpu/cpu", shares.optimizer.front(), "/cache/index3/id"));
  if (int id; file >> id) place.cache_ids.push_back(id);
  place.cache_ids.push_back(static_cast<int>(*binding.node));  // some kernels number domains so
  return place;
}

absl::StatusOr<Seat> FindSeat(const v1::DaemonConfig& config) {
  Seat seat{.topology = topology::Discover(), .superchip = std::nullopt, .shares = {}, .binding = {}};
  seat.binding.huge_pages = config.huge_pages() != v1::HUGE_PAGES_OFF;
  seat.binding.strict = config.misplaced_memory() != v1::MISPLACED_MEMORY_WARN;
  if (!config.has_superchip()) return seat;
  if (!seat.topology.ok()) return seat.topology.status();
  absl::StatusOr<topology::Superchip> superchip = topology::FindSuperchip(*seat.topology, config.superchip());
  if (!superchip.ok()) return superchip.status();
  const size_t trainer_cores =
      config.has_trainer_cores() ? config.trainer_cores() : topology::DefaultTrainerCores(*superchip);
  absl::StatusOr<topology::CoreShares> shares = topology::ShareCores(*superchip, trainer_cores);
  if (!shares.ok()) return shares.status();
  seat.superchip = config.superchip();
  seat.shares = *std::move(shares);
  seat.binding.node = superchip->memory_node;
  return seat;
}

uint64_t SeatMemoryBytes(const v1::DaemonConfig& config) {
  const uint64_t limit_bytes = memory::MemoryLimitBytes();
  if (!config.has_superchip()) return limit_bytes;
  const absl::StatusOr<topology::Topology> topology = topology::Discover();
  if (!topology.ok()) return limit_bytes;
  const absl::StatusOr<topology::Superchip> superchip = topology::FindSuperchip(*topology, config.superchip());
  return superchip.ok() ? std::min(limit_bytes, superchip->memory_bytes) : limit_bytes;
}

}  // namespace superoffload::host
