#include "server/service_manager.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <systemd/sd-daemon.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace superoffload {

ServiceManager::ServiceManager() : present_(std::getenv("NOTIFY_SOCKET") != nullptr) {}

Inheritance ServiceManager::TakeInheritance() {
  Inheritance inheritance;
  char** names = nullptr;
  const int count = ::sd_listen_fds_with_names(/*unset_environment=*/1, &names);
  for (int i = 0; i < count; ++i) {
    const int fd = SD_LISTEN_FDS_START + i;
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    if (::sd_is_socket(fd, AF_UNIX, SOCK_STREAM, /*listening=*/1) > 0) {
      inheritance.control_socket = memory::FileDescriptor(fd);
    } else if (::sd_is_socket(fd, AF_UNIX, SOCK_SEQPACKET, /*listening=*/1) > 0) {
      inheritance.descriptor_socket = memory::FileDescriptor(fd);
    } else {
      inheritance.kept[names[i]].emplace_back(fd);
    }
    std::free(names[i]);
  }
  std::free(names);
  return inheritance;
}

void ServiceManager::Ready() { ::sd_notify(0, "READY=1"); }

void ServiceManager::ExtendTimeout(absl::Duration time) {
  ::sd_notify(0, absl::StrCat("EXTEND_TIMEOUT_USEC=", absl::ToInt64Microseconds(time)).c_str());
}

void ServiceManager::Stopping() { ::sd_notify(0, "STOPPING=1"); }

void ServiceManager::Keep(const std::string& name, const std::vector<int>& fds) {
  // One message, so that the store has all of an optimizer's memory or none. memfds never hang up: no polling.
  const std::string message = absl::StrCat("FDSTORE=1\nFDNAME=", name, "\nFDPOLL=0");
  ::sd_pid_notify_with_fds(0, 0, message.c_str(), fds.data(), static_cast<unsigned>(fds.size()));
}

void ServiceManager::Drop(const std::string& name) {
  ::sd_notify(0, absl::StrCat("FDSTOREREMOVE=1\nFDNAME=", name).c_str());
}

}  // namespace superoffload
