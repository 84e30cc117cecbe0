// The memory of one optimizer: all that it is. Each part is a memfd of its own, whose name tells what it is, so that a
// restarted daemon recognises what its predecessor left in the descriptor store.
#ifndef SUPEROFFLOAD_SERVER_OPTIMIZER_HOSTED_MEMORY_H_
#define SUPEROFFLOAD_SERVER_OPTIMIZER_HOSTED_MEMORY_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/chunk_view.h"
#include "server/engine/layout.h"
#include "server/engine/spec.h"
#include "server/memory/memory_budget.h"
#include "server/memory/shared_memory.h"

namespace superoffload::optimizer {

struct HostedMemory {
  memory::SharedMemory parameters;
  memory::SharedMemory gradients;
  memory::SharedMemory state;
  memory::SharedMemory record;
  memory::SharedMemory description;  // an opaque string, in two copies of which the newer whole one counts

  // What an optimizer needs; what the daemon keeps beside the layout's memory is estimated.
  static memory::MemoryUse Use(const engine::Layout& layout, const engine::OptimizerSpec& spec);

  static uint64_t ParametersBytes(const engine::Layout& layout);

  // RESOURCE_EXHAUSTED.
  static absl::StatusOr<HostedMemory> Create(const engine::Layout& layout, const std::string& description,
                                             const memory::Binding& binding);

  // Recognises the parts by their names. DATA_LOSS: one is missing or damaged. After an error `fds` are still the
  // caller's.
  static absl::StatusOr<HostedMemory> Open(std::vector<memory::FileDescriptor>& fds);

  // Gives the descriptors away.
  std::vector<memory::FileDescriptor> Release();

  // DATA_LOSS: damaged.
  absl::StatusOr<std::string> Description() const;

  // Replaces the description; killed meanwhile, the old one stays. RESOURCE_EXHAUSTED: longer than what Create has left
  // room for.
  absl::Status Describe(const std::string& text) const;

  // Whether the parts are as large as the layout needs. DATA_LOSS.
  absl::Status CheckSizes(const engine::Layout& layout) const;

  // The same, and whether the record is one of the layout. DATA_LOSS, FAILED_PRECONDITION: see Record::Check.
  absl::Status Check(const engine::Layout& layout) const;

  // By NUMA node.
  std::map<int, uint64_t> BytesByNode() const;

  std::vector<int> fds() const { return {parameters.fd(), gradients.fd(), state.fd(), record.fd(), description.fd()}; }
  // Where parameters are published: Layout::in_place.
  const memory::SharedMemory& published(const engine::Layout& layout) const {
    return layout.in_place ? gradients : parameters;
  }
  engine::OptimizerMemory view(const engine::Layout& layout) const {
    return {published(layout).data(), gradients.data(), state.data(), record.data()};
  }
};

}  // namespace superoffload::optimizer

#endif  // SUPEROFFLOAD_SERVER_OPTIMIZER_HOSTED_MEMORY_H_
