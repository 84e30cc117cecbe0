#include "server/simulator/workload.h"

#include <utility>

#include "kernels/base/check.h"

namespace superoffload::simulator {
namespace {

struct AttentionWork {
  double flops = 0;  // that are computed per token and block, forward
  double efficiency = 0;
  double backward = 0;  // as a multiple of forward
};

// Forward has two products. The gradients of both take four; fused attention first computes the scores again.
AttentionWork AttentionOf(const GpuModel& gpu, const Architecture& architecture, const Pass& pass) {
  if (pass.attention == Attention::kFlash) {
    return {AttentionFlopsPerToken(architecture, pass.sequence), gpu.attention_efficiency, 2.5};
  }
  const double square = ScoreFlopsPerPair(architecture) * static_cast<double>(pass.sequence);
  return {square, gpu.matmul_efficiency, 2};
}

}  // namespace

double Workload::forward_seconds() const {
  double sum = 0;
  for (const UnitSeconds& unit : units) sum += unit.forward;
  return sum;
}

double Workload::backward_seconds() const {
  double sum = 0;
  for (const UnitSeconds& unit : units) sum += unit.backward;
  return sum;
}

Workload MakeWorkload(const GpuModel& gpu, Model model, const Pass& pass, uint64_t accumulation) {
  SUPEROFFLOAD_CHECK(accumulation >= 1);
  const Architecture& a = model.architecture;
  const double tokens = pass.tokens(), hidden = static_cast<double>(a.hidden);
  const AttentionWork attention = AttentionOf(gpu, a, pass);
  const double attention_seconds = tokens * attention.flops / (gpu.peak_flops * attention.efficiency);
  const std::vector<double> matrix_flops = MatrixFlopsPerToken(model);

  Workload workload;
  workload.pass = pass;
  workload.accumulation = accumulation;
  workload.units.resize(matrix_flops.size());
  double flops_per_token = 0;
  for (size_t unit = 0; unit < matrix_flops.size(); ++unit) {
    const bool is_block = unit > 0 && unit < a.head_unit(), is_head = unit == a.head_unit();
    UnitSeconds& seconds = workload.units[unit];
    seconds.forward = tokens * matrix_flops[unit] / (gpu.peak_flops * gpu.matmul_efficiency);
    flops_per_token += matrix_flops[unit];
    double bytes = tokens * hidden * 4;  // read and written once, in 2 bytes
    if (is_block) {
      seconds.forward += attention_seconds + gpu.block_overhead;
      flops_per_token += AttentionFlopsPerToken(a, pass.sequence);
      bytes = tokens * hidden * gpu.block_traffic;
    } else if (is_head) {
      bytes += tokens * kLogitBytes * static_cast<double>(a.vocabulary);
    }
    seconds.forward += bytes / gpu.memory_bandwidth;
    seconds.backward = 2 * seconds.forward;
    if (is_head) seconds.backward += LossChunkTraffic(a, pass) / gpu.memory_bandwidth;
    if (is_block) seconds.backward += (attention.backward - 2) * attention_seconds;
    if (is_block && pass.checkpointing == Checkpointing::kFull) seconds.backward += seconds.forward;
    if (is_block && pass.checkpointing == Checkpointing::kSelective) seconds.backward += attention_seconds;
  }
  workload.flops_per_step = 3 * flops_per_token * workload.tokens_per_step();
  workload.model = std::move(model);
  return workload;
}

std::vector<uint64_t> UnitElements(const Model& model) {
  std::vector<uint64_t> elements(model.architecture.head_unit() + 1);
  for (const engine::ParameterSpec& parameter : model.parameters) {
    elements[parameter.unit] += engine::ElementCount(parameter);
  }
  return elements;
}

}  // namespace superoffload::simulator
