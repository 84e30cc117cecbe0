// Reads checkpoints into the state of an optimizer, whatever its bucket layout.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_READER_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_READER_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/index.h"
#include "server/optimizer/hosted_optimizer.h"

namespace superoffload::checkpoint {

// Restores masters, moments, the number of committed steps and the hyper-parameters. Every parameter of the optimizer
// is looked for by name in all of `directories`: several are those of the ranks of a run with another world size, all
// of the same step. `restorer` counts as attached meanwhile. Everything is checked, checksums included, before the
// state is touched. The calling thread must act as the optimizer's user (act_as.h).
//
// INVALID_ARGUMENT: not of the same step, or a path is not absolute. FAILED_PRECONDITION: a trainer is attached; a
// parameter is missing or has another shape; an unknown format version. DATA_LOSS: damaged files. Others: what the file
// system says.
absl::Status RestoreCheckpoint(optimizer::HostedOptimizer& optimizer, const optimizer::AttachmentInfo& restorer,
                               const std::vector<std::string>& directories);

// The index of the checkpoint in `directory`.
absl::StatusOr<Index> ReadIndex(const std::string& directory);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_READER_H_
