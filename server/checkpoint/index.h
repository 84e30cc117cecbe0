// What a checkpoint is, as its index says. A checkpoint is a directory:
//
//   ARRAY-00001-of-0000N.safetensors   tensors "ARRAY.NAME" of one state array of the algorithm, in shards of some GiB;
//                                      the first array, "model", holds the master weights
//   model.safetensors.index.json       this index
//
// The index is JSON: "weight_map" (tensor to file) and "metadata.total_size" as Hugging Face's tools know them, and
// beside them what restoring needs: the format's version, the run, steps, algorithm, the hyper-parameters of each
// parameter group by name, the seed of stochastic rounding, each parameter's group, the steps of each parameter that
// lacked gradients in some, the place of shards in their tensors, the arrays of codes with the arrays of their scales,
// the CRC-32 of each file, and at its end that of the index itself (summed_json.h). Version 2 had no CRC-32 of itself,
// version 1 no steps of parameters either; both are read. Whoever has made a file may have put any number into it: each
// is in its range, or the index is refused.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_INDEX_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_INDEX_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/algorithm.h"

namespace superoffload::checkpoint {

inline constexpr char kIndexFile[] = "model.safetensors.index.json";
inline constexpr char kDoubtfulIndexFile[] = "model.safetensors.index.json.doubtful";
inline constexpr char kDoubtsFile[] = "NOT_GUARANTEED.txt";

// The tensors' files name every tensor, as the index does, in at least an eighth of the bytes: an index that is larger
// is none. The MiB is for one of few tensors and many groups.
inline constexpr uint64_t kMaxIndexBytes = uint64_t{1} << 30;
constexpr uint64_t MaxIndexBytes(uint64_t tensor_file_bytes) {
  constexpr uint64_t kLeast = uint64_t{1} << 20, kPerByte = 8;
  return tensor_file_bytes >= (kMaxIndexBytes - kLeast) / kPerByte ? kMaxIndexBytes
                                                                   : kLeast + kPerByte * tensor_file_bytes;
}

// Hyper-parameters of a parameter group, by name.
using NamedScalars = std::map<std::string, double>;

// Where a parameter that is a shard lies in its tensor.
struct ShardPlace {
  std::vector<uint64_t> global_shape, global_offset;
};

// An array whose elements are codes, each block of which has a scale in another array.
struct BlockedArray {
  std::string scales;
  uint32_t elements = 1;                       // of a block
  const kernels::BlockCodec* codec = nullptr;  // of the index's algorithm; null: it is not known here
};
using BlockedArrays = std::map<std::string, BlockedArray>;  // by the array's name

BlockedArrays BlockedArraysOf(const kernels::Algorithm& algorithm);

struct Index {
  std::string optimizer;
  std::string algorithm;
  std::string run_name;  // of a run of several ranks; empty: it trained alone
  uint32_t rank = 0;     // of a run: this is its part of the checkpoint, see run_index.h
  uint32_t ranks = 1;
  uint64_t lineage = 0;   // of a run: ranks with equal ones are at steps of one training; 0 where it is not known
  uint64_t run = 0;       // names the training run; 0 in checkpoints that do not know it
  uint64_t sequence = 0;  // of a scheduled one: it was written as the n-th of its run in its directory; else 0
  uint64_t step = 0;
  uint64_t committed_steps = 0;
  std::optional<uint64_t> seed;  // under which state was rounded; none: not stochastically
  std::vector<NamedScalars> groups;
  std::map<std::string, uint32_t> parameter_groups;  // by parameter name
  std::map<std::string, uint64_t> parameter_steps;   // by parameter name; none: `committed_steps`
  std::map<std::string, ShardPlace> shards;          // by parameter name; none: it is the whole tensor
  BlockedArrays blocks;
  std::map<std::string, std::string> tensor_files;  // by tensor name
  std::map<std::string, uint32_t> file_crc32;       // by file name; none for a file that nobody summed up
  uint64_t total_bytes = 0;
};

// Memory that it takes, about.
uint64_t BytesOf(const Index& index);

std::string EncodeIndex(const Index& index);

// The groups as a JSON array, in one line.
std::string HyperparametersText(const std::vector<NamedScalars>& groups);

// DATA_LOSS: not an index, or one that was changed after it was written, or with a number out of its range.
// FAILED_PRECONDITION: of a version that this daemon does not know. File names have no path.
absl::StatusOr<Index> ParseIndex(std::string_view text);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_INDEX_H_
