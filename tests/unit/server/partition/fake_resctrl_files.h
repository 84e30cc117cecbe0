// A resctrl file system in memory that enforces the kernel's rules (Documentation/filesystems/resctrl.rst).
#ifndef SUPEROFFLOAD_TESTS_UNIT_SERVER_PARTITION_FAKE_RESCTRL_FILES_H_
#define SUPEROFFLOAD_TESTS_UNIT_SERVER_PARTITION_FAKE_RESCTRL_FILES_H_

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/partition/resctrl_files.h"

namespace superoffload::partition {

struct FakeMachine {
  std::vector<int> domains{0};
  uint64_t cbm_mask = 0xfff;
  unsigned min_cbm_bits = 1;
  bool sparse_masks = false;
  unsigned min_bandwidth = 1, bandwidth_gran = 1;
  size_t num_closids = 8;
  bool has_l3 = true, has_mb = true, has_mbm_local = true, mounted = true, is_root = true;
  std::string other_schemata{};  // lines of resources that nobody here knows
};

struct FakeGroup {
  std::map<int, uint64_t> masks;
  std::map<int, unsigned> bandwidths;
  std::set<int> cpus;
  std::set<pid_t> tasks;
  uid_t tasks_owner = 0;
};

class FakeResctrlFiles final : public ResctrlFiles {
 public:
  FakeResctrlFiles(const FakeMachine& machine, std::map<std::string, FakeGroup>* groups)
      : machine_(machine), groups_(*groups) {
    groups_.try_emplace("", Fresh());
  }

  int Read(const std::string& path, std::string* text) override {
    if (!machine_.mounted) return ENOENT;
    if (path == "info/last_cmd_status") return *text = last_command_ + "\n", 0;
    if (path == "info/L3/cbm_mask" && machine_.has_l3) return *text = Hex(machine_.cbm_mask) + "\n", 0;
    if (path == "info/L3/min_cbm_bits" && machine_.has_l3) return *text = absl::StrCat(machine_.min_cbm_bits, "\n"), 0;
    if (path == "info/MB/min_bandwidth" && machine_.has_mb) {
      return *text = absl::StrCat(machine_.min_bandwidth, "\n"), 0;
    }
    if (path == "schemata") return *text = Schemata(groups_.at("")), 0;
    const auto [group, file] = Split(path);
    if (!groups_.contains(group)) return ENOENT;
    if (file == "schemata") return *text = Schemata(groups_.at(group)), 0;
    const std::vector<std::string> words = absl::StrSplit(file, '/');
    if (words.size() != 3 || words[0] != "mon_data") return ENOENT;
    if (words[2] == "llc_occupancy") return *text = "4096\n", 0;
    if (words[2] == "mbm_total_bytes") return *text = words[1] == "mon_L3_00" ? "1000\n" : "Unavailable\n", 0;
    if (words[2] == "mbm_local_bytes" && machine_.has_mbm_local) return *text = "Unassigned\n", 0;
    return ENOENT;
  }

  int Write(const std::string& path, const std::string& text) override {
    if (!machine_.mounted) return ENOENT;
    const auto [name, file] = Split(path);
    if (!groups_.contains(name)) return ENOENT;
    FakeGroup& group = groups_.at(name);
    if (!machine_.is_root && !(file == "tasks" && group.tasks_owner != 0)) return EACCES;
    if (text.empty() || text.back() != '\n') return Refuse(EINVAL, "a line ends with a newline");
    const std::string line = text.substr(0, text.size() - 1);
    if (file == "schemata") return WriteSchemata(group, line);
    if (file == "cpus_list") return WriteCpus(group, line);
    if (file == "tasks") return WriteTask(group, line);
    return EACCES;
  }

  int MakeDirectory(const std::string& path) override {
    if (!machine_.mounted) return ENOENT;
    if (!machine_.is_root) return EACCES;
    if (groups_.contains(path)) return EEXIST;
    if (groups_.size() >= machine_.num_closids) return Refuse(ENOSPC, "Out of CLOSIDs");
    groups_[path] = Fresh();
    return 0;
  }

  int RemoveDirectory(const std::string& path) override {
    if (!machine_.is_root) return EACCES;
    const auto found = groups_.find(path);
    if (found == groups_.end()) return ENOENT;
    groups_.at("").tasks.merge(found->second.tasks);
    groups_.at("").cpus.merge(found->second.cpus);
    groups_.erase(found);
    return 0;
  }

  int List(const std::string& path, std::vector<std::string>* names) override {
    const auto [group, file] = Split(path);
    if (!groups_.contains(group) || file != "mon_data") return ENOENT;
    names->clear();
    for (const int domain : machine_.domains) names->push_back(absl::StrCat("mon_L3_0", domain));
    return 0;
  }

  int GiveTo(const std::string& path, uid_t uid) override {
    if (!machine_.is_root) return EPERM;
    groups_.at(Split(path).first).tasks_owner = uid;
    return 0;
  }

  int Lock() override { return machine_.mounted ? 0 : ENOENT; }
  void Unlock() override {}

 private:
  static std::string Hex(uint64_t value) { return absl::StrCat(absl::Hex(value)); }
  static std::pair<std::string, std::string> Split(const std::string& path) {
    const size_t slash = path.find('/');
    return {path.substr(0, slash), slash == std::string::npos ? "" : path.substr(slash + 1)};
  }

  FakeGroup Fresh() const {
    FakeGroup group;
    for (const int domain : machine_.domains) {
      group.masks[domain] = machine_.cbm_mask;
      group.bandwidths[domain] = 100;
    }
    return group;
  }

  std::string Schemata(const FakeGroup& group) const {
    std::vector<std::string> masks, bandwidths;
    for (const auto& [domain, mask] : group.masks) masks.push_back(absl::StrCat(domain, "=", Hex(mask)));
    for (const auto& [domain, percent] : group.bandwidths) bandwidths.push_back(absl::StrCat(domain, "=", percent));
    std::string text = machine_.other_schemata;
    if (machine_.has_mb) absl::StrAppend(&text, "    MB:", absl::StrJoin(bandwidths, ";"), "\n");
    if (machine_.has_l3) absl::StrAppend(&text, "    L3:", absl::StrJoin(masks, ";"), "\n");
    return text;
  }

  int Refuse(int error, const std::string& why) {
    last_command_ = why;
    return error;
  }

  int WriteSchemata(FakeGroup& group, const std::string& line) {
    const std::vector<std::string> parts = absl::StrSplit(line, ':');
    if (parts.size() != 2 || !((parts[0] == "L3" && machine_.has_l3) || (parts[0] == "MB" && machine_.has_mb))) {
      return Refuse(EINVAL, "Unknown or unsupported resource name '" + parts[0] + "'");
    }
    for (const std::string& word : std::vector<std::string>(absl::StrSplit(parts[1], ';'))) {
      const std::vector<std::string> pair = absl::StrSplit(word, '=');
      int domain;
      if (pair.size() != 2 || !absl::SimpleAtoi(pair[0], &domain) || !group.masks.contains(domain)) {
        return Refuse(EINVAL, "Unknown domain " + pair[0]);
      }
      if (const int error = parts[0] == "L3" ? SetMask(group, domain, pair[1]) : SetBandwidth(group, domain, pair[1]);
          error != 0) {
        return error;
      }
    }
    last_command_ = "ok";
    return 0;
  }

  int SetMask(FakeGroup& group, int domain, const std::string& text) {
    const uint64_t mask = std::strtoull(text.c_str(), nullptr, 16);
    if (mask == 0 || (mask & ~machine_.cbm_mask) != 0) return Refuse(EINVAL, "Mask out of range");
    const uint64_t shifted = mask >> __builtin_ctzll(mask);
    if (!machine_.sparse_masks && (shifted & (shifted + 1)) != 0) {
      return Refuse(EINVAL, "The mask " + text + " has non-consecutive 1-bits");
    }
    if (static_cast<unsigned>(__builtin_popcountll(mask)) < machine_.min_cbm_bits) {
      return Refuse(EINVAL, absl::StrCat("Need at least ", machine_.min_cbm_bits, " bits in the mask"));
    }
    group.masks[domain] = mask;
    return 0;
  }

  int SetBandwidth(FakeGroup& group, int domain, const std::string& text) {
    unsigned percent;
    if (!absl::SimpleAtoi(text, &percent) || percent < machine_.min_bandwidth || percent > 100) {
      return Refuse(EINVAL, absl::StrCat("MB value ", text, " out of range [", machine_.min_bandwidth, ",100]"));
    }
    const unsigned gran = machine_.bandwidth_gran;
    group.bandwidths[domain] = (percent + gran - 1) / gran * gran;
    return 0;
  }

  int WriteCpus(FakeGroup& group, const std::string& line) {
    std::set<int> cpus;
    for (const std::string& word : std::vector<std::string>(absl::StrSplit(line, ',', absl::SkipEmpty()))) {
      int cpu;
      if (!absl::SimpleAtoi(word, &cpu)) return Refuse(EINVAL, "Bad CPU list/mask");
      cpus.insert(cpu);
    }
    for (auto& [name, other] : groups_) {
      for (const int cpu : cpus) other.cpus.erase(cpu);  // silently taken from whoever had them
    }
    group.cpus = cpus;
    return 0;
  }

  int WriteTask(FakeGroup& group, const std::string& line) {
    pid_t task;
    if (!absl::SimpleAtoi(line, &task)) return Refuse(EINVAL, "one task at a time");
    if (task == kEndedTask) return ESRCH;
    for (auto& [name, other] : groups_) other.tasks.erase(task);
    group.tasks.insert(task);
    return 0;
  }

 public:
  static constexpr pid_t kEndedTask = 4242;

 private:
  const FakeMachine machine_;
  std::map<std::string, FakeGroup>& groups_;
  std::string last_command_ = "ok";
};

}  // namespace superoffload::partition

#endif  // SUPEROFFLOAD_TESTS_UNIT_SERVER_PARTITION_FAKE_RESCTRL_FILES_H_
