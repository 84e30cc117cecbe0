#include "server/plan/memory_plan.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/engine/record.h"
#include "server/memory/memory_budget.h"
#include "server/memory/memory_limit.h"
#include "server/optimizer/hosted_memory.h"
#include "server/simulator/model_layout.h"

namespace superoffload::plan {
namespace {

using simulator::MemoryItem;
using simulator::TotalBytes;

// Each is laid out; as many take some seconds.
constexpr uint64_t kMostShards = 1 << 23;

}  // namespace

std::vector<MemoryItem> HostMemory(const Question& question, const engine::OptimizerSpec& spec,
                                   const engine::Layout& layout) {
  const memory::MemoryUse use = optimizer::HostedMemory::Use(layout, spec);
  const uint64_t undo_bytes = engine::Record::UndoBytes(layout);
  const uint64_t record_bytes = engine::Record::Bytes(layout);
  std::vector<MemoryItem> items;
  uint64_t arrays_bytes = 0;
  for (const engine::StateFormat& format : layout.formats) {
    const char* const whose = &format == &layout.formats.front() ? "" : " of parameters with fp32 moments";
    for (size_t i = 0; i < format.arrays.size(); ++i) {
      const kernels::StateArray& array = format.arrays[i].array;
      const uint64_t bytes = array.Bytes(format.elements);
      const std::string name(array.name);
      const std::string per = array.elements_per_entry == 1 ? "" : absl::StrCat(" / ", array.elements_per_entry);
      items.push_back(
          {absl::StrCat(i == 0 ? "master weights" : absl::StrCat("state ", name), whose), bytes,
           absl::StrCat(format.elements, " elements", per, " x ", kernels::DTypeBytes(array.dtype), " bytes")});
      arrays_bytes += bytes;
    }
  }
  items.push_back({"gradient slots", use.gradients_bytes - layout.logs_bytes,
                   spec.gradient_slots == 1 ? "1 slot; each gradient lands when the one before it was absorbed"
                                            : "2 slots, one of them pending"});
  if (layout.has_logs) {
    items.push_back({"gradient logs", layout.logs_bytes,
                     absl::StrCat(layout.buckets.back().log_slots - spec.gradient_slots,
                                  " slots more of the buckets that are resident on the GPU")});
  }
  items.push_back({"published parameters", use.parameters_bytes,
                   layout.in_place ? "over the gradients that they came of" : "in the parameters' dtype"});
  items.push_back({"record", record_bytes - undo_bytes, "how far each chunk and parameter has come"});
  items.push_back(
      {"undo slots", undo_bytes, absl::StrCat("one for each of at most ", engine::kMaxWorkers, " workers")});
  items.push_back(
      {"metadata", use.metadata_bytes + (layout.state_bytes - arrays_bytes), "names, shapes, plan, alignment"});
  const simulator::Architecture& architecture = question.model.architecture;
  if (const uint64_t gone = simulator::OffloadedBlocks(architecture, question.pass); gone > 0) {
    items.push_back({"activations", static_cast<uint64_t>(simulator::ActivationsOf(architecture, question.pass).host),
                     absl::StrCat("inputs of ", gone, " checkpointed blocks; the daemon lends their memory")});
  }
  return items;
}

std::vector<Question> WithLessRoom(const Question& question) {
  if (!question.may_save_room) return {};
  std::vector<Question> less(2, question);
  for (Question& with : less) with.spec.gradient_slots = 1;
  less.back().spec.in_place = true;
  less.back().SetResidents(question.gpu.resident_buckets);
  if (question.gpu.streamed_weights > 0 || question.gpu.sums_on_host || !engine::ValidateSpec(less.back().spec).ok()) {
    less.pop_back();
  }
  return less;
}

uint64_t HostBudgetBytes(const simulator::Machine& machine) {
  return memory::BudgetBytes(0, static_cast<uint64_t>(machine.host.memory_bytes));
}

uint64_t Question::gpu_bytes() const {
  const auto bytes = static_cast<uint64_t>(machine.gpu.memory_bytes);
  if (!machine.one_memory) return bytes;
  const engine::OptimizerSpec share = simulator::ShardOf(spec, 0, ranks);
  const absl::StatusOr<engine::Layout> layout = engine::PlanLayout(share);
  if (!layout.ok()) return 0;  // whoever plans says why
  return bytes - std::min(bytes, TotalBytes(HostMemory(*this, share, *layout)));
}

std::vector<MemoryItem> GpuMemoryOf(const Question& question, const engine::Layout& layout) {
  return simulator::GpuMemory(question.model, layout, question.pass, question.gpu_use(), question.gpu_bytes());
}

namespace {

absl::StatusOr<MemoryPlan> PlanMemoryAsAsked(const Question& question) {
  if (const uint64_t shards = question.spec.parameters.size() * question.ranks; shards > kMostShards) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ranks is ", question.ranks, " and the model has ", question.spec.parameters.size(), " parameters: ", shards,
        " shards are too many to plan, the most are ", kMostShards, "; ask with fewer ranks"));
  }
  MemoryPlan plan{.ranks = {}, .gradient_slots = question.spec.gradient_slots, .in_place = question.spec.in_place};
  const uint64_t gpu_bytes = question.gpu_bytes();
  for (uint32_t rank = 0; rank < question.ranks; ++rank) {
    const engine::OptimizerSpec spec = simulator::ShardOf(question.spec, rank, question.ranks);
    const absl::StatusOr<engine::Layout> layout = engine::PlanLayout(spec);
    if (!layout.ok()) return layout.status();
    RankMemory& memory = plan.ranks.emplace_back();
    memory.gpu = simulator::GpuMemory(question.model, *layout, question.pass, question.gpu_use(), gpu_bytes);
    memory.host = HostMemory(question, spec, *layout);
    plan.gpu_fits = plan.gpu_fits && TotalBytes(memory.gpu) <= gpu_bytes;
    plan.host_fits = plan.host_fits && TotalBytes(memory.host) <= HostBudgetBytes(question.machine);
  }
  return plan;
}

}  // namespace

absl::StatusOr<MemoryPlan> PlanMemory(const Question& question) {
  absl::StatusOr<MemoryPlan> plan = PlanMemoryAsAsked(question);
  if (!plan.ok() || plan->host_fits) return plan;
  for (const Question& less : WithLessRoom(question)) {
    absl::StatusOr<MemoryPlan> smaller = PlanMemoryAsAsked(less);
    if (!smaller.ok() || smaller->host_fits) return smaller;
  }
  return plan;
}

}  // namespace superoffload::plan
