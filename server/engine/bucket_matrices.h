// The matrices of one bucket, for the stages of its passes (kernels::MatrixStages).
#ifndef SUPEROFFLOAD_SERVER_ENGINE_BUCKET_MATRICES_H_
#define SUPEROFFLOAD_SERVER_ENGINE_BUCKET_MATRICES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/algorithm.h"
#include "server/engine/chunk_view.h"
#include "server/engine/layout.h"

namespace superoffload::engine {

class BucketMatrices {
 public:
  // What a worker does of a stage at a time: elements [first, end) of a matrix, which begins at element `at` of the
  // bucket.
  struct Task {
    kernels::MatrixView matrix;  // with the gradient of slot 0
    uint32_t parameter = 0;
    uint64_t at = 0;
    uint64_t first = 0, end = 0;
    uint64_t gap = 0;  // elements behind the matrix, where this is its last task
  };

  BucketMatrices(const Layout& layout, const OptimizerMemory& memory, const BucketLayout& bucket)
      : gradient_dtype_(bucket.gradient_dtype), slot_bytes_(bucket.gradient_offsets[1] - bucket.gradient_offsets[0]) {
    auto* const directions = reinterpret_cast<float*>(memory.state + layout.directions_offset);
    float* scratch = directions + layout.directions_elements;
    uint64_t at = 0;
    for (const Part& part : layout.PartsOf(bucket)) {
      const MatrixLayout& shape = layout.matrices[part.parameter];
      kernels::MatrixView matrix;
      matrix.rows = shape.rows;
      matrix.columns = shape.columns;
      matrix.scratch = scratch;
      const StateFormat& format = layout.FormatOf(bucket);
      for (size_t array = 0; array < format.arrays.size(); ++array) {
        matrix.state.arrays[array] = memory.state + format.Byte(array, bucket.state_offset + at);
      }
      matrix.state.directions = directions + at;
      matrix.gradient = {memory.gradients + bucket.gradient_offsets[0] + at * kernels::DTypeBytes(gradient_dtype_),
                         gradient_dtype_};
      for (uint64_t first = 0; first < shape.elements(); first += kernels::kChunkElements) {
        tasks_.push_back(
            {matrix, part.parameter, at, first, std::min<uint64_t>(shape.elements(), first + kernels::kChunkElements)});
      }
      tasks_.back().gap = part.elements - shape.elements();
      scratch += layout.algorithm->stages->scratch_elements(shape.rows, shape.columns);
      at += part.elements;
    }
  }

  size_t tasks() const { return tasks_.size(); }
  const Task& task(size_t index) const { return tasks_[index]; }

  // With the gradient of `slot`. Gaps move nowhere.
  void Run(const kernels::MatrixStages& stages, size_t stage, const Task& task, uint32_t slot,
           const kernels::StepConstants& constants) const {
    kernels::MatrixView matrix = task.matrix;
    matrix.gradient.data = static_cast<const std::byte*>(matrix.gradient.data) + slot * slot_bytes_;
    stages.run(stage, task.first, task.end, matrix, constants);
    std::fill_n(matrix.state.directions + task.end, task.gap, 0.0f);
  }

 private:
  const kernels::DType gradient_dtype_;
  const uint64_t slot_bytes_;
  std::vector<Task> tasks_;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_BUCKET_MATRICES_H_
