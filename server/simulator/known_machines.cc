#include "server/simulator/known_machines.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/check.h"

namespace superoffload::simulator {
namespace {

const std::vector<KnownMachine>& All() {
  static const auto* const all = [] {
    auto* const machines = new std::vector<KnownMachine>(KnownSuperchips());
    for (KnownMachine& machine : KnownServersAndDesktops()) machines->push_back(std::move(machine));
    return machines;
  }();
  return *all;
}

absl::StatusOr<const KnownMachine*> Find(std::string_view name) {
  for (const KnownMachine& known : All()) {
    if (known.machine.name == name) return &known;
  }
  std::string names;
  for (const KnownMachine& known : All()) absl::StrAppend(&names, names.empty() ? "" : ", ", known.machine.name);
  return absl::NotFoundError(absl::StrCat("no machine is called '", std::string(name), "'; take one of ", names,
                                          ", or a file that superoffloadctl bench wrote"));
}

// Of the fields that have ranges. A link is known by what its largest copies reach.
double ValueOf(const Machine& machine, std::string_view field) {
  if (field == "host.bandwidth") return machine.host.bandwidth;
  if (field == "gpu.peak_flops") return machine.gpu.peak_flops;
  if (field == "h2d") return machine.h2d.points.back().bytes_per_second;
  SUPEROFFLOAD_CHECK(field == "d2h", "a range of ", std::string(field));
  return machine.d2h.points.back().bytes_per_second;
}

void SetValue(Machine& machine, std::string_view field, double value) {
  const double factor = value / ValueOf(machine, field);
  if (field == "host.bandwidth") machine.host.bandwidth = value;
  if (field == "gpu.peak_flops") machine.gpu.peak_flops = value;
  if (field != "h2d" && field != "d2h") return;
  for (LinkPoint& point : (field == "h2d" ? machine.h2d : machine.d2h).points) point.bytes_per_second *= factor;
}

}  // namespace

std::vector<Source> WithSources(std::vector<Source> sources, const std::vector<Source>& changed) {
  for (const Source& source : changed) {
    const auto same =
        std::find_if(sources.begin(), sources.end(), [&](const Source& other) { return other.field == source.field; });
    same == sources.end() ? sources.push_back(source) : static_cast<void>(*same = source);
  }
  return sources;
}

std::vector<Source> CommonSources() {
  return {
      {"gpu.attention_efficiency", Basis::kAssumed, "FlashAttention 2 on H100, forward and backward, heads of 128"},
      {"gpu.block_traffic", Basis::kAssumed, "kernels of a block that are not fused with its products"},
      {"gpu.block_overhead", Basis::kAssumed, "about ten gaps of 5 us in a block whose small kernels are compiled"},
      {"passes.publish_masters", Basis::kAssumed, "loads, integer rounding and stores; no division"},
      {"network.collective_seconds", Basis::kAssumed,
       "NCCL's launch and a few hops; small collectives take 20 to 60 us"},
      {"network.agreement_seconds", Basis::kAssumed,
       "client/bench/verdict_bench.py adds 0.3 to 0.4 ms, with two ranks over gloo on one machine"},
      {"trainer_cores", Basis::kAssumed, "a tenth of the cores"},
  };
}

GpuModel KnownGpu(double peak_flops, double memory_bytes, double memory_bandwidth) {
  return {.peak_flops = peak_flops,
          .matmul_efficiency = 0.72,
          .attention_efficiency = 0.45,
          .memory_bytes = memory_bytes,
          .memory_bandwidth = memory_bandwidth,
          .block_traffic = 80,
          .block_overhead = 50e-6};
}

NetworkModel KnownNetwork(uint32_t node_ranks, double node_bandwidth, double adapter_gigabits) {
  return {.node_ranks = node_ranks,
          .node_bandwidth = node_bandwidth,
          .bandwidth = 0.9 * adapter_gigabits * kGiga / 8,
          .collective_seconds = 40e-6,
          .agreement_seconds = 0.4e-3};
}

std::vector<std::string_view> MachineNames() {
  std::vector<std::string_view> names;
  for (const KnownMachine& known : All()) names.push_back(known.machine.name);
  return names;
}

absl::StatusOr<Machine> FindMachine(std::string_view name) {
  const absl::StatusOr<const KnownMachine*> known = Find(name);
  if (!known.ok()) return known.status();
  return (*known)->machine;
}

absl::StatusOr<std::span<const Source>> SourcesOf(std::string_view name) {
  const absl::StatusOr<const KnownMachine*> known = Find(name);
  if (!known.ok()) return known.status();
  return (*known)->sources;
}

RangeEnd AtEndOfRanges(const Machine& machine, std::string_view name, bool most) {
  RangeEnd end{machine, {}};
  const absl::StatusOr<const KnownMachine*> known = Find(name);
  if (!known.ok()) return end;
  for (const Source& source : (*known)->sources) {
    if (source.most == 0 || ValueOf(machine, source.field) != ValueOf((*known)->machine, source.field)) continue;
    const double value = most ? source.most : source.least;
    SetValue(end.machine, source.field, value);
    const bool flops = source.field == "gpu.peak_flops";
    end.changes.push_back(
        absl::StrFormat("%s %.4g %s", source.field, value / (flops ? kTera : kGiga), flops ? "TFLOPS" : "GB/s"));
  }
  return end;
}

}  // namespace superoffload::simulator
