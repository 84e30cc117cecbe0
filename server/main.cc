// superoffloadd: reads the configuration, starts the daemon, runs until SIGTERM or SIGINT. SIGHUP reloads.
#include <grpc/grpc.h>
#include <pthread.h>
#include <pwd.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/checkpoint/command.h"
#include "server/engine/record.h"
#include "server/host/config.h"
#include "server/host/daemon.h"
#include "server/host/descriptor_limit.h"
#include "server/host/keeper.h"
#include "server/host/log.h"
#include "server/host/seat.h"
#include "server/partition/partition.h"
#include "superoffload/v1/exit_status.h"

ABSL_FLAG(std::string, config, "", "path of superoffloadd.textproto; flags override its fields");
ABSL_FLAG(std::string, runtime_directory, "", "directory of the daemon's sockets");
ABSL_FLAG(uint64_t, memory_budget_bytes, 0, "memory that all optimizers together may take");
ABSL_FLAG(uint32_t, worker_threads, 0, "threads that run the optimizer kernels");
ABSL_FLAG(std::string, metrics_address, "", "host:port of the Prometheus exposer, or \"off\"");
ABSL_FLAG(int, superchip, -1, "the Superchip that the daemon belongs to, counted from 0; -1: none");
ABSL_FLAG(bool, prepare_partition, false,
          "as root: make the resctrl groups that a daemon of another user joins, and exit");
ABSL_FLAG(bool, remove_partition, false, "as root: remove them, and exit");
ABSL_FLAG(bool, record_versions, false,
          "print the oldest and the newest format of optimizers' memory that this daemon recovers, and exit");
ABSL_FLAG(bool, keeper, false,
          "start the daemon as a child, keep its optimizers' memory while it is dead and start it again; for places "
          "without systemd");
ABSL_FLAG(bool, exit_on_stdin_eof, false, "stop when standard input ends, as a trainer's private daemon does");

namespace superoffload::host {
namespace {

absl::StatusOr<v1::DaemonConfig> LoadConfig() {
  v1::DaemonConfig config;
  if (const std::string path = absl::GetFlag(FLAGS_config); !path.empty()) {
    absl::StatusOr<v1::DaemonConfig> read = ReadConfig(path);
    if (!read.ok()) return read.status();
    config = *std::move(read);
  }
  if (std::string value = absl::GetFlag(FLAGS_runtime_directory); !value.empty()) config.set_runtime_directory(value);
  if (uint64_t value = absl::GetFlag(FLAGS_memory_budget_bytes); value != 0) config.set_memory_budget_bytes(value);
  if (uint32_t value = absl::GetFlag(FLAGS_worker_threads); value != 0) config.set_worker_threads(value);
  if (std::string value = absl::GetFlag(FLAGS_metrics_address); !value.empty()) config.set_metrics_address(value);
  if (int value = absl::GetFlag(FLAGS_superchip); value >= 0) config.set_superchip(static_cast<uint32_t>(value));
  const uint64_t memory_bytes = SeatMemoryBytes(config);
  return CompleteConfig(std::move(config), memory_bytes);
}

// Ends the process the way an operator would once whoever holds the other end of standard input is gone.
void StopOnStdinEof() {
  std::thread([] {
    char buffer[256];
    while (::read(STDIN_FILENO, buffer, sizeof(buffer)) > 0) {
    }
    ::kill(::getpid(), SIGTERM);
  }).detach();
}

// For the service: its daemon is not root.
int RunPartition(bool prepare) {
  absl::StatusOr<v1::DaemonConfig> config = LoadConfig();
  absl::StatusOr<Seat> seat = config.ok() ? FindSeat(*config) : absl::StatusOr<Seat>(config.status());
  if (!seat.ok() || !seat->superchip) {
    LogError(seat.ok() ? "partitions are of a Superchip: give --superchip" : std::string(seat.status().message()));
    return 2;
  }
  if (config->partition().off()) return 0;
  partition::Place place = seat->partition_place();
  if (const passwd* user = ::getpwnam("superoffload"); user != nullptr) place.daemon_uid = user->pw_uid;
  partition::Partition groups(partition::KernelResctrlFiles(), place);
  const absl::Status status = prepare ? groups.Prepare(PartitionShares(*config)) : groups.Remove();
  if (!status.ok()) LogInfo(std::string(status.message()));
  return status.ok() || !config->partition().required() ? 0 : 1;
}

// The configuration is read anew; one that is wrong changes nothing.
void Reload(Daemon& daemon) {
  absl::StatusOr<v1::DaemonConfig> config = LoadConfig();
  if (!config.ok()) {
    LogError(absl::StrCat("not reloaded: ", config.status().message()));
    return;
  }
  LogInfo(daemon.Reload(*config) ? "reloaded; what else has changed takes a restart, over which optimizers stay"
                                 : "reloaded");
}

absl::StatusOr<std::unique_ptr<Daemon>> Start(const v1::DaemonConfig& config) {
  try {
    // Who starts a private daemon has made its directory, and once that is gone nobody needs the daemon any more.
    return Daemon::Start(config, /*make_directory=*/!absl::GetFlag(FLAGS_exit_on_stdin_eof));
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot start a thread (", error.what(), "); raise the limit of processes and threads"));
  }
}

int Run() {
  // Before any thread starts, so that all inherit the mask and only sigwait sees the signals.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a file size limit is an error of the write that met it

  absl::StatusOr<v1::DaemonConfig> config = LoadConfig();
  if (!config.ok()) {
    LogError(std::string(config.status().message()));
    return 2;
  }
  grpc_init();  // once more than it is shut down: its shutdown waits for ever for a thread that it could not start
  absl::StatusOr<std::unique_ptr<Daemon>> daemon = Start(*config);
  if (!daemon.ok()) {
    LogError(std::string(daemon.status().message()));
    return 1;
  }
  if (absl::GetFlag(FLAGS_exit_on_stdin_eof)) StopOnStdinEof();
  int signal_number = 0;
  while (sigwait(&signals, &signal_number) == 0 && signal_number == SIGHUP) Reload(**daemon);
  LogInfo(absl::StrCat("stopping on signal ", signal_number));
  daemon->reset();
  return 0;
}

}  // namespace
}  // namespace superoffload::host

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("owns optimizer state in host memory and runs optimizer steps for trainers");
  absl::FlagsUsageConfig usage;
  usage.version_string = [] { return std::string("superoffloadd " SUPEROFFLOAD_VERSION "\n"); };
  usage.contains_helpshort_flags =
      usage.contains_help_flags = [](absl::string_view file) { return absl::StrContains(file, "server/"); };
  absl::SetFlagsUsageConfig(usage);
  superoffload::EndWithZeroAfterHelp(argc, argv);
  if (const std::vector<char*> rest = absl::ParseCommandLine(argc, argv); rest.size() > 1) {
    std::fprintf(stderr, "superoffloadd takes flags only, not \"%s\"; see --help\n", rest[1]);
    return 2;
  }
  if (absl::GetFlag(FLAGS_record_versions)) {
    std::printf("%u %u\n", superoffload::engine::Record::kOldestVersion, superoffload::engine::Record::kVersion);
    return 0;
  }
  if (const std::optional<int> status = superoffload::checkpoint::RunCheckpointCommand()) return *status;
  if (absl::GetFlag(FLAGS_prepare_partition)) return superoffload::host::RunPartition(/*prepare=*/true);
  if (absl::GetFlag(FLAGS_remove_partition)) return superoffload::host::RunPartition(/*prepare=*/false);
  superoffload::host::RaiseDescriptorLimit();
  if (absl::GetFlag(FLAGS_keeper)) {
    std::vector<std::string> command{"/proc/self/exe"};
    for (int i = 1; i < argc; ++i) command.push_back(argv[i]);
    command.push_back("--nokeeper");  // the last word wins
    return superoffload::host::RunKeeper(command);
  }
  return superoffload::host::Run();
}
