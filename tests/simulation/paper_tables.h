// The tables of the SuperOffload paper (arXiv, version 1) for one Superchip: what the simulator gives for the published
// schedules, beside what their authors measured. README.md shows what PaperTables prints and explains every larger
// deviation.
#ifndef SUPEROFFLOAD_TESTS_SIMULATION_PAPER_TABLES_H_
#define SUPEROFFLOAD_TESTS_SIMULATION_PAPER_TABLES_H_

#include <string>
#include <string_view>
#include <vector>

#include "server/simulator/machine.h"
#include "server/simulator/workload.h"
#include "tests/simulation/peer_memory.h"

namespace superoffload::simulator {

inline constexpr uint64_t kPaperBatch = 8, kPaperSequence = 2048;

// gh200-96-480 with the software of the paper's experiments: three numbers of its GPU kernels are calibrated, and the
// link is the paper's own measurement in both directions.
Machine PaperMachine();

// Throughput of one model under one system; 0: out of memory.
struct PaperRow {
  std::string_view model;  // in the catalogue
  Peer peer = Peer::kDdp;
  double measured = 0;  // TFLOPS
  double simulated = 0;
  uint64_t micro_batch = 0;
  bool calibrated = false;  // else predicted
  double exposed = 0;       // of the simulated step

  // Else the GPU's numbers alone make the prediction.
  bool tests_offloading() const { return exposed >= 0.05; }
};
std::vector<PaperRow> SimulateThroughput();

// At 5 billion parameters, each feature on top of those before it.
struct AblationRow {
  std::string_view feature;
  double measured = 0;  // TFLOPS
  double simulated = 0;
};
std::vector<AblationRow> SimulateAblation();

// The largest of the artifact's shapes that each system trains.
struct LargestRow {
  Peer peer = Peer::kDdp;
  std::string_view measured;  // as published, "gpt2-25b"
  std::string simulated;
};
std::vector<LargestRow> FindLargest();

// Floating-point operations of a step as the field reports them (Narayanan et al. 2021, equation 3, without
// recomputation): attention over the whole square.
double ReportedFlops(const Model& model, double tokens, double sequence);

// All of them, as Markdown.
std::string PaperTables();

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_TESTS_SIMULATION_PAPER_TABLES_H_
