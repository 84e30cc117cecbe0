// Reads checkpoints into the state of an optimizer, whatever its bucket layout.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_READER_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_READER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/read_scope.h"
#include "server/optimizer/hosted_optimizer.h"

namespace superoffload::checkpoint {

// A safetensors file that is no part of a checkpoint. Beside the arrays of each parameter it has "steps.NAME", one I64,
// of those that had a gradient in fewer than all committed steps.
struct TensorFile {
  std::string path;
  uint64_t committed_steps = 0;
};

struct RestoreSource {
  std::vector<std::string> directories;  // that of a run, or of an optimizer; several are put together
  std::vector<TensorFile> files{};       // beside them, or alone; then hyper-parameters stay as they are
  uint64_t lineage = 0;                  // of what is restored; 0: a new one is drawn
};

struct Restored {
  uint64_t blocks_rounded = 0;     // see read_blocks.h
  uint64_t tensors_converted = 0;  // to fp32 or bf16, moments that were saved in another dtype
};

// Restores masters, moments, the number of committed steps, the hyper-parameters, and the seed of stochastic rounding.
// Every parameter of the optimizer is looked for by name in all of `source`, which must be of one step; its elements
// are put together from the shards that were saved, whatever the number of ranks was. `restorer` counts as attached
// meanwhile. Everything is checked, checksums included, before the state is touched. The calling thread must act as the
// optimizer's user (act_as.h).
//
// INVALID_ARGUMENT: nothing to restore from, or not of the same step; a path is not absolute. FAILED_PRECONDITION: a
// trainer is attached; a parameter is missing or has another shape; an unknown format version. DATA_LOSS: damaged
// files. RESOURCE_EXHAUSTED: what describes the tensors is too large for the user's budget. CANCELLED: `scope` says so;
// if the state was being loaded, the optimizer is incomplete until it is restored again. Others: what the file system
// says.
absl::StatusOr<Restored> RestoreCheckpoint(optimizer::HostedOptimizer& optimizer,
                                           const optimizer::AttachedTrainer& restorer, const RestoreSource& source,
                                           const ReadScope& scope = {});

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_READER_H_
