// The plain optimizer that the daemon must equal, bit for bit.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_SEQUENTIAL_OPTIMIZER_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_SEQUENTIAL_OPTIMIZER_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/adam/adam_kernels.h"
#include "server/engine/bucket_pass.h"
#include "server/engine/layout.h"
#include "server/engine/record.h"
#include "server/transport/transport.h"

namespace superoffload::test {

struct Memory {
  explicit Memory(const engine::Layout& layout)
      : parameters(layout.parameters_bytes),
        gradients(layout.gradients_bytes),
        state(layout.state_bytes + 4096),
        record_bytes(engine::Record::Bytes(engine::kMaxGroups, layout.chunks) / sizeof(kernels::UndoSlot) + 1) {}
  engine::OptimizerMemory view() {
    return {parameters.data(), gradients.data(), state.data(), reinterpret_cast<std::byte*>(record_bytes.data())};
  }
  std::vector<std::byte> parameters, gradients, state;
  std::vector<kernels::UndoSlot> record_bytes;  // aligned as a record is
};

// One pass per step after the verdict, no pending gradients, one thread.
class SequentialOptimizer {
 public:
  SequentialOptimizer(const engine::Layout& layout, const engine::OptimizerMemory& initial,
                      std::vector<kernels::AdamHyperparameters> groups, const kernels::AdamKernels& kernels)
      : layout_(layout), memory_(layout), groups_(std::move(groups)), kernels_(kernels) {
    std::memcpy(memory_.state.data(), initial.state, layout.state_bytes);
    std::memcpy(memory_.parameters.data(), initial.parameters, layout.parameters_bytes);
  }

  std::vector<kernels::AdamHyperparameters>& groups() { return groups_; }

  transport::Verdict Step(const std::byte* gradients, uint32_t slot, double scale, double max_grad_norm) {
    double sum = 0;
    for (const engine::BucketLayout& bucket : layout_.buckets) {
      double bucket_sum = 0;
      for (size_t first = 0; first < bucket.elements; first += kernels::kChunkElements) {
        bucket_sum += kernels_.sum_of_squares(std::min<size_t>(kernels::kChunkElements, bucket.elements - first),
                                              Gradient(bucket, gradients, slot, first));
      }
      sum += bucket_sum;
    }
    norm_ = std::sqrt(sum) * std::abs(scale);
    if (!std::isfinite(sum)) return transport::Verdict::kSkipNonFinite;
    if (norm_ >= 0x1p63) return transport::Verdict::kSkipOverflow;
    double clip = 1;
    if (max_grad_norm > 0) clip = std::min(1.0, max_grad_norm / (norm_ + 1e-6));
    ++step_;
    for (const engine::BucketLayout& bucket : layout_.buckets) {
      const kernels::AdamStep constants = kernels::MakeAdamStep(groups_[bucket.group], step_, scale * clip);
      for (size_t first = 0; first < bucket.elements; first += kernels::kChunkElements) {
        kernels_.plain(
            std::min<size_t>(kernels::kChunkElements, bucket.elements - first),
            {State(0, bucket) + first, State(1, bucket) + first, State(2, bucket) + first}, constants,
            Gradient(bucket, gradients, slot, first),
            {memory_.parameters.data() + bucket.parameters_offset + first * kernels::DTypeBytes(bucket.dtype),
             bucket.dtype});
      }
    }
    return clip < 1 ? transport::Verdict::kClip : transport::Verdict::kCommit;
  }

  double norm() const { return norm_; }
  const Memory& memory() const { return memory_; }

 private:
  float* State(int array, const engine::BucketLayout& bucket) {
    return reinterpret_cast<float*>(memory_.state.data() + layout_.state_array_offsets[array]) + bucket.state_offset;
  }
  static kernels::ConstElements Gradient(const engine::BucketLayout& bucket, const std::byte* gradients, uint32_t slot,
                                         size_t first) {
    return {gradients + bucket.gradient_offsets[slot] + first * kernels::DTypeBytes(bucket.gradient_dtype),
            bucket.gradient_dtype};
  }

  const engine::Layout& layout_;
  Memory memory_;
  std::vector<kernels::AdamHyperparameters> groups_;
  const kernels::AdamKernels& kernels_;
  uint64_t step_ = 0;
  double norm_ = 0;
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
