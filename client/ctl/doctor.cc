#include "client/ctl/doctor.h"

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/ctl/service_files.h"
#include "superoffload/client.hpp"
#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::ctl {
namespace {

namespace fs = std::filesystem;

constexpr char kUnit[] = "superoffloadd@.service";

class Machine {
 public:
  explicit Machine(std::string root) : root_(std::move(root)) {}

  // Without white space at the ends; empty when it cannot be read.
  std::string Read(const std::string& path) const {
    std::ifstream file(root_ + path);
    std::ostringstream text;
    text << file.rdbuf();
    return std::string(absl::StripAsciiWhitespace(text.str()));
  }
  bool Exists(const std::string& path) const {
    std::error_code error;
    return fs::exists(root_ + path, error);
  }
  std::vector<std::string> List(const std::string& path) const {
    std::vector<std::string> names;
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(root_ + path, error)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }
  // The number after a key of /proc/meminfo.
  uint64_t Meminfo(const std::string& key) const {
    std::istringstream text(Read("/proc/meminfo"));
    std::string word;
    for (uint64_t value; text >> word >> value; text.ignore(64, '\n')) {
      if (word == key + ":") return value;
    }
    return 0;
  }

 private:
  const std::string root_;
};

Finding Ok(std::string check, std::string what) { return {std::move(check), Severity::kOk, std::move(what), ""}; }

bool InstalledByPackage(const Machine& machine) {
  return machine.Exists(absl::StrCat("/usr/lib/systemd/system/", kUnit)) ||
         machine.Exists(absl::StrCat("/lib/systemd/system/", kUnit));
}

bool SystemdRuns(const Machine& machine) { return machine.Exists("/run/systemd/system"); }

std::string HowToStart(const Machine& machine) {
  if (!SystemdRuns(machine)) return "start it: superoffloadd --keeper";
  if (InstalledByPackage(machine) || machine.Exists(absl::StrCat("/etc/systemd/system/", kUnit))) {
    return "start it: systemctl enable --now superoffloadd@0.socket";
  }
  return "start it: superoffloadctl install-service, or superoffloadd --keeper";
}

Finding CheckDaemon(const absl::StatusOr<v1::ServerInfo>& daemon, const Machine& machine) {
  if (!daemon.ok()) {
    return {"daemon", Severity::kWarning, std::string(daemon.status().message()), HowToStart(machine)};
  }
  if (daemon->wire_version() != SUPEROFFLOAD_WIRE_VERSION) {
    return {"daemon", Severity::kFailure,
            absl::StrCat("it is version ", daemon->version(), " with wire version ", daemon->wire_version(), ", this is ",
                         SUPEROFFLOAD_VERSION, " with ", SUPEROFFLOAD_WIRE_VERSION, ": trainers cannot use it"),
            "restart the daemon after an upgrade: systemctl restart 'superoffloadd@*'; optimizers stay"};
  }
  if (daemon->version() != SUPEROFFLOAD_VERSION) {
    return {"daemon", Severity::kNote,
            absl::StrCat("it is version ", daemon->version(), ", this is ", SUPEROFFLOAD_VERSION,
                         "; they work together, as their wire versions are equal"),
            "after an upgrade: systemctl restart 'superoffloadd@*'; optimizers stay"};
  }
  return Ok("daemon", absl::StrCat("version ", daemon->version(), ", ", daemon->kernel_target(), " kernels"));
}

Finding CheckService(const Machine& machine) {
  if (InstalledByPackage(machine)) return Ok("service", "installed by the Debian package");
  const std::string unit = machine.Read(absl::StrCat("/etc/systemd/system/", kUnit));
  if (!unit.empty()) {
    if (machine.Exists(absl::StrCat(kServiceHome, "/superoffload/bin/superoffloadd"))) {
      return Ok("service", absl::StrCat("installed by install-service in ", kServiceHome));
    }
    return {"service", Severity::kFailure, absl::StrCat("its unit is there and its program is not, in ", kServiceHome),
            "superoffloadctl install-service"};
  }
  if (!SystemdRuns(machine)) {
    return {"service", Severity::kNote, "no systemd runs here", "superoffloadd --keeper keeps optimizers as well"};
  }
  return {"service", Severity::kNote, "not installed: private daemons end with their trainers",
          "superoffloadctl install-service, from a wheel, or the Debian package"};
}

Finding CheckDescriptorStore(const absl::StatusOr<v1::ServerInfo>& daemon) {
  if (!daemon.ok()) return {"descriptor store", Severity::kNote, "unknown without a daemon", ""};
  if (!daemon->survives_restarts()) {
    return {"descriptor store", Severity::kWarning, "a crash of the daemon loses its optimizers",
            absl::StrCat("run it as ", kUnit, " or with --keeper")};
  }
  return Ok("descriptor store", "optimizers survive a crash or restart of the daemon");
}

Finding CheckPidNamespace(const absl::StatusOr<v1::ServerInfo>& daemon, bool same) {
  if (!daemon.ok()) return {"PID namespace", Severity::kNote, "unknown without a daemon", ""};
  if (!same) {
    return {"PID namespace", Severity::kWarning,
            "the daemon runs in another one: once restarted, it cannot see which trainers have died meanwhile, and keeps "
            "their optimizers taken for ten minutes",
            "share the host's PID namespace with the container (hostPID, --pid=host)"};
  }
  return Ok("PID namespace", "the daemon is in this one");
}

Finding CheckResctrl(const Machine& machine) {
  const bool known = absl::StrContains(machine.Read("/proc/filesystems"), "resctrl");
  if (absl::StrContains(machine.Read("/proc/cmdline"), "arm64.nompam")) {
    return {"resctrl", Severity::kWarning, "MPAM is turned off on the kernel's command line", "remove arm64.nompam"};
  }
  if (!known) {
    return {"resctrl", Severity::kNote, "the kernel cannot partition cache and memory bandwidth",
            "on Grace use a kernel with CONFIG_ARM64_MPAM, CONFIG_ACPI_MPAM and CONFIG_ARM64_MPAM_RESCTRL_FS"};
  }
  if (!machine.Exists("/sys/fs/resctrl/info")) {
    return {"resctrl", Severity::kWarning, "it is not mounted", "systemctl enable --now sys-fs-resctrl.mount"};
  }
  return Ok("resctrl", "mounted");
}

Finding CheckHugePages(const Machine& machine) {
  const uint64_t total = machine.Meminfo("HugePages_Total"), size = machine.Meminfo("Hugepagesize");
  if (total > 0) return Ok("huge pages", absl::StrCat(total, " of ", size, " KiB in the pool"));
  if (absl::StrContains(machine.Read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"), "[always]") ||
      absl::StrContains(machine.Read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"), "[advise]")) {
    return Ok("huge pages", "transparent ones for shared memory");
  }
  return {"huge pages", Severity::kWarning, "optimizers lie in base pages, which costs some per cent",
          "echo advise >/sys/kernel/mm/transparent_hugepage/shmem_enabled, or reserve a pool: sysctl vm.nr_hugepages"};
}

Finding CheckNumaBalancing(const Machine& machine) {
  if (machine.Read("/proc/sys/kernel/numa_balancing") != "1") return Ok("NUMA balancing", "off");
  return {"NUMA balancing", Severity::kWarning, "the kernel unmaps pages to see who uses them, and moves them",
          "sysctl kernel.numa_balancing=0 (numa_balancing=disable on the command line)"};
}

Finding CheckMemlock() {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return Ok("memlock", "unlimited");
  return {"memlock", Severity::kNote,
          absl::StrCat("limited to ", limit.rlim_cur >> 10, " KiB here: registering memory with CUDA may fail"),
          "LimitMEMLOCK=infinity for services, ulimit -l unlimited for shells"};
}

Finding CheckGovernor(const Machine& machine) {
  size_t others = 0, cpus = 0;
  std::string example;
  for (const std::string& name : machine.List("/sys/devices/system/cpu")) {
    const std::string governor = machine.Read("/sys/devices/system/cpu/" + name + "/cpufreq/scaling_governor");
    if (governor.empty()) continue;
    ++cpus;
    if (governor == "performance") continue;
    ++others;
    example = governor;
  }
  if (others == 0) return Ok("CPU governor", cpus == 0 ? "not the kernel's to choose" : "performance");
  return {"CPU governor", Severity::kWarning, absl::StrCat(others, " of ", cpus, " CPUs have \"", example, "\""),
          "cpupower frequency-set -g performance"};
}

Finding CheckPageSize() {
  const long bytes = ::sysconf(_SC_PAGESIZE);
  utsname name{};
  ::uname(&name);
  if (std::strcmp(name.machine, "aarch64") != 0 || bytes >= 65536) {
    return Ok("page size", absl::StrCat(bytes / 1024, " KiB"));
  }
  return {"page size", Severity::kWarning, absl::StrCat(bytes / 1024, " KiB"),
          "NVIDIA advises a kernel with 64 KiB pages on Grace"};
}

Finding CheckInitOnAlloc(const Machine& machine) {
  if (!absl::StrContains(machine.Read("/proc/cmdline"), "init_on_alloc=1")) return Ok("init_on_alloc", "not forced");
  return {"init_on_alloc", Severity::kWarning, "the kernel zeroes every page twice", "boot with init_on_alloc=0"};
}

Finding CheckDriver(const Machine& machine) {
  const std::string version = machine.Read("/proc/driver/nvidia/version");
  if (version.empty()) return {"NVIDIA driver", Severity::kNote, "none; trainers on the CPU are served", ""};
  return Ok("NVIDIA driver", version.substr(0, version.find('\n')));
}

const char* SeverityName(Severity severity) {
  switch (severity) {
    case Severity::kOk:
      return "ok";
    case Severity::kNote:
      return "note";
    case Severity::kWarning:
      return "warning";
    case Severity::kFailure:
      return "failure";
  }
  return "unknown";
}

// The kernel tells the daemon's process id only to those who can see it.
bool SharesPidNamespace(const std::string& endpoint) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = endpoint.substr(absl::StartsWith(endpoint, "unix:") ? 5 : 0);
  if (path.size() >= sizeof(address.sun_path)) return true;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ucred peer{};
  socklen_t size = sizeof(peer);
  const bool told = ::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
                    ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
  ::close(fd);
  return !told || peer.pid != 0;
}

}  // namespace

std::vector<Finding> Examine(const std::string& root, const absl::StatusOr<v1::ServerInfo>& daemon,
                             bool same_pid_namespace) {
  const Machine machine(root);
  return {CheckDaemon(daemon, machine),
          CheckService(machine),
          CheckDescriptorStore(daemon),
          CheckPidNamespace(daemon, same_pid_namespace),
          CheckResctrl(machine),
          CheckHugePages(machine),
          CheckNumaBalancing(machine),
          CheckMemlock(),
          CheckGovernor(machine),
          CheckPageSize(),
          CheckInitOnAlloc(machine),
          CheckDriver(machine)};
}

std::string FindingsText(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& finding : findings) {
    absl::StrAppend(&text, SeverityName(finding.severity), ": ", finding.check, ": ", finding.what, "\n");
    if (!finding.remedy.empty()) absl::StrAppend(&text, "    ", finding.remedy, "\n");
  }
  return text;
}

std::string FindingsJson(const std::vector<Finding>& findings) {
  google::protobuf::ListValue list;
  for (const Finding& finding : findings) {
    auto& fields = *list.add_values()->mutable_struct_value()->mutable_fields();
    fields["check"].set_string_value(finding.check);
    fields["severity"].set_string_value(SeverityName(finding.severity));
    fields["what"].set_string_value(finding.what);
    fields["remedy"].set_string_value(finding.remedy);
  }
  std::string text;
  (void)google::protobuf::util::MessageToJsonString(list, &text);
  return text + "\n";
}

int RunDoctor(const std::string& endpoint, const std::string& root, bool json) {
  absl::StatusOr<v1::ServerInfo> info = absl::UnavailableError("");
  bool same_pid_namespace = true;
  if (absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(endpoint); client.ok()) {
    info = (*client)->GetServerInfo();
    same_pid_namespace = SharesPidNamespace((*client)->endpoint());
  } else {
    info = client.status();
  }
  const std::vector<Finding> findings = Examine(root, info, same_pid_namespace);
  const std::string text = json ? FindingsJson(findings) : FindingsText(findings);
  std::fwrite(text.data(), 1, text.size(), stdout);
  for (const Finding& finding : findings) {
    if (finding.severity == Severity::kFailure) return 1;
  }
  return 0;
}

}  // namespace superoffload::ctl
