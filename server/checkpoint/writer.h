// Writes a checkpoint of an optimizer while its trainer goes on.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_WRITER_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_WRITER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "server/optimizer/hosted_optimizer.h"

namespace superoffload::checkpoint {

// May be read while the checkpoint is written.
struct Progress {
  std::atomic<uint64_t> committed_steps{0};
  std::atomic<uint64_t> bytes_total{0};  // 0 until the moment of the checkpoint has come
  std::atomic<uint64_t> bytes_written{0};
};

struct WriteOptions {
  // Taken at the first moment between steps with at least so many committed.
  uint64_t committed_steps = 0;
  // Of a rank of a run: taken after just so many committed steps, and written as this rank's part of `directory`
  // (run_index.h), which is there once all ranks have written theirs.
  bool of_run = false;
  bool again = false;  // if `directory` is there and of this very moment, a daemon that died since has written it
  uint64_t next = 0;   // see StepMachine::SnapshotTime
  std::function<uint64_t()> sequence = [] { return 0; };  // see Index; called while no snapshot is open
  // Absolute path for a checkpoint of so many committed steps. It must not exist; the directory above it must.
  std::function<std::string(uint64_t committed_steps)> directory;
  // With the rights of the optimizer's user, whom the calling thread must act as (act_as.h); else with the daemon's.
  bool as_user = true;
  // What is not guaranteed, in sentences. If there is anything, it is written beside the files (kDoubtsFile), and the
  // index has another name (kDoubtfulIndexFile), so that nothing restores it unasked.
  std::string doubts{};
};

// Everything goes to a hidden directory beside it (".NAME.partial"), is synced, and is renamed at the end: what has the
// name is a whole checkpoint, whatever happens.
//
// ALREADY_EXISTS, INVALID_ARGUMENT: the directory. OUT_OF_RANGE: the step of a run is over. FAILED_PRECONDITION:
// another one is being written there. RESOURCE_EXHAUSTED: the disk is full. CANCELLED: `cancelled` was set, see
// StepEngine::WaitSnapshot. Others: what the file system says. While another checkpoint of the optimizer is being
// taken, waits. After an error nothing of it is left.
optimizer::CheckpointReport WriteCheckpoint(optimizer::HostedOptimizer& optimizer, const WriteOptions& options,
                                            const std::atomic<bool>& cancelled, Progress* progress);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_WRITER_H_
