// What a simulation knows of a machine: one CPU with its memory, one GPU with its memory, and the link between them.
// Plain values; `superoffloadctl bench` measures them where the machine is at hand.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_MACHINE_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_MACHINE_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/algorithm.h"
#include "server/simulator/link_curve.h"

namespace superoffload::simulator {

struct GpuModel {
  double peak_flops = 0;            // per second, dense bf16 products
  double matmul_efficiency = 0;     // part of the peak that large products reach
  double attention_efficiency = 0;  // part of the peak that fused attention reaches
  double memory_bytes = 0;
  double memory_bandwidth = 0;  // bytes per second that kernels reach
  // Bytes that the small kernels between the products (norms, activations, residuals, transposes) move in a forward
  // pass of one block, per token and hidden element. A backward pass moves twice as many.
  double block_traffic = 0;
  // Seconds of one block's forward pass that do not depend on its size: kernels that wait to be launched. Twice that in
  // its backward pass.
  double block_overhead = 0;
};

struct HostModel {
  double memory_bytes = 0;
  uint32_t cores = 0;
  double bandwidth = 0;       // bytes per second, reads plus writes, of all cores together
  double core_bandwidth = 0;  // of one core alone
};

// Seconds that one core computes per element of a pass, whatever its memory does. Absorbing and publishing in one pass
// takes the sum.
struct PassCosts {
  double absorb = 0;
  double publish = 0;
  double publish_masters = 0;  // the masters narrowed to the parameters' dtype

  // How many times as long, where moments are codes, and in units of `absorb` what each of moments and masters adds
  // that is rounded stochastically. On SVE2 at 128 bits by the instructions of the loops, four a cycle, against what
  // the divider takes (kernels/bench/README.md).
  double coded_absorb = 4.9, coded_publish = 2.4;
  double rounding = 0.9;
};

// What the passes of `algorithm` compute, which are those above but for that.
PassCosts CostsOf(const PassCosts& costs, const kernels::Algorithm& algorithm);

// What connects the ranks of a run. Zeros: not known, so that several ranks cannot be simulated.
struct NetworkModel {
  uint32_t node_ranks = 0;        // of one node
  double node_bandwidth = 0;      // bytes per second that each rank receives in a collective within a node
  double bandwidth = 0;           // the same through each rank's adapter, between nodes
  double collective_seconds = 0;  // of a collective, whatever its size
  double agreement_seconds = 0;   // of a step's verdict: each rank's CPU gathers a number of every rank
  uint32_t most_ranks = 1024;     // how many such machines there are to be connected; 1: it comes alone
};

// Seconds in which all of `ranks` gather `bytes`, of which each has a share, or reduce as many and keep their share. A
// ring through several nodes is as fast as a node's adapters together, and no faster than within a node.
double CollectiveSeconds(const NetworkModel& network, uint32_t ranks, double bytes);

struct Machine {
  std::string name;
  // GPU and host have one memory, of host.memory_bytes: what fits is the sum of what both take.
  bool one_memory = false;
  GpuModel gpu;
  HostModel host;
  PassCosts passes;
  LinkCurve h2d;
  LinkCurve d2h;
  NetworkModel network;
  uint32_t trainer_cores = 1;  // of the host's; the workers have the others

  uint32_t worker_cores() const { return host.cores - trainer_cores; }
};

// The GPU with the four numbers of its software that the paper's rows of training were fitted with
// (tests/simulation/README.md), instead of those of fused and compiled kernels, which the named machines have.
GpuModel WithPapersTrainer(GpuModel gpu);

// How a number is known.
enum class Basis {
  kMeasured,   // on such a machine, by whom the source says
  kPublished,  // by the vendor or in a paper
  kAssumed,    // nobody is known to have measured it
};

std::string_view BasisName(Basis basis);

// Where numbers of a named machine come from: `field` as in Machine, for example "host.bandwidth".
struct Source {
  std::string_view field;
  Basis basis = Basis::kAssumed;
  std::string_view text;
  // What sources give, where they disagree; of a link, its largest copies' bandwidth. 0: one number.
  double least = 0;
  double most = 0;
};

// gh200-96-480, gh200-144, gb200, gb300, h100-pcie, h100-sxm, h200-sxm, rtx-5090, dgx-spark, laptop.
std::vector<std::string_view> MachineNames();

// NOT_FOUND naming the machines that are known.
absl::StatusOr<Machine> FindMachine(std::string_view name);
absl::StatusOr<std::span<const Source>> SourcesOf(std::string_view name);

// One end of what is known of a named machine.
struct RangeEnd {
  Machine machine;
  std::vector<std::string> changes;  // as "host.bandwidth 288 GB/s"; empty: no number has a range
};

// `machine` with the least (`most`: the most) of what sources give for each number in which it is still the machine
// that is called `known`. Empty, too, if none is.
RangeEnd AtEndOfRanges(const Machine& machine, std::string_view known, bool most);

// INVALID_ARGUMENT naming the first field that no machine can have: a size, rate or cost out of its range, a curve
// whose sizes do not grow, no core left for the workers.
absl::Status ValidateMachine(const Machine& machine);

// Whether runs of several ranks can be simulated. INVALID_ARGUMENT naming the first field that is missing or cannot be.
absl::Status ValidateNetwork(const Machine& machine);

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_MACHINE_H_
