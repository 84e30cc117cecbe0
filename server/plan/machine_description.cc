#include "server/plan/machine_description.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace superoffload::plan {
namespace {

using simulator::LinkCurve;
using simulator::Machine;

// Zero leaves what is there.
template <typename Number>
void Replace(Number given, Number& number) {
  if (given != 0) number = given;
}

void Replace(const google::protobuf::RepeatedPtrField<v1::LinkPoint>& given, LinkCurve& curve) {
  if (given.empty()) return;
  curve.points.clear();
  for (const v1::LinkPoint& point : given) curve.points.push_back({point.bytes(), point.bytes_per_second()});
}

void Overlay(const v1::MachineDescription& described, Machine& machine) {
  if (!described.name().empty()) machine.name = described.name();
  Replace(described.gpu().peak_flops(), machine.gpu.peak_flops);
  Replace(described.gpu().matmul_efficiency(), machine.gpu.matmul_efficiency);
  Replace(described.gpu().memory_bytes(), machine.gpu.memory_bytes);
  Replace(described.gpu().memory_bandwidth(), machine.gpu.memory_bandwidth);
  Replace(described.gpu().block_traffic(), machine.gpu.block_traffic);
  Replace(described.gpu().attention_efficiency(), machine.gpu.attention_efficiency);
  Replace(described.gpu().block_overhead(), machine.gpu.block_overhead);
  Replace(described.host().memory_bytes(), machine.host.memory_bytes);
  if (described.host().cores() != 0) {
    machine.host.cores = described.host().cores();
    machine.trainer_cores = std::max(1u, machine.host.cores / 10);  // as the daemon shares them
  }
  Replace(described.host().bandwidth(), machine.host.bandwidth);
  Replace(described.host().core_bandwidth(), machine.host.core_bandwidth);
  Replace(described.host().trainer_cores(), machine.trainer_cores);
  Replace(described.passes().absorb(), machine.passes.absorb);
  Replace(described.passes().publish(), machine.passes.publish);
  Replace(described.passes().publish_masters(), machine.passes.publish_masters);
  Replace(described.host_to_device(), machine.h2d);
  Replace(described.device_to_host(), machine.d2h);
  Replace(described.network().node_ranks(), machine.network.node_ranks);
  Replace(described.network().node_bandwidth(), machine.network.node_bandwidth);
  Replace(described.network().bandwidth(), machine.network.bandwidth);
  Replace(described.network().collective_seconds(), machine.network.collective_seconds);
  Replace(described.network().agreement_seconds(), machine.network.agreement_seconds);
}

std::string CurveText(const LinkCurve& curve) {
  const simulator::LinkPoint& first = curve.points.front();
  const simulator::LinkPoint& last = curve.points.back();
  return absl::StrFormat("%.4g GB/s at %.4g MB to %.4g GB/s from %.4g MB on", first.bytes_per_second / 1e9,
                         first.bytes / 1e6, last.bytes_per_second / 1e9, last.bytes / 1e6);
}

// With its unit; empty for a field that is not known here.
std::string ValueText(const Machine& machine, std::string_view field) {
  const auto text = [](double value, double unit, const char* name) {
    return absl::StrFormat("%.4g%s", value / unit, name);
  };
  if (field == "gpu.peak_flops") return text(machine.gpu.peak_flops, 1e12, " TFLOPS");
  if (field == "gpu.matmul_efficiency") return text(machine.gpu.matmul_efficiency, 1, "");
  if (field == "gpu.memory_bytes") return text(machine.gpu.memory_bytes, 1e9, " GB");
  if (field == "gpu.memory_bandwidth") return text(machine.gpu.memory_bandwidth, 1e9, " GB/s");
  if (field == "gpu.block_traffic") return text(machine.gpu.block_traffic, 1, " bytes per token and hidden element");
  if (field == "gpu.attention_efficiency") return text(machine.gpu.attention_efficiency, 1, "");
  if (field == "gpu.block_overhead") return text(machine.gpu.block_overhead, 1e-6, " us");
  if (field == "host.memory_bytes") return text(machine.host.memory_bytes, 1e9, " GB");
  if (field == "host.cores") return text(machine.host.cores, 1, "");
  if (field == "host.bandwidth") return text(machine.host.bandwidth, 1e9, " GB/s");
  if (field == "host.core_bandwidth") return text(machine.host.core_bandwidth, 1e9, " GB/s");
  if (field == "passes.absorb") return text(machine.passes.absorb, 1e-9, " ns per element");
  if (field == "passes.publish") return text(machine.passes.publish, 1e-9, " ns per element");
  if (field == "passes.publish_masters") return text(machine.passes.publish_masters, 1e-9, " ns per element");
  if (field == "h2d") return CurveText(machine.h2d);
  if (field == "d2h") return CurveText(machine.d2h);
  if (field == "network.node_ranks") return text(machine.network.node_ranks, 1, "");
  if (field == "network.node_bandwidth") return text(machine.network.node_bandwidth, 1e9, " GB/s");
  if (field == "network.bandwidth") return text(machine.network.bandwidth, 1e9, " GB/s");
  if (field == "network.collective_seconds") return text(machine.network.collective_seconds, 1e-6, " us");
  if (field == "network.agreement_seconds") return text(machine.network.agreement_seconds, 1e-6, " us");
  if (field == "trainer_cores") return text(machine.trainer_cores, 1, "");
  return "";
}

constexpr std::string_view kFields[] = {"gpu.peak_flops",
                                        "gpu.matmul_efficiency",
                                        "gpu.memory_bytes",
                                        "gpu.memory_bandwidth",
                                        "gpu.block_traffic",
                                        "gpu.attention_efficiency",
                                        "gpu.block_overhead",
                                        "host.memory_bytes",
                                        "host.cores",
                                        "host.bandwidth",
                                        "host.core_bandwidth",
                                        "passes.absorb",
                                        "passes.publish",
                                        "passes.publish_masters",
                                        "h2d",
                                        "d2h",
                                        "network.node_ranks",
                                        "network.node_bandwidth",
                                        "network.bandwidth",
                                        "network.collective_seconds",
                                        "network.agreement_seconds",
                                        "trainer_cores"};

bool SameCurve(const LinkCurve& left, const LinkCurve& right) {
  return std::equal(left.points.begin(), left.points.end(), right.points.begin(), right.points.end(),
                    [](const simulator::LinkPoint& a, const simulator::LinkPoint& b) {
                      return a.bytes == b.bytes && a.bytes_per_second == b.bytes_per_second;
                    });
}

bool Same(const Machine& left, const Machine& right, std::string_view field) {
  if (field == "h2d") return SameCurve(left.h2d, right.h2d);
  if (field == "d2h") return SameCurve(left.d2h, right.d2h);
  return ValueText(left, field) == ValueText(right, field);
}

}  // namespace

absl::StatusOr<DescribedMachine> ToMachine(const v1::PlanRequest& request) {
  if (request.has_machine() == !request.machine_name().empty()) {
    return absl::InvalidArgumentError("give either the name of a machine or its description");
  }
  DescribedMachine described;
  described.known = request.has_machine() ? request.machine().like() : request.machine_name();
  if (!described.known.empty()) {
    absl::StatusOr<Machine> known = simulator::FindMachine(described.known);
    if (!known.ok()) return known.status();
    described.machine = *std::move(known);
  }
  if (request.has_machine()) Overlay(request.machine(), described.machine);
  if (absl::Status status = simulator::ValidateMachine(described.machine); !status.ok()) {
    if (!described.known.empty()) return status;
    return absl::InvalidArgumentError(
        absl::StrCat(status.message(), "; `like` names a machine to take what is absent from"));
  }
  return described;
}

std::vector<std::string> MachineSentences(const Machine& machine, const std::string& known, bool network) {
  std::vector<std::string> sentences;
  const absl::StatusOr<Machine> base = known.empty() ? absl::NotFoundError("") : simulator::FindMachine(known);
  const auto sources = known.empty() ? absl::NotFoundError("") : simulator::SourcesOf(known);
  for (const std::string_view field : kFields) {
    if (!network && field.starts_with("network.")) continue;
    std::string sentence = absl::StrCat(std::string(field), " is ", ValueText(machine, field));
    if (base.ok() && sources.ok() && Same(machine, *base, field)) {
      for (const simulator::Source& source : *sources) {
        if (source.field != field) continue;
        absl::StrAppend(&sentence, " (", std::string(simulator::BasisName(source.basis)), ": ",
                        std::string(source.text), ").");
      }
    } else {
      absl::StrAppend(&sentence, " (given).");
    }
    sentences.push_back(std::move(sentence));
  }
  return sentences;
}

}  // namespace superoffload::plan
