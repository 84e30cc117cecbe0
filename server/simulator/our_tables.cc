#include "server/simulator/our_tables.h"

#include <algorithm>
#include <map>
#include <memory>

#include "absl/strings/str_format.h"
#include "kernels/check.h"
#include "server/simulator/catalogue.h"
#include "server/simulator/fit.h"
#include "server/simulator/ours.h"
#include "server/simulator/peers.h"
#include "server/simulator/simulated_training.h"

namespace superoffload::simulator {
namespace {

constexpr uint64_t kSequence = 2048;
constexpr uint64_t kTokens[] = {2048, 8192, 16384, 65536};
constexpr std::string_view kModels[] = {"llama-8b", "gpt2-25b"};

struct Ending {
  std::string_view name;
  RunOptions options;
};
constexpr Ending kEndings[] = {{"commit", {}},
                               {"all are clipped", {.clip_rate = 1}},
                               {"one in ten is skipped", {.skip_rate = 0.1}}};

Workload MakeStep(const Machine& machine, const Model& model, uint64_t tokens) {
  Pass pass{.batch = 1, .sequence = kSequence};
  const uint64_t batch = tokens / kSequence;
  const uint64_t fits = LargestBatch(model, LayoutOf(model, 0), pass, {}, static_cast<uint64_t>(machine.gpu.memory_bytes));
  SUPEROFFLOAD_CHECK_LT(0u, fits, "a model that does not fit");
  pass.batch = std::min(batch, fits);
  while (batch % pass.batch != 0) --pass.batch;
  return MakeWorkload(machine.gpu, model, pass, batch / pass.batch);
}

}  // namespace

std::vector<OurRow> SimulateOurs() {
  const absl::StatusOr<Machine> machine = FindMachine("gh200-96-480");
  SUPEROFFLOAD_CHECK(machine.ok());
  const std::unique_ptr<Schedule> published = MakePublishedSuperOffload();
  std::vector<OurRow> rows;
  for (const std::string_view name : kModels) {
    const absl::StatusOr<Model> model = FindModel(name);
    SUPEROFFLOAD_CHECK(model.ok());
    for (const uint64_t tokens : kTokens) {
      const Workload workload = MakeStep(*machine, *model, tokens);
      for (const Ending& ending : kEndings) {
        rows.push_back({name, tokens, ending.name, Ours({}).Run(*machine, workload, ending.options),
                        published->Run(*machine, workload, ending.options)});
      }
    }
  }
  return rows;
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

std::string OurTables() {
  const std::vector<OurRow> rows = SimulateOurs();
  std::string text =
      "| model | tokens | steps | seconds | MFU | exposed | most of it waits for | published SuperOffload, seconds |\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- |\n";
  for (const OurRow& row : rows) {
    absl::StrAppendFormat(&text, "| %s | %d | %s | %.2f | %.0f %% | %.0f ms | %s, %.0f ms | %.2f |\n", row.model, row.tokens,
                          row.steps, row.ours.step_seconds, 100 * row.ours.utilisation, 1e3 * row.ours.exposed_seconds,
                          row.ours.exposed.front().cause, 1e3 * row.ours.exposed.front().seconds,
                          row.published.step_seconds);
  }
  text += "\nOver all rows the GPU waits for\n\n| what | share |\n| --- | --- |\n";
  double sum = 0;
  const std::vector<Exposed> causes = RankCauses(rows);
  for (const Exposed& part : causes) sum += part.seconds;
  for (const Exposed& part : causes) absl::StrAppendFormat(&text, "| %s | %.0f %% |\n", part.cause, 100 * part.seconds / sum);
  return text;
}

}  // namespace superoffload::simulator
