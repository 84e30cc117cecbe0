// The service manager that started the daemon, systemd or the keeper (keeper.h): it is told when the daemon serves, and
// it keeps descriptors that a restarted or upgraded daemon gets back. Without one nothing is kept and nothing is told.
#ifndef SUPEROFFLOAD_SERVER_SERVICE_MANAGER_H_
#define SUPEROFFLOAD_SERVER_SERVICE_MANAGER_H_

#include <map>
#include <string>
#include <vector>

#include "server/memory/shared_memory.h"
#include "server/optimizer/descriptor_store.h"

namespace superoffload {

class ServiceManager final : public optimizer::DescriptorStore {
 public:
  // What a predecessor had kept, by name. Only the first call returns anything.
  std::map<std::string, std::vector<memory::FileDescriptor>> TakeDescriptors();

  void Ready();
  void Stopping();

  void Keep(const std::string& name, const std::vector<int>& fds) override;
  void Drop(const std::string& name) override;
};

}  // namespace superoffload

#endif  // SUPEROFFLOAD_SERVER_SERVICE_MANAGER_H_
