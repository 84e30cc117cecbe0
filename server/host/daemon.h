// Builds the parts of the daemon in order and takes them down in the reverse order.
#ifndef SUPEROFFLOAD_SERVER_HOST_DAEMON_H_
#define SUPEROFFLOAD_SERVER_HOST_DAEMON_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/checkpoint/scheduler.h"
#include "server/engine/worker_threads.h"
#include "server/host/control_server.h"
#include "server/host/observers.h"
#include "server/host/runtime_directory.h"
#include "server/host/seat.h"
#include "server/host/service_manager.h"
#include "server/host/stop_checkpoints.h"
#include "server/host/watchdog.h"
#include "server/memory/memory_budget.h"
#include "server/memory/shared_memory.h"
#include "server/metrics/metrics.h"
#include "server/optimizer/optimizer_table.h"
#include "server/optimizer/step_report_hub.h"
#include "server/transport/descriptor_server.h"
#include "superoffload/v1/config.pb.h"

namespace superoffload::host {

class Daemon {
 public:
  // Serves from when it returns. `config` is complete. FAILED_PRECONDITION when another daemon serves the same
  // runtime directory, which is made where it is missing if `make_directory`.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const v1::DaemonConfig& config, bool make_directory);

  // Takes over what can change while it runs: allowed_uids, operator_uids, control_calls_per_second,
  // prefetch_elements. Returns whether `config` asks for anything that needs a restart.
  bool Reload(const v1::DaemonConfig& config);

  // Ends attachments, settles optimizers, then stops serving.
  ~Daemon();

 private:
  Daemon(const v1::DaemonConfig& config, Seat seat);
  absl::Status JoinPartition();
  void AdoptOptimizers(std::map<std::string, std::vector<memory::FileDescriptor>> kept);
  absl::Status Serve(Inheritance inheritance);
  absl::StatusOr<memory::FileDescriptor> Listener(memory::FileDescriptor inherited, const char* socket, int type);
  memory::FileDescriptor KeepersListener();
  // Ends attachments and calls, and settles. False when something did not end in time, and goes on.
  bool EndService();
  v1::ServerInfo Info() const;
  absl::StatusOr<v1::Topology> UsedTopology() const;

  v1::DaemonConfig config_;  // as it is applied; changed by Reload only
  const Seat seat_;
  const absl::Time start_time_;
  std::unique_ptr<RuntimeDirectory> directory_;
  memory::MemoryBudget budget_;
  engine::WorkerThreads pool_;
  std::unique_ptr<partition::Partition> partition_;  // where there is one
  metrics::Metrics metrics_;
  optimizer::StepReportHub hub_;
  checkpoint::Scheduler scheduler_;
  Observers observers_;
  ServiceManager service_manager_;
  const StopCheckpoints stop_checkpoints_;
  optimizer::OptimizerTable table_;
  std::string metrics_address_;
  std::unique_ptr<transport::DescriptorServer> descriptors_;
  std::unique_ptr<ControlServer> control_;
  std::unique_ptr<Watchdog> watchdog_;
  // Of unknown names; kept as the store keeps them.
  std::vector<memory::FileDescriptor> unknown_;
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_DAEMON_H_
