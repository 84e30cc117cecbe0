#include "server/partition/partition.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace superoffload::partition {
namespace {

constexpr const char* kRoles[] = {"trainer", "optimizer"};
constexpr const char* kCounters[] = {"llc_occupancy", "mbm_total_bytes", "mbm_local_bytes"};

// Held from its making to its end.
class LockScope {
 public:
  explicit LockScope(ResctrlFiles& files) : files_(files), error_(files.Lock()) {}
  ~LockScope() {
    if (error_ == 0) files_.Unlock();
  }
  int error() const { return error_; }

 private:
  ResctrlFiles& files_;
  const int error_;
};

uint64_t Ones(unsigned bits) { return bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1; }

}  // namespace

// One line of the root's schemata, "    L3:0=fff;1=fff".
struct Partition::Resource {
  std::string name;
  std::vector<int> domains;
};

std::string Partition::Group(const char* role) const {
  return absl::StrCat("superoffloadd-", place_.memory_node, "-", role);
}

absl::Status Partition::Failed(int error, const std::string& action) const {
  std::string said;
  if (files_->Read("info/last_cmd_status", &said) != 0 || absl::StartsWith(said, "ok")) said.clear();
  absl::StripAsciiWhitespace(&said);
  const std::string message =
      absl::StrCat("resctrl: ", action, ": ", std::strerror(error), said.empty() ? "" : ", ", said);
  if (error == ENOSPC) {
    return absl::ResourceExhaustedError(absl::StrCat(message, "; remove control groups that nobody needs"));
  }
  if (error == EACCES || error == EPERM) {
    return absl::PermissionDeniedError(
        absl::StrCat(message, "; root makes the groups (superoffloadd --prepare_partition)"));
  }
  if (error == ENOENT) {
    return absl::UnavailableError(absl::StrCat(
        message,
        "; mount it (systemctl start sys-fs-resctrl.mount) on a kernel with MPAM or RDT, without arm64.nompam"));
  }
  return absl::ErrnoToStatus(error, message);
}

uint64_t Partition::Number(const std::string& path, uint64_t missing, int base) const {
  std::string text;
  if (files_->Read(path, &text) != 0) return missing;
  char* end = nullptr;
  const uint64_t number = std::strtoull(text.c_str(), &end, base);
  return end == text.c_str() ? missing : number;
}

absl::StatusOr<std::vector<Partition::Resource>> Partition::Probe() const {
  std::string schemata;
  if (const int error = files_->Read("schemata", &schemata); error != 0) return Failed(error, "reading schemata");
  std::vector<Resource> resources;
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(schemata, '\n'))) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
    Resource resource{std::string(absl::StripAsciiWhitespace(parts[0])), {}};
    // Whatever else a kernel offers (L3_MAX, MB_HLIM, L3CODE) is left as it is.
    if (parts.size() != 2 || (resource.name != "L3" && resource.name != "MB")) continue;
    for (const std::string& domain : std::vector<std::string>(absl::StrSplit(parts[1], ';'))) {
      int id;
      if (absl::SimpleAtoi(domain.substr(0, domain.find('=')), &id)) resource.domains.push_back(id);
    }
    if (!resource.domains.empty()) resources.push_back(std::move(resource));
  }
  return resources;
}

int Partition::Domain(const Resource& resource) const {
  for (const int id : place_.cache_ids) {
    if (std::find(resource.domains.begin(), resource.domains.end(), id) != resource.domains.end()) return id;
  }
  return resource.domains.front();
}

absl::Status Partition::MakeGroup(const char* role) {
  const std::string group = Group(role);
  const int error = files_->MakeDirectory(group);
  if (error != 0 && error != EEXIST) return Failed(error, "making " + group);  // EEXIST: a predecessor's
  return absl::OkStatus();
}

absl::Status Partition::Set(const char* role, const std::vector<std::string>& lines) {
  for (const std::string& line : lines) {  // one by one, so that an error is of a line
    if (const int error = files_->Write(Group(role) + "/schemata", line + "\n"); error != 0) {
      return Failed(error, absl::StrCat("setting ", Group(role), " to ", line));
    }
  }
  return absl::OkStatus();
}

absl::Status Partition::Prepare(const Shares& shares) {
  LockScope lock(*files_);
  if (lock.error() != 0) return Failed(lock.error(), "locking");
  absl::StatusOr<std::vector<Resource>> resources = Probe();
  if (!resources.ok()) return resources.status();
  std::vector<std::string> trainer, optimizer;
  for (const Resource& resource : *resources) {
    const int domain = Domain(resource);
    if (resource.name == "L3") {
      const uint64_t mask = Number("info/L3/cbm_mask", 0, 16);
      const auto ways = static_cast<unsigned>(__builtin_popcountll(mask));
      const unsigned least = static_cast<unsigned>(std::max<uint64_t>(1, Number("info/L3/min_cbm_bits", 1, 10)));
      if (ways < 2 * least) continue;  // there is nothing to share
      const unsigned mine = std::clamp((ways * shares.optimizer_cache_percent + 50) / 100, least, ways - least);
      optimizer.push_back(absl::StrFormat("L3:%d=%x", domain, Ones(mine)));
      trainer.push_back(absl::StrFormat("L3:%d=%x", domain, Ones(ways) & ~Ones(mine)));
    } else {
      const uint64_t least = Number("info/MB/min_bandwidth", 1, 10);
      const auto percent = [least](uint32_t wanted) { return std::clamp<uint64_t>(wanted, least, 100); };
      optimizer.push_back(absl::StrFormat("MB:%d=%d", domain, percent(shares.optimizer_bandwidth_percent)));
      trainer.push_back(absl::StrFormat("MB:%d=%d", domain, percent(shares.trainer_bandwidth_percent)));
    }
  }
  if (optimizer.empty()) {
    return absl::UnavailableError("resctrl: the machine can partition neither L3 nor memory bandwidth");
  }
  for (const char* role : kRoles) {
    if (absl::Status status = MakeGroup(role); !status.ok()) return status;
  }
  if (absl::Status status = Set("trainer", trainer); !status.ok()) return status;
  if (absl::Status status = Set("optimizer", optimizer); !status.ok()) return status;
  const std::string cpus = absl::StrJoin(place_.trainer_cpus, ",");
  if (const int error = files_->Write(Group("trainer") + "/cpus_list", cpus + "\n"); error != 0) {
    return Failed(error, absl::StrCat("giving CPUs ", cpus, " to ", Group("trainer")));
  }
  if (const int error = files_->GiveTo(Group("optimizer") + "/tasks", place_.daemon_uid); error != 0) {
    return Failed(error, "giving the tasks file to the daemon's user");
  }
  return absl::OkStatus();
}

absl::Status Partition::Join(const std::vector<pid_t>& threads) {
  LockScope lock(*files_);
  if (lock.error() != 0) return Failed(lock.error(), "locking");
  for (const pid_t thread : threads) {
    const int error = files_->Write(Group("optimizer") + "/tasks", absl::StrCat(thread, "\n"));
    if (error != 0 && error != ESRCH) return Failed(error, absl::StrCat("moving thread ", thread));  // ESRCH: it ended
  }
  return absl::OkStatus();
}

absl::Status Partition::Remove() {
  LockScope lock(*files_);
  if (lock.error() != 0) return Failed(lock.error(), "locking");
  for (const char* role : kRoles) {
    const int error = files_->RemoveDirectory(Group(role));
    if (error != 0 && error != ENOENT) return Failed(error, "removing " + Group(role));
  }
  return absl::OkStatus();
}

std::vector<Reading> Partition::Read() const {
  std::vector<Reading> readings;
  for (const char* role : kRoles) {
    const std::string data = Group(role) + "/mon_data";
    std::vector<std::string> domains;
    if (files_->List(data, &domains) != 0) continue;
    for (const char* counter : kCounters) {
      Reading reading{role, counter, 0};
      bool told = false;
      for (const std::string& domain : domains) {
        std::string text;
        uint64_t value;
        if (files_->Read(absl::StrCat(data, "/", domain, "/", counter), &text) != 0) continue;
        if (!absl::SimpleAtoi(text, &value)) continue;  // "Unavailable", "Unassigned"
        reading.value += value;
        told = true;
      }
      if (told) readings.push_back(reading);
    }
  }
  return readings;
}

}  // namespace superoffload::partition
