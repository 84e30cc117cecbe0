#include "server/host/config.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>
#include <sched.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/elements/elements.h"
#include "server/engine/record.h"
#include "server/memory/memory_limit.h"
#include "server/topology/topology.h"
#include "superoffload/v1/runtime_directory.h"

namespace superoffload::host {
namespace {

constexpr uint64_t kMinMemoryBudgetBytes = 1 << 20;
constexpr uint32_t kMetricsPort = 9470;  // of the first Superchip's daemon

// Keeps the first error: the later ones are mostly its consequences.
class FirstError final : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, int column, const std::string& message) override {
    if (message_.empty()) message_ = absl::StrCat(line + 1, ":", column + 1, ": ", message);
  }
  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string DefaultRuntimeDirectory() {
  if (std::string path = Environment("RUNTIME_DIRECTORY"); !path.empty()) return path;
  return OwnRuntimeDirectory();
}

uint32_t AvailableCores() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? static_cast<uint32_t>(CPU_COUNT(&set)) : 1;
}

}  // namespace

absl::StatusOr<v1::DaemonConfig> ParseConfig(const std::string& text, const std::string& source) {
  FirstError error;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  v1::DaemonConfig config;
  if (parser.ParseFromString(text, &config)) return config;
  return absl::InvalidArgumentError(
      absl::StrCat(source, ":", error.message(), " (fields are described in config.proto)"));
}

partition::Shares PartitionShares(const v1::DaemonConfig& config) {
  partition::Shares shares;
  const v1::Partition& given = config.partition();
  if (given.optimizer_cache_percent() > 0) shares.optimizer_cache_percent = given.optimizer_cache_percent();
  if (given.optimizer_bandwidth_percent() > 0) shares.optimizer_bandwidth_percent = given.optimizer_bandwidth_percent();
  if (given.trainer_bandwidth_percent() > 0) shares.trainer_bandwidth_percent = given.trainer_bandwidth_percent();
  return shares;
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {  // a FIFO would be waited for
    return absl::InvalidArgumentError(absl::StrCat(path, " is no regular file; check the configuration"));
  }
  std::ifstream file(path, std::ios::binary);
  std::string text;
  std::array<char, 4096> buffer;
  do {
    file.read(buffer.data(), buffer.size());  // unlike an iterator, it throws nothing when the disk fails
    text.append(buffer.data(), static_cast<size_t>(file.gcount()));
  } while (file);
  if (file.is_open() && !file.bad()) return text;
  return absl::NotFoundError(absl::StrCat("cannot read ", path, "; check the configuration"));
}

absl::StatusOr<v1::DaemonConfig> ReadConfig(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return text.status();
  return ParseConfig(*text, path);
}

absl::StatusOr<v1::DaemonConfig> CompleteConfig(v1::DaemonConfig config, uint64_t memory_limit_bytes) {
  if (config.runtime_directory().empty()) config.set_runtime_directory(DefaultRuntimeDirectory());
  if (config.metrics_address().empty()) {
    config.set_metrics_address(absl::StrCat("127.0.0.1:", uint64_t{kMetricsPort} + config.superchip()));
  }
  // A Superchip has one worker per core of the optimizer's share.
  if (config.worker_threads() == 0 && !config.has_superchip()) {
    config.set_worker_threads(topology::DefaultWorkers(AvailableCores()));
  }
  config.set_memory_budget_bytes(memory::BudgetBytes(config.memory_budget_bytes(), memory_limit_bytes));
  if (config.per_user_memory_bytes() == 0) config.set_per_user_memory_bytes(config.memory_budget_bytes());
  if (config.max_optimizers_per_user() == 0) config.set_max_optimizers_per_user(1024);
  if (config.control_calls_per_second() == 0) config.set_control_calls_per_second(500);
  if (config.prefetch_elements() == 0) {
    config.set_prefetch_elements(static_cast<uint32_t>(kernels::PrefetchElements()));
  }
  if (config.prefetch_elements() < 64 || config.prefetch_elements() > 16384) {
    return absl::InvalidArgumentError(
        absl::StrCat("prefetch_elements is ", config.prefetch_elements(), " but must be 64 to 16384"));
  }
  if (config.runtime_directory().front() != '/') {
    return absl::InvalidArgumentError(
        absl::StrCat("runtime_directory is \"", config.runtime_directory(), "\" but must be an absolute path"));
  }
  if (config.worker_threads() > engine::kMaxWorkers) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker_threads is ", config.worker_threads(), " but must be at most ", engine::kMaxWorkers));
  }
  if (config.memory_budget_bytes() < kMinMemoryBudgetBytes) {
    return absl::InvalidArgumentError(absl::StrCat("memory_budget_bytes is ", config.memory_budget_bytes(),
                                                   " but must be at least ", kMinMemoryBudgetBytes));
  }
  const partition::Shares shares = PartitionShares(config);
  for (const uint32_t percent :
       {shares.optimizer_cache_percent, shares.optimizer_bandwidth_percent, shares.trainer_bandwidth_percent}) {
    if (percent > 100) {
      return absl::InvalidArgumentError(absl::StrCat("partition has a share of ", percent, " percent; at most 100"));
    }
  }
  if (config.has_stop_checkpoints()) {
    v1::StopCheckpoints& stop = *config.mutable_stop_checkpoints();
    if (stop.seconds() == 0) stop.set_seconds(600);
    if (stop.directory().empty()) stop.set_directory(Environment("STATE_DIRECTORY"));
    if (stop.directory().empty() || stop.directory().front() != '/') {
      return absl::InvalidArgumentError(
          absl::StrCat("stop_checkpoints.directory is \"", stop.directory(), "\" but must be an absolute path"));
    }
  }
  const v1::RemoteOperators& remote = config.remote_operators();
  if (config.has_remote_operators() && (remote.address().empty() || remote.certificate_file().empty() ||
                                        remote.key_file().empty() || remote.client_authority_file().empty())) {
    return absl::InvalidArgumentError(
        "remote_operators needs address, certificate_file, key_file and client_authority_file; there is no TCP without "
        "mutual TLS");
  }
  return config;
}

}  // namespace superoffload::host
