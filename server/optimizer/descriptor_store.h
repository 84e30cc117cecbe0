// Keeps descriptors of memory beyond the life of the daemon.
#ifndef SUPEROFFLOAD_SERVER_OPTIMIZER_DESCRIPTOR_STORE_H_
#define SUPEROFFLOAD_SERVER_OPTIMIZER_DESCRIPTOR_STORE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace superoffload::optimizer {

// Thread-safe. Names are unique; the descriptors of a name are kept and dropped together, and stay open until they are
// dropped.
class DescriptorStore {
 public:
  virtual ~DescriptorStore() = default;
  // RESOURCE_EXHAUSTED: they would not outlive the daemon, or keep another one from starting; nothing is kept.
  virtual absl::Status Keep(const std::string& name, const std::vector<int>& fds) = 0;
  virtual void Drop(const std::string& name) = 0;
};

}  // namespace superoffload::optimizer

#endif  // SUPEROFFLOAD_SERVER_OPTIMIZER_DESCRIPTOR_STORE_H_
