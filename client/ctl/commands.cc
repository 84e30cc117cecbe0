#include "client/ctl/commands.h"

#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/ctl/json.h"
#include "client/ctl/list.h"
#include "client/ctl/optimizer_text.h"
#include "client/ctl/run.h"
#include "client/ctl/text.h"
#include "client/ctl/upgrade.h"

namespace superoffload::ctl {
namespace {

void Print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

template <typename Message>
absl::Status PrintAnswer(const absl::StatusOr<Message>& answer, bool json, std::string (*text)(const Message&)) {
  if (!answer.ok()) return answer.status();
  Print(json ? JsonText(*answer) : text(*answer));
  return absl::OkStatus();
}

absl::Status Info(Client& client, const Arguments& arguments) {
  return PrintAnswer(client.GetServerInfo(), arguments.json, &InfoText);
}

absl::Status Describe(Client& client, const Arguments& arguments) {
  return PrintAnswer(client.GetOptimizer(arguments.name(), v1::OPTIMIZER_VIEW_FULL), arguments.json, &DescriptionText);
}

absl::Status Watch(Client& client, const Arguments& arguments) {
  uint64_t seen = 0;
  return client.WatchSteps(arguments.name(), [&](const v1::StepReport& report) {
    if (!arguments.json && seen % 20 == 0) Print(StepHeading());
    Print(arguments.json ? JsonLine(report) : StepText(report));
    return ++seen != arguments.count;
  });
}

absl::Status Settle(Client& client, const Arguments& arguments) {
  return PrintAnswer(client.SettleOptimizer(arguments.name()), arguments.json, &SettledText);
}

absl::Status Delete(Client& client, const Arguments& arguments) { return client.DeleteOptimizer(arguments.name()); }

absl::Status Topology(Client& client, const Arguments& arguments) {
  return PrintAnswer(client.GetTopology(), arguments.json, &TopologyText);
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

// What the daemon gets: it has another working directory.
std::string Absolute(const std::string& path) {
  std::error_code error;
  return std::filesystem::absolute(path, error).lexically_normal();
}

absl::Status Checkpoint(Client& client, const Arguments& arguments) {
  absl::StatusOr<v1::Optimizer> optimizer = client.GetOptimizer(arguments.name());
  if (!optimizer.ok()) return optimizer.status();
  if (optimizer->has_member() && arguments.step == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer \"", optimizer->name(), "\" is rank ", optimizer->member().rank(), " of ",
                     optimizer->member().ranks(), " of run \"", optimizer->member().run(), "\", at step ",
                     optimizer->committed_steps(), "; give --step=N, a later one, and the same directory on all ranks"));
  }
  const bool live = !arguments.json && ::isatty(STDERR_FILENO) != 0;
  absl::StatusOr<v1::CheckpointProgress> progress = client.CheckpointOptimizer(
      arguments.name(), Absolute(arguments.operands[1]), [live](const v1::CheckpointProgress& now) {
        if (live) std::fprintf(stderr, "\r%s", ProgressText(now).c_str());
        return true;
      },
      arguments.step == 0 ? std::nullopt : std::optional<uint64_t>(arguments.step));
  if (live) std::fprintf(stderr, "\n");
  return PrintAnswer(progress, arguments.json, &CheckpointText);
}

absl::Status Export(Client& client, const Arguments& arguments) {
  return PrintAnswer(client.ExportOptimizer(arguments.name(), Absolute(arguments.operands[1])), arguments.json,
                     &ExportText);
}

absl::Status Restore(Client& client, const Arguments& arguments) {
  std::vector<std::string> directories;
  for (size_t i = 1; i < arguments.operands.size(); ++i) directories.push_back(Absolute(arguments.operands[i]));
  return PrintAnswer(client.RestoreOptimizer(arguments.name(), directories), arguments.json, &RestoredText);
}

absl::Status CheckUpgradeOf(Client& client, const Arguments& arguments) {
  absl::StatusOr<v1::ServerInfo> running = client.GetServerInfo();
  if (!running.ok()) return running.status();
  const absl::StatusOr<std::string> text =
      CheckUpgrade(*running, arguments.operands.empty() ? InstalledDaemon() : Absolute(arguments.operands.front()));
  if (!text.ok()) return text.status();
  Print(*text);
  return absl::OkStatus();
}

constexpr size_t kMany = 1 << 20;

constexpr Command kCommands[] = {{"info", "", 0, 0, false, &Info},
                                 {"list", "", 0, 0, false, &List},
                                 {"describe", "NAME", 1, 1, true, &Describe},
                                 {"watch", "[NAME]", 0, 1, true, &Watch},
                                 {"settle", "NAME", 1, 1, true, &Settle},
                                 {"checkpoint", "NAME DIRECTORY", 2, 2, true, &Checkpoint},
                                 {"export", "NAME DIRECTORY", 2, 2, true, &Export},
                                 {"restore", "NAME DIRECTORY...", 2, kMany, true, &Restore},
                                 {"delete", "NAME", 1, 1, true, &Delete},
                                 {"report", "NAME", 1, 1, true, &Report},
                                 {"resolve", "NAME abandon|commit SUM SCALE THRESHOLD", 2, 5, true, &Resolve},
                                 {"topology", "", 0, 0, false, &Topology},
                                 {"check-upgrade", "[PROGRAM]", 0, 1, false, &CheckUpgradeOf},
                                 {"pin", "-- COMMAND...", 1, kMany, false, &Pin}};

}  // namespace

absl::StatusOr<std::string> NameWithOwner(Client& client, const std::string& name, std::optional<uint32_t> uid) {
  if (uid) return absl::StrCat(*uid, "/", name);
  absl::StatusOr<std::vector<v1::Optimizer>> optimizers = client.ListOptimizers();
  if (!optimizers.ok()) return optimizers.status();
  std::vector<uint32_t> owners;
  for (const v1::Optimizer& optimizer : *optimizers) {
    if (optimizer.name() == name) owners.push_back(optimizer.uid());
  }
  if (owners.empty()) return name;
  if (owners.size() == 1) return absl::StrCat(owners.front(), "/", name);
  return absl::FailedPreconditionError(
      absl::StrCat("the users ", absl::StrJoin(owners, ", "), " have an optimizer \"", name, "\"; say whose with --uid"));
}

const Command* FindCommand(std::string_view name) {
  for (const Command& command : kCommands) {
    if (command.name == name) return &command;
  }
  return nullptr;
}

}  // namespace superoffload::ctl
