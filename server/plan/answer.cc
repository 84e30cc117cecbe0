#include "server/plan/answer.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/plan/machine_description.h"
#include "server/plan/memory_plan.h"
#include "server/plan/performance.h"
#include "server/plan/question.h"
#include "server/plan/recommendation.h"
#include "server/plan/report.h"
#include "server/simulator/model_layout.h"

namespace superoffload::plan {
namespace {

void SetMemory(const std::vector<simulator::MemoryItem>& items, uint64_t available, v1::MemoryPlan* out) {
  for (const simulator::MemoryItem& item : items) {
    v1::MemoryItem* const entry = out->add_items();
    entry->set_purpose(item.purpose);
    entry->set_bytes(item.bytes);
    entry->set_formula(item.formula);
  }
  out->set_total_bytes(simulator::TotalBytes(items));
  out->set_available_bytes(available);
  out->set_fits(out->total_bytes() <= available);
}

void SetLargest(const Question& question, const engine::Layout& layout, v1::Largest* out) {
  constexpr uint64_t kMost = std::numeric_limits<uint32_t>::max();
  const simulator::GpuUse use = question.gpu_use();
  out->set_batch(static_cast<uint32_t>(
      std::min(kMost, simulator::LargestBatch(question.model, layout, question.pass, use, question.gpu_bytes()))));
  out->set_sequence(simulator::LargestSequence(question.model, layout, question.pass, use, question.gpu_bytes()));
}

std::vector<std::string> Assumptions(const Question& question) {
  std::vector<std::string> sentences = MachineSentences(question.machine, question.known_machine, question.ranks > 1);
  if (question.machine.one_memory) {
    sentences.push_back(
        "GPU and host have one memory: what is available to the GPU is what the optimizer leaves of it, and neither "
        "slows down the other's accesses in the simulation.");
  }
  sentences.push_back(
      "Activations are those of Korthikanti et al. 2022, section 4, adapted to grouped-query attention, gated "
      "feed-forwards, experts and FlashAttention, without dropout, in 2 bytes per element, with fused norms.");
  sentences.push_back(
      absl::StrCat("Logits take ", simulator::kLogitBytes, " bytes each; a fused or chunked loss takes less."));
  sentences.push_back(absl::StrCat("The CUDA context takes ", simulator::kContextBytes >> 20, " MiB, and ",
                                   question.gpu.allocator_reserve * 100, " % of HBM stays free for fragmentation."));
  sentences.push_back(
      "Gradients leave during backward (overlap=True, or overlap=\"auto\" after its first three steps).");
  sentences.push_back(
      "A step is simulated with the daemon's own step machine, layout and order of copies; launching takes "
      "no time, and packing does not slow down the model's kernels.");
  if (const kernels::Algorithm* const first = kernels::Algorithms().front(); question.spec.algorithm != first) {
    sentences.push_back(absl::StrCat("The passes of ", std::string(question.spec.algorithm->name),
                                     " move their own bytes; their arithmetic is taken to last as long as that of ",
                                     std::string(first->name), ", which is an upper bound."));
  }
  if (question.ranks > 1) {
    sentences.push_back(
        "Ranks share the parameters along the first dimension, as FSDP2 and ZeRO-3 do; blocks, embeddings and head are "
        "sharded each by itself, gathered one ahead and freed again (reshard_after_forward).");
    sentences.push_back(
        "All ranks are equally fast and have the same batch, collectives do not slow down kernels, and parameters are "
        "gathered and gradients reduced in their own dtypes.");
  }
  return sentences;
}

}  // namespace

absl::StatusOr<v1::PlanResponse> Answer(const v1::PlanRequest& request) {
  const absl::StatusOr<Question> question = ToQuestion(request);
  if (!question.ok()) return question.status();
  const absl::StatusOr<engine::Layout> layout =
      engine::PlanLayout(simulator::ShardOf(question->spec, 0, question->ranks));
  if (!layout.ok()) return layout.status();
  const absl::StatusOr<MemoryPlan> memory = PlanMemory(*question);
  if (!memory.ok()) return memory.status();
  v1::PlanResponse response;
  response.set_model(question->model.name);
  response.set_machine(question->machine.name);
  response.set_parameters(simulator::ParameterCount(question->model));
  response.set_active_parameters(simulator::ActiveParameterCount(question->model));
  response.set_buckets(static_cast<uint32_t>(layout->buckets.size()));
  for (const engine::BucketLayout& bucket : layout->buckets) {
    response.set_largest_bucket_bytes(
        std::max(response.largest_bucket_bytes(), bucket.gradient_bytes()));
  }
  for (uint32_t rank = 0; rank < memory->ranks.size(); ++rank) {
    v1::RankMemory* const out = response.add_memory();
    out->set_rank(rank);
    SetMemory(memory->ranks[rank].gpu, question->gpu_bytes(), out->mutable_gpu());
    SetMemory(memory->ranks[rank].host, HostBudgetBytes(question->machine), out->mutable_host());
  }
  SetLargest(*question, *layout, response.mutable_largest());
  absl::StatusOr<v1::Recommendation> recommendation = Recommend(*question, *memory);
  if (!recommendation.ok()) return recommendation.status();
  *response.mutable_recommendation() = *std::move(recommendation);
  for (std::string& sentence : Assumptions(*question)) response.add_assumptions(std::move(sentence));
  if (absl::Status status = SetPerformance(*question, *layout, *memory, response); !status.ok()) return status;
  response.set_report(Report(response));
  return response;
}

}  // namespace superoffload::plan
