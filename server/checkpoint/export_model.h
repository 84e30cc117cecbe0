// Writes the master weights of a checkpoint as a model directory that Hugging Face's from_pretrained loads.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_EXPORT_MODEL_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_EXPORT_MODEL_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace superoffload::checkpoint {

struct ExportOptions {
  std::string checkpoint;  // of an optimizer or of a run
  std::string target;      // absolute; must not exist
  std::string source;      // a model directory: its other files are copied, and tensors that were not trained; "": none
  std::string dtype = "BF16";                 // or "F32"
  uint64_t shard_bytes = uint64_t{5} << 30;   // most bytes of a file, unless one tensor has more
  uint64_t piece_bytes = uint64_t{64} << 20;  // most bytes of a tensor that are in memory at a time
};

struct ExportReport {
  uint64_t tensors = 0;  // trained ones
  uint64_t tied = 0;     // that share the value of a trained one in the source
  uint64_t copied = 0;   // from the source
  uint64_t files = 0;
  uint64_t bytes = 0;
  uint64_t committed_steps = 0;
};

// Names of wrappers (compiled, checkpointed, distributed modules) are left out of parameters' names. A tensor that only
// the source has is copied; one that has the bytes of a trained matrix there is tied to it, and gets its new value.
//
// INVALID_ARGUMENT: an option. NOT_FOUND, DATA_LOSS: the checkpoint. FAILED_PRECONDITION: the checkpoint is of another
// model than the source, or its names are no model's. ALREADY_EXISTS: the target.
absl::StatusOr<ExportReport> ExportModel(const ExportOptions& options);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_EXPORT_MODEL_H_
