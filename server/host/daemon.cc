#include "server/host/daemon.h"

#include <google/protobuf/util/message_differencer.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "kernels/algorithm.h"
#include "kernels/elements/elements.h"
#include "server/host/config.h"
#include "server/host/descriptor_limit.h"
#include "server/host/log.h"
#include "server/memory/thread.h"
#include "server/rpc/durable.h"
#include "superoffload/v1/keeper_socket.h"
#include "superoffload/v1/runtime_directory.h"

namespace superoffload::host {
namespace {

// For the recovery of one optimizer.
constexpr absl::Duration kAdoptTime = absl::Minutes(10);

// For the end of everything that is under way, settling included, of which the largest takes seconds.
constexpr absl::Duration kShutdownTime = absl::Seconds(30);
constexpr absl::Duration kShutdownStep = absl::Seconds(1);

transport::AccessPolicy Access(const v1::DaemonConfig& config) {
  return {{config.allowed_uids().begin(), config.allowed_uids().end()},
          {config.operator_uids().begin(), config.operator_uids().end()}};
}

// Those that are started later follow the thread that starts them.
std::vector<pid_t> OwnThreads() {
  std::vector<pid_t> threads;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", error)) {
    threads.push_back(static_cast<pid_t>(std::stol(entry.path().filename())));
  }
  return threads;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const v1::DaemonConfig& config, bool make_directory) {
  kernels::SetPrefetchElements(config.prefetch_elements());
  absl::StatusOr<Seat> seat = FindSeat(config);
  if (!seat.ok()) return seat.status();
  std::unique_ptr<Daemon> daemon(new Daemon(config, *std::move(seat)));
  Inheritance inheritance = daemon->service_manager_.TakeInheritance();
  absl::StatusOr<std::unique_ptr<RuntimeDirectory>> directory =
      RuntimeDirectory::Claim(config.runtime_directory(), make_directory, std::move(inheritance.succession));
  if (!directory.ok()) return directory.status();
  daemon->directory_ = *std::move(directory);
  if (absl::Status status = daemon->service_manager_.KeepSuccession(daemon->directory_->succession()); !status.ok()) {
    LogWarning(absl::StrCat("another daemon may take ", config.runtime_directory(),
                            " when this one dies: ", status.message()));
  }
  if (absl::Status status = daemon->JoinPartition(); !status.ok()) return status;
  daemon->AdoptOptimizers(std::move(inheritance.kept));
  daemon->stop_checkpoints_.Restore(daemon->table_, daemon->scheduler_);
  if (absl::Status status = daemon->Serve(std::move(inheritance)); !status.ok()) return status;
  daemon->service_manager_.Ready(daemon->KeepersListener());
  daemon->watchdog_ = std::make_unique<Watchdog>(&daemon->pool_);
  return daemon;
}

Daemon::Daemon(const v1::DaemonConfig& config, Seat seat)
    : config_(config),
      seat_(std::move(seat)),
      start_time_(absl::Now()),
      budget_(config.memory_budget_bytes(), config.per_user_memory_bytes()),
      pool_(config.worker_threads() > 0 ? config.worker_threads() : seat_.shares.optimizer.size(),
            seat_.shares.optimizer),
      metrics_({.version = SUPEROFFLOAD_VERSION,
                .kernel_target = std::string(kernels::KernelTarget()),
                .worker_threads = pool_.worker_count(),
                .memory_budget_bytes = config.memory_budget_bytes(),
                .labels_are_names = config.metric_labels() == v1::METRIC_LABELS_NAMES}),
      scheduler_(&observers_),
      observers_(&metrics_, &hub_, &scheduler_, &stop_checkpoints_),
      stop_checkpoints_(config.stop_checkpoints().directory(), absl::Seconds(config.stop_checkpoints().seconds()),
                        [this](absl::Duration time) { service_manager_.ExtendTimeout(time); }),
      table_({.per_user = config.max_optimizers_per_user(), .total = MostOptimizers()}, seat_.binding, &budget_, &pool_,
             &observers_, &service_manager_) {}

absl::Status Daemon::JoinPartition() {
  if (!seat_.superchip || config_.partition().off()) return absl::OkStatus();
  auto groups = std::make_unique<partition::Partition>(partition::KernelResctrlFiles(), seat_.partition_place());
  // Not root: somebody who is has made the groups (--prepare_partition).
  absl::Status status = ::geteuid() == 0 ? groups->Prepare(PartitionShares(config_)) : absl::OkStatus();
  if (status.ok()) status = groups->Join(OwnThreads());
  if (status.ok()) {
    LogInfo("cache and memory bandwidth are partitioned between trainers and the optimizer");
    partition_ = std::move(groups);
    return absl::OkStatus();
  }
  if (config_.partition().required()) return status;
  LogInfo(absl::StrCat("cache and memory bandwidth are not partitioned: ", status.message()));
  return absl::OkStatus();
}

void Daemon::AdoptOptimizers(std::map<std::string, std::vector<memory::FileDescriptor>> kept) {
  for (auto& [name, fds] : kept) {
    service_manager_.ExtendTimeout(kAdoptTime);
    const absl::StatusOr<optimizer::OptimizerId> id = optimizer::OptimizerTable::IdInStore(name);
    if (!id.ok()) {
      LogError(std::string(id.status().message()));
      for (memory::FileDescriptor& fd : fds) unknown_.push_back(std::move(fd));
      continue;
    }
    if (absl::Status adopted = rpc::Adopt(table_, scheduler_, *id, std::move(fds)); adopted.ok()) {
      LogInfo(absl::StrCat("recovered optimizer \"", id->name, "\" at its last committed step"));
    } else {
      LogError(absl::StrCat("cannot recover optimizer \"", id->name, "\" of uid ", id->uid,
                            ", whose memory and name stay taken: ", adopted.message()));
    }
  }
}

absl::Status Daemon::Serve(Inheritance inheritance) {
  absl::StatusOr<memory::FileDescriptor> descriptor_listener =
      Listener(std::move(inheritance.descriptor_socket), kDescriptorSocket, SOCK_SEQPACKET);
  if (!descriptor_listener.ok()) return descriptor_listener.status();
  absl::StatusOr<std::unique_ptr<transport::DescriptorServer>> descriptors = transport::DescriptorServer::Serve(
      *std::move(descriptor_listener), directory_->PathOf(kDescriptorSocket), Access(config_),
      DescriptorConnectionLimits(),
      [this](const transport::Peer& peer, uint64_t epoch) { return table_.Descriptors(peer, epoch); },
      [this](const transport::Peer& peer, uint64_t epoch, uint64_t number) { return table_.Lent(peer, epoch, number); },
      [this](const transport::Peer& peer, const superoffload_device_request& request,
             std::span<const int> descriptors) { return table_.MapDevice(peer, request, descriptors); },
      [this](const transport::Peer& peer) { table_.OnSessionEnd(peer); });
  if (!descriptors.ok()) return descriptors.status();
  descriptors_ = *std::move(descriptors);
  if (config_.metrics_address() != "off") {
    absl::StatusOr<std::string> bound = metrics_.Expose(config_.metrics_address(), [this] {
      return metrics::DaemonGauges{
          table_.size(),        table_.attachments(),
          budget_.used(),       table_.Elements(),
          table_.BytesByNode(), partition_ == nullptr ? std::vector<partition::Reading>() : partition_->Read(),
          table_.GpuUses()};
    });
    if (bound.ok()) {
      metrics_address_ = *bound;
    } else {
      LogWarning(absl::StrCat("no metrics: ", bound.status().message()));  // optimizers are worth more
    }
  }
  absl::StatusOr<memory::FileDescriptor> control_listener =
      Listener(std::move(inheritance.control_socket), kControlSocket, SOCK_STREAM);
  if (!control_listener.ok()) return control_listener.status();
  absl::StatusOr<std::unique_ptr<ControlServer>> control = ControlServer::Serve(
      config_, *std::move(control_listener),
      {&table_, &scheduler_, &hub_, &observers_, descriptors_.get(), [this] { return Info(); }, UsedTopology()});
  if (!control.ok()) return control.status();
  control_ = *std::move(control);
  LogInfo(absl::StrFormat("superoffloadd %s serves unix:%s with %d workers on %s, budget %.1f GiB, metrics %s",
                          SUPEROFFLOAD_VERSION, directory_->PathOf(kControlSocket), pool_.worker_count(),
                          std::string(kernels::KernelTarget()),
                          static_cast<double>(config_.memory_budget_bytes()) / (1 << 30),
                          metrics_address_.empty() ? "off" : "http://" + metrics_address_ + "/metrics"));
  return absl::OkStatus();
}

// Inherited, or made now: until then trainers see the socket of the daemon before this one, and know that a successor
// is on its way.
absl::StatusOr<memory::FileDescriptor> Daemon::Listener(memory::FileDescriptor inherited, const char* socket,
                                                        int type) {
  if (inherited.valid()) return inherited;
  return directory_->Listen(socket, type);
}

// Invalid when there is no keeper, or its socket cannot be made.
memory::FileDescriptor Daemon::KeepersListener() {
  if (!service_manager_.has_keeper()) return {};
  absl::StatusOr<memory::FileDescriptor> listener = directory_->Listen(SUPEROFFLOAD_KEEPER_SOCKET, SOCK_STREAM);
  if (listener.ok()) return *std::move(listener);
  LogWarning(absl::StrCat("superoffloadctl cannot reach the keeper: ", listener.status().message()));
  return {};
}

bool Daemon::Reload(const v1::DaemonConfig& config) {
  descriptors_->SetAccess(Access(config));
  control_->SetCallsPerSecond(config.control_calls_per_second());
  kernels::SetPrefetchElements(config.prefetch_elements());
  *config_.mutable_allowed_uids() = config.allowed_uids();
  *config_.mutable_operator_uids() = config.operator_uids();
  config_.set_control_calls_per_second(config.control_calls_per_second());
  config_.set_prefetch_elements(config.prefetch_elements());
  return !google::protobuf::util::MessageDifferencer::Equals(config_, config);
}

bool Daemon::EndService() {
  const auto ended = std::make_shared<absl::Notification>();  // shared with a thread that may not end
  const auto end = [this, ended] {
    scheduler_.Shutdown();
    table_.Shutdown();
    control_->Shutdown();
    ended->Notify();
  };
  absl::StatusOr<std::thread> thread = memory::StartThread("so-shutdown", end);
  if (!thread.ok()) {
    end();
    return true;
  }
  for (absl::Duration waited; waited < kShutdownTime; waited += kShutdownStep) {
    service_manager_.ExtendTimeout(2 * kShutdownStep);
    if (!ended->WaitForNotificationWithTimeout(kShutdownStep)) continue;
    thread->join();
    return true;
  }
  LogWarning(absl::StrCat("calls have not ended in ", absl::FormatDuration(kShutdownTime),
                          ", probably because a file system does not answer; stopping without them"));
  thread->detach();
  return false;
}

Daemon::~Daemon() {
  service_manager_.Stopping();
  if (control_ != nullptr) {
    watchdog_.reset();
    control_->BeginShutdown();
    const bool ended = EndService();
    directory_->RemoveSockets();
    if (!service_manager_.RestartsUs()) stop_checkpoints_.Write(table_.List({.is_operator = true}));
    LogInfo(absl::StrCat("stopped; ", table_.size(), " optimizers were settled"));
    service_manager_.Stopped();
    if (!ended) ::_exit(0);  // a thread still uses what would be destroyed here
  }
  metrics_.Close();
  if (partition_ != nullptr && ::geteuid() == 0) {
    if (absl::Status status = partition_->Remove(); !status.ok()) LogWarning(std::string(status.message()));
  }
  descriptors_.reset();
}

absl::StatusOr<v1::Topology> Daemon::UsedTopology() const {
  if (!seat_.topology.ok()) return seat_.topology.status();
  v1::Topology topology = rpc::ToProto(*seat_.topology);
  if (seat_.superchip) topology.set_used_superchip(*seat_.superchip);
  topology.mutable_trainer_cpus()->Assign(seat_.shares.trainer.begin(), seat_.shares.trainer.end());
  topology.mutable_optimizer_cpus()->Assign(seat_.shares.optimizer.begin(), seat_.shares.optimizer.end());
  return topology;
}

v1::ServerInfo Daemon::Info() const {
  v1::ServerInfo info;
  info.set_version(SUPEROFFLOAD_VERSION);
  info.set_descriptor_socket(descriptors_->path());
  info.set_metrics_address(metrics_address_);
  info.set_worker_threads(static_cast<uint32_t>(pool_.worker_count()));
  info.set_kernel_target(std::string(kernels::KernelTarget()));
  info.set_memory_budget_bytes(config_.memory_budget_bytes());
  info.set_memory_used_bytes(budget_.used().total_bytes());
  info.set_optimizers(static_cast<uint32_t>(table_.size()));
  info.set_attachments(static_cast<uint32_t>(table_.attachments()));
  info.set_survives_restarts(service_manager_.present());
  std::set<uint32_t> record_versions;
  for (const optimizer::OptimizerPtr& optimizer : table_.List({.is_operator = true})) {
    record_versions.insert(optimizer->record_version());
  }
  info.mutable_record_versions()->Assign(record_versions.begin(), record_versions.end());
  for (const kernels::Algorithm* algorithm : kernels::Algorithms()) *info.add_algorithms() = rpc::ToProto(*algorithm);
  info.set_wire_version(SUPEROFFLOAD_WIRE_VERSION);
  info.set_oldest_record_version(engine::Record::kOldestVersion);
  info.set_record_version(engine::Record::kVersion);
  info.mutable_start_time()->set_seconds(absl::ToUnixSeconds(start_time_));
  return info;
}

}  // namespace superoffload::host
