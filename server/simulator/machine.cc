#include "server/simulator/machine.h"

#include <algorithm>
#include <span>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace superoffload::simulator {
namespace {

struct Field {
  std::string_view name;
  double value;
  double least;
  double most;
};

// Far beyond what is built; within them no sum of the simulation leaves the range of its numbers.
constexpr double kMostBytes = 1e16, kLeastBandwidth = 1e3, kMostBandwidth = 1e16, kMostSeconds = 10;
constexpr double kLeast = 1e-18;
constexpr int kMostPoints = 1000;

absl::Status CheckFields(const Machine& machine, std::span<const Field> fields) {
  for (const Field& field : fields) {
    if (!(field.value >= field.least && field.value <= field.most)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s of machine '%s' is %.12g but must be %.12g to %.12g; plan.proto has its unit", field.name,
                          machine.name, field.value, field.least, field.most));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckNumbers(const Machine& machine) {
  const Field fields[] = {
      {"gpu.peak_flops", machine.gpu.peak_flops, 1e6, 1e20},
      {"gpu.matmul_efficiency", machine.gpu.matmul_efficiency, 1e-6, 1},
      {"gpu.attention_efficiency", machine.gpu.attention_efficiency, 1e-6, 1},
      {"gpu.memory_bytes", machine.gpu.memory_bytes, 1, kMostBytes},
      {"gpu.memory_bandwidth", machine.gpu.memory_bandwidth, kLeastBandwidth, kMostBandwidth},
      {"gpu.block_traffic", machine.gpu.block_traffic, kLeast, 1e6},
      {"gpu.block_overhead", machine.gpu.block_overhead, kLeast, kMostSeconds},
      {"host.memory_bytes", machine.host.memory_bytes, 1, kMostBytes},
      {"host.cores", double(machine.host.cores), 1, 1 << 16},
      {"host.bandwidth", machine.host.bandwidth, kLeastBandwidth, kMostBandwidth},
      {"host.core_bandwidth", machine.host.core_bandwidth, kLeastBandwidth, kMostBandwidth},
      {"passes.absorb", machine.passes.absorb, kLeast, 1e-3},
      {"passes.publish", machine.passes.publish, kLeast, 1e-3},
      {"passes.publish_masters", machine.passes.publish_masters, kLeast, 1e-3},
  };
  return CheckFields(machine, fields);
}

absl::Status ValidateCurve(const Machine& machine, std::string_view field, const LinkCurve& curve) {
  if (curve.points.empty() || curve.points.size() > kMostPoints) {
    return absl::InvalidArgumentError(absl::StrCat(std::string(field), " of machine '", machine.name, "' has ",
                                                   curve.points.size(), " points but must have 1 to ", kMostPoints));
  }
  double size = 0;
  for (const LinkPoint& point : curve.points) {
    const Field fields[] = {
        {"the size of a point of a link", point.bytes, 1, kMostBytes},
        {"the bandwidth of a point of a link", point.bytes_per_second, kLeastBandwidth, kMostBandwidth}};
    if (absl::Status status = CheckFields(machine, fields); !status.ok()) return status;
    if (point.bytes <= size) {
      return absl::InvalidArgumentError(absl::StrCat(std::string(field), " of machine '", machine.name,
                                                     "' has a point of ", point.bytes, " bytes behind one of ", size,
                                                     ": sizes must grow"));
    }
    size = point.bytes;
  }
  return absl::OkStatus();
}

}  // namespace

GpuModel WithPapersTrainer(GpuModel gpu) {
  gpu.matmul_efficiency = 0.60;
  gpu.attention_efficiency = 0.35;  // heads of 64 to 256; assumed, not fitted
  gpu.block_traffic = 480;
  gpu.block_overhead = 2.5e-3;
  return gpu;
}

std::string_view BasisName(Basis basis) {
  switch (basis) {
    case Basis::kMeasured:
      return "measured";
    case Basis::kPublished:
      return "published";
    case Basis::kAssumed:
      return "assumed";
  }
  return "unknown";
}

PassCosts CostsOf(const PassCosts& costs, const kernels::Algorithm& algorithm) {
  PassCosts own = costs;
  if (algorithm.block_elements > 1) {
    own.absorb *= costs.coded_absorb;
    own.publish *= costs.coded_publish;
  }
  if (algorithm.rounds_moments) own.absorb += costs.rounding * costs.absorb;
  if (algorithm.rounds_masters) {
    own.absorb += costs.rounding * costs.absorb;
    own.publish += costs.rounding * costs.absorb;
  }
  return own;
}

double CollectiveSeconds(const NetworkModel& network, uint32_t ranks, double bytes) {
  if (ranks == 1) return 0;
  const double adapters = std::min(network.node_bandwidth, network.node_ranks * network.bandwidth);
  const double received = bytes * (ranks - 1) / ranks;
  return network.collective_seconds + received / (ranks <= network.node_ranks ? network.node_bandwidth : adapters);
}

absl::Status ValidateNetwork(const Machine& machine) {
  const NetworkModel& network = machine.network;
  const Field fields[] = {{"network.node_ranks", double(network.node_ranks), 1, 1 << 16},
                          {"network.node_bandwidth", network.node_bandwidth, kLeastBandwidth, kMostBandwidth},
                          {"network.bandwidth", network.bandwidth, kLeastBandwidth, kMostBandwidth},
                          {"network.collective_seconds", network.collective_seconds, kLeast, kMostSeconds},
                          {"network.agreement_seconds", network.agreement_seconds, kLeast, kMostSeconds},
                          {"network.most_ranks", double(network.most_ranks), 1, 1 << 16}};
  return CheckFields(machine, fields);
}

absl::Status ValidateMachine(const Machine& machine) {
  if (absl::Status status = CheckNumbers(machine); !status.ok()) return status;
  if (machine.trainer_cores >= machine.host.cores) {
    return absl::InvalidArgumentError(absl::StrCat("machine '", machine.name, "' gives ", machine.trainer_cores, " of ",
                                                   machine.host.cores,
                                                   " cores to the trainer: leave at least one to the workers"));
  }
  if (absl::Status status = ValidateCurve(machine, "h2d", machine.h2d); !status.ok()) return status;
  return ValidateCurve(machine, "d2h", machine.d2h);
}

}  // namespace superoffload::simulator
