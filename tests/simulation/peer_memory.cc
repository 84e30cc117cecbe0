#include "tests/simulation/peer_memory.h"

#include <algorithm>

#include "server/simulator/fit.h"
#include "server/simulator/workload.h"

namespace superoffload::simulator {
namespace {

constexpr double kReserve = 0.05;

double States(Peer peer, const Model& model) {
  const double elements = static_cast<double>(ParameterCount(model));
  const std::vector<uint64_t> units = UnitElements(model);
  switch (peer) {
    case Peer::kDdp:
      return 16 * elements;
    case Peer::kZeroOffload:
      return 4 * elements;
    case Peer::kZeroInfinity:
      return 6 * static_cast<double>(*std::max_element(units.begin(), units.end()));
    case Peer::kSuperOffload:
      return 2 * elements + 2 * 4 * static_cast<double>(kSubGroupElements);
  }
  return 0;
}

}  // namespace

double PeerGpuMemory(Peer peer, const Machine& machine, const Model& model, const Pass& pass) {
  return States(peer, model) + ActivationsOf(model.architecture, pass).peak() + static_cast<double>(kContextBytes) +
         kReserve * machine.gpu.memory_bytes;
}

double PeerHostMemory(Peer peer, const Model& model) {
  const double elements = static_cast<double>(ParameterCount(model));
  switch (peer) {
    case Peer::kDdp:
      return 0;
    case Peer::kZeroOffload:
      return 16 * elements;
    case Peer::kZeroInfinity:
      return 18 * elements;
    case Peer::kSuperOffload:
      return 16 * elements;
  }
  return 0;
}

std::optional<MicroBatch> LargestMicroBatch(Peer peer, const Machine& machine, const Model& model, uint64_t batch,
                                            uint64_t sequence) {
  if (PeerHostMemory(peer, model) > (1 - kReserve) * machine.host.memory_bytes) return std::nullopt;
  for (uint64_t size = batch; size > 0; --size) {
    if (batch % size != 0) continue;
    const Pass pass{
        .batch = size, .sequence = sequence, .checkpointing = Checkpointing::kNone, .attention = Attention::kFlash};
    if (PeerGpuMemory(peer, machine, model, pass) <= machine.gpu.memory_bytes) return MicroBatch{pass, batch / size};
  }
  return std::nullopt;
}

}  // namespace superoffload::simulator
