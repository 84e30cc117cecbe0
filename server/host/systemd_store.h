// systemd's store of descriptors. What it cannot keep it drops without a word, or cannot start the daemon with; so what
// it has is counted here, and more is refused.
#ifndef SUPEROFFLOAD_SERVER_HOST_SYSTEMD_STORE_H_
#define SUPEROFFLOAD_SERVER_HOST_SYSTEMD_STORE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace superoffload::host {

// Thread-safe.
class SystemdStore {
 public:
  // `kept`: how many descriptors of which names it has. `most`: FileDescriptorStoreMax=, where that is known.
  SystemdStore(std::map<std::string, size_t> kept, std::optional<uint32_t> most);

  // RESOURCE_EXHAUSTED: it could not keep them, or not pass them on.
  absl::Status Keep(const std::string& name, const std::vector<int>& fds);
  void Drop(const std::string& name);

 private:
  size_t Optimizers() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::optional<uint32_t> most_;
  absl::Mutex mu_;
  std::map<std::string, size_t> kept_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_SYSTEMD_STORE_H_
