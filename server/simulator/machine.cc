#include "server/simulator/machine.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"

namespace superoffload::simulator {
namespace {

using Field = std::pair<std::string_view, double>;

absl::Status CheckPositive(const Machine& machine, std::span<const Field> fields) {
  for (const auto& [field, value] : fields) {
    if (!std::isfinite(value) || value <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(std::string(field), " of machine '", machine.name, "' is ", value, ": it must be above zero"));
    }
  }
  return absl::OkStatus();
}

absl::Status PositiveFields(const Machine& machine) {
  const Field fields[] = {
      {"gpu.peak_flops", machine.gpu.peak_flops},
      {"gpu.matmul_efficiency", machine.gpu.matmul_efficiency},
      {"gpu.attention_efficiency", machine.gpu.attention_efficiency},
      {"gpu.memory_bytes", machine.gpu.memory_bytes},
      {"gpu.memory_bandwidth", machine.gpu.memory_bandwidth},
      {"gpu.block_traffic", machine.gpu.block_traffic},
      {"gpu.block_overhead", machine.gpu.block_overhead},
      {"host.memory_bytes", machine.host.memory_bytes},
      {"host.cores", machine.host.cores},
      {"host.bandwidth", machine.host.bandwidth},
      {"host.core_bandwidth", machine.host.core_bandwidth},
      {"passes.absorb", machine.passes.absorb},
      {"passes.publish", machine.passes.publish},
      {"passes.publish_masters", machine.passes.publish_masters},
  };
  return CheckPositive(machine, fields);
}

absl::Status ValidateCurve(const Machine& machine, std::string_view field, const LinkCurve& curve) {
  double size = 0;
  for (const LinkPoint& point : curve.points) {
    if (!std::isfinite(point.bytes) || point.bytes <= size || !std::isfinite(point.bytes_per_second) ||
        point.bytes_per_second <= 0) {
      return absl::InvalidArgumentError(absl::StrCat(std::string(field), " of machine '", machine.name, "' has a point (",
                                                     point.bytes, " bytes, ", point.bytes_per_second,
                                                     " bytes/s): sizes must grow and bandwidths be above zero"));
    }
    size = point.bytes;
  }
  if (curve.points.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(std::string(field), " of machine '", machine.name, "' has no point: give at least one"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view BasisName(Basis basis) {
  switch (basis) {
    case Basis::kMeasured: return "measured";
    case Basis::kPublished: return "published";
    case Basis::kAssumed: return "assumed";
  }
  return "unknown";
}

double CollectiveSeconds(const NetworkModel& network, uint32_t ranks, double bytes) {
  if (ranks == 1) return 0;
  const double adapters = std::min(network.node_bandwidth, network.node_ranks * network.bandwidth);
  const double received = bytes * (ranks - 1) / ranks;
  return network.collective_seconds + received / (ranks <= network.node_ranks ? network.node_bandwidth : adapters);
}

absl::Status ValidateNetwork(const Machine& machine) {
  const NetworkModel& network = machine.network;
  const Field fields[] = {{"network.node_ranks", network.node_ranks},
                          {"network.node_bandwidth", network.node_bandwidth},
                          {"network.bandwidth", network.bandwidth},
                          {"network.collective_seconds", network.collective_seconds},
                          {"network.agreement_seconds", network.agreement_seconds}};
  return CheckPositive(machine, fields);
}

absl::Status ValidateMachine(const Machine& machine) {
  if (absl::Status status = PositiveFields(machine); !status.ok()) return status;
  if (machine.gpu.matmul_efficiency > 1 || machine.gpu.attention_efficiency > 1) {
    return absl::InvalidArgumentError(absl::StrCat("machine '", machine.name, "' has gpu.matmul_efficiency ",
                                                   machine.gpu.matmul_efficiency, " and gpu.attention_efficiency ",
                                                   machine.gpu.attention_efficiency, ": they are at most 1"));
  }
  if (machine.trainer_cores >= machine.host.cores) {
    return absl::InvalidArgumentError(absl::StrCat("machine '", machine.name, "' gives ", machine.trainer_cores, " of ",
                                                   machine.host.cores,
                                                   " cores to the trainer: leave at least one to the workers"));
  }
  if (absl::Status status = ValidateCurve(machine, "h2d", machine.h2d); !status.ok()) return status;
  return ValidateCurve(machine, "d2h", machine.d2h);
}

}  // namespace superoffload::simulator
