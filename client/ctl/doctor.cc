// doctor: looks at the machine for what makes a daemon slow, unsafe or impossible.
#include <google/protobuf/struct.pb.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/ctl/commands.h"
#include "client/ctl/output.h"
#include "client/ctl/service_files.h"
#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::ctl {
namespace {

namespace fs = std::filesystem;

constexpr char kUnit[] = "superoffloadd@.service";

struct Machine {
  std::string root;  // its files are below it

  // Without white space at the ends; empty when it cannot be read.
  std::string Read(const std::string& path) const {
    std::ifstream file(root + path);
    std::ostringstream text;
    text << file.rdbuf();
    return std::string(absl::StripAsciiWhitespace(text.str()));
  }
  bool Exists(const std::string& path) const {
    std::error_code error;
    return fs::exists(root + path, error);
  }
  std::vector<std::string> List(const std::string& path) const {
    std::vector<std::string> names;
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(root + path, error)) {
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
};

using Daemon = absl::StatusOr<v1::ServerInfo>;

struct Subject {
  Machine machine;
  Daemon daemon;                   // what it says of itself, or why none answers
  bool same_pid_namespace = true;  // as this process's
};

enum Severity { kOk, kNote, kWarning, kFailure };
constexpr const char* kSeverityNames[] = {"ok", "note", "warning", "failure"};

struct Finding {
  Severity severity;
  std::string what;
  std::string remedy;  // empty when there is nothing to do
};

Finding Ok(std::string what) { return {kOk, std::move(what), ""}; }

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

Finding CheckDaemon(const Subject& subject) {
  if (!subject.daemon.ok()) {
    return {kWarning, std::string(subject.daemon.status().message()), HowToStart(subject.machine)};
  }
  if (subject.daemon->wire_version() != SUPEROFFLOAD_WIRE_VERSION) {
    return {kFailure,
            absl::StrCat("it is version ", subject.daemon->version(), " with wire version ",
                         subject.daemon->wire_version(), ", this is ", SUPEROFFLOAD_VERSION, " with ",
                         SUPEROFFLOAD_WIRE_VERSION, ": trainers cannot use it"),
            "restart the daemon after an upgrade: systemctl restart 'superoffloadd@*'; optimizers stay"};
  }
  if (subject.daemon->version() != SUPEROFFLOAD_VERSION) {
    return {kNote,
            absl::StrCat("it is version ", subject.daemon->version(), ", this is ", SUPEROFFLOAD_VERSION,
                         "; they work together, as their wire versions are equal"),
            "after an upgrade: systemctl restart 'superoffloadd@*'; optimizers stay"};
  }
  return Ok(absl::StrCat("version ", subject.daemon->version(), ", ", subject.daemon->kernel_target(), " kernels"));
}

Finding CheckService(const Subject& subject) {
  if (InstalledByPackage(subject.machine)) return Ok("installed by the Debian package");
  const std::string unit = subject.machine.Read(absl::StrCat("/etc/systemd/system/", kUnit));
  if (!unit.empty()) {
    if (subject.machine.Exists(absl::StrCat(kServiceHome, "/superoffload/bin/superoffloadd"))) {
      return Ok(absl::StrCat("installed by install-service in ", kServiceHome));
    }
    return {kFailure, absl::StrCat("its unit is there and its program is not, in ", kServiceHome),
            "superoffloadctl install-service"};
  }
  if (!SystemdRuns(subject.machine)) {
    return {kNote, "no systemd runs here", "superoffloadd --keeper keeps optimizers as well"};
  }
  return {kNote, "not installed: private daemons end with their trainers",
          "superoffloadctl install-service, from a wheel, or the Debian package"};
}

Finding CheckDescriptorStore(const Subject& subject) {
  if (!subject.daemon.ok()) return {kNote, "unknown without a daemon", ""};
  if (!subject.daemon->survives_restarts()) {
    return {kWarning, "a crash of the daemon loses its optimizers",
            absl::StrCat("run it as ", kUnit, " or with --keeper")};
  }
  return Ok("optimizers survive a crash or restart of the daemon");
}

Finding CheckPidNamespace(const Subject& subject) {
  if (!subject.daemon.ok()) return {kNote, "unknown without a daemon", ""};
  if (!subject.same_pid_namespace) {
    return {
        kWarning,
        "the daemon runs in another one: once restarted, it cannot see which trainers have died meanwhile, and keeps "
        "their optimizers taken for ten minutes",
        "share the host's PID namespace with the container (hostPID, --pid=host)"};
  }
  return Ok("the daemon is in this one");
}

Finding CheckResctrl(const Subject& subject) {
  const bool known = absl::StrContains(subject.machine.Read("/proc/filesystems"), "resctrl");
  if (absl::StrContains(subject.machine.Read("/proc/cmdline"), "arm64.nompam")) {
    return {kWarning, "MPAM is turned off on the kernel's command line", "remove arm64.nompam"};
  }
  if (!known) {
    return {kNote, "the kernel cannot partition cache and memory bandwidth",
            "on Grace use a kernel with CONFIG_ARM64_MPAM, CONFIG_ACPI_MPAM and CONFIG_ARM64_MPAM_RESCTRL_FS"};
  }
  if (!subject.machine.Exists("/sys/fs/resctrl/info")) {
    return {kWarning, "it is not mounted", "systemctl enable --now sys-fs-resctrl.mount"};
  }
  return Ok("mounted");
}

Finding CheckHugePages(const Subject& subject) {
  const uint64_t total = subject.machine.Meminfo("HugePages_Total"), size = subject.machine.Meminfo("Hugepagesize");
  if (total > 0) return Ok(absl::StrCat(total, " of ", size, " KiB in the pool"));
  const std::string shared = subject.machine.Read("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  if (absl::StrContains(shared, "[always]") || absl::StrContains(shared, "[advise]")) {
    return Ok("transparent ones for shared memory");
  }
  return {kWarning, "optimizers lie in base pages, which costs some per cent",
          "echo advise >/sys/kernel/mm/transparent_hugepage/shmem_enabled, or reserve a pool: sysctl vm.nr_hugepages"};
}

Finding CheckNumaBalancing(const Subject& subject) {
  if (subject.machine.Read("/proc/sys/kernel/numa_balancing") != "1") return Ok("off");
  return {kWarning, "the kernel unmaps pages to see who uses them, and moves them",
          "sysctl kernel.numa_balancing=0 (numa_balancing=disable on the command line)"};
}

Finding CheckMemlock(const Subject&) {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return Ok("unlimited");
  return {kNote, absl::StrCat("limited to ", limit.rlim_cur >> 10, " KiB here: registering memory with CUDA may fail"),
          "LimitMEMLOCK=infinity for services, ulimit -l unlimited for shells"};
}

Finding CheckGovernor(const Subject& subject) {
  size_t others = 0, cpus = 0;
  std::string example;
  for (const std::string& name : subject.machine.List("/sys/devices/system/cpu")) {
    const std::string governor = subject.machine.Read("/sys/devices/system/cpu/" + name + "/cpufreq/scaling_governor");
    if (governor.empty()) continue;
    ++cpus;
    if (governor == "performance") continue;
    ++others;
    example = governor;
  }
  if (others == 0) return Ok(cpus == 0 ? "not the kernel's to choose" : "performance");
  return {kWarning, absl::StrCat(others, " of ", cpus, " CPUs have \"", example, "\""),
          "cpupower frequency-set -g performance"};
}

Finding CheckPageSize(const Subject&) {
  const long bytes = ::sysconf(_SC_PAGESIZE);
  utsname name{};
  ::uname(&name);
  if (std::strcmp(name.machine, "aarch64") != 0 || bytes >= 65536) {
    return Ok(absl::StrCat(bytes / 1024, " KiB"));
  }
  return {kWarning, absl::StrCat(bytes / 1024, " KiB"), "NVIDIA advises a kernel with 64 KiB pages on Grace"};
}

Finding CheckInitOnAlloc(const Subject& subject) {
  if (!absl::StrContains(subject.machine.Read("/proc/cmdline"), "init_on_alloc=1")) return Ok("not forced");
  return {kWarning, "the kernel zeroes every page twice", "boot with init_on_alloc=0"};
}

Finding CheckDriver(const Subject& subject) {
  const std::string version = subject.machine.Read("/proc/driver/nvidia/version");
  if (version.empty()) return {kNote, "none; trainers on the CPU are served", ""};
  return Ok(version.substr(0, version.find('\n')));
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

Subject SubjectAt(const Arguments& arguments) {
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(arguments.endpoint);
  if (!client.ok()) return {{arguments.root}, client.status()};
  return {{arguments.root}, (*client)->GetServerInfo(), SharesPidNamespace((*client)->endpoint())};
}

struct Check {
  const char* name;
  Finding (*run)(const Subject& subject);
};

constexpr Check kChecks[] = {{"daemon", CheckDaemon},
                             {"service", CheckService},
                             {"descriptor store", CheckDescriptorStore},
                             {"PID namespace", CheckPidNamespace},
                             {"resctrl", CheckResctrl},
                             {"huge pages", CheckHugePages},
                             {"NUMA balancing", CheckNumaBalancing},
                             {"memlock", CheckMemlock},
                             {"CPU governor", CheckGovernor},
                             {"page size", CheckPageSize},
                             {"init_on_alloc", CheckInitOnAlloc},
                             {"NVIDIA driver", CheckDriver}};

}  // namespace

// One JSON array of {check, severity, what, remedy}, or text. Fails when a check does.
int Doctor(const Arguments& arguments) {
  const Subject subject = SubjectAt(arguments);
  google::protobuf::ListValue list;
  std::string text;
  bool failed = false;
  for (const Check& check : kChecks) {
    const Finding finding = check.run(subject);
    const char* severity = kSeverityNames[finding.severity];
    failed = failed || finding.severity == kFailure;
    auto& fields = *list.add_values()->mutable_struct_value()->mutable_fields();
    fields["check"].set_string_value(check.name);
    fields["severity"].set_string_value(severity);
    fields["what"].set_string_value(finding.what);
    fields["remedy"].set_string_value(finding.remedy);
    absl::StrAppend(&text, severity, ": ", check.name, ": ", finding.what, "\n");
    if (!finding.remedy.empty()) absl::StrAppend(&text, "    ", finding.remedy, "\n");
  }
  Print(arguments.json ? JsonOf(list) : text);
  return failed ? 1 : 0;
}

}  // namespace superoffload::ctl
