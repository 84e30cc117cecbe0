// The process group of two ranks: a connection between their processes. Each one is a generation of the group: what was
// sent on one is never read on another. When a rank dies or leaves, the other one's gatherings fail.
#ifndef SUPEROFFLOAD_TESTS_FAULT_RANKS_PAIR_H_
#define SUPEROFFLOAD_TESTS_FAULT_RANKS_PAIR_H_

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "superoffload/v1/file_descriptor.h"

namespace superoffload::fault {

class Pair {
 public:
  // The messages of both ranks, in rank order. UNAVAILABLE: the other one has left. DEADLINE_EXCEEDED: it hangs.
  absl::StatusOr<std::array<std::string, 2>> Gather(const std::string& own) const;

 private:
  friend class Meeting;
  Pair(uint32_t rank, FileDescriptor peer) : rank_(rank), peer_(std::move(peer)) {}

  uint32_t rank_;
  FileDescriptor peer_;
};

// Where a rank meets the other one, again and again: rank 0 listens at `path`. Kept for the life of the process.
class Meeting {
 public:
  Meeting(const std::string& path, uint32_t rank);

  // UNAVAILABLE: the other one is not there now.
  absl::StatusOr<Pair> Join() const;

 private:
  const std::string path_;
  const uint32_t rank_;
  FileDescriptor listener_;  // of rank 0
};

}  // namespace superoffload::fault

#endif  // SUPEROFFLOAD_TESTS_FAULT_RANKS_PAIR_H_
