// The machines with a Grace. What nobody has measured is marked as assumed; a test holds every number to a source.
#include <utility>

#include "server/simulator/known_machines.h"

namespace superoffload::simulator {
namespace {

// Of the part with 480 GB. 348 is the most of NVIDIA's reference results for STREAM.
constexpr double kGraceBandwidth = 348 * kGiga;
constexpr double kGraceLeast = 288 * kGiga, kGraceMost = 368 * kGiga;

LinkCurve ScaledCurve(LinkCurve curve, double factor) {
  for (LinkPoint& point : curve.points) point.bytes_per_second *= factor;
  return curve;
}

LinkCurve PaperH2D() {
  return {{{0.25 * kMB, 59 * kGiga},
           {1 * kMB, 97 * kGiga},
           {4 * kMB, 178 * kGiga},
           {16 * kMB, 320 * kGiga},
           {64 * kMB, 400 * kGiga},
           {256 * kMB, 406 * kGiga}}};
}

LinkCurve PaperD2H() {
  return {{{0.25 * kMB, 57 * kGiga},
           {1 * kMB, 94 * kGiga},
           {4 * kMB, 175 * kGiga},
           {16 * kMB, 315 * kGiga},
           {64 * kMB, 385 * kGiga},
           {256 * kMB, 388 * kGiga}}};
}

Machine Gh200(std::string name, double hbm_bytes, double hbm_bandwidth, uint32_t node_ranks) {
  return {
      .name = std::move(name),
      .gpu = KnownGpu(990 * kTera, hbm_bytes, hbm_bandwidth),
      .host = {.memory_bytes = 478.6 * kGiB, .cores = 72, .bandwidth = kGraceBandwidth, .core_bandwidth = 22 * kGiga},
      .passes = kGracePasses,
      .h2d = PaperH2D(),
      .d2h = ScaledCurve(PaperD2H(), 297.0 / 388),
      .network = KnownNetwork(node_ranks, 340 * kGiga, 200),
      .trainer_cores = 7};
}

// Half a Grace for each of two GPUs.
Machine Blackwell(std::string name, double hbm_bytes) {
  return {.name = std::move(name),
          .gpu = KnownGpu(2500 * kTera, hbm_bytes, 6.8 * kTera),
          .host = {.memory_bytes = 478.6 / 2 * kGiB,
                   .cores = 36,
                   .bandwidth = kGraceBandwidth / 2,
                   .core_bandwidth = 22 * kGiga},
          .passes = kGracePasses,
          .h2d = ScaledCurve(PaperH2D(), 0.5),
          .d2h = ScaledCurve(PaperD2H(), 0.5 * 297 / 388),
          .network = KnownNetwork(72, 675 * kGiga, 400),
          .trainer_cores = 3};
}

constexpr std::string_view kPassModel = "a pipeline model of Neoverse V2 at 3.1 GHz, bound by its divider";
constexpr std::string_view kCores = "Grace has 72 cores of which the paper leaves 7 to the trainer";

std::vector<Source> GraceSources() {
  return WithSources(
      CommonSources(),
      {{"gpu.peak_flops", Basis::kPublished,
        "NVIDIA's data sheet, dense bf16; the paper counts utilisation against it"},
       {"gpu.matmul_efficiency", Basis::kPublished,
        "the paper's figure of streamed weights is reproduced with 715 TFLOPS of 990; 0.60 fits its rows of training"},
       {"gpu.memory_bytes", Basis::kMeasured, "CUDA reports 95.0 GiB (some drivers 94.9) of what is sold as 96 GB"},
       {"gpu.memory_bandwidth", Basis::kAssumed, "0.85 of the data sheet's 4 TB/s"},
       {"host.memory_bytes", Basis::kMeasured, "Linux reports 478.6 GiB of what is sold as 480 GB"},
       {"host.cores", Basis::kPublished, kCores},
       {"host.bandwidth", Basis::kMeasured,
        "NVIDIA's tuning guide: STREAM triad on the part with 480 GB 288 to 348 GB/s; the paper's kernel reached 368, "
        "which its table of step times implies, of 384 at most; the 410 to 486 that others report are of the part with "
        "120 GB",
        kGraceLeast, kGraceMost},
       {"host.core_bandwidth", Basis::kAssumed, "no measurement of one Grace core found; 32 are known to saturate"},
       {"passes.absorb", Basis::kAssumed, kPassModel},
       {"passes.publish", Basis::kAssumed, kPassModel},
       {"h2d", Basis::kPublished,
        "the paper's figure of bandwidth by size, read by coordinates; nvbandwidth gave others 375 to 421 GB/s",
        375 * kGiga, 421 * kGiga},
       {"d2h", Basis::kMeasured,
        "nvbandwidth gave others 297 and about 170 GB/s, and the paper's figure shows 388; the shape is the paper's",
        170 * kGiga, 388 * kGiga},
       {"network.node_ranks", Basis::kAssumed, "four Superchips in a node, as most large installations have them"},
       {"network.node_bandwidth", Basis::kAssumed, "three quarters of NVLink's 450 GB/s in each direction"},
       {"network.bandwidth", Basis::kAssumed, "an adapter of 200 Gb/s for each Superchip, at 0.9"},
       {"trainer_cores", Basis::kPublished, kCores}});
}

std::vector<Source> BlackwellSources() {
  return WithSources(
      GraceSources(),
      {{"gpu.peak_flops", Basis::kPublished, "NVIDIA's data sheet, dense bf16 of one of the two GPUs"},
       {"gpu.matmul_efficiency", Basis::kAssumed, "as GH200"},
       {"gpu.memory_bytes", Basis::kMeasured, "CUDA reports 184.3 GiB for each GPU"},
       {"gpu.memory_bandwidth", Basis::kAssumed, "0.85 of the data sheet's 8 TB/s"},
       {"host.memory_bytes", Basis::kAssumed,
        "half of what Linux reports of a GH200's Grace with 480 GB: two GPUs share it"},
       {"host.cores", Basis::kPublished, "half of a Grace's 72"},
       {"host.bandwidth", Basis::kAssumed, "half of a GH200's Grace with 480 GB", kGraceLeast / 2, kGraceMost / 2},
       {"h2d", Basis::kMeasured, "190 to 225 GB/s while both GPUs stream; the shape of GH200", 190 * kGiga,
        225 * kGiga},
       {"d2h", Basis::kAssumed, "half of GH200's", 85 * kGiga, 194 * kGiga},
       {"network.node_ranks", Basis::kPublished, "72 GPUs in a rack (NVL72)"},
       {"network.node_bandwidth", Basis::kAssumed, "three quarters of NVLink's 900 GB/s in each direction"},
       {"network.bandwidth", Basis::kAssumed, "an adapter of 400 Gb/s for each GPU, at 0.9"},
       {"trainer_cores", Basis::kAssumed, "a tenth of the cores"}});
}

}  // namespace

std::vector<KnownMachine> KnownSuperchips() {
  return {
      {Gh200("gh200-96-480", 95.0 * kGiB, 3.4 * kTera, 4), GraceSources()},
      {Gh200("gh200-144", 142.5 * kGiB, 4.16 * kTera, 2),
       WithSources(GraceSources(),
                   {{"gpu.memory_bytes", Basis::kMeasured, "CUDA reports 142.5 GiB of what is sold as 144 GB"},
                    {"gpu.memory_bandwidth", Basis::kAssumed, "0.85 of the data sheet's 4.9 TB/s"},
                    {"host.memory_bytes", Basis::kAssumed, "as the part with 96 GB"},
                    {"network.node_ranks", Basis::kPublished, "two Superchips in a node (NVL2)"}})},
      {Blackwell("gb200", 184.3 * kGiB), BlackwellSources()},
      {Blackwell("gb300", 276.5 * kGiB),
       WithSources(
           BlackwellSources(),
           {{"gpu.memory_bytes", Basis::kMeasured,
             "CUDA reports 276.5 GiB for each GPU of NVL72; that of a DGX Station has less"},
            {"h2d", Basis::kAssumed, "as GB200, of which 190 to 225 GB/s were measured", 190 * kGiga, 225 * kGiga}})},
  };
}

}  // namespace superoffload::simulator
