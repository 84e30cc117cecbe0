// Simulated step times of the CPU path beside real ones, on the machine that this runs on: a real daemon with one
// worker, a synthetic trainer (synthetic_trainer.h), and the simulator with the machine that adam_bench measures.
// Never a test: real times are the machine's business. Rounds of measurement and of training alternate, and medians are
// compared, because others may use the machine meanwhile.
//
//   cpu_path_bench [--rounds=5] [--steps=8] [--largest=300000000]
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "server/simulator/ours.h"
#include "superoffload/v1/exit_status.h"
#include "tests/simulation/measured_host.h"
#include "tests/simulation/synthetic_trainer.h"
#include "tests/support/daemon_process.h"

ABSL_FLAG(int, rounds, 5, "of measuring and training");
ABSL_FLAG(int, steps, 8, "of each model in a round");
ABSL_FLAG(uint64_t, largest, 300'000'000, "parameters; larger models are left out");

namespace superoffload {
namespace {

using simulator::Workload;

struct Shape {
  const char* name;
  uint64_t hidden, layers;
};
constexpr Shape kShapes[] = {{"10 M", 256, 12}, {"30 M", 512, 10}, {"100 M", 768, 14}, {"300 M", 1024, 24}};

// Backward takes `seconds_per_element` for the elements of a unit, forward half of it.
Workload MakeSynthetic(const Shape& shape, double seconds_per_element) {
  simulator::Architecture architecture{.layers = shape.layers,
                                       .hidden = shape.hidden,
                                       .query_heads = 8,
                                       .feed_forward = 4 * shape.hidden,
                                       .vocabulary = 1024,
                                       .learned_positions = 128,
                                       .tied_embeddings = true,
                                       .biases = true};
  if (!simulator::Complete(architecture).ok()) std::abort();
  Workload workload;
  workload.model = {shape.name, architecture,
                    simulator::MakeParameters(architecture, kernels::DType::kBFloat16, kernels::DType::kBFloat16)};
  for (const uint64_t elements : simulator::UnitElements(workload.model)) {
    const double backward = static_cast<double>(elements) * seconds_per_element;
    workload.units.push_back({backward / 2, backward});
  }
  return workload;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

double Simulate(const Workload& workload, const std::vector<simulator::Machine>& rounds) {
  const simulator::Ours::Settings settings{.device_slots = 1u << 16, .sums_with_gradients = false};
  return simulator::Ours(settings).Run(WithoutLink(rounds), workload, {}).step_seconds;
}

void Compare(Client& client, const Shape& shape, double seconds_per_element) {
  const Workload workload = MakeSynthetic(shape, seconds_per_element);
  SyntheticTrainer trainer(&client, "synthetic", workload);
  trainer.Run(3);  // touches the memory
  std::vector<simulator::Machine> machine;
  std::vector<double> real;
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    machine.push_back(MeasureHost());
    const std::vector<double> steps = trainer.Run(absl::GetFlag(FLAGS_steps));
    real.insert(real.end(), steps.begin(), steps.end());
  }
  const double simulated = Simulate(workload, machine), measured = Median(real);
  std::sort(real.begin(), real.end());
  const double computes = workload.compute_seconds();
  std::printf("| %s | %.1f | %.1f | %.1f (%.1f to %.1f) | %+.0f %% | %.1f | %.1f |\n", shape.name, 1e3 * computes,
              1e3 * simulated, 1e3 * measured, 1e3 * real[real.size() / 4], 1e3 * real[real.size() * 3 / 4],
              100 * (simulated / measured - 1), 1e3 * (simulated - computes), 1e3 * (measured - computes));
  std::fflush(stdout);
}

}  // namespace
}  // namespace superoffload

int main(int argc, char** argv) {
  superoffload::EndWithZeroAfterHelp(argc, argv);
  absl::ParseCommandLine(argc, argv);
  superoffload::test::DaemonProcess daemon({"--worker_threads=1", "--memory_budget_bytes=12000000000"});
  auto client = superoffload::Client::Connect(daemon.endpoint());
  if (!client.ok()) return 1;
  std::printf(
      "| model | computes, ms | simulated | real (quartiles) | deviation | exposed, simulated | exposed, real |\n"
      "| --- | --- | --- | --- | --- | --- | --- |\n");
  // A backward pass that the optimizer hides behind, and one that it does not.
  for (const double seconds_per_element : {4e-9, 0.5e-9}) {
    for (const auto& shape : superoffload::kShapes) {
      if (12 * shape.hidden * shape.hidden * shape.layers > 1.1 * absl::GetFlag(FLAGS_largest)) continue;
      superoffload::Compare(**client, shape, seconds_per_element);
    }
  }
}
