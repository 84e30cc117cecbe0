// One rank of a run of two, as a C++ trainer: it comes to an agreement, trains, and comes to another one whenever the
// other rank or a daemon dies. It knows no checkpoint.
#ifndef SUPEROFFLOAD_TESTS_FAULT_RANKS_RANK_H_
#define SUPEROFFLOAD_TESTS_FAULT_RANKS_RANK_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "superoffload/client.hpp"

namespace superoffload::fault {

// What has happened over the lives of all ranks' processes; in a file that they map.
struct Tally {
  std::atomic<uint32_t> agreements;
  std::atomic<uint32_t> rolled_forward;  // prepared steps that an agreement has committed
  std::atomic<uint32_t> abandoned;       // and those that it has abandoned
  std::atomic<uint32_t> skips;           // steps that a rank's NaN has skipped
  std::atomic<uint32_t> commits;         // of steps, by both ranks
};

Tally& MapTally(const std::string& path);

struct RankOptions {
  uint32_t rank = 0;
  std::string endpoint;
  std::string directory;  // of the meeting and the tally
  uint64_t steps = 0;     // to be committed
  uint64_t seed = 0;      // of pauses and NaNs, 0: none; what is computed does not depend on it
};

// Creates the rank's optimizer, with parameters of its own.
void CreateShard(Client& client, uint32_t rank, uint64_t lineage);

// The exit status: 0 when `steps` are committed.
int RunRank(const RankOptions& options);

struct Shard {
  uint64_t steps = 0;
  std::vector<float> weights;
};

// What the daemon has, once no trainer is attached and nothing is prepared.
Shard ReadShard(const std::string& endpoint, uint32_t rank);

}  // namespace superoffload::fault

#endif  // SUPEROFFLOAD_TESTS_FAULT_RANKS_RANK_H_
