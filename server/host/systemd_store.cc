#include "server/host/systemd_store.h"

#include <systemd/sd-daemon.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/host/keeper_protocol.h"

namespace superoffload::host {
namespace {

// systemd passes the names on in one variable, with the sockets' names; execve(2) takes 32 pages of one.
size_t MostNameBytes() { return 31 * static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }

}  // namespace

SystemdStore::SystemdStore(std::map<std::string, size_t> kept, std::optional<uint32_t> most)
    : most_(most), kept_(std::move(kept)) {}

size_t SystemdStore::Optimizers() const { return kept_.size() - kept_.count(kSuccessionName); }

absl::Status SystemdStore::Keep(const std::string& name, const std::vector<int>& fds) {
  absl::MutexLock lock(&mu_);
  size_t count = fds.size(), name_bytes = fds.size() * (name.size() + 1);
  for (const auto& [other, others] : kept_) {
    count += others;
    name_bytes += others * (other.size() + 1);
  }
  if (most_ && count > *most_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("systemd keeps the memory of ", Optimizers(),
                     " optimizers over a restart of the daemon, and not of one more: delete "
                     "some, or raise FileDescriptorStoreMax=, which is ",
                     *most_, ", to ", fds.size(), " for each and one (systemctl edit, then a restart)"));
  }
  if (name_bytes > MostNameBytes()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("systemd could not start the daemon again with the names of more than these ", Optimizers(),
                     " optimizers: delete some, or give them shorter names"));
  }
  // One message, so that the store has all of an optimizer's memory or none. memfds never hang up: no polling.
  const std::string message = absl::StrCat("FDSTORE=1\nFDNAME=", name, "\nFDPOLL=0");
  ::sd_pid_notify_with_fds(0, 0, message.c_str(), fds.data(), static_cast<unsigned>(fds.size()));
  kept_[name] = fds.size();
  return absl::OkStatus();
}

void SystemdStore::Drop(const std::string& name) {
  absl::MutexLock lock(&mu_);
  kept_.erase(name);
  ::sd_notify(0, absl::StrCat("FDSTOREREMOVE=1\nFDNAME=", name).c_str());
}

}  // namespace superoffload::host
