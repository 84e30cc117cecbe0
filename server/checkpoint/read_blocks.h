// Reads a state array of codes, each block of which has a scale. Blocks count from the first element of what a rank
// has, so ranks of another number may cut them elsewhere. A block that the checkpoint has as it is wanted comes to the
// bit; one that it has in parts is decoded and encoded again, which rounds.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_READ_BLOCKS_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_READ_BLOCKS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/algorithm.h"
#include "server/checkpoint/read_scope.h"
#include "server/checkpoint/saved_tensors.h"

namespace superoffload::checkpoint {

// Whether `tensor`, as SavedTensors::Find has it, has what ReadBlocks reads. DATA_LOSS: scales are missing.
// FAILED_PRECONDITION: they are of blocks of another size.
absl::Status CheckBlocks(const SavedTensors::Tensor& tensor, const kernels::Algorithm& algorithm,
                         const kernels::StateArray& array);

// `array`, which has a codec, of `algorithm`. Writes the codes of the tensor's elements, and the scales of its blocks;
// says how many blocks were encoded again.
absl::StatusOr<uint64_t> ReadBlocks(const SavedTensors::Tensor& tensor, const kernels::Algorithm& algorithm,
                                    const kernels::StateArray& array, std::byte* codes, std::byte* scales,
                                    const ReadScope& scope = {});

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_READ_BLOCKS_H_
