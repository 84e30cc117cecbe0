#include "server/topology/topology.h"

#include <hwloc.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace superoffload::topology {
namespace {

constexpr unsigned kNvidia = 0x10de;
constexpr unsigned kDisplayClass = 0x03;

struct Destroy {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
using Machine = std::unique_ptr<hwloc_topology, Destroy>;

struct FreeBitmap {
  void operator()(hwloc_bitmap_t bitmap) const { hwloc_bitmap_free(bitmap); }
};

// Those with CPUs have the lower numbers.
std::vector<hwloc_obj_t> Nodes(hwloc_topology_t machine) {
  std::vector<hwloc_obj_t> nodes;
  for (hwloc_obj_t node = nullptr; (node = hwloc_get_next_obj_by_type(machine, HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
    nodes.push_back(node);
  }
  std::sort(nodes.begin(), nodes.end(), [](hwloc_obj_t a, hwloc_obj_t b) { return a->os_index < b->os_index; });
  return nodes;
}

bool IsGpuMemory(hwloc_obj_t node) {
  return node->subtype != nullptr && std::string_view(node->subtype) == "GPUMemory";
}

std::vector<int> Cpus(hwloc_const_cpuset_t cpuset) {
  std::vector<int> cpus;
  for (int cpu = hwloc_bitmap_first(cpuset); cpu >= 0; cpu = hwloc_bitmap_next(cpuset, cpu)) cpus.push_back(cpu);
  return cpus;
}

std::vector<std::vector<int>> Cores(hwloc_topology_t machine, hwloc_const_cpuset_t cpuset) {
  std::vector<std::vector<int>> cores;
  for (hwloc_obj_t core = nullptr;
       (core = hwloc_get_next_obj_inside_cpuset_by_type(machine, cpuset, HWLOC_OBJ_CORE, core)) != nullptr;) {
    cores.push_back(Cpus(core->cpuset));
  }
  if (!cores.empty()) return cores;
  for (const int cpu : Cpus(cpuset)) cores.push_back({cpu});  // a machine that does not tell its cores
  return cores;
}

void AddGpus(hwloc_topology_t machine, Topology& topology) {
  for (hwloc_obj_t device = nullptr; (device = hwloc_get_next_pcidev(machine, device)) != nullptr;) {
    const auto& pci = device->attr->pcidev;
    if (pci.vendor_id != kNvidia || pci.class_id >> 8 != kDisplayClass) continue;
    const hwloc_obj_t place = hwloc_get_non_io_ancestor_obj(machine, device);
    for (Superchip& superchip : topology.superchips) {
      if (!hwloc_bitmap_isset(place->cpuset, superchip.cores.front().front())) continue;
      superchip.gpus.push_back(absl::StrFormat("%04x:%02x:%02x.%x", pci.domain, pci.bus, pci.dev, pci.func));
      break;  // a device of the whole machine goes to the first
    }
  }
}

}  // namespace

absl::StatusOr<Topology> Discover() {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return absl::UnavailableError("hwloc cannot describe this machine");
  const Machine machine(raw);
  hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  if (hwloc_topology_load(raw) != 0) return absl::UnavailableError("hwloc cannot describe this machine");
  Topology topology;
  topology.page_bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::unique_ptr<hwloc_bitmap_s, FreeBitmap> taken(hwloc_bitmap_alloc());
  for (hwloc_obj_t node : Nodes(raw)) {
    // A node without CPUs has none or, where the kernel tells distances, those of the nodes nearest to it.
    if (hwloc_bitmap_iszero(node->cpuset) || hwloc_bitmap_intersects(node->cpuset, taken.get()) || IsGpuMemory(node)) {
      topology.nodes_without_cpus.push_back(node->os_index);
      continue;
    }
    hwloc_bitmap_or(taken.get(), taken.get(), node->cpuset);
    topology.superchips.push_back({.memory_node = node->os_index,
                                   .memory_bytes = node->attr->numanode.local_memory,
                                   .cores = Cores(raw, node->cpuset),
                                   .gpus = {}});
  }
  if (topology.superchips.empty()) return absl::UnavailableError("hwloc finds no memory node with cores");
  AddGpus(raw, topology);
  return topology;
}

size_t DefaultTrainerCores(const Superchip& superchip) { return std::max<size_t>(1, superchip.cores.size() / 10); }

uint32_t DefaultWorkers(uint32_t cores) { return cores - cores / 10; }

absl::StatusOr<CoreShares> ShareCores(const Superchip& superchip, size_t trainer_cores) {
  const size_t cores = superchip.cores.size();
  if (cores == 1) return CoreShares{superchip.cores.front(), {superchip.cores.front().front()}};
  if (trainer_cores >= cores) {
    return absl::InvalidArgumentError(absl::StrCat("trainer_cores is ", trainer_cores, " but node ",
                                                   superchip.memory_node, " has ", cores,
                                                   " cores; leave at least one for the optimizer"));
  }
  CoreShares shares;
  for (size_t i = 0; i < cores; ++i) {
    const std::vector<int>& threads = superchip.cores[i];
    if (i < trainer_cores) {
      shares.trainer.insert(shares.trainer.end(), threads.begin(), threads.end());
    } else {
      shares.optimizer.push_back(threads.front());
    }
  }
  return shares;
}

absl::StatusOr<Superchip> FindSuperchip(const Topology& topology, size_t index) {
  if (index < topology.superchips.size()) return topology.superchips[index];
  return absl::InvalidArgumentError(absl::StrCat("superchip is ", index, " but this machine has ",
                                                 topology.superchips.size(),
                                                 ", counted from 0; see superoffloadctl topology"));
}

}  // namespace superoffload::topology
