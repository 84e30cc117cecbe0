// The machines without a Grace. What nobody has measured is marked as assumed; a test holds every number to a source.
#include <utility>

#include "server/simulator/known_machines.h"

namespace superoffload::simulator {
namespace {

// A link with one rate and a fixed cost for each copy.
LinkCurve Link(double bytes_per_second, double seconds_each) {
  LinkCurve curve;
  for (double bytes = 0.0625 * kMB; bytes <= 256 * kMB; bytes *= 4) {
    curve.points.push_back({bytes, bytes / (bytes / bytes_per_second + seconds_each)});
  }
  return curve;
}

// PCIe 5 x16.
LinkCurve Pcie5() { return Link(52 * kGiga, 5e-6); }

constexpr PassCosts kAvx512Passes{.absorb = 0.43e-9,
                                  .publish = 0.43e-9,
                                  .publish_masters = 0.05e-9,
                                  .coded_absorb = 2.7,
                                  .coded_publish = 1,
                                  .rounding = 0.8};

// An eighth of a DGX with eight cards.
Machine Sxm(std::string name, double hbm_bytes, double hbm_bandwidth) {
  return {.name = std::move(name),
          .gpu = KnownGpu(989 * kTera, hbm_bytes, hbm_bandwidth),
          .host = {.memory_bytes = 256 * kGiB, .cores = 14, .bandwidth = 61 * kGiga, .core_bandwidth = 28 * kGiga},
          .passes = kAvx512Passes,
          .h2d = Pcie5(),
          .d2h = Pcie5(),
          .network = KnownNetwork(8, 340 * kGiga, 400),
          .trainer_cores = 1};
}

constexpr std::string_view kPcie5 = "PCIe 5 x16: 52 GB/s for large copies, 5 us for each";

std::vector<Source> X86Sources() {
  return WithSources(
      CommonSources(),
      {{"gpu.peak_flops", Basis::kPublished, "NVIDIA's data sheet of the PCIe card, dense bf16"},
       {"gpu.matmul_efficiency", Basis::kAssumed, "as GH200; the card's power limit is lower"},
       {"gpu.memory_bytes", Basis::kMeasured, "CUDA reports 79.1 GiB of what is sold as 80 GB"},
       {"gpu.memory_bandwidth", Basis::kAssumed, "0.85 of the data sheet's 2 TB/s"},
       {"host.memory_bytes", Basis::kAssumed, "a server with 512 GiB for each card"},
       {"host.cores", Basis::kAssumed, "32 cores for each card"},
       {"host.bandwidth", Basis::kAssumed, "eight channels of DDR5-4800 at 0.8"},
       {"host.core_bandwidth", Basis::kMeasured,
        "one AVX-512 core of a cloud machine reads 14 GB/s and writes as it reads"},
       {"passes.absorb", Basis::kMeasured, "AVX-512: 0.43 ns per element and thread for exact root and division"},
       {"passes.publish", Basis::kMeasured, "as absorb"},
       {"h2d", Basis::kAssumed, kPcie5},
       {"d2h", Basis::kAssumed, kPcie5},
       {"network.node_ranks", Basis::kAssumed, "eight cards in a server"},
       {"network.node_bandwidth", Basis::kAssumed, "PCIe 5 x16 through switches, 40 of 63 GB/s"},
       {"network.bandwidth", Basis::kAssumed, "an adapter of 200 Gb/s for two cards, at 0.9"}});
}

std::vector<Source> SxmSources() {
  return WithSources(
      X86Sources(),
      {{"gpu.peak_flops", Basis::kPublished, "NVIDIA's data sheet of the SXM card, dense bf16"},
       {"gpu.matmul_efficiency", Basis::kAssumed, "as GH200"},
       {"gpu.memory_bandwidth", Basis::kAssumed, "0.85 of the data sheet's 3.35 TB/s"},
       {"host.memory_bytes", Basis::kPublished, "an eighth of the 2 TB of a DGX with eight cards"},
       {"host.cores", Basis::kPublished, "an eighth of a DGX's 112"},
       {"host.bandwidth", Basis::kAssumed,
        "an eighth of two sockets of eight channels of DDR5-4800 at 0.8: all eight cards train at once"},
       {"network.node_ranks", Basis::kPublished, "eight cards in a DGX"},
       {"network.node_bandwidth", Basis::kAssumed, "three quarters of NVLink's 450 GB/s in each direction"},
       {"network.bandwidth", Basis::kAssumed, "an adapter of 400 Gb/s for each card, at 0.9"}});
}

std::vector<Source> DesktopSources() {
  return WithSources(X86Sources(), {{"gpu.matmul_efficiency", Basis::kAssumed, "half: such GPUs are limited by power"},
                                    {"gpu.attention_efficiency", Basis::kAssumed, "a little less than on H100"},
                                    {"host.core_bandwidth", Basis::kAssumed, "half of what all cores reach"},
                                    {"network.node_ranks", Basis::kAssumed, "one GPU"},
                                    {"network.node_bandwidth", Basis::kAssumed, "not used: one GPU"},
                                    {"network.bandwidth", Basis::kAssumed, "Ethernet of 2.5 Gb/s, at 0.9"}});
}

// Whoever has such a machine has no more of them to connect.
NetworkModel AtMost(uint32_t ranks, NetworkModel network) {
  network.most_ranks = ranks;
  return network;
}

KnownMachine Laptop() {
  Machine machine{
      .name = "laptop",
      .gpu = KnownGpu(100 * kTera, 16 * kGiga, 490 * kGiga),
      .host = {.memory_bytes = 64 * kGiB, .cores = 8, .bandwidth = 70 * kGiga, .core_bandwidth = 35 * kGiga},
      .passes = {.absorb = 0.86e-9, .publish = 0.86e-9, .publish_masters = 0.1e-9},
      .h2d = Link(12 * kGiga, 10e-6),
      .d2h = Link(12 * kGiga, 10e-6),
      .network = AtMost(1, KnownNetwork(1, 2.5 * kGiga / 8, 2.5)),
      .trainer_cores = 1};
  machine.gpu.matmul_efficiency = 0.5;
  machine.gpu.attention_efficiency = 0.35;
  constexpr std::string_view kLink = "PCIe 4 x8: 12 GB/s for large copies, 10 us for each";
  return {machine, WithSources(DesktopSources(),
                               {{"gpu.peak_flops", Basis::kAssumed, "a mobile GPU with 100 TFLOPS of dense bf16"},
                                {"gpu.memory_bytes", Basis::kAssumed, "16 GB, of which CUDA reports about 15 GiB"},
                                {"gpu.memory_bandwidth", Basis::kAssumed, "0.85 of 576 GB/s"},
                                {"host.memory_bytes", Basis::kAssumed, "64 GiB"},
                                {"host.cores", Basis::kAssumed, "8 cores"},
                                {"host.bandwidth", Basis::kAssumed, "two channels of DDR5-5600 at 0.8"},
                                {"passes.absorb", Basis::kAssumed, "AVX2: half the width of AVX-512"},
                                {"passes.publish", Basis::kAssumed, "as absorb"},
                                {"h2d", Basis::kAssumed, kLink},
                                {"d2h", Basis::kAssumed, kLink},
                                {"trainer_cores", Basis::kAssumed, "one"}})};
}

KnownMachine Rtx5090() {
  Machine machine{
      .name = "rtx-5090",
      .gpu = KnownGpu(209.5 * kTera, 31.36 * kGiB, 0.85 * 1792 * kGiga),
      .host = {.memory_bytes = 128 * kGiB, .cores = 16, .bandwidth = 70 * kGiga, .core_bandwidth = 35 * kGiga},
      .passes = kAvx512Passes,
      .h2d = Pcie5(),
      .d2h = Pcie5(),
      .network = AtMost(1, KnownNetwork(1, 2.5 * kGiga / 8, 2.5)),
      .trainer_cores = 1};
  return {machine,
          WithSources(DesktopSources(),
                      {{"gpu.peak_flops", Basis::kPublished,
                        "NVIDIA's white paper of RTX Blackwell, dense bf16 with fp32 accumulation"},
                       {"gpu.matmul_efficiency", Basis::kAssumed, "as GH200"},
                       {"gpu.attention_efficiency", Basis::kAssumed, "as on H100"},
                       {"gpu.memory_bytes", Basis::kMeasured, "CUDA reports 31.36 GiB of what is sold as 32 GB"},
                       {"gpu.memory_bandwidth", Basis::kAssumed, "0.85 of the data sheet's 1792 GB/s"},
                       {"host.memory_bytes", Basis::kAssumed, "a desktop with 128 GiB"},
                       {"host.cores", Basis::kAssumed, "a desktop with 16 cores"},
                       {"host.bandwidth", Basis::kAssumed, "two channels of DDR5-5600 at 0.8"},
                       {"passes.absorb", Basis::kAssumed, "AVX-512 as measured on a server's core"},
                       {"passes.publish", Basis::kAssumed, "as absorb"},
                       {"trainer_cores", Basis::kAssumed, "one"}})};
}

// One memory for both: a copy reads and writes it.
KnownMachine DgxSpark() {
  constexpr double kBandwidth = 0.85 * 273 * kGiga;
  Machine machine{
      .name = "dgx-spark",
      .one_memory = true,
      .gpu = KnownGpu(62.5 * kTera, 119.68 * kGiB, kBandwidth),
      .host = {.memory_bytes = 119.68 * kGiB, .cores = 20, .bandwidth = kBandwidth, .core_bandwidth = 22 * kGiga},
      .passes = kGracePasses,
      .h2d = Link(kBandwidth / 2, 5e-6),
      .d2h = Link(kBandwidth / 2, 5e-6),
      .network = AtMost(2, KnownNetwork(1, 100 * kGiga / 8, 100)),
      .trainer_cores = 2};
  constexpr std::string_view kCopies = "memory to memory: half of what it reaches, 5 us for each";
  constexpr std::string_view kPasses = "as Grace's cores at 3.1 GHz; ten of the twenty are smaller";
  return {machine,
          WithSources(DesktopSources(),
                      {{"gpu.peak_flops", Basis::kAssumed,
                        "a sixteenth of the data sheet's 1000 TOPS of sparse FP4, as of RTX Blackwell; an eighth, 125, "
                        "is claimed as well",
                        62.5 * kTera, 125 * kTera},
                       {"gpu.matmul_efficiency", Basis::kAssumed, "as GH200"},
                       {"gpu.attention_efficiency", Basis::kAssumed, "as on H100"},
                       {"gpu.memory_bytes", Basis::kMeasured, "Linux reports 119.7 GiB, which GPU and host share"},
                       {"gpu.memory_bandwidth", Basis::kAssumed,
                        "0.85 of the data sheet's 273 GB/s, as if the host did not use it meanwhile"},
                       {"host.memory_bytes", Basis::kMeasured, "Linux reports 119.7 GiB, which GPU and host share"},
                       {"host.cores", Basis::kPublished, "ten Cortex-X925 and ten Cortex-A725"},
                       {"host.bandwidth", Basis::kAssumed,
                        "0.85 of the data sheet's 273 GB/s, as if the GPU did not use it meanwhile"},
                       {"host.core_bandwidth", Basis::kAssumed, "as one Grace core"},
                       {"passes.absorb", Basis::kAssumed, kPasses},
                       {"passes.publish", Basis::kAssumed, kPasses},
                       {"h2d", Basis::kAssumed, kCopies},
                       {"d2h", Basis::kAssumed, kCopies},
                       {"network.bandwidth", Basis::kAssumed, "half of its adapter of 200 Gb/s, at 0.9"}})};
}

}  // namespace

std::vector<KnownMachine> KnownServersAndDesktops() {
  Machine pcie{
      .name = "h100-pcie",
      .gpu = KnownGpu(756 * kTera, 79.1 * kGiB, 1.7 * kTera),
      .host = {.memory_bytes = 512 * kGiB, .cores = 32, .bandwidth = 245 * kGiga, .core_bandwidth = 28 * kGiga},
      .passes = kAvx512Passes,
      .h2d = Pcie5(),
      .d2h = Pcie5(),
      .network = KnownNetwork(8, 40 * kGiga, 100),
      .trainer_cores = 3};
  return {
      {std::move(pcie), X86Sources()},
      {Sxm("h100-sxm", 79.1 * kGiB, 0.85 * 3.35 * kTera), SxmSources()},
      {Sxm("h200-sxm", 139.8 * kGiB, 0.85 * 4.8 * kTera),
       WithSources(SxmSources(),
                   {{"gpu.memory_bytes", Basis::kMeasured, "CUDA reports 139.8 GiB of what is sold as 141 GB"},
                    {"gpu.memory_bandwidth", Basis::kAssumed, "0.85 of the data sheet's 4.8 TB/s"}})},
      Rtx5090(),
      DgxSpark(),
      Laptop(),
  };
}

}  // namespace superoffload::simulator
