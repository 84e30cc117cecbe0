#include "server/host/service_manager.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/base/check.h"
#include "server/host/keeper_protocol.h"
#include "server/host/systemd_unit.h"

namespace superoffload::host {

namespace {

// A descriptor that a keeper has passed; invalid where none has started the daemon.
memory::FileDescriptor Passed(const char* variable) {
  const char* const number = std::getenv(variable);
  int fd = -1;
  if (number == nullptr || !absl::SimpleAtoi(number, &fd) || ::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) return {};
  ::unsetenv(variable);
  return memory::FileDescriptor(fd);
}

// The names that the keeper's memory has, in the order of its descriptors.
std::vector<std::string> ReadNames(const memory::FileDescriptor& file) {
  std::string text;
  struct stat there{};
  if (::fstat(file.get(), &there) == 0) text.resize(static_cast<size_t>(there.st_size));
  SUPEROFFLOAD_CHECK(::pread(file.get(), text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()),
                     "the keeper's names cannot be read: ", std::strerror(errno));
  return absl::StrSplit(text, ':', absl::SkipEmpty());
}

}  // namespace

ServiceManager::ServiceManager()
    : socket_(std::getenv("NOTIFY_SOCKET") == nullptr ? "" : std::getenv("NOTIFY_SOCKET")),
      present_(std::getenv(kKeeperSocketVariable) != nullptr || !socket_.empty()),
      keeper_socket_(Passed(kKeeperSocketVariable)) {}

bool ServiceManager::RestartsUs() const { return socket_ == "/run/systemd/notify" && UnitsJobType() == "restart"; }

Inheritance ServiceManager::TakeInheritance() {
  Inheritance inheritance;
  char** names = nullptr;
  const int count = ::sd_listen_fds_with_names(/*unset_environment=*/1, &names);
  const memory::FileDescriptor keepers_names = Passed(kKeptNamesVariable);
  const std::vector<std::string> of_keeper =
      keepers_names.valid() ? ReadNames(keepers_names) : std::vector<std::string>();
  SUPEROFFLOAD_CHECK(!keepers_names.valid() || of_keeper.size() == static_cast<size_t>(std::max(count, 0)),
                     "the keeper has passed ", count, " descriptors and ", of_keeper.size(), " names");
  for (int i = 0; i < count; ++i) {
    const int fd = SD_LISTEN_FDS_START + i;
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    if (::sd_is_socket(fd, AF_UNIX, SOCK_STREAM, /*listening=*/1) > 0) {
      inheritance.control_socket = memory::FileDescriptor(fd);
    } else if (::sd_is_socket(fd, AF_UNIX, SOCK_SEQPACKET, /*listening=*/1) > 0) {
      inheritance.descriptor_socket = memory::FileDescriptor(fd);
    } else {
      inheritance.kept[keepers_names.valid() ? of_keeper[static_cast<size_t>(i)] : names[i]].emplace_back(fd);
    }
    std::free(names[i]);
  }
  std::free(names);
  if (const auto succession = inheritance.kept.extract(kSuccessionName); !succession.empty()) {
    inheritance.succession = std::move(succession.mapped().front());
  }
  std::map<std::string, std::vector<int>> kept;
  std::map<std::string, size_t> counts;
  for (const auto& [name, fds] : inheritance.kept) {
    for (const memory::FileDescriptor& fd : fds) kept[name].push_back(fd.get());
    counts[name] = fds.size();
  }
  if (keeper_socket_.valid()) {
    keeper_ = std::make_unique<KeeperLink>(std::move(keeper_socket_), std::move(kept));
  } else if (!socket_.empty()) {
    systemd_ = std::make_unique<SystemdStore>(std::move(counts), UnitsDescriptorStoreMax());
  }
  return inheritance;
}

void ServiceManager::Ready(memory::FileDescriptor keepers_listener) {
  if (keeper_ != nullptr) return keeper_->Ready(std::move(keepers_listener));
  ::sd_notify(0, "READY=1");
}

void ServiceManager::ExtendTimeout(absl::Duration time) {
  ::sd_notify(0, absl::StrCat("EXTEND_TIMEOUT_USEC=", absl::ToInt64Microseconds(time)).c_str());
}

void ServiceManager::Stopping() {
  if (keeper_ != nullptr) return keeper_->Stop();
  ::sd_notify(0, "STOPPING=1");
}

void ServiceManager::Stopped() {
  if (keeper_ != nullptr) keeper_->Stopped();
}

absl::Status ServiceManager::KeepSuccession(int fd) {
  Drop(kSuccessionName);  // it may be that of another directory
  return Keep(kSuccessionName, {fd});
}

absl::Status ServiceManager::Keep(const std::string& name, const std::vector<int>& fds) {
  if (systemd_ != nullptr) return systemd_->Keep(name, fds);
  if (keeper_ != nullptr) keeper_->Keep(name, fds);
  return absl::OkStatus();
}

void ServiceManager::Drop(const std::string& name) {
  if (systemd_ != nullptr) return systemd_->Drop(name);
  if (keeper_ != nullptr) keeper_->Drop(name);
}

}  // namespace superoffload::host
