// The machines that are known by name. What nobody has measured is marked as assumed; a test holds every number to a
// row of sources.
#include "absl/strings/str_cat.h"
#include "server/simulator/machine.h"

namespace superoffload::simulator {
namespace {

constexpr double kGiga = 1e9, kTera = 1e12, kGiB = 1024.0 * 1024 * 1024, kMB = 1e6;

// Neoverse V2: a pipeline model of the kernels gives 2.45 cycles per element for one update and 4.7 for two.
constexpr double kGraceHertz = 3.1e9;
constexpr PassCosts kGracePasses{.absorb = 2.45 / kGraceHertz, .publish = 2.25 / kGraceHertz,
                                 .publish_masters = 0.3 / kGraceHertz};

LinkCurve Scaled(LinkCurve curve, double factor) {
  for (LinkPoint& point : curve.points) point.bytes_per_second *= factor;
  return curve;
}

LinkCurve PaperH2D() {
  return {{{0.25 * kMB, 59 * kGiga}, {1 * kMB, 97 * kGiga}, {4 * kMB, 178 * kGiga}, {16 * kMB, 320 * kGiga},
           {64 * kMB, 400 * kGiga}, {256 * kMB, 406 * kGiga}}};
}

LinkCurve PaperD2H() {
  return {{{0.25 * kMB, 57 * kGiga}, {1 * kMB, 94 * kGiga}, {4 * kMB, 175 * kGiga}, {16 * kMB, 315 * kGiga},
           {64 * kMB, 385 * kGiga}, {256 * kMB, 388 * kGiga}}};
}

// Between nodes: an adapter of so many Gb/s for each rank, of which nine tenths arrive.
NetworkModel Network(uint32_t node_ranks, double node_bandwidth, double adapter_gigabits) {
  return {.node_ranks = node_ranks,
          .node_bandwidth = node_bandwidth,
          .bandwidth = 0.9 * adapter_gigabits * kGiga / 8,
          .collective_seconds = 40e-6,
          .agreement_seconds = 0.4e-3};
}

// Whoever has such a machine has no second one to connect.
NetworkModel Alone(NetworkModel network) {
  network.most_ranks = 1;
  return network;
}

Machine Gh200(std::string name, double hbm_bytes, double hbm_bandwidth, double host_bytes, double host_bandwidth,
              uint32_t node_ranks) {
  return {.name = std::move(name),
          .gpu = {.peak_flops = 990 * kTera, .matmul_efficiency = 0.72, .attention_efficiency = 0.45,
                  .memory_bytes = hbm_bytes,
                  .memory_bandwidth = hbm_bandwidth, .block_traffic = 80, .block_overhead = 50e-6},
          .host = {.memory_bytes = host_bytes, .cores = 72, .bandwidth = host_bandwidth, .core_bandwidth = 22 * kGiga},
          .passes = kGracePasses,
          .h2d = PaperH2D(),
          .d2h = Scaled(PaperD2H(), 297.0 / 388),
          .network = Network(node_ranks, 340 * kGiga, 200),
          .trainer_cores = 7};
}

constexpr std::string_view kPeak = "NVIDIA's data sheet, dense bf16; the paper counts utilisation against it";
constexpr std::string_view kEfficiency = "the paper's figure of streamed weights is reproduced with 715 TFLOPS of 990";
constexpr std::string_view kTraffic = "kernels of a block that are not fused with its products";
constexpr std::string_view kAttention = "FlashAttention 2 on H100, forward and backward, heads of 128";
constexpr std::string_view kOverhead = "about ten gaps of 5 us in a block whose small kernels are compiled";
constexpr std::string_view kCores = "Grace has 72 cores of which the paper leaves 7 to the trainer";
constexpr std::string_view kCoreBandwidth = "no measurement of one Grace core found; 32 are known to saturate";
constexpr std::string_view kPassModel = "a pipeline model of Neoverse V2 at 3.1 GHz, bound by its divider";
constexpr std::string_view kH2D = "the paper's figure of bandwidth by size, read by coordinates";
constexpr std::string_view kNvlink = "three quarters of NVLink's 450 GB/s in each direction";
constexpr std::string_view kAdapter = "an adapter of 200 Gb/s for each Superchip, at 0.9";
constexpr std::string_view kCollective = "NCCL's launch and a few hops; small collectives take 20 to 60 us";
constexpr std::string_view kAgreement =
    "client/bench/verdict_bench.py adds 0.3 to 0.4 ms, with two ranks over gloo on one machine";
constexpr std::string_view kD2H = "the paper's shape, scaled to the 297 GB/s that others measured (170 to 388)";

constexpr Source kGh200_480[] = {
    {"gpu.peak_flops", Basis::kPublished, kPeak},
    {"gpu.matmul_efficiency", Basis::kPublished, kEfficiency},
    {"gpu.attention_efficiency", Basis::kAssumed, kAttention},
    {"gpu.memory_bytes", Basis::kPublished, "NVIDIA's data sheet: 96 GB of HBM3"},
    {"gpu.memory_bandwidth", Basis::kAssumed, "0.85 of the data sheet's 4 TB/s"},
    {"gpu.block_traffic", Basis::kAssumed, kTraffic},
    {"gpu.block_overhead", Basis::kAssumed, kOverhead},
    {"host.memory_bytes", Basis::kPublished, "NVIDIA's data sheet: 480 GB of LPDDR5X"},
    {"host.cores", Basis::kPublished, kCores},
    {"host.bandwidth", Basis::kMeasured,
     "STREAM triad on the 480 GB part: 288 to 348 GB/s; the paper's kernel reached 368"},
    {"host.core_bandwidth", Basis::kAssumed, kCoreBandwidth},
    {"passes.absorb", Basis::kAssumed, kPassModel},
    {"passes.publish", Basis::kAssumed, kPassModel},
    {"passes.publish_masters", Basis::kAssumed, "loads, integer rounding and stores; no division"},
    {"h2d", Basis::kPublished, kH2D},
    {"d2h", Basis::kAssumed, kD2H},
    {"network.node_ranks", Basis::kAssumed, "four Superchips in a node, as most large installations have them"},
    {"network.node_bandwidth", Basis::kAssumed, kNvlink},
    {"network.bandwidth", Basis::kAssumed, kAdapter},
    {"network.collective_seconds", Basis::kAssumed, kCollective},
    {"network.agreement_seconds", Basis::kAssumed, kAgreement},
    {"trainer_cores", Basis::kPublished, kCores},
};
constexpr Source kGh200_144[] = {
    {"gpu.peak_flops", Basis::kPublished, kPeak},
    {"gpu.matmul_efficiency", Basis::kPublished, kEfficiency},
    {"gpu.attention_efficiency", Basis::kAssumed, kAttention},
    {"gpu.memory_bytes", Basis::kPublished, "NVIDIA's data sheet: 144 GB of HBM3e"},
    {"gpu.memory_bandwidth", Basis::kAssumed, "0.85 of the data sheet's 4.9 TB/s"},
    {"gpu.block_traffic", Basis::kAssumed, kTraffic},
    {"gpu.block_overhead", Basis::kAssumed, kOverhead},
    {"host.memory_bytes", Basis::kPublished, "NVIDIA's data sheet: 480 GB of LPDDR5X"},
    {"host.cores", Basis::kPublished, kCores},
    {"host.bandwidth", Basis::kAssumed, "as the 480 GB part of GH200 with 96 GB"},
    {"host.core_bandwidth", Basis::kAssumed, kCoreBandwidth},
    {"passes.absorb", Basis::kAssumed, kPassModel},
    {"passes.publish", Basis::kAssumed, kPassModel},
    {"passes.publish_masters", Basis::kAssumed, "loads, integer rounding and stores; no division"},
    {"h2d", Basis::kAssumed, "as the part with 96 GB"},
    {"d2h", Basis::kAssumed, "as the part with 96 GB"},
    {"network.node_ranks", Basis::kPublished, "two Superchips in a node (NVL2)"},
    {"network.node_bandwidth", Basis::kAssumed, kNvlink},
    {"network.bandwidth", Basis::kAssumed, kAdapter},
    {"network.collective_seconds", Basis::kAssumed, kCollective},
    {"network.agreement_seconds", Basis::kAssumed, kAgreement},
    {"trainer_cores", Basis::kPublished, kCores},
};
constexpr Source kGb200[] = {
    {"gpu.peak_flops", Basis::kPublished, "NVIDIA's data sheet, dense bf16 of one of the two GPUs"},
    {"gpu.matmul_efficiency", Basis::kAssumed, "as GH200"},
    {"gpu.attention_efficiency", Basis::kAssumed, kAttention},
    {"gpu.memory_bytes", Basis::kPublished, "NVIDIA's data sheet: 186 GB of HBM3e for each GPU"},
    {"gpu.memory_bandwidth", Basis::kAssumed, "0.85 of the data sheet's 8 TB/s"},
    {"gpu.block_traffic", Basis::kAssumed, kTraffic},
    {"gpu.block_overhead", Basis::kAssumed, kOverhead},
    {"host.memory_bytes", Basis::kPublished, "half of a Grace's 480 GB: two GPUs share it"},
    {"host.cores", Basis::kPublished, "half of a Grace's 72"},
    {"host.bandwidth", Basis::kAssumed, "half of a Grace's"},
    {"host.core_bandwidth", Basis::kAssumed, kCoreBandwidth},
    {"passes.absorb", Basis::kAssumed, kPassModel},
    {"passes.publish", Basis::kAssumed, kPassModel},
    {"passes.publish_masters", Basis::kAssumed, "loads, integer rounding and stores; no division"},
    {"h2d", Basis::kMeasured, "190 to 225 GB/s while both GPUs stream; the shape of GH200"},
    {"d2h", Basis::kAssumed, "half of GH200's"},
    {"network.node_ranks", Basis::kPublished, "72 GPUs in a rack (NVL72)"},
    {"network.node_bandwidth", Basis::kAssumed, "three quarters of NVLink's 900 GB/s in each direction"},
    {"network.bandwidth", Basis::kAssumed, "an adapter of 400 Gb/s for each GPU, at 0.9"},
    {"network.collective_seconds", Basis::kAssumed, kCollective},
    {"network.agreement_seconds", Basis::kAssumed, kAgreement},
    {"trainer_cores", Basis::kAssumed, "a tenth of the cores"},
};
constexpr Source kH100Pcie[] = {
    {"gpu.peak_flops", Basis::kPublished, "NVIDIA's data sheet of the PCIe card, dense bf16"},
    {"gpu.matmul_efficiency", Basis::kAssumed, "as GH200; the card's power limit is lower"},
    {"gpu.attention_efficiency", Basis::kAssumed, kAttention},
    {"gpu.memory_bytes", Basis::kPublished, "NVIDIA's data sheet: 80 GB of HBM2e"},
    {"gpu.memory_bandwidth", Basis::kAssumed, "0.85 of the data sheet's 2 TB/s"},
    {"gpu.block_traffic", Basis::kAssumed, kTraffic},
    {"gpu.block_overhead", Basis::kAssumed, kOverhead},
    {"host.memory_bytes", Basis::kAssumed, "a server with 512 GiB for each card"},
    {"host.cores", Basis::kAssumed, "32 cores for each card"},
    {"host.bandwidth", Basis::kAssumed, "eight channels of DDR5-4800 at 0.8"},
    {"host.core_bandwidth", Basis::kMeasured,
     "one AVX-512 core of a cloud machine reads 14 GB/s and writes as it reads"},
    {"passes.absorb", Basis::kMeasured, "AVX-512: 0.43 ns per element and thread for exact root and division"},
    {"passes.publish", Basis::kMeasured, "as absorb"},
    {"passes.publish_masters", Basis::kAssumed, "loads, integer rounding and stores; no division"},
    {"h2d", Basis::kAssumed, "PCIe 5 x16: 52 GB/s for large copies, 5 us for each"},
    {"d2h", Basis::kAssumed, "PCIe 5 x16: 52 GB/s for large copies, 5 us for each"},
    {"network.node_ranks", Basis::kAssumed, "eight cards in a server"},
    {"network.node_bandwidth", Basis::kAssumed, "PCIe 5 x16 through switches, 40 of 63 GB/s"},
    {"network.bandwidth", Basis::kAssumed, "an adapter of 200 Gb/s for two cards, at 0.9"},
    {"network.collective_seconds", Basis::kAssumed, kCollective},
    {"network.agreement_seconds", Basis::kAssumed, kAgreement},
    {"trainer_cores", Basis::kAssumed, "a tenth of the cores"},
};
constexpr Source kLaptop[] = {
    {"gpu.peak_flops", Basis::kAssumed, "a mobile GPU with 100 TFLOPS of dense bf16"},
    {"gpu.matmul_efficiency", Basis::kAssumed, "half: such GPUs are limited by power"},
    {"gpu.attention_efficiency", Basis::kAssumed, kAttention},
    {"gpu.memory_bytes", Basis::kAssumed, "16 GB"},
    {"gpu.memory_bandwidth", Basis::kAssumed, "0.85 of 576 GB/s"},
    {"gpu.block_traffic", Basis::kAssumed, kTraffic},
    {"gpu.block_overhead", Basis::kAssumed, kOverhead},
    {"host.memory_bytes", Basis::kAssumed, "64 GiB"},
    {"host.cores", Basis::kAssumed, "8 cores"},
    {"host.bandwidth", Basis::kAssumed, "two channels of DDR5-5600 at 0.8"},
    {"host.core_bandwidth", Basis::kAssumed, "half of what all cores reach"},
    {"passes.absorb", Basis::kAssumed, "AVX2: half the width of AVX-512"},
    {"passes.publish", Basis::kAssumed, "as absorb"},
    {"passes.publish_masters", Basis::kAssumed, "loads, integer rounding and stores; no division"},
    {"h2d", Basis::kAssumed, "PCIe 4 x8: 12 GB/s for large copies, 10 us for each"},
    {"d2h", Basis::kAssumed, "PCIe 4 x8: 12 GB/s for large copies, 10 us for each"},
    {"network.node_ranks", Basis::kAssumed, "one GPU"},
    {"network.node_bandwidth", Basis::kAssumed, "not used: one GPU"},
    {"network.bandwidth", Basis::kAssumed, "Ethernet of 2.5 Gb/s, at 0.9"},
    {"network.collective_seconds", Basis::kAssumed, kCollective},
    {"network.agreement_seconds", Basis::kAssumed, kAgreement},
    {"trainer_cores", Basis::kAssumed, "one"},
};

// A link with one rate and a fixed cost for each copy.
LinkCurve Link(double bytes_per_second, double seconds_each) {
  LinkCurve curve;
  for (double bytes = 0.0625 * kMB; bytes <= 256 * kMB; bytes *= 4) {
    curve.points.push_back({bytes, bytes / (bytes / bytes_per_second + seconds_each)});
  }
  return curve;
}

struct Known {
  Machine machine;
  std::span<const Source> sources;
};

const std::vector<Known>& All() {
  static const auto* const all = new std::vector<Known>{
      {Gh200("gh200-96-480", 96 * kGiga, 3.4 * kTera, 480 * kGiga, 368 * kGiga, 4), kGh200_480},
      {Gh200("gh200-144", 144 * kGiga, 4.16 * kTera, 480 * kGiga, 368 * kGiga, 2), kGh200_144},
      {{.name = "gb200",
        .gpu = {.peak_flops = 2500 * kTera, .matmul_efficiency = 0.72, .attention_efficiency = 0.45,
                .memory_bytes = 186 * kGiga,
                .memory_bandwidth = 6.8 * kTera, .block_traffic = 80, .block_overhead = 50e-6},
        .host = {.memory_bytes = 240 * kGiga, .cores = 36, .bandwidth = 184 * kGiga, .core_bandwidth = 22 * kGiga},
        .passes = kGracePasses,
        .h2d = Scaled(PaperH2D(), 0.5),
        .d2h = Scaled(PaperD2H(), 0.5 * 297 / 388),
        .network = Network(72, 675 * kGiga, 400),
        .trainer_cores = 3},
       kGb200},
      {{.name = "h100-pcie",
        .gpu = {.peak_flops = 756 * kTera, .matmul_efficiency = 0.72, .attention_efficiency = 0.45,
                .memory_bytes = 80 * kGiga,
                .memory_bandwidth = 1.7 * kTera, .block_traffic = 80, .block_overhead = 50e-6},
        .host = {.memory_bytes = 512 * kGiB, .cores = 32, .bandwidth = 245 * kGiga, .core_bandwidth = 28 * kGiga},
        .passes = {.absorb = 0.43e-9, .publish = 0.43e-9, .publish_masters = 0.05e-9},
        .h2d = Link(52 * kGiga, 5e-6),
        .d2h = Link(52 * kGiga, 5e-6),
        .network = Network(8, 40 * kGiga, 100),
        .trainer_cores = 3},
       kH100Pcie},
      {{.name = "laptop",
        .gpu = {.peak_flops = 100 * kTera, .matmul_efficiency = 0.5, .attention_efficiency = 0.35,
                .memory_bytes = 16 * kGiga,
                .memory_bandwidth = 490 * kGiga, .block_traffic = 80, .block_overhead = 50e-6},
        .host = {.memory_bytes = 64 * kGiB, .cores = 8, .bandwidth = 70 * kGiga, .core_bandwidth = 35 * kGiga},
        .passes = {.absorb = 0.86e-9, .publish = 0.86e-9, .publish_masters = 0.1e-9},
        .h2d = Link(12 * kGiga, 10e-6),
        .d2h = Link(12 * kGiga, 10e-6),
        .network = Alone(Network(1, 2.5 * kGiga / 8, 2.5)),
        .trainer_cores = 1},
       kLaptop},
  };
  return *all;
}

absl::StatusOr<const Known*> Find(std::string_view name) {
  for (const Known& known : All()) {
    if (known.machine.name == name) return &known;
  }
  std::string names;
  for (const Known& known : All()) absl::StrAppend(&names, names.empty() ? "" : ", ", known.machine.name);
  return absl::NotFoundError(absl::StrCat("no machine is called '", std::string(name), "'; take one of ", names,
                                          ", or a file that superoffloadctl bench wrote"));
}

}  // namespace

std::vector<std::string_view> MachineNames() {
  std::vector<std::string_view> names;
  for (const Known& known : All()) names.push_back(known.machine.name);
  return names;
}

absl::StatusOr<Machine> FindMachine(std::string_view name) {
  const absl::StatusOr<const Known*> known = Find(name);
  if (!known.ok()) return known.status();
  return (*known)->machine;
}

absl::StatusOr<std::span<const Source>> SourcesOf(std::string_view name) {
  const absl::StatusOr<const Known*> known = Find(name);
  if (!known.ok()) return known.status();
  return (*known)->sources;
}

}  // namespace superoffload::simulator
