// What a checkpoint of a run of several ranks is, as its index says. It is a directory:
//
//   rank-00000-of-00004/   the checkpoint of rank 0's shard (index.h), and so on for each rank
//   run.index.json         this index: the run, its step, the CRC-32 of each rank's index, and its own (summed_json.h);
//                          version 1 had not its own, and is read
//
// The ranks write beside it, into ".NAME.ranks". Whichever of them comes last finds all parts whole, writes this index
// and gives the directory its name: what has the name is whole.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_RUN_INDEX_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_RUN_INDEX_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace superoffload::checkpoint {

inline constexpr char kRunIndexFile[] = "run.index.json";
inline constexpr uint64_t kMaxRunIndexBytes = uint64_t{16} << 20;  // of a hundred thousand ranks

// Of which moment of which run a part is: ranks whose parts have the same one belong together.
struct RunMoment {
  std::string run_name;
  uint32_t ranks = 1;
  uint64_t lineage = 0;
  uint64_t committed_steps = 0;

  bool operator==(const RunMoment&) const = default;
};

struct RunIndex {
  RunMoment moment;
  std::string algorithm;
  uint64_t run = 0;       // rank 0's, see Index
  uint64_t sequence = 0;  // see Index
  uint64_t total_bytes = 0;
  std::vector<uint32_t> index_crc32;  // of each rank's index, in rank order
};

// The name of a rank's part.
std::string PartName(uint32_t rank, uint32_t ranks);

std::string EncodeRunIndex(const RunIndex& index);

// DATA_LOSS: not an index of a run, or changed, or with a number out of its range. FAILED_PRECONDITION: of a version
// that this daemon does not know.
absl::StatusOr<RunIndex> ParseRunIndex(std::string_view text);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_RUN_INDEX_H_
