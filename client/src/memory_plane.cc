#include "client/src/memory_plane.h"

namespace superoffload::client {

Status HostPlane::WaitUntil(const Deadline& deadline, const Condition& done) {
  while (!done(progress_)) {
    superoffload_ring_entry entry;
    if (Status status = rings_.WaitCompletion(deadline, &entry); !status.ok()) return status;
    if (entry.opcode == SUPEROFFLOAD_COMPLETE_ERROR) return rings_.ErrorOf(entry);
    progress_.Take(entry);
  }
  return {};
}

}  // namespace superoffload::client
