// The service manager that started the daemon, systemd or the keeper (keeper.h): it learns when the daemon serves, and
// it keeps descriptors that a restarted or upgraded daemon gets back. Without one nothing is kept.
#ifndef SUPEROFFLOAD_SERVER_HOST_SERVICE_MANAGER_H_
#define SUPEROFFLOAD_SERVER_HOST_SERVICE_MANAGER_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/host/keeper_link.h"
#include "server/host/systemd_store.h"
#include "server/memory/shared_memory.h"
#include "server/optimizer/descriptor_store.h"

namespace superoffload::host {

// What the service manager passed at the start.
struct Inheritance {
  // Descriptors that a predecessor had kept, by name.
  std::map<std::string, std::vector<memory::FileDescriptor>> kept;
  memory::FileDescriptor succession;  // see RuntimeDirectory
  // Listening sockets, where it listens (socket activation); else invalid.
  memory::FileDescriptor control_socket;     // SOCK_STREAM
  memory::FileDescriptor descriptor_socket;  // SOCK_SEQPACKET
};

class ServiceManager final : public optimizer::DescriptorStore {
 public:
  ServiceManager();

  bool present() const { return present_; }

  // Only the first call returns anything. Descriptors that were kept stay open until Drop or Stopping.
  Inheritance TakeInheritance();

  // Whether it is a keeper.
  bool has_keeper() const { return keeper_ != nullptr; }

  // `keepers_listener`: for a keeper, see KeeperLink.
  void Ready(memory::FileDescriptor keepers_listener);

  // See RuntimeDirectory::succession, which must stay open. RESOURCE_EXHAUSTED: as of Keep.
  absl::Status KeepSuccession(int fd);

  // The start or the stop takes longer: so much more time from now.
  void ExtendTimeout(absl::Duration time);

  // The daemon stops on purpose: nothing is kept from here on.
  void Stopping();

  // Whether the memory stays over the stop that is under way: systemd keeps it when it restarts the service.
  bool RestartsUs() const;

  // It has stopped, and the process exits next.
  void Stopped();

  absl::Status Keep(const std::string& name, const std::vector<int>& fds) override;
  void Drop(const std::string& name) override;

 private:
  const std::string socket_;
  const bool present_;
  memory::FileDescriptor keeper_socket_;   // until TakeInheritance
  std::unique_ptr<KeeperLink> keeper_;     // where there is one
  std::unique_ptr<SystemdStore> systemd_;  // likewise
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_SERVICE_MANAGER_H_
