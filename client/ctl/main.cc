// superoffloadctl: an operator's view of a daemon.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/ctl/commands.h"
#include "client/ctl/output.h"
#include "superoffload/v1/exit_status.h"

ABSL_FLAG(std::string, endpoint, "",
          "the daemon's endpoint, unix:/path/control.sock; default: $SUPEROFFLOAD_ENDPOINT, else a running daemon's");
ABSL_FLAG(std::string, tls_authority, "", "for a daemon at host:port: certificates of whoever signed its certificate");
ABSL_FLAG(std::string, tls_certificate, "", "likewise: your certificate");
ABSL_FLAG(std::string, tls_key, "", "likewise: its key");
ABSL_FLAG(bool, json, false, "print JSON: one object, or one per line for watch");
ABSL_FLAG(bool, all, false,
          "list: of all daemons of this machine, or of those that --endpoint names, with commas between");
ABSL_FLAG(
    std::string, root, "",
    "doctor: look at the machine whose files are below this directory; install-service: write there, run nothing");
ABSL_FLAG(uint32_t, superchip, 0, "install-service: the Superchip whose daemon is enabled, counted from 0");
ABSL_FLAG(bool, yes, false, "install-service, uninstall-service: do not ask");
ABSL_FLAG(int64_t, uid, -1, "the owner of the optimizer that is named, for operators; default: whoever alone has one");
ABSL_FLAG(uint64_t, step, 0, "checkpoint of a rank of a run: after how many committed steps; the same on all ranks");
ABSL_FLAG(bool, verify, false, "inspect: read all files and compare their checksums");
ABSL_FLAG(
    std::string, source, "",
    "export: the Hugging Face model directory that was trained; its other files, and tensors that were not trained, "
    "are copied");
ABSL_FLAG(std::string, dtype, "bf16", "export: of the weights, bf16 or fp32");
ABSL_FLAG(uint64_t, shard_bytes, uint64_t{5} << 30, "export: most bytes of a file of weights");
ABSL_FLAG(uint64_t, count, 0, "watch: stop after so many steps; 0 goes on");

namespace superoffload::ctl {
namespace {

constexpr char kUsage[] = R"(looks into a running superoffloadd

  superoffloadctl info             the daemon: version, limits, use
  superoffloadctl list [--all]     its optimizers; --all: those of all daemons of this machine, or of --endpoint=A,B,
                                   ranks of a run together, with their daemons
  superoffloadctl describe NAME    one optimizer: groups, buckets, parameters, statistics
  superoffloadctl watch [NAME]     one line per step, live
  superoffloadctl settle NAME      absorb pending gradients: masters and moments are those of the last step
  superoffloadctl checkpoint NAME DIRECTORY
                                   write a checkpoint (safetensors) while its trainer goes on; of a run's ranks with
                                   --step=N, the same on all, into one directory
  superoffloadctl restore NAME DIRECTORY...
                                   load a checkpoint, also that of a run of any number of ranks, before a trainer attaches
  superoffloadctl inspect PATH [--verify]
                                   what is in a checkpoint, and whether it is whole; needs no daemon
  superoffloadctl export PATH DIRECTORY [--source=MODEL] [--dtype=bf16|fp32] [--shard_bytes=N]
                                   write a checkpoint's weights as a Hugging Face model directory; needs no daemon
  superoffloadctl export NAME DIRECTORY
                                   write what is whole of a damaged optimizer, and say what is not guaranteed
  superoffloadctl report NAME      of a rank of a run: what it has committed, and what is prepared and waits for its run
  superoffloadctl resolve NAME abandon
                                   end what is prepared where no trainer of the run comes back: no rank has committed it
  superoffloadctl resolve NAME commit SUM SCALE THRESHOLD
                                   likewise where some rank has: as its report says
  superoffloadctl topology         the machine: memory nodes, cores and GPUs, and what of it the daemon uses
  superoffloadctl pin -- COMMAND...
                                   run a trainer on the cores that the daemon leaves to trainers
  superoffloadctl doctor           what makes a daemon slow or unsafe on this machine, each with its remedy
  superoffloadctl bench [--output=FILE] [FLAG...]
                                   this machine's best number of workers and prefetch distance (adam_bench --tune)
  superoffloadctl bench --machine_output=FILE [--machine_like=NAME]
                                   measure this machine's CPU for plan
  superoffloadctl plan --model=NAME|FILE --machine=NAME|FILE --batch=N --sequence=N [FLAG...]
                                   memory, speed and settings of a training run on a machine that need not be there
  superoffloadctl delete NAME      free an optimizer that no trainer is attached to, or one that is damaged
  superoffloadctl check-upgrade [PROGRAM]
                                   whether another superoffloadd, by default the installed one, will recover the
                                   optimizers of the running one when it replaces it
  superoffloadctl version          versions of this program, of the wire and of records, and the daemon's where one runs
  superoffloadctl install-service [--superchip=N] [--yes]
                                   make a systemd service of what a wheel has brought; shows first what it will do
  superoffloadctl uninstall-service [--yes]
                                   undo it
  superoffloadctl kept             what the daemon's keeper (superoffloadd --keeper) holds, also while no daemon can start
  superoffloadctl drop-kept NAME   free some of it, while no daemon runs; its optimizer is lost

Flags: --endpoint=unix:/path/control.sock --json --count=N (watch) --uid=UID (whose NAME); --endpoint=HOST:PORT with --tls_authority,
--tls_certificate and --tls_key for a daemon on another machine. Exit status: 0, 1 when the daemon refuses or cannot
be reached, 2 when the command line is wrong, 3 when what is planned does not fit.)";

bool IsDirectory(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

constexpr LocalCommand kLocalCommands[] = {
    {"doctor", 0, Doctor},
    {"version", 0, Version},
    {"install-service", 0, InstallService},
    {"uninstall-service", 0, UninstallService},
    {"list", 0, ListAll, [](const Arguments& arguments) { return arguments.all; }},
    {"kept", 0, Kept},
    {"drop-kept", 1, DropKept},
    {"inspect", 1, Inspect},
    // A directory is no optimizer's name.
    {"export", 2, ExportModel, [](const Arguments& arguments) { return IsDirectory(arguments.operands[0]); }},
};

constexpr size_t kMany = 1 << 20;

constexpr Command kCommands[] = {{"info", "", 0, 0, false, Info},
                                 {"list", "", 0, 0, false, List},
                                 {"describe", "NAME", 1, 1, true, Describe},
                                 {"watch", "[NAME]", 0, 1, true, Watch},
                                 {"settle", "NAME", 1, 1, true, Settle},
                                 {"checkpoint", "NAME DIRECTORY", 2, 2, true, Checkpoint},
                                 {"export", "NAME DIRECTORY", 2, 2, true, ExportDamaged},
                                 {"restore", "NAME DIRECTORY...", 2, kMany, true, Restore},
                                 {"delete", "NAME", 1, 1, true, Delete},
                                 {"report", "NAME", 1, 1, true, Report},
                                 {"resolve", "NAME abandon|commit SUM SCALE THRESHOLD", 2, 5, true, Resolve},
                                 {"topology", "", 0, 0, false, Topology},
                                 {"check-upgrade", "[PROGRAM]", 0, 1, false, CheckUpgrade},
                                 {"pin", "-- COMMAND...", 1, kMany, false, Pin}};

Arguments ArgumentsOf(const std::vector<std::string>& words) {
  const int64_t uid = absl::GetFlag(FLAGS_uid);
  return {
      .operands = {words.begin() + 1, words.end()},
      .endpoint = absl::GetFlag(FLAGS_endpoint),
      .tls = {absl::GetFlag(FLAGS_tls_authority), absl::GetFlag(FLAGS_tls_certificate), absl::GetFlag(FLAGS_tls_key)},
      .json = absl::GetFlag(FLAGS_json),
      .all = absl::GetFlag(FLAGS_all),
      .root = absl::GetFlag(FLAGS_root),
      .superchip = absl::GetFlag(FLAGS_superchip),
      .yes = absl::GetFlag(FLAGS_yes),
      .uid = uid < 0 ? std::nullopt : std::optional<uint32_t>(uid),
      .step = absl::GetFlag(FLAGS_step),
      .verify = absl::GetFlag(FLAGS_verify),
      .source = absl::GetFlag(FLAGS_source),
      .dtype = absl::GetFlag(FLAGS_dtype),
      .shard_bytes = absl::GetFlag(FLAGS_shard_bytes),
      .count = absl::GetFlag(FLAGS_count)};
}

// The name with its owner, UID/NAME: `uid`, if it is given, else the only one who has an optimizer of that name.
// FAILED_PRECONDITION: several users have. A name of nobody's stays as it is.
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
  return absl::FailedPreconditionError(absl::StrCat("the users ", absl::StrJoin(owners, ", "), " have an optimizer \"",
                                                    name, "\"; say whose with --uid"));
}

absl::Status RunOnDaemon(const Command& command, Arguments arguments) {
  absl::StatusOr<std::unique_ptr<Client>> client = arguments.tls.certificate.empty()
                                                       ? Client::Connect(arguments.endpoint)
                                                       : Client::ConnectRemote(arguments.endpoint, arguments.tls);
  if (!client.ok()) return client.status();
  if (command.names_optimizer && !arguments.operands.empty()) {
    absl::StatusOr<std::string> name = NameWithOwner(**client, arguments.operands.front(), arguments.uid);
    if (!name.ok()) return name.status();
    arguments.operands.front() = *name;
  }
  return command.run(**client, arguments);
}

int BadUsage(const std::string& message) {
  std::fprintf(stderr, "superoffloadctl: %s; see superoffloadctl --help\n", message.c_str());
  return 2;
}

int Run(const std::vector<std::string>& words) {
  if (words.empty()) return BadUsage("which command?");
  const std::string& name = words[0];
  const Arguments arguments = ArgumentsOf(words);
  const size_t operands = arguments.operands.size();
  for (const LocalCommand& command : kLocalCommands) {
    if (command.name != name || command.operands != operands) continue;
    if (command.meant == nullptr || command.meant(arguments)) return command.run(arguments);
  }
  const Command* const command = std::find_if(std::begin(kCommands), std::end(kCommands),
                                              [&](const Command& candidate) { return candidate.name == name; });
  if (command == std::end(kCommands)) return BadUsage(absl::StrCat("unknown command \"", name, "\""));
  if (operands < command->min_operands) return BadUsage(absl::StrCat(name, " needs ", std::string(command->operands)));
  if (operands > command->max_operands) {
    return BadUsage(
        absl::StrCat("\"", arguments.operands[command->max_operands], "\" is one word too many for ", name));
  }
  return ExitStatus(RunOnDaemon(*command, arguments));
}

}  // namespace
}  // namespace superoffload::ctl

int main(int argc, char** argv) {
  // Their flags are others: those of another program, and the fields of a message.
  if (argc > 1 && absl::string_view(argv[1]) == "bench") return superoffload::ctl::RunBench(argc, argv);
  if (argc > 1 && absl::string_view(argv[1]) == "plan") return superoffload::ctl::RunPlan(argc, argv);
  absl::SetProgramUsageMessage(superoffload::ctl::kUsage);
  absl::FlagsUsageConfig usage;
  usage.version_string = [] { return std::string("superoffloadctl " SUPEROFFLOAD_VERSION "\n"); };
  usage.contains_helpshort_flags =
      usage.contains_help_flags = [](absl::string_view file) { return absl::StrContains(file, "client/ctl/"); };
  absl::SetFlagsUsageConfig(usage);
  superoffload::EndWithZeroAfterHelp(argc, argv);
  const std::vector<char*> words = absl::ParseCommandLine(argc, argv);
  return superoffload::ctl::Run({words.begin() + 1, words.end()});
}
