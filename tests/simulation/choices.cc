#include "tests/simulation/choices.h"

#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/check.h"
#include "server/plan/memory_plan.h"
#include "server/plan/question.h"
#include "server/simulator/model_layout.h"

namespace superoffload::plan {
namespace {

constexpr uint64_t kSequence = 2048;

struct Run {
  const char* model;
  uint32_t ranks;
};
constexpr Run kRuns[] = {{"llama-8b", 1},      {"phi-4", 1},        {"qwen3-14b", 1},     {"gpt-oss-20b", 1},
                         {"qwen3-30b-a3b", 1}, {"seed-oss-36b", 1}, {"qwen3-30b-a3b", 2}, {"seed-oss-36b", 2},
                         {"llama-70b", 4},     {"gpt2-25b", 1},     {"gpt2-50b", 4},      {"gpt2-200b", 16}};

struct Moments {
  const char* algorithm;
  const char* words;
};
constexpr Moments kMoments[] = {{"adamw", "fp32"}, {"adamw_bf16", "bf16"}, {"adamw_8bit", "8 bits"}};

Question Ask(const Run& run, const Moments& moments) {
  v1::PlanRequest request;
  request.set_model_name(run.model);
  request.set_machine_name("gh200-96-480");
  request.set_ranks(run.ranks);
  request.set_batch(1);
  request.set_sequence(kSequence);
  request.set_loss(v1::LOSS_CHUNKED);
  request.set_algorithm(moments.algorithm);
  request.set_resident_buckets(0);
  absl::StatusOr<Question> question = ToQuestion(request);
  SUPEROFFLOAD_CHECK(question.ok(), question.status().ToString());
  return *std::move(question);
}

// With the room for gradients that the host's memory has; nothing: it does not hold the optimizer.
std::optional<Question> WithRoom(Question question) {
  const absl::StatusOr<MemoryPlan> memory = PlanMemory(question);
  SUPEROFFLOAD_CHECK(memory.ok(), memory.status().ToString());
  if (!memory->host_fits) return std::nullopt;
  question.spec.gradient_slots = memory->gradient_slots;
  question.spec.in_place = memory->in_place;
  return question;
}

enum class Activations { kStay, kLeave };  // as many of them as must

bool Fits(Question question, const engine::OptimizerSpec& share, const engine::Layout& layout,
          Activations activations) {
  if (activations == Activations::kLeave) {
    const std::optional<uint32_t> leaving =
        simulator::FewestOffloaded(question.model, layout, question.pass, question.gpu_use(), question.gpu_bytes());
    if (!leaving) return false;
    const auto blocks = static_cast<uint32_t>(question.model.architecture.layers);
    question.pass.offloaded_activations = simulator::ShareOfBlocks(*leaving, blocks);
  }
  return simulator::TotalBytes(GpuMemoryOf(question, layout)) <= question.gpu_bytes() &&
         simulator::TotalBytes(HostMemory(question, share, layout)) <= HostBudgetBytes(question.machine);
}

std::string MostTokens(Question question, Activations activations) {
  const engine::OptimizerSpec share = simulator::ShardOf(question.spec, 0, question.ranks);
  const absl::StatusOr<engine::Layout> layout = engine::PlanLayout(share);
  SUPEROFFLOAD_CHECK(layout.ok(), layout.status().ToString());
  uint64_t fit = 0;
  for (uint64_t step = 1 << 12; step > 0; step /= 2) {
    question.pass.batch = fit + step;
    if (Fits(question, share, *layout, activations)) fit += step;
  }
  return fit == 0 ? "none" : absl::StrCat(fit * kSequence);
}

std::string RowOf(const Run& run) {
  for (const Moments& moments : kMoments) {
    std::optional<Question> question = WithRoom(Ask(run, moments));
    if (!question) continue;
    const engine::OptimizerSpec share = simulator::ShardOf(question->spec, 0, run.ranks);
    const double host_bytes =
        static_cast<double>(simulator::TotalBytes(HostMemory(*question, share, *engine::PlanLayout(share))));
    std::string row = absl::StrFormat("| %s | %d | %s | %s | %.0f GiB | %s |", run.model, run.ranks, moments.words,
                                      question->spec.in_place              ? "one, parameters in it"
                                      : question->spec.gradient_slots == 1 ? "one"
                                                                           : "two",
                                      host_bytes / (1 << 30), MostTokens(*question, Activations::kStay));
    absl::StrAppend(&row, " ", MostTokens(*question, Activations::kLeave), " |");
    question->gpu.streamed_weights = 1;
    const bool streams = run.ranks == 1 && !question->spec.in_place;
    return absl::StrCat(row, " ", streams ? MostTokens(*question, Activations::kLeave) : "", " |\n");
  }
  return absl::StrCat("| ", run.model, " | ", run.ranks, " | does not fit on the host | | | | | |\n");
}

}  // namespace

std::string ChoicesTable() {
  std::string text =
      "| model | Superchips | moments | gradient slots | host memory of each | tokens, all stays | and inputs of "
      "blocks "
      "leave | and blocks stream |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n";
  for (const Run& run : kRuns) text += RowOf(run);
  return text;
}

}  // namespace superoffload::plan
