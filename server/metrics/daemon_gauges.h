// What the daemon holds at the moment, in numbers that are read at every scrape.
#ifndef SUPEROFFLOAD_SERVER_METRICS_DAEMON_GAUGES_H_
#define SUPEROFFLOAD_SERVER_METRICS_DAEMON_GAUGES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "server/memory/memory_budget.h"
#include "server/optimizer/gpu_use.h"
#include "server/optimizer/optimizer_observer.h"
#include "server/partition/partition.h"

namespace superoffload::metrics {

struct DaemonGauges {
  size_t optimizers = 0;
  size_t attachments = 0;
  memory::MemoryUse memory;
  uint64_t elements = 0;  // of parameters
  std::map<int, uint64_t> bytes_by_node;
  std::vector<partition::Reading> partition;
  std::vector<std::pair<optimizer::OptimizerId, optimizer::GpuUse>> gpus;
};

}  // namespace superoffload::metrics

#endif  // SUPEROFFLOAD_SERVER_METRICS_DAEMON_GAUGES_H_
