// The plain optimizer that the daemon must equal, bit for bit.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_SEQUENTIAL_OPTIMIZER_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_SEQUENTIAL_OPTIMIZER_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/elements/element_kernels.h"
#include "server/engine/bucket_pass.h"
#include "server/engine/layout.h"
#include "server/engine/record.h"
#include "server/engine/step_contract.h"

namespace superoffload::test {

struct Memory {
  explicit Memory(const engine::Layout& layout)
      : parameters(layout.parameters_bytes),
        gradients(layout.gradients_bytes),
        state(layout.state_bytes + 4096),
        record_bytes(engine::Record::Bytes(layout) / sizeof(kernels::UndoSlot) + 1) {}
  engine::OptimizerMemory view() {
    return {parameters.data(), gradients.data(), state.data(), reinterpret_cast<std::byte*>(record_bytes.data())};
  }
  // As a daemon has it: parameters may be published over their gradients.
  engine::OptimizerMemory view(const engine::Layout& layout) {
    engine::OptimizerMemory view = this->view();
    view.parameters = published(layout).data();
    return view;
  }
  std::vector<std::byte>& published(const engine::Layout& layout) { return layout.in_place ? gradients : parameters; }

  std::vector<std::byte> parameters, gradients, state;
  std::vector<kernels::UndoSlot> record_bytes;  // aligned as a record is
};

// Calls visit(format, index of the array) for the state arrays of all formats.
template <typename Visit>
void ForEachArray(const engine::Layout& layout, Visit visit) {
  for (const engine::StateFormat& format : layout.formats) {
    for (size_t array = 0; array < format.arrays.size(); ++array) visit(format, array);
  }
}

// One pass per step after the verdict, no pending gradients, one thread.
class SequentialOptimizer {
 public:
  using Kernels = const kernels::AlgorithmKernels& (kernels::Algorithm::*)() const;

  SequentialOptimizer(const engine::Layout& layout, const engine::OptimizerMemory& initial,
                      std::vector<engine::Scalars> groups, Kernels kernels = &kernels::Algorithm::scalar)
      : layout_(layout),
        memory_(layout),
        groups_(std::move(groups)),
        kernels_(kernels),
        steps_(layout.placements.size()) {
    std::memcpy(memory_.state.data(), initial.state, layout.state_bytes);
    std::memcpy(memory_.parameters.data(), initial.parameters, layout.parameters_bytes);
  }

  std::vector<engine::Scalars>& groups() { return groups_; }

  // `absent`, by parameter, have no gradient; empty: all have one.
  engine::Verdict Step(const std::byte* gradients, uint32_t slot, double scale, double max_grad_norm,
                       const std::vector<bool>& absent = {}) {
    const auto is_absent = [&](uint32_t parameter) { return !absent.empty() && absent[parameter]; };
    double sum = 0;
    for (const engine::BucketLayout& bucket : layout_.buckets) {
      std::vector<kernels::NormLanes> chunks(bucket.chunks());
      ForEachRun(bucket, [&](uint32_t parameter, size_t chunk, size_t first, size_t end) {
        if (is_absent(parameter)) return;
        kernels::kScalarElementKernels.add_squares(first, end, Gradient(bucket, gradients, slot, chunk), chunks[chunk]);
      });
      double bucket_sum = 0;
      for (const kernels::NormLanes& chunk : chunks) bucket_sum += chunk.Sum();
      sum += bucket_sum;
    }
    norm_ = std::sqrt(sum) * std::abs(scale);
    if (!std::isfinite(sum)) return engine::Verdict::kSkipNonFinite;
    if (norm_ >= 0x1p63) return engine::Verdict::kSkipOverflow;
    double clip = 1;
    if (max_grad_norm > 0) clip = std::min(1.0, max_grad_norm / (norm_ + 1e-6));
    for (uint32_t i = 0; i < steps_.size(); ++i) steps_[i] += is_absent(i) ? 0 : 1;
    for (const engine::BucketLayout& bucket : layout_.buckets) {
      if (layout_.algorithm->stages != nullptr) Prepare(bucket, gradients, slot, scale * clip, absent);
      ForEachRun(bucket, [&](uint32_t parameter, size_t chunk, size_t first, size_t end) {
        if (is_absent(parameter)) return;
        const engine::ChunkView view = engine::ViewChunk(layout_, memory_.view(), bucket, chunk);
        (Real(*layout_.FormatOf(bucket).algorithm).*kernels_)().plain(
            first, end, engine::StateOf(layout_, view, parameter, seed_),
            layout_.algorithm->make_constants(groups_[bucket.group].data(), steps_[parameter], scale * clip),
            Gradient(bucket, gradients, slot, chunk), view.parameters);
      });
    }
    return clip < 1 ? engine::Verdict::kClip : engine::Verdict::kCommit;
  }

  double norm() const { return norm_; }
  const Memory& memory() const { return memory_; }
  const std::vector<uint64_t>& steps() const { return steps_; }
  void set_seed(uint64_t seed) { seed_ = seed; }                              // of stochastic rounding
  void set_steps(std::vector<uint64_t> steps) { steps_ = std::move(steps); }  // those that `initial` holds

 private:
  // A layout's algorithm may be one that dies.
  static const kernels::Algorithm& Real(const kernels::Algorithm& algorithm) {
    return *kernels::FindAlgorithm(algorithm.name);
  }

  // The directions of the bucket's matrices, stage by stage.
  void Prepare(const engine::BucketLayout& bucket, const std::byte* gradients, uint32_t slot, double scale,
               const std::vector<bool>& absent) {
    engine::OptimizerMemory memory = memory_.view();
    memory.gradients = const_cast<std::byte*>(gradients);
    const engine::BucketMatrices matrices(layout_, memory, bucket);
    const kernels::MatrixStages& stages = *Real(*layout_.algorithm).stages;
    for (size_t stage = 0; stage < stages.count; ++stage) {
      for (size_t i = 0; i < matrices.tasks(); ++i) {
        const engine::BucketMatrices::Task& task = matrices.task(i);
        if (!absent.empty() && absent[task.parameter]) continue;
        const kernels::StepConstants constants =
            layout_.algorithm->make_constants(groups_[bucket.group].data(), steps_[task.parameter], scale);
        matrices.Run(stages, stage, task, slot, constants);
      }
    }
  }

  // What a chunk has of one parameter, counted from the chunk's beginning.
  template <typename Body>
  void ForEachRun(const engine::BucketLayout& bucket, Body body) const {
    size_t begin = 0;
    for (const engine::Part& part : layout_.PartsOf(bucket)) {
      const size_t end = begin + part.elements;
      while (begin < end) {
        const size_t chunk = begin / kernels::kChunkElements, first = begin % kernels::kChunkElements;
        const size_t count = std::min<size_t>(kernels::kChunkElements - first, end - begin);
        body(part.parameter, chunk, first, first + count);
        begin += count;
      }
    }
  }

  // Of a whole chunk.
  static kernels::ConstElements Gradient(const engine::BucketLayout& bucket, const std::byte* gradients, uint32_t slot,
                                         size_t chunk) {
    return {gradients + bucket.gradient_offsets[slot] +
                chunk * kernels::kChunkElements * kernels::DTypeBytes(bucket.gradient_dtype),
            bucket.gradient_dtype};
  }

  const engine::Layout& layout_;
  Memory memory_;
  std::vector<engine::Scalars> groups_;
  const Kernels kernels_;
  std::vector<uint64_t> steps_;  // by parameter: those in which it had a gradient
  double norm_ = 0;
  uint64_t seed_ = 0;
};

// Rounds `value` to `dtype` and stores it as element `index`.
inline void StoreElement(std::byte* base, size_t index, kernels::DType dtype, float value) {
  if (dtype == kernels::DType::kFloat32) {
    std::memcpy(base + 4 * index, &value, 4);
    return;
  }
  kernels::Narrow(1, &value, {base + 2 * index, dtype});
}

}  // namespace superoffload::test

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_SEQUENTIAL_OPTIMIZER_H_
