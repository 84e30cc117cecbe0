// What a checkpoint is, as its index says. A checkpoint is a directory:
//
//   model-00001-of-0000N.safetensors, exp_avg-..., exp_avg_sq-...   fp32 tensors "model.NAME", "exp_avg.NAME",
//                                                                   "exp_avg_sq.NAME", in shards of some GiB
//   model.safetensors.index.json                                    this index
//
// The index is JSON: "weight_map" (tensor to file) and "metadata.total_size" as Hugging Face's tools know them, and
// beside them what restoring needs: the format's version, the run, steps, algorithm, the hyper-parameters of each parameter
// group, each parameter's group, and the CRC-32 of each file.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_INDEX_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_INDEX_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/adam/adam.h"

namespace superoffload::checkpoint {

inline constexpr char kIndexFile[] = "model.safetensors.index.json";
inline constexpr size_t kMaxIndexBytes = 1 << 30;

// The state's arrays, in the order of engine::Layout::state_array_offsets.
inline constexpr std::array<const char*, 3> kArrays = {"model", "exp_avg", "exp_avg_sq"};

struct Index {
  std::string optimizer;
  uint64_t run = 0;       // names the training run; 0 in checkpoints that do not know it
  uint64_t sequence = 0;  // of a scheduled one: it was written as the n-th of its run in its directory; else 0
  uint64_t step = 0;
  uint64_t committed_steps = 0;
  std::vector<kernels::AdamHyperparameters> groups;
  std::map<std::string, uint32_t> parameter_groups;  // by parameter name
  std::map<std::string, std::string> tensor_files;   // by tensor name
  std::map<std::string, uint32_t> file_crc32;        // by file name; none for a file that nobody summed up
  uint64_t total_bytes = 0;
};

std::string EncodeIndex(const Index& index);

// The groups as a JSON array, in one line.
std::string HyperparametersText(const std::vector<kernels::AdamHyperparameters>& groups);

// DATA_LOSS: not an index. FAILED_PRECONDITION: of a version that this daemon does not know. File names have no path.
absl::StatusOr<Index> ParseIndex(std::string_view text);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_INDEX_H_
