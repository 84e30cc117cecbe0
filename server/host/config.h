// The daemon's configuration: superoffloadd.textproto, overridden by flags, completed by defaults.
#ifndef SUPEROFFLOAD_SERVER_HOST_CONFIG_H_
#define SUPEROFFLOAD_SERVER_HOST_CONFIG_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/partition/partition.h"
#include "superoffload/v1/config.pb.h"

namespace superoffload::host {

// INVALID_ARGUMENT with `source`, line, column and field of what is wrong.
absl::StatusOr<v1::DaemonConfig> ParseConfig(const std::string& text, const std::string& source);

partition::Shares PartitionShares(const v1::DaemonConfig& config);

// The whole file. NOT_FOUND, INVALID_ARGUMENT when it is a directory, a FIFO or a device.
absl::StatusOr<std::string> ReadFile(const std::string& path);

// Errors as of ReadFile and ParseConfig.
absl::StatusOr<v1::DaemonConfig> ReadConfig(const std::string& path);

// Fills what is left empty from the machine and the environment, then checks ranges. `memory_limit_bytes`: all that the
// daemon can use (seat.h). INVALID_ARGUMENT names the field.
absl::StatusOr<v1::DaemonConfig> CompleteConfig(v1::DaemonConfig config, uint64_t memory_limit_bytes);

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_CONFIG_H_
