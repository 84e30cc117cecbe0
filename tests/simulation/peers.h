// The published schedules. Each is a small policy over the parts of a Rig, which are those that our own schedule runs
// over, so that a comparison is of like with like.
//
// All of them are simulated for one step: each step ends with the new parameters in place, so the next begins as this
// one did. Micro-batches but the last keep their gradients in HBM where the system has room for them.
#ifndef SUPEROFFLOAD_TESTS_SIMULATION_PEERS_H_
#define SUPEROFFLOAD_TESTS_SIMULATION_PEERS_H_

#include <memory>

#include "server/simulator/outcome.h"
#include "tests/simulation/peer_costs.h"

namespace superoffload::simulator {

class Schedule {
 public:
  virtual ~Schedule() = default;
  virtual Outcome Run(const Machine& machine, const Workload& workload, const RunOptions& options) const = 0;
};

// What the published SuperOffload added to ZeRO-Offload, one by one (the paper's ablation).
struct PublishedFeatures {
  bool vector_step = true;  // the CPU kernel of its own
  bool gpu_cast = true;     // gradients and parameters are cast on the GPU and cross the link in fp32
  bool speculation = true;  // steps begin in backward; validation runs beside the next forward
  bool repartition = true;  // buckets of 64 MB instead of sub-groups, the last of them stay on the GPU
};

// Data parallel on one GPU: the optimizer's state is in HBM.
std::unique_ptr<Schedule> MakeDdp();

// The CPU step comes after backward, its norm and casts on the CPU.
std::unique_ptr<Schedule> MakeZeroOffload(const PeerCosts& costs = {});

// Parameters are streamed from the host for forward and for backward, gradients to it.
std::unique_ptr<Schedule> MakeZeroInfinity(const PeerCosts& costs = {});

std::unique_ptr<Schedule> MakePublishedSuperOffload(const PublishedFeatures& features = {},
                                                    const PeerCosts& costs = {});

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_TESTS_SIMULATION_PEERS_H_
