#include "server/host/service_manager.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <systemd/sd-bus.h>
#include <systemd/sd-daemon.h>
#include <systemd/sd-login.h>

#include <cstdint>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/host/keeper_protocol.h"

namespace superoffload::host {

namespace {

constexpr char kSystemd[] = "org.freedesktop.systemd1";

// The type of the job that systemd has for this process's unit ("stop", "restart"), or "" when there is none or the bus
// does not tell.
std::string JobType() {
  char *unit = nullptr, *path = nullptr, *type = nullptr;
  const char* job = nullptr;
  uint32_t job_id = 0;
  sd_bus* bus = nullptr;
  sd_bus_message* reply = nullptr;
  const bool found =
      ::sd_pid_get_unit(0, &unit) >= 0 && ::sd_bus_path_encode("/org/freedesktop/systemd1/unit", unit, &path) >= 0 &&
      ::sd_bus_open_system(&bus) >= 0 &&
      ::sd_bus_get_property(bus, kSystemd, path, "org.freedesktop.systemd1.Unit", "Job", nullptr, &reply, "(uo)") >= 0 &&
      ::sd_bus_message_read(reply, "(uo)", &job_id, &job) >= 0 && job_id != 0 &&
      ::sd_bus_get_property_string(bus, kSystemd, job, "org.freedesktop.systemd1.Job", "JobType", nullptr, &type) >= 0;
  const std::string result = found ? type : "";
  ::sd_bus_message_unref(reply);
  ::sd_bus_flush_close_unref(bus);
  for (char* text : {unit, path, type}) std::free(text);
  return result;
}

// Invalid where no keeper has started the daemon.
memory::FileDescriptor KeeperSocket() {
  const char* const number = std::getenv(kKeeperSocketVariable);
  int fd = -1;
  if (number == nullptr || !absl::SimpleAtoi(number, &fd) || ::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) return {};
  ::unsetenv(kKeeperSocketVariable);
  return memory::FileDescriptor(fd);
}

}  // namespace

ServiceManager::ServiceManager()
    : socket_(std::getenv("NOTIFY_SOCKET") == nullptr ? "" : std::getenv("NOTIFY_SOCKET")),
      present_(std::getenv(kKeeperSocketVariable) != nullptr || !socket_.empty()),
      keeper_socket_(KeeperSocket()) {}

bool ServiceManager::RestartsUs() const { return socket_ == "/run/systemd/notify" && JobType() == "restart"; }

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
  if (keeper_socket_.valid()) {
    std::map<std::string, std::vector<int>> kept;
    for (const auto& [name, fds] : inheritance.kept) {
      for (const memory::FileDescriptor& fd : fds) kept[name].push_back(fd.get());
    }
    keeper_ = std::make_unique<KeeperLink>(std::move(keeper_socket_), std::move(kept));
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

void ServiceManager::Keep(const std::string& name, const std::vector<int>& fds) {
  if (keeper_ != nullptr) return keeper_->Keep(name, fds);
  // One message, so that the store has all of an optimizer's memory or none. memfds never hang up: no polling.
  const std::string message = absl::StrCat("FDSTORE=1\nFDNAME=", name, "\nFDPOLL=0");
  ::sd_pid_notify_with_fds(0, 0, message.c_str(), fds.data(), static_cast<unsigned>(fds.size()));
}

void ServiceManager::Drop(const std::string& name) {
  if (keeper_ != nullptr) return keeper_->Drop(name);
  ::sd_notify(0, absl::StrCat("FDSTOREREMOVE=1\nFDNAME=", name).c_str());
}

}  // namespace superoffload::host
