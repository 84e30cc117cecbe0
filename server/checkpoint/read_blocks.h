// Reads state arrays of which the checkpoint or the optimizer has codes, each block of which has a scale. Blocks count
// from the first element of what a rank has, so ranks of another number may cut them elsewhere. A block that the
// checkpoint has as it is wanted comes to the bit; others are put together from numbers and encoded, which may round.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_READ_BLOCKS_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_READ_BLOCKS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/algorithm.h"
#include "server/checkpoint/read_scope.h"
#include "server/checkpoint/saved_tensors.h"

namespace superoffload::checkpoint {

// Whether some of `tensor`, as SavedTensors::Find has it, was saved as codes.
bool HasBlocks(const SavedTensors::Tensor& tensor);

// Whether `tensor` has what is needed to read it into `array`, whatever was saved. DATA_LOSS: scales are missing.
// FAILED_PRECONDITION: codes are of another kind than this daemon knows.
absl::Status CheckBlocks(const SavedTensors::Tensor& tensor, const kernels::StateArray& array);

// Into `array`, which has a codec, of `algorithm`: the codes of the tensor's elements, and the scales of its blocks. To
// `rounded` it adds how many blocks stand for other numbers than the checkpoint has.
absl::Status ReadBlocks(const SavedTensors::Tensor& tensor, const kernels::Algorithm& algorithm,
                        const kernels::StateArray& array, std::byte* codes, std::byte* scales, const ReadScope& scope,
                        uint64_t* rounded);

// The tensor's numbers, row-major. bf16 is rounded to nearest even.
absl::Status ReadDecoded(const SavedTensors::Tensor& tensor, kernels::MutableElements to, const ReadScope& scope);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_READ_BLOCKS_H_
