// topology, pin, bench: the machine, and programs that run on it.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/ctl/commands.h"
#include "client/ctl/output.h"
#include "client/ctl/programs.h"

namespace superoffload::ctl {
namespace {

// Numbers as ranges: "0-7,16".
std::string CpusText(std::vector<uint32_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  std::vector<std::string> ranges;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    ranges.push_back(last == i ? absl::StrCat(numbers[i]) : absl::StrCat(numbers[i], "-", numbers[last]));
    i = last + 1;
  }
  return absl::StrJoin(ranges, ",");
}

std::vector<uint32_t> AllCpus(const v1::Superchip& superchip) {
  std::vector<uint32_t> cpus;
  for (const v1::Superchip::Core& core : superchip.cores()) {
    cpus.insert(cpus.end(), core.cpus().begin(), core.cpus().end());
  }
  return cpus;
}

std::string TopologyText(const v1::Topology& t) {
  std::string text;
  for (int i = 0; i < t.superchips_size(); ++i) {
    const v1::Superchip& s = t.superchips(i);
    const bool used = t.has_used_superchip() && static_cast<int>(t.used_superchip()) == i;
    absl::StrAppend(&text, "superchip ", i, used ? "  <- this daemon\n" : "\n");
    std::vector<Row> rows{{"  ├─", "memory", absl::StrCat("node ", s.memory_node(), ", ", BytesText(s.memory_bytes()))},
                          {"  ├─", "cores", absl::StrCat(s.cores_size(), ", hardware threads ", CpusText(AllCpus(s)))}};
    if (used) {
      rows.push_back({"  │  ", "trainers", CpusText({t.trainer_cpus().begin(), t.trainer_cpus().end()})});
      rows.push_back({"  │  ", "workers", CpusText({t.optimizer_cpus().begin(), t.optimizer_cpus().end()})});
    }
    rows.push_back({"  └─", "gpus", s.gpus().empty() ? "none" : absl::StrJoin(s.gpus(), ", ")});
    absl::StrAppend(&text, Table(rows));
  }
  const std::vector<uint32_t> other(t.nodes_without_cpus().begin(), t.nodes_without_cpus().end());
  if (!other.empty()) absl::StrAppend(&text, "never used: nodes without CPUs ", CpusText(other), "\n");
  if (!t.has_used_superchip()) {
    absl::StrAppend(&text, "the daemon is bound to none of them; start it with --superchip=N to bind it\n");
  }
  return text;
}

}  // namespace

absl::Status Topology(Client& client, const Arguments& arguments) {
  return PrintAnswer(client.GetTopology(), arguments.json, TopologyText);
}

// Becomes the command, on the hardware threads that are left to trainers.
absl::Status Pin(Client& client, const Arguments& arguments) {
  absl::StatusOr<v1::Topology> topology = client.GetTopology();
  if (!topology.ok()) return topology.status();
  if (topology->trainer_cpus().empty()) {
    return absl::FailedPreconditionError(
        "the daemon is bound to no Superchip and leaves trainers no cores of their own; start it with --superchip");
  }
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (const uint32_t cpu : topology->trainer_cpus()) CPU_SET(cpu, &cpus);
  if (::sched_setaffinity(0, sizeof(cpus), &cpus) != 0) return absl::ErrnoToStatus(errno, "sched_setaffinity");
  std::vector<char*> words;
  for (const std::string& word : arguments.operands) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  ::execvp(words.front(), words.data());
  return absl::ErrnoToStatus(errno, absl::StrCat("running ", words.front()));
}

int RunBench(int argc, char** argv) {
  const std::filesystem::path here = ThisProgram().parent_path();
  std::string name = "adam_bench", tune = "--tune";
  std::vector<char*> words{name.data(), tune.data()};
  for (int i = 2; i < argc; ++i) words.push_back(argv[i]);
  words.push_back(nullptr);
  // Installed beside this program, or in the tree that it was built in.
  for (const std::filesystem::path& place : {here / name, here / "../kernels/bench" / name}) {
    ::execv(place.c_str(), words.data());
  }
  ::execvp(name.c_str(), words.data());
  std::fprintf(stderr, "superoffloadctl: cannot run adam_bench: %s; it is in the Debian package and not in the wheel\n",
               std::strerror(errno));
  return 1;
}

}  // namespace superoffload::ctl
