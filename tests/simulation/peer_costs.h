// What the software of published systems costs on Grace, as seconds per element with all cores. Where a number is
// calibrated, README.md says on which rows of the paper.
#ifndef SUPEROFFLOAD_TESTS_SIMULATION_PEER_COSTS_H_
#define SUPEROFFLOAD_TESTS_SIMULATION_PEER_COSTS_H_

namespace superoffload::simulator {

struct PeerCosts {
  // DeepSpeed's CPU step on Arm is a scalar loop: 0.163 s for a billion elements (its pull request 8365).
  double scalar_step = 0.163e-9;
  // The paper's vector kernel: 0.316 s for four billion elements, 0.608 s for eight (its authors' table).
  double vector_step = 0.078e-9;
  // Gradients to fp32, or parameters from fp32, on the CPU, by tensor operations outside of the step.
  double cast = 0.039e-9;
  // Norm and overflow check of gradients on the CPU. Fitted to ZeRO-Offload's rows, where it is settled together with
  // the casts. The published SuperOffload's rows are the same within a twentieth for all from 0 to 0.165.
  double validate = 0.165e-9;
  // A hand-over of one bucket to the optimizer's process, which sleeps a millisecond between looks: half of it.
  double handover_seconds = 0.5e-3;
  // Bytes per second of ZeRO-Infinity's copies of single parameters and gradients between pageable memory and the GPU.
  double streamed_bandwidth = 2.7e9;

  // Bytes that the CPU reads and writes per element.
  static constexpr double kStepBytes = 28;        // three fp32 arrays read and written, an fp32 gradient
  static constexpr double kCastBytes = 6;         // 4 on one side, 2 on the other
  static constexpr double kValidateBytes = 4;     // an fp32 gradient read
  static constexpr double kAccumulateBytes = 10;  // fp32 sum read and written, a 2-byte gradient read
};

// The other end of what the paper's tables leave open of the published SuperOffload: the norm at the speed of memory.
inline PeerCosts FastestCosts(double host_bandwidth) {
  PeerCosts costs;
  costs.validate = PeerCosts::kValidateBytes / host_bandwidth;
  return costs;
}

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_TESTS_SIMULATION_PEER_COSTS_H_
