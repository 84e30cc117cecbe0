#include "tests/simulation/paper_tables.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/check.h"
#include "server/simulator/catalogue.h"
#include "tests/simulation/peers.h"

namespace superoffload::simulator {
namespace {

constexpr Peer kPeers[] = {Peer::kDdp, Peer::kZeroInfinity, Peer::kZeroOffload, Peer::kSuperOffload};
constexpr const char* kPeerNames[] = {"DDP", "ZeRO-Infinity", "ZeRO-Offload", "SuperOffload, published"};

// TFLOPS as published, in the order of kPeers; 0: out of memory.
struct PublishedRow {
  const char* model;
  double tflops[4];
};
constexpr PublishedRow kPublished[] = {
    {"gpt2-2b", {174, 47, 123, 203}}, {"gpt2-3b", {107, 49, 107, 178}}, {"gpt2-5b", {0, 49, 129, 238}},
    {"gpt2-10b", {0, 43, 118, 253}},  {"gpt2-15b", {0, 34, 102, 256}},  {"gpt2-20b", {0, 30, 0, 286}},
    {"gpt2-25b", {0, 23, 0, 299}},
};
constexpr std::pair<const char*, double> kAblation[] = {{"none", 116},
                                                        {"+ CPU kernel", 128},
                                                        {"+ casting on the GPU", 144},
                                                        {"+ speculation", 209},
                                                        {"+ repartitioning", 239}};

std::unique_ptr<Schedule> MakePeer(Peer peer) {
  switch (peer) {
    case Peer::kDdp:
      return MakeDdp();
    case Peer::kZeroInfinity:
      return MakeZeroInfinity();
    case Peer::kZeroOffload:
      return MakeZeroOffload();
    case Peer::kSuperOffload:
      return MakePublishedSuperOffload();
  }
  return nullptr;
}

struct Simulated {
  double tflops = 0;
  uint64_t micro_batch = 0;
  double exposed = 0;  // of the step
};

Simulated Simulate(const char* name, Peer peer, const Schedule& schedule) {
  const Machine machine = PaperMachine();
  const absl::StatusOr<Model> model = FindModel(name);
  SUPEROFFLOAD_CHECK(model.ok());
  const std::optional<MicroBatch> micro_batch = LargestMicroBatch(peer, machine, *model, kPaperBatch, kPaperSequence);
  if (!micro_batch) return {};
  const Workload workload = MakeWorkload(machine.gpu, *model, micro_batch->pass, micro_batch->accumulation);
  const Outcome outcome = schedule.Run(machine, workload, {});
  return {ReportedFlops(*model, workload.tokens_per_step(), kPaperSequence) / outcome.step_seconds / 1e12,
          micro_batch->pass.batch, outcome.exposed_seconds / outcome.step_seconds};
}

// SuperOffload's row at 5 billion parameters is the last one of the ablation.
bool Calibrated(Peer peer, std::string_view model) {
  switch (peer) {
    case Peer::kDdp:
      return model == "gpt2-2b";
    case Peer::kZeroInfinity:
    case Peer::kZeroOffload:
      return true;
    case Peer::kSuperOffload:
      return model == "gpt2-5b";
  }
  return false;
}

std::string Tflops(double value) { return value == 0 ? "oom" : absl::StrFormat("%.0f", value); }

std::string Deviation(double simulated, double measured) {
  if (simulated == 0 || measured == 0) return "differs";
  return absl::StrFormat("%+.0f %%", 100 * (simulated / measured - 1));
}

std::string NameOf(Peer peer) { return kPeerNames[std::find(std::begin(kPeers), std::end(kPeers), peer) - kPeers]; }

// "gpt2-25b" -> "25 B"
std::string Size(std::string_view model) { return absl::StrCat(std::string(model.substr(5, model.size() - 6)), " B"); }

std::string ThroughputTable() {
  std::string table =
      "| model | system | micro-batch | paper | simulated | deviation | exposed | |\n| --- | --- | --- | --- | --- | "
      "--- | --- | --- |\n";
  for (const PaperRow& row : SimulateThroughput()) {
    if (row.measured == 0 && row.simulated == 0) continue;  // neither fits
    absl::StrAppend(&table, "| ", Size(row.model), " | ", NameOf(row.peer), " | ",
                    row.micro_batch == 0 ? "" : absl::StrCat(row.micro_batch), " | ", Tflops(row.measured), " | ",
                    Tflops(row.simulated), " | ", Deviation(row.simulated, row.measured), " | ",
                    row.simulated == 0 ? "" : absl::StrFormat("%.0f %%", 100 * row.exposed), " | ",
                    row.calibrated           ? "calibrated"
                    : row.tests_offloading() ? "predicted"
                                             : "predicted *",
                    " |\n");
  }
  return table;
}

std::string AblationTable() {
  std::string table = "| features | paper | simulated | deviation |\n| --- | --- | --- | --- |\n";
  for (const AblationRow& row : SimulateAblation()) {
    absl::StrAppend(&table, "| ", std::string(row.feature), " | ", Tflops(row.measured), " | ", Tflops(row.simulated),
                    " | ", Deviation(row.simulated, row.measured), " |\n");
  }
  return table;
}

std::string LargestTable() {
  std::string table = "| system | paper | simulated |\n| --- | --- | --- |\n";
  for (const LargestRow& row : FindLargest()) {
    absl::StrAppend(&table, "| ", NameOf(row.peer), " | ", Size(row.measured), " | ", Size(row.simulated), " |\n");
  }
  return table;
}

}  // namespace

Machine PaperMachine() {
  Machine machine = *FindMachine("gh200-96-480");
  machine.name = "gh200-96-480 with the paper's software";
  machine.gpu = WithPapersTrainer(machine.gpu);
  machine.gpu.memory_bytes =
      96e9;                        // with all of the 95 GiB, DDP would fit at 5 billion parameters; the paper's did not
  machine.host.bandwidth = 368e9;  // which its kernel reached
  machine.d2h = machine.h2d;       // the paper's picture has both curves, within 5 % of each other
  for (LinkPoint& point : machine.d2h.points) point.bytes_per_second *= 0.95;
  return machine;
}

double ReportedFlops(const Model& model, double tokens, double sequence) {
  const double h = static_cast<double>(model.architecture.hidden),
               layers = static_cast<double>(model.architecture.layers);
  const double vocabulary = static_cast<double>(model.architecture.vocabulary);
  return 72 * tokens * layers * h * h * (1 + sequence / (6 * h) + vocabulary / (12 * layers * h));
}

std::vector<PaperRow> SimulateThroughput() {
  std::vector<PaperRow> rows;
  for (size_t i = 0; i < std::size(kPeers); ++i) {
    const std::unique_ptr<Schedule> schedule = MakePeer(kPeers[i]);
    for (const PublishedRow& published : kPublished) {
      const Simulated simulated = Simulate(published.model, kPeers[i], *schedule);
      const bool calibrated = Calibrated(kPeers[i], published.model);
      rows.push_back({.model = published.model,
                      .peer = kPeers[i],
                      .measured = published.tflops[i],
                      .simulated = simulated.tflops,
                      .micro_batch = simulated.micro_batch,
                      .calibrated = calibrated && simulated.tflops > 0,
                      .exposed = simulated.exposed});
    }
  }
  return rows;
}

std::vector<AblationRow> SimulateAblation() {
  std::vector<AblationRow> rows;
  for (size_t on = 0; on < std::size(kAblation); ++on) {
    const PublishedFeatures features{
        .vector_step = on >= 1, .gpu_cast = on >= 2, .speculation = on >= 3, .repartition = on >= 4};
    const Simulated simulated = Simulate("gpt2-5b", Peer::kSuperOffload, *MakePublishedSuperOffload(features));
    rows.push_back({kAblation[on].first, kAblation[on].second, simulated.tflops});
  }
  return rows;
}

std::vector<LargestRow> FindLargest() {
  // DDP: 3.5 B as published, between two shapes.
  constexpr std::string_view kMeasured[] = {"gpt2-3b", "gpt2-25b", "gpt2-15b", "gpt2-25b"};
  std::vector<LargestRow> rows;
  for (size_t i = 0; i < std::size(kPeers); ++i) {
    rows.push_back({kPeers[i], kMeasured[i], ""});
    for (const char* name :
         {"gpt2-1b", "gpt2-2b", "gpt2-3b", "gpt2-5b", "gpt2-10b", "gpt2-15b", "gpt2-20b", "gpt2-25b", "gpt2-50b"}) {
      if (LargestMicroBatch(kPeers[i], PaperMachine(), *FindModel(name), kPaperBatch, kPaperSequence)) {
        rows.back().simulated = name;
      }
    }
  }
  return rows;
}

std::string PaperTables() {
  return absl::StrCat("One Superchip, batch 8, sequence 2048, TFLOPS:\n\n", ThroughputTable(),
                      "\nAblation at 5 billion parameters, TFLOPS (calibrated):\n\n", AblationTable(),
                      "\nThe largest of the artifact's shapes that fits (predicted):\n\n", LargestTable());
}

}  // namespace superoffload::simulator
