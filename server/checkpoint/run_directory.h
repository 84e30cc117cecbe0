// Directories of checkpoints of runs: where ranks write, who gives them their name, and what is in them.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_RUN_DIRECTORY_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_RUN_DIRECTORY_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/checkpoint/index.h"
#include "server/checkpoint/read_scope.h"
#include "server/checkpoint/run_index.h"
#include "server/memory/memory_budget.h"

namespace superoffload::checkpoint {

// Where the ranks write what becomes `target`.
std::string GrowingRun(const std::string& target);

// The directory of one checkpoint that a reader opens: `directory` itself, or a rank's part of a run.
struct Part {
  std::string directory;
  Index index;
  memory::MemoryReservation reservation{};  // of what the index takes
};

// A checkpoint as it lies in `directory`. NOT_FOUND: neither the index of a run nor that of an optimizer is there, as
// of one that is half-written. DATA_LOSS: a part is missing, damaged, or of another moment than the run.
struct Checkpoint {
  std::optional<RunIndex> run;  // none: of one optimizer
  std::vector<Part> parts;      // in rank order
};
absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& directory, const ReadScope& scope = {});

// The index of the run in `directory`; NOT_FOUND: there is none.
absl::StatusOr<RunIndex> ReadRunIndex(const std::string& directory, const ReadScope& scope = {});

// The index of the optimizer's checkpoint in `directory`; NOT_FOUND: there is none. DATA_LOSS: it is damaged, or larger
// than that of the tensors beside it can be (MaxIndexBytes).
absl::StatusOr<Index> ReadIndex(const std::string& directory, const ReadScope& scope = {});

// Makes the directory in which the parts grow. ALREADY_EXISTS: `target` exists, and is not of `moment`.
absl::Status BeginRun(const std::string& target, const RunMoment& moment);

// Whether `rank` has already written its part of `moment`. Removes one of another moment.
bool HasPart(const std::string& target, const RunMoment& moment, uint32_t rank, const ReadScope& scope = {});

enum class Seal {
  kPartsMissing,  // other ranks have yet to write theirs
  kSealed,        // by this call
  kWasSealed,     // by another rank
};

// Gives the parts the name `target` if all are whole and of `moment`; by any rank, and several at once. `sequence` as
// in Index, called when it is about to.
absl::StatusOr<Seal> SealRun(const std::string& target, const RunMoment& moment,
                             const std::function<uint64_t()>& sequence, const ReadScope& scope = {});

// Of a part.
RunMoment MomentOf(const Index& index);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_RUN_DIRECTORY_H_
