// What is in a checkpoint, for people and programs: of one optimizer, of a run, or half of one.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_INSPECT_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_INSPECT_H_

#include <string>

#include "absl/status/statusor.h"

namespace superoffload::checkpoint {

struct Inspection {
  bool whole = false;  // every file and every element of every tensor is there; with `checksums`, every bit
  std::string text;
  std::string json;  // one object
};

// `checksums`: reads all files. NOT_FOUND: there is no checkpoint, and none has begun to grow.
absl::StatusOr<Inspection> InspectCheckpoint(const std::string& directory, bool checksums);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_INSPECT_H_
