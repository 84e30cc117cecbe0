// The text of superoffloadd.textproto: anything is either refused with a sentence or a configuration within its ranges.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "server/host/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::StatusOr<superoffload::v1::DaemonConfig> config =
      superoffload::host::ParseConfig(std::string(reinterpret_cast<const char*>(data), size), "fuzz");
  if (!config.ok()) {
    if (config.status().message().find("fuzz:") == std::string::npos) std::abort();
    return 0;
  }
  const absl::StatusOr<superoffload::v1::DaemonConfig> complete =
      superoffload::host::CompleteConfig(*config, uint64_t{1} << 34);
  if (!complete.ok()) return 0;
  if (complete->worker_threads() == 0 || complete->memory_budget_bytes() == 0 ||
      complete->runtime_directory().front() != '/') {
    std::abort();
  }
  return 0;
}
