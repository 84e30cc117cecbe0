#include "tests/simulation/our_tables.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/check.h"
#include "server/simulator/catalogue.h"
#include "server/simulator/fit.h"
#include "server/simulator/model_layout.h"
#include "server/simulator/ours.h"
#include "tests/simulation/paper_tables.h"
#include "tests/simulation/peers.h"

namespace superoffload::simulator {
namespace {

constexpr uint64_t kSequence = 2048;
constexpr uint64_t kTokens[] = {2048, 8192, 16384, 65536};
constexpr std::string_view kModels[] = {"llama-8b", "gpt2-25b"};

struct RunOfModel {
  std::string_view model;
  uint32_t ranks;
};
constexpr RunOfModel kRuns[] = {{"qwen3-30b-a3b", 2}, {"seed-oss-36b", 2}, {"llama-70b", 4}, {"llama-70b", 8}};

struct Ending {
  std::string_view name;
  RunOptions options;
};
constexpr Ending kEndings[] = {{"commit", {}},
                               {"one in a hundred is clipped", {.clip_rate = 0.01}},
                               {"all are clipped", {.clip_rate = 1}},
                               {"one in ten is skipped", {.skip_rate = 0.1}}};

// With accumulation where the batch does not fit; the memory for its gradients is not looked at then.
Workload MakeStep(const Machine& machine, const Model& model, uint64_t tokens, uint64_t sequence, uint32_t ranks,
                  GpuUse use = {}) {
  Pass pass{.batch = 1, .sequence = sequence};
  const uint64_t batch = tokens / sequence;
  const engine::Layout layout = LayoutOf(model, {}, ranks);
  use.gathers = ranks > 1;
  const uint64_t fits = LargestBatch(model, layout, pass, use, static_cast<uint64_t>(machine.gpu.memory_bytes));
  SUPEROFFLOAD_CHECK_LT(0u, fits, "a model that does not fit");
  pass.batch = std::min(batch, fits);
  while (batch % pass.batch != 0) --pass.batch;
  Workload workload = MakeWorkload(machine.gpu, model, pass, batch / pass.batch);
  workload.ranks = ranks;
  return workload;
}

// Of a table with a column for each number of tokens, behind others.
std::string HeaderOf(std::initializer_list<std::string_view> columns, std::span<const uint64_t> tokens) {
  std::string text = "|", line = "|";
  for (const std::string_view column : columns) absl::StrAppendFormat(&text, " %s |", column);
  for (const uint64_t count : tokens) absl::StrAppend(&text, " ", count, " tokens |");
  for (size_t i = 0; i < columns.size() + tokens.size(); ++i) line += " --- |";
  return absl::StrCat(text, "\n", line, "\n");
}

Machine Gh200() {
  absl::StatusOr<Machine> machine = FindMachine("gh200-96-480");
  SUPEROFFLOAD_CHECK(machine.ok());
  return *std::move(machine);
}

std::vector<OurRow> SimulateSteps(const Machine& machine, std::span<const Ending> endings) {
  const std::unique_ptr<Schedule> slowest = MakePublishedSuperOffload();
  const std::unique_ptr<Schedule> fastest = MakePublishedSuperOffload({}, FastestCosts(machine.host.bandwidth));
  std::vector<OurRow> rows;
  for (const std::string_view name : kModels) {
    const absl::StatusOr<Model> model = FindModel(name);
    SUPEROFFLOAD_CHECK(model.ok());
    for (const uint64_t tokens : kTokens) {
      const Workload workload = MakeStep(machine, *model, tokens, kSequence, 1);
      for (const Ending& ending : endings) {
        rows.push_back({name, tokens, ending.name, Ours({}).Run(machine, workload, ending.options),
                        fastest->Run(machine, workload, ending.options),
                        slowest->Run(machine, workload, ending.options)});
      }
    }
  }
  return rows;
}

}  // namespace

std::vector<OurRow> SimulateOurs() { return SimulateSteps(Gh200(), kEndings); }

std::vector<RanksRow> SimulateRanks() {
  const Machine machine = Gh200();
  std::vector<RanksRow> rows;
  for (const RunOfModel& run : kRuns) {
    const absl::StatusOr<Model> model = FindModel(run.model);
    SUPEROFFLOAD_CHECK(model.ok());
    for (const uint64_t tokens : {8192, 32768}) {
      const Workload workload = MakeStep(machine, *model, tokens, 4096, run.ranks);
      for (const Ending& ending : {kEndings[0], kEndings[2]}) {
        rows.push_back({run.model, run.ranks, tokens, ending.name, Ours({}).Run(machine, workload, ending.options)});
      }
    }
  }
  return rows;
}

std::string RanksTable() {
  std::string text =
      "| model | ranks | tokens of each | steps | seconds | MFU | exposed | most of it waits for |\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- |\n";
  for (const RanksRow& row : SimulateRanks()) {
    absl::StrAppendFormat(&text, "| %s | %d | %d | %s | %.2f | %.0f %% | %.0f ms | %s, %.0f ms |\n", row.model,
                          row.ranks, row.tokens, row.steps, row.ours.step_seconds, 100 * row.ours.utilisation,
                          1e3 * row.ours.exposed_seconds, row.ours.exposed.front().cause,
                          1e3 * row.ours.exposed.front().seconds);
  }
  return text;
}

std::vector<Exposed> RankCauses(const std::vector<OurRow>& rows) {
  std::map<std::string, double> seconds;
  for (const OurRow& row : rows) {
    for (const Exposed& part : row.ours.exposed) seconds[part.cause] += part.seconds;
  }
  std::vector<Exposed> ranked;
  for (const auto& [cause, sum] : seconds) ranked.push_back({cause, sum});
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const Exposed& a, const Exposed& b) { return a.seconds > b.seconds; });
  return ranked;
}

namespace {

// Of the published SuperOffload's range: we need less than all of it, lie inside of it, or need more.
std::string_view Comparison(const OurRow& row) {
  constexpr double kSame = 0.01;
  if (row.ours.step_seconds < row.fastest.step_seconds * (1 - kSame)) return "less";
  if (row.ours.step_seconds > row.slowest.step_seconds * (1 + kSame)) return "more";
  return row.slowest.step_seconds <= row.fastest.step_seconds * (1 + 2 * kSame) ? "level" : "open";
}

std::string StepsTable(const std::vector<OurRow>& rows) {
  std::string text =
      "| model | tokens | steps | seconds | MFU | exposed | most of it waits for | published SuperOffload, seconds | "
      "we need |\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
  for (const OurRow& row : rows) {
    absl::StrAppendFormat(&text, "| %s | %d | %s | %.2f | %.0f %% | %.0f ms%s | %s, %.0f ms | %.2f to %.2f | %s |\n",
                          row.model, row.tokens, row.steps, row.ours.step_seconds, 100 * row.ours.utilisation,
                          1e3 * row.ours.exposed_seconds, HidesOffloading(row.ours) ? " *" : "",
                          row.ours.exposed.front().cause, 1e3 * row.ours.exposed.front().seconds,
                          row.fastest.step_seconds, row.slowest.step_seconds, Comparison(row));
  }
  return text;
}

// A row for each: what `cells` says of it, a cell for each of `columns`.
template <typename Cells>
std::string TableOfFewTokens(const std::string& columns, Cells cells) {
  std::string text = absl::StrCat("| machine | model | tokens | steps |", columns, "\n| --- | --- | --- | --- |");
  for (ptrdiff_t i = std::ranges::count(columns, '|'); i > 0; --i) text += " --- |";
  text += "\n";
  for (const std::string_view machine_name : {"gh200-96-480", "h100-pcie"}) {
    const absl::StatusOr<Machine> machine = FindMachine(std::string(machine_name));
    SUPEROFFLOAD_CHECK(machine.ok());
    for (const std::string_view model_name : {"llama-8b", "qwen3-14b"}) {
      const absl::StatusOr<Model> model = FindModel(model_name);
      SUPEROFFLOAD_CHECK(model.ok());
      for (const uint64_t tokens : {2048, 4096, 8192}) {
        const Workload workload = MakeStep(*machine, *model, tokens, kSequence, 1);
        for (const Ending& ending : {kEndings[0], kEndings[2]}) {
          absl::StrAppendFormat(&text, "| %s | %s | %d | %s |", machine_name, model_name, tokens, ending.name);
          text += cells(*machine, workload, ending.options) + "\n";
        }
      }
    }
  }
  return text;
}

}  // namespace

std::string OurTables() {
  const std::vector<OurRow> rows = SimulateOurs();
  std::string text = StepsTable(rows);
  text += "\nOver all rows the GPU waits for\n\n| what | share |\n| --- | --- |\n";
  double sum = 0;
  const std::vector<Exposed> causes = RankCauses(rows);
  for (const Exposed& part : causes) sum += part.seconds;
  for (const Exposed& part : causes) {
    absl::StrAppendFormat(&text, "| %s | %.0f %% |\n", part.cause, 100 * part.seconds / sum);
  }
  absl::StrAppend(&text, "\nWith the GPU numbers of the paper's own trainer, steps that commit:\n\n");
  Machine papers = Gh200();
  papers.gpu = WithPapersTrainer(papers.gpu);
  return text + StepsTable(SimulateSteps(papers, {kEndings, 1}));
}

std::string StatesTable() {
  // Of a log of 4 steps.
  constexpr std::pair<uint32_t, uint32_t> kResidents[] = {{0, 0}, {192, 5}};
  return TableOfFewTokens(
      " fp32 moments | bf16 | 8 bits | bf16, and masters | 192 residents, fp32 | bf16 | 8 bits | bf16, and masters |",
      [&](const Machine& machine, const Workload& workload, const RunOptions& options) {
        std::string cells;
        for (const auto& [residents, log_slots] : kResidents) {
          for (const char* name : {"adamw", "adamw_bf16", "adamw_8bit", "adamw_bf16_bf16_masters"}) {
            const kernels::Algorithm& algorithm = *kernels::FindAlgorithm(name);
            Workload stored = workload;
            KeepSomeInFp32(algorithm, stored.model.parameters);
            const Ours ours({.algorithm = &algorithm, .resident_buckets = residents, .log_slots = log_slots});
            const Outcome outcome = ours.Run(machine, stored, options);
            absl::StrAppendFormat(&cells, " %.0f (%.0f) |", 1e3 * outcome.step_seconds, 1e3 * outcome.exposed_seconds);
          }
        }
        return cells;
      });
}

std::string ResidentsTable() {
  // Of a log of K steps, one slot more is for the step to come.
  constexpr std::pair<uint32_t, uint32_t> kResidents[] = {{0, 0}, {64, 0}, {64, 5}, {64, 9}, {128, 5}, {192, 5}};
  return TableOfFewTokens(" none | 64, K = 1 | 64, K = 4 | 64, K = 8 | 128, K = 4 | 192, K = 4 |",
                          [&](const Machine& machine, const Workload& workload, const RunOptions& options) {
                            std::string cells;
                            for (const auto& [residents, log_slots] : kResidents) {
                              const Ours ours({.resident_buckets = residents, .log_slots = log_slots});
                              absl::StrAppendFormat(&cells, " %.0f |",
                                                    1e3 * ours.Run(machine, workload, options).step_seconds);
                            }
                            return cells;
                          });
}

std::string StreamsTable() {
  constexpr uint64_t kTokensOfColumns[] = {4096, 8192, 16384, 32768, 65536};
  struct Row {
    const char *machine, *model, *algorithm;
    uint32_t ranks = 1;
  };
  constexpr Row kRows[] = {{"gh200-96-480", "llama-8b", "adamw"},
                           {"gh200-96-480", "gpt2-25b", "adamw"},
                           {"gh200-96-480", "seed-oss-36b", "adamw_8bit"},
                           {"gh200-96-480", "seed-oss-36b", "adamw", 2},
                           {"gh200-96-480", "llama-70b", "adamw_8bit", 2},
                           {"gh200-96-480", "llama-70b", "adamw", 4},
                           {"h100-pcie", "llama-8b", "adamw"},
                           {"h100-pcie", "gpt2-25b", "adamw"},
                           {"h100-pcie", "seed-oss-36b", "adamw_8bit"}};
  std::string text = HeaderOf({"machine", "ranks", "model", "moments"}, kTokensOfColumns);
  for (const Row& row : kRows) {
    const absl::StatusOr<Machine> machine = FindMachine(row.machine);
    const absl::StatusOr<Model> model = FindModel(row.model);
    SUPEROFFLOAD_CHECK(machine.ok() && model.ok());
    const kernels::Algorithm& algorithm = *kernels::FindAlgorithm(row.algorithm);
    absl::StrAppendFormat(&text, "| %s | %d | %s | %d bits |", row.machine, row.ranks, row.model,
                          algorithm.block_elements > 1 ? 8 : 32);
    for (const uint64_t tokens : kTokensOfColumns) {
      Workload workload = MakeStep(*machine, *model, tokens, 4096, row.ranks, {.streamed_weights = 1});
      KeepSomeInFp32(algorithm, workload.model.parameters);
      const double stay = Ours({.algorithm = &algorithm}).Run(*machine, workload, {}).step_seconds;
      const double stream =
          Ours({.algorithm = &algorithm, .streamed_weights = 1}).Run(*machine, workload, {}).step_seconds;
      absl::StrAppendFormat(&text, " %.2f (%+.0f %%) |", stream,
                            std::round(100 * (stream / stay - 1)) + 0.0);  // not -0
    }
    text += "\n";
  }
  return text;
}

// What makes it fit: inputs of so many blocks leave, or so many blocks stream; else both.
std::string RoomFor(const Model& model, const engine::Layout& layout, Pass pass, uint64_t memory_bytes) {
  const std::optional<uint32_t> leave = FewestOffloaded(model, layout, pass, {}, memory_bytes);
  const std::optional<uint32_t> stream = FewestStreamed(model, layout, pass, {}, memory_bytes);
  if (leave == 0) return "all stay";
  if (leave && stream) return absl::StrFormat("%d leave, or %d stream", *leave, *stream);
  if (leave) return absl::StrFormat("%d leave", *leave);
  if (stream) return absl::StrFormat("%d stream", *stream);
  pass.offloaded_activations = 1;
  const std::optional<uint32_t> both = FewestStreamed(model, layout, pass, {}, memory_bytes);
  return both ? absl::StrFormat("all leave, %d stream", *both) : "does not fit";
}

std::string SequencesTable() {
  constexpr uint64_t kSequences[] = {16384, 32768, 65536, 131072, 262144};
  const Machine machine = Gh200();
  const auto memory_bytes = static_cast<uint64_t>(machine.gpu.memory_bytes);
  std::string text = HeaderOf({"model", "blocks"}, kSequences);
  for (const std::string_view name :
       {"llama-8b", "phi-4", "qwen3-14b", "gpt-oss-20b", "gpt2-25b", "qwen3-30b-a3b", "seed-oss-36b"}) {
    const absl::StatusOr<Model> model = FindModel(name);
    SUPEROFFLOAD_CHECK(model.ok());
    const engine::Layout layout = LayoutOf(*model);
    absl::StrAppendFormat(&text, "| %s | %d |", name, model->architecture.layers);
    for (const uint64_t sequence : kSequences) {
      const Pass pass{.sequence = sequence, .loss = Loss::kChunked};
      absl::StrAppendFormat(&text, " %s |", RoomFor(*model, layout, pass, memory_bytes));
    }
    text += "\n";
  }
  return text;
}

std::string RoomTable() {
  constexpr std::pair<uint32_t, bool> kRooms[] = {{2, false}, {1, false}, {1, true}};
  return TableOfFewTokens(" two slots | one slot | in place |", [&](const Machine& machine, const Workload& workload,
                                                                    const RunOptions& options) {
    std::string cells;
    for (const auto& [gradient_slots, in_place] : kRooms) {
      const Ours ours({.gradient_slots = gradient_slots, .in_place = in_place});
      const Outcome outcome = ours.Run(machine, workload, options);
      absl::StrAppendFormat(&cells, " %.0f (%.0f) |", 1e3 * outcome.step_seconds, 1e3 * outcome.exposed_seconds);
    }
    return cells;
  });
}

}  // namespace superoffload::simulator
