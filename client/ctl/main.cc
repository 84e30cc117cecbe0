// superoffloadctl: an operator's view of a daemon.
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/ctl/bench.h"
#include "client/ctl/commands.h"
#include "client/ctl/doctor.h"
#include "superoffload/client.hpp"
#include "superoffload/v1/printable.h"

ABSL_FLAG(std::string, endpoint, "",
          "the daemon's endpoint, unix:/path/control.sock; default: $SUPEROFFLOAD_ENDPOINT, else a running daemon's");
ABSL_FLAG(std::string, tls_authority, "", "for a daemon at host:port: certificates of whoever signed its certificate");
ABSL_FLAG(std::string, tls_certificate, "", "likewise: your certificate");
ABSL_FLAG(std::string, tls_key, "", "likewise: its key");
ABSL_FLAG(bool, json, false, "print JSON: one object, or one per line for watch");
ABSL_FLAG(std::string, root, "", "doctor: look at the machine whose files are below this directory");
ABSL_FLAG(int64_t, uid, -1, "the owner of the optimizer that is named, for operators; default: whoever alone has one");
ABSL_FLAG(uint64_t, count, 0, "watch: stop after so many steps; 0 goes on");

namespace superoffload::ctl {
namespace {

constexpr char kUsage[] = R"(looks into a running superoffloadd

  superoffloadctl info             the daemon: version, limits, use
  superoffloadctl list             its optimizers
  superoffloadctl describe NAME    one optimizer: groups, buckets, parameters, statistics
  superoffloadctl watch [NAME]     one line per step, live
  superoffloadctl settle NAME      absorb pending gradients: masters and moments are those of the last step
  superoffloadctl checkpoint NAME DIRECTORY
                                   write a checkpoint (safetensors) while its trainer goes on
  superoffloadctl restore NAME DIRECTORY...
                                   load checkpoints, several for the ranks of a run, before a trainer attaches
  superoffloadctl topology         the machine: memory nodes, cores and GPUs, and what of it the daemon uses
  superoffloadctl pin -- COMMAND...
                                   run a trainer on the cores that the daemon leaves to trainers
  superoffloadctl doctor           what makes a daemon slow or unsafe on this machine, each with its remedy
  superoffloadctl bench [--output=FILE] [FLAG...]
                                   this machine's best number of workers and prefetch distance (adam_bench --tune)
  superoffloadctl delete NAME      free an optimizer that no trainer is attached to, or one that is damaged

Flags: --endpoint=unix:/path/control.sock --json --count=N (watch) --uid=UID (whose NAME); --endpoint=HOST:PORT with --tls_authority,
--tls_certificate and --tls_key for a daemon on another machine. Exit status: 0, 1 when the daemon refuses or cannot
be reached, 2 when the command line is wrong.)";

int BadUsage(const std::string& message) {
  std::fprintf(stderr, "superoffloadctl: %s; see superoffloadctl --help\n", message.c_str());
  return 2;
}

int Run(const std::vector<std::string>& words) {
  if (words.empty()) return BadUsage("which command?");
  if (words[0] == "doctor" && words.size() == 1) {
    return RunDoctor(absl::GetFlag(FLAGS_endpoint), absl::GetFlag(FLAGS_root), absl::GetFlag(FLAGS_json));
  }
  const Command* command = FindCommand(words[0]);
  if (command == nullptr) return BadUsage(absl::StrCat("unknown command \"", words[0], "\""));
  const size_t operands = words.size() - 1;
  if (operands < command->min_operands)
    return BadUsage(absl::StrCat(words[0], " needs ", std::string(command->operands)));
  if (operands > command->max_operands) {
    return BadUsage(absl::StrCat("\"", words[command->max_operands + 1], "\" is one word too many for ", words[0]));
  }
  const TlsFiles tls{absl::GetFlag(FLAGS_tls_authority), absl::GetFlag(FLAGS_tls_certificate),
                     absl::GetFlag(FLAGS_tls_key)};
  const std::string endpoint = absl::GetFlag(FLAGS_endpoint);
  absl::StatusOr<std::unique_ptr<Client>> client =
      tls.certificate.empty() ? Client::Connect(endpoint) : Client::ConnectRemote(endpoint, tls);
  absl::Status status = client.status();
  Arguments arguments{.operands = {words.begin() + 1, words.end()},
                      .json = absl::GetFlag(FLAGS_json),
                      .count = absl::GetFlag(FLAGS_count)};
  if (status.ok() && command->names_optimizer && !arguments.operands.empty()) {
    const int64_t uid = absl::GetFlag(FLAGS_uid);
    absl::StatusOr<std::string> name =
        NameWithOwner(**client, arguments.operands.front(), uid < 0 ? std::nullopt : std::optional<uint32_t>(uid));
    status = name.status();
    if (name.ok()) arguments.operands.front() = *name;
  }
  if (status.ok()) status = command->run(**client, arguments);
  if (status.ok()) return 0;
  std::fprintf(stderr, "superoffloadctl: %s: %s\n", absl::StatusCodeToString(status.code()).c_str(),
               Printable(std::string(status.message())).c_str());
  return 1;
}

}  // namespace
}  // namespace superoffload::ctl

int main(int argc, char** argv) {
  // Its flags are those of another program.
  if (argc > 1 && absl::string_view(argv[1]) == "bench") return superoffload::ctl::RunBench(argc, argv);
  absl::SetProgramUsageMessage(superoffload::ctl::kUsage);
  absl::FlagsUsageConfig usage;
  usage.version_string = [] { return std::string("superoffloadctl " SUPEROFFLOAD_VERSION "\n"); };
  usage.contains_helpshort_flags =
      usage.contains_help_flags = [](absl::string_view file) { return absl::StrContains(file, "client/ctl/"); };
  absl::SetFlagsUsageConfig(usage);
  const std::vector<char*> words = absl::ParseCommandLine(argc, argv);
  return superoffload::ctl::Run({words.begin() + 1, words.end()});
}
