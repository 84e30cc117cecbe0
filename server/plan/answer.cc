#include "server/plan/answer.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
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
  const auto batch = [&](const simulator::Pass& pass) {
    return static_cast<uint32_t>(
        std::min(kMost, simulator::LargestBatch(question.model, layout, pass, use, question.gpu_bytes())));
  };
  const auto sequence = [&](const simulator::Pass& pass) {
    return simulator::LargestSequence(question.model, layout, pass, use, question.gpu_bytes());
  };
  simulator::Pass chunked = question.pass;
  chunked.loss = simulator::Loss::kChunked;
  out->set_batch(batch(question.pass));
  out->set_sequence(sequence(question.pass));
  out->set_chunked_loss_batch(batch(chunked));
  out->set_chunked_loss_sequence(sequence(chunked));
}

std::string LossSentence(const Question& question) {
  const std::string logits = absl::StrCat("Logits take ", simulator::kLogitBytes, " bytes each");
  if (question.pass.loss == simulator::Loss::kWhole) {
    return absl::StrCat(logits, ", all of them at once; a chunked loss (loss=chunked) takes less.");
  }
  const simulator::Architecture& a = question.model.architecture;
  const simulator::GpuModel& gpu = question.machine.gpu;
  const double product = question.pass.tokens() * 2 * static_cast<double>(a.vocabulary) *
                         static_cast<double>(a.hidden) / (gpu.peak_flops * gpu.matmul_efficiency);
  return absl::StrFormat(
      "%s, those of %d tokens at a time, as Liger's fused linear cross entropy cuts them (its kernel takes less). The "
      "chunks' gradients come with their logits, so no product is computed again; adding up the head's gradient takes "
      "%.3f s of a pass. A loss that computes its logits again in backward takes another %.3f s.",
      logits, simulator::LossChunk(a, question.pass),
      simulator::LossChunkTraffic(a, question.pass) / gpu.memory_bandwidth, product);
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
  sentences.push_back(LossSentence(question));
  sentences.push_back(absl::StrCat("The CUDA context takes ", simulator::kContextBytes >> 20, " MiB, and ",
                                   question.gpu.allocator_reserve * 100, " % of HBM stays free for fragmentation."));
  sentences.push_back(
      "Gradients leave during backward (overlap=True, or overlap=\"auto\" after its first three steps).");
  sentences.push_back(
      "A step is simulated with the daemon's own step machine, layout and order of copies; launching takes "
      "no time, and packing does not slow down the model's kernels.");
  if (question.gpu.streamed_weights > 0) {
    sentences.push_back(
        "Blocks that stream are copied from the host's memory for each forward and each backward pass, but for those "
        "still in a slot, and updated after the verdict; the copies do not slow down kernels.");
  }
  if (question.pass.offloaded_activations > 0) {
    sentences.push_back(
        "Inputs of checkpointed blocks that wait on the host are copied beside the kernels, which that does not slow "
        "down; two of them are on the GPU at any time.");
  }
  const kernels::Algorithm& algorithm = *question.spec.algorithm;
  if (const kernels::Algorithm& first = *kernels::Algorithms().front(); &algorithm != &first) {
    const simulator::PassCosts costs = question.machine.passes, own = simulator::CostsOf(costs, algorithm);
    sentences.push_back(absl::StrFormat(
        "The passes of %s move their own bytes; their arithmetic is taken to last %.2g times as long to absorb, and "
        "%.2g "
        "times to publish, as that of %s, by the instructions of their loops; where it is no more, that is an upper "
        "bound.",
        algorithm.name, own.absorb / costs.absorb, own.publish / costs.publish, first.name));
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

void SetPrices(double price_per_hour, uint32_t ranks, v1::PlanResponse& response) {
  if (price_per_hour == 0) return;
  if (response.has_performance()) {
    response.mutable_performance()->set_price_per_million_tokens(1e6 * price_per_hour * ranks /
                                                                 (3600 * response.performance().tokens_per_second()));
  }
  response.add_assumptions(absl::StrCat("Tokens cost what ", ranks, ranks == 1 ? " machine costs" : " machines cost",
                                        " at ", price_per_hour,
                                        " an hour each, for as long as the steps take: loading, evaluation, "
                                        "checkpoints and failures are not in it."));
}

}  // namespace

absl::StatusOr<v1::PlanResponse> Answer(const v1::PlanRequest& request) {
  absl::StatusOr<Question> question = ToQuestion(request);
  if (!question.ok()) return question.status();
  const absl::StatusOr<MemoryPlan> memory = PlanMemory(*question);
  if (!memory.ok()) return memory.status();
  question->spec.gradient_slots = memory->gradient_slots;
  question->spec.in_place = memory->in_place;
  question->SetResidents(question->gpu.resident_buckets);
  const absl::StatusOr<engine::Layout> layout =
      engine::PlanLayout(simulator::ShardOf(question->spec, 0, question->ranks));
  if (!layout.ok()) return layout.status();
  v1::PlanResponse response;
  response.set_model(question->model.name);
  response.set_machine(question->machine.name);
  response.set_one_memory(question->machine.one_memory);
  response.set_parameters(simulator::ParameterCount(question->model));
  response.set_active_parameters(simulator::ActiveParameterCount(question->model));
  response.set_buckets(static_cast<uint32_t>(layout->buckets.size()));
  for (const engine::BucketLayout& bucket : layout->buckets) {
    response.set_largest_bucket_bytes(std::max(response.largest_bucket_bytes(), bucket.gradient_bytes()));
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
  SetPrices(request.price_per_hour(), question->ranks, response);
  response.set_report(Report(response, request.assumptions()));
  return response;
}

}  // namespace superoffload::plan
