// What the published systems keep in HBM and on the host, and the micro-batch that then fits.
//
//                        HBM, bytes per element                      host, bytes per element
//     ddp                16: parameter, gradient, three fp32          -
//     zero-offload        4: parameter, gradient                     16: three fp32, an fp32 gradient
//     zero-infinity       of two units: parameters; one: gradients   18: as above, and the parameters
//     superoffload        2: parameter; and two sub-groups' casts    16
//
// Beside it activations (activations.h), the context and the reserve of fit.h.
#ifndef SUPEROFFLOAD_TESTS_SIMULATION_PEER_MEMORY_H_
#define SUPEROFFLOAD_TESTS_SIMULATION_PEER_MEMORY_H_

#include <cstdint>
#include <optional>

#include "server/simulator/activations.h"
#include "server/simulator/architecture.h"
#include "server/simulator/machine.h"

namespace superoffload::simulator {

enum class Peer { kDdp, kZeroOffload, kZeroInfinity, kSuperOffload };

inline constexpr uint64_t kSubGroupElements = 600'000'000;

// Bytes.
double PeerGpuMemory(Peer peer, const Machine& machine, const Model& model, const Pass& pass);
double PeerHostMemory(Peer peer, const Model& model);

struct MicroBatch {
  Pass pass;
  uint64_t accumulation = 1;
};

// The largest micro-batch of at most `batch` sequences that divides it and fits, with fused attention and all other
// activations kept; none when not even one sequence does, or when the host's memory does not suffice.
std::optional<MicroBatch> LargestMicroBatch(Peer peer, const Machine& machine, const Model& model, uint64_t batch,
                                            uint64_t sequence);

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_TESTS_SIMULATION_PEER_MEMORY_H_
