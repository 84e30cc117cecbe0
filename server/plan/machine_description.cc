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
  Replace(described.network().most_ranks(), machine.network.most_ranks);
}

std::string CurveText(const LinkCurve& curve) {
  const simulator::LinkPoint& first = curve.points.front();
  const simulator::LinkPoint& last = curve.points.back();
  return absl::StrFormat("%.4g GB/s at %.4g MB to %.4g GB/s from %.4g MB on", first.bytes_per_second / 1e9,
                         first.bytes / 1e6, last.bytes_per_second / 1e9, last.bytes / 1e6);
}

std::string Text(double value, double unit, const char* name) { return absl::StrFormat("%.4g%s", value / unit, name); }

struct Number {
  std::string_view field;
  std::string (*text)(const Machine&);  // with its unit
};

constexpr Number kNumbers[] = {
    {"gpu.peak_flops", [](const Machine& m) { return Text(m.gpu.peak_flops, 1e12, " TFLOPS"); }},
    {"gpu.matmul_efficiency", [](const Machine& m) { return Text(m.gpu.matmul_efficiency, 1, ""); }},
    {"gpu.memory_bytes", [](const Machine& m) { return Text(m.gpu.memory_bytes, 1e9, " GB"); }},
    {"gpu.memory_bandwidth", [](const Machine& m) { return Text(m.gpu.memory_bandwidth, 1e9, " GB/s"); }},
    {"gpu.block_traffic",
     [](const Machine& m) { return Text(m.gpu.block_traffic, 1, " bytes per token and hidden element"); }},
    {"gpu.attention_efficiency", [](const Machine& m) { return Text(m.gpu.attention_efficiency, 1, ""); }},
    {"gpu.block_overhead", [](const Machine& m) { return Text(m.gpu.block_overhead, 1e-6, " us"); }},
    {"host.memory_bytes", [](const Machine& m) { return Text(m.host.memory_bytes, 1e9, " GB"); }},
    {"host.cores", [](const Machine& m) { return Text(m.host.cores, 1, ""); }},
    {"host.bandwidth", [](const Machine& m) { return Text(m.host.bandwidth, 1e9, " GB/s"); }},
    {"host.core_bandwidth", [](const Machine& m) { return Text(m.host.core_bandwidth, 1e9, " GB/s"); }},
    {"passes.absorb", [](const Machine& m) { return Text(m.passes.absorb, 1e-9, " ns per element"); }},
    {"passes.publish", [](const Machine& m) { return Text(m.passes.publish, 1e-9, " ns per element"); }},
    {"passes.publish_masters",
     [](const Machine& m) { return Text(m.passes.publish_masters, 1e-9, " ns per element"); }},
    {"h2d", [](const Machine& m) { return CurveText(m.h2d); }},
    {"d2h", [](const Machine& m) { return CurveText(m.d2h); }},
    {"network.node_ranks", [](const Machine& m) { return Text(m.network.node_ranks, 1, ""); }},
    {"network.node_bandwidth", [](const Machine& m) { return Text(m.network.node_bandwidth, 1e9, " GB/s"); }},
    {"network.bandwidth", [](const Machine& m) { return Text(m.network.bandwidth, 1e9, " GB/s"); }},
    {"network.collective_seconds", [](const Machine& m) { return Text(m.network.collective_seconds, 1e-6, " us"); }},
    {"network.agreement_seconds", [](const Machine& m) { return Text(m.network.agreement_seconds, 1e-6, " us"); }},
    {"trainer_cores", [](const Machine& m) { return Text(m.trainer_cores, 1, ""); }},
};

// Empty where there is one number.
std::string RangeText(const simulator::Source& source) {
  if (source.most == 0) return "";
  const bool flops = source.field == "gpu.peak_flops";
  const double unit = flops ? 1e12 : 1e9;
  return absl::StrFormat("; range %.4g to %.4g %s", source.least / unit, source.most / unit, flops ? "TFLOPS" : "GB/s");
}

bool SameCurve(const LinkCurve& left, const LinkCurve& right) {
  return std::equal(left.points.begin(), left.points.end(), right.points.begin(), right.points.end(),
                    [](const simulator::LinkPoint& a, const simulator::LinkPoint& b) {
                      return a.bytes == b.bytes && a.bytes_per_second == b.bytes_per_second;
                    });
}

bool Same(const Machine& left, const Machine& right, const Number& number) {
  if (number.field == "h2d") return SameCurve(left.h2d, right.h2d);
  if (number.field == "d2h") return SameCurve(left.d2h, right.d2h);
  return number.text(left) == number.text(right);
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
  for (const Number& number : kNumbers) {
    if (!network && number.field.starts_with("network.")) continue;
    std::string sentence = absl::StrCat(std::string(number.field), " is ", number.text(machine));
    if (base.ok() && sources.ok() && Same(machine, *base, number)) {
      for (const simulator::Source& source : *sources) {
        if (source.field != number.field) continue;
        absl::StrAppend(&sentence, " (", std::string(simulator::BasisName(source.basis)), ": ",
                        std::string(source.text), RangeText(source), ").");
      }
    } else {
      absl::StrAppend(&sentence, " (given).");
    }
    sentences.push_back(std::move(sentence));
  }
  return sentences;
}

}  // namespace superoffload::plan
