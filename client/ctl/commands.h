// The commands of superoffloadctl. main.cc has the command line and the table of all commands; each group of them is in
// the file named here.
#ifndef SUPEROFFLOAD_CLIENT_CTL_COMMANDS_H_
#define SUPEROFFLOAD_CLIENT_CTL_COMMANDS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "superoffload/client.hpp"

namespace superoffload::ctl {

// The words after the command, and the flags, which `superoffloadctl --help` describes.
struct Arguments {
  std::vector<std::string> operands;
  std::string endpoint;
  TlsFiles tls;
  bool json = false;
  bool all = false;
  std::string root;
  uint32_t superchip = 0;
  bool yes = false;
  std::optional<uint32_t> uid;
  uint64_t step = 0;
  bool verify = false;
  std::string source;
  std::string dtype;
  uint64_t shard_bytes = 0;
  uint64_t count = 0;

  // The first operand of a command about one optimizer, as the daemon takes it; empty when it was not given.
  std::string name() const { return operands.empty() ? "" : operands.front(); }
};

// A command that asks one daemon.
struct Command {
  std::string_view name;
  std::string_view operands;  // as the usage shows them
  size_t min_operands;
  size_t max_operands;
  bool names_optimizer;  // the first operand is an optimizer's name
  absl::Status (*run)(Client& client, const Arguments& arguments);
};

// A command that can do without a daemon. It returns an exit status, and has said why it is not 0.
struct LocalCommand {
  std::string_view name;
  size_t operands;
  int (*run)(const Arguments& arguments);
  bool (*meant)(const Arguments& arguments) = nullptr;  // where a Command has the same name; null: always
};

// daemon_commands.cc
absl::Status Info(Client& client, const Arguments& arguments);
absl::Status CheckUpgrade(Client& client, const Arguments& arguments);
int Version(const Arguments& arguments);

// machine_commands.cc, doctor.cc
absl::Status Topology(Client& client, const Arguments& arguments);
absl::Status Pin(Client& client, const Arguments& arguments);
int Doctor(const Arguments& arguments);
// Becomes "adam_bench --tune" with the words after "bench"; returns an exit status when that cannot be.
int RunBench(int argc, char** argv);

// plan.cc: with the words after "plan", of which plan_arguments.h makes a request. Asks superoffload-plan, and starts
// no daemon. Returns an exit status: 1 when it cannot be asked or has no step to draw, 2 when the command line, a file
// or the request is wrong, 3 when what is planned does not fit.
int RunPlan(int argc, char** argv);

// optimizer_commands.cc
absl::Status List(Client& client, const Arguments& arguments);
absl::Status Describe(Client& client, const Arguments& arguments);
absl::Status Watch(Client& client, const Arguments& arguments);
absl::Status Settle(Client& client, const Arguments& arguments);
absl::Status Delete(Client& client, const Arguments& arguments);
// Of all daemons at the endpoint, which then has commas; else of all of this machine that are where they are by
// default. One that does not answer is named on stderr, and the others are listed; a failure when there is none.
int ListAll(const Arguments& arguments);

// checkpoint_commands.cc. The local ones read checkpoints as they lie on disk, with the daemon's program.
absl::Status Checkpoint(Client& client, const Arguments& arguments);
absl::Status Restore(Client& client, const Arguments& arguments);
absl::Status ExportDamaged(Client& client, const Arguments& arguments);
int Inspect(const Arguments& arguments);
int ExportModel(const Arguments& arguments);

// run_commands.cc: of ranks of a run.
absl::Status Report(Client& client, const Arguments& arguments);
absl::Status Resolve(Client& client, const Arguments& arguments);

// keeper_commands.cc: what a daemon's keeper holds, also while no daemon can start.
int Kept(const Arguments& arguments);
int DropKept(const Arguments& arguments);

// service_commands.cc: from a wheel to a service of systemd, and back. They print what they will do, and do it once it
// is wanted; done again, they do nothing.
int InstallService(const Arguments& arguments);
int UninstallService(const Arguments& arguments);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_COMMANDS_H_
