// Which tensor of a checkpoint lies where in which file, and which pieces of them a bucket holds.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_SHARD_PLAN_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_SHARD_PLAN_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "server/checkpoint/index.h"
#include "server/engine/layout.h"

namespace superoffload::checkpoint {

inline constexpr uint64_t kShardBytes = uint64_t{4} << 30;

struct Shard {
  std::string file;
  std::string header;  // with its length, see safetensors.h
  uint64_t bytes = 0;  // header and data
};

// A range of elements of one parameter: whole blocks, but at its end.
struct Piece {
  uint32_t parameter = 0;
  uint64_t first = 0;  // element of the parameter
  uint64_t elements = 0;
};

struct ShardPlan {
  struct Place {
    uint32_t shard = 0;
    uint64_t offset = 0;  // of the tensor's first byte in the file
  };
  std::vector<Shard> shards;
  std::vector<std::vector<Place>> places;         // per parameter, per state array of its format
  std::vector<std::vector<Piece>> bucket_pieces;  // per bucket; together every element of every parameter
};

// A state array's tensor of a parameter, and its dtype, as checkpoints name them.
std::string TensorName(const kernels::StateArray& array, const std::string& parameter);
const char* SafetensorsDType(kernels::DType dtype);

// Shards hold whole tensors of arrays of one name, as many as fit `shard_bytes`, at least one. `metadata` goes into
// each header.
ShardPlan PlanShards(const engine::OptimizerSpec& spec, const engine::Layout& layout,
                     const std::map<std::string, std::string>& metadata, uint64_t shard_bytes = kShardBytes);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_SHARD_PLAN_H_
