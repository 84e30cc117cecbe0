// The trainer's side of the two step rings (proto/superoffload/v1/step_ring.h).
#ifndef SUPEROFFLOAD_CLIENT_SRC_CORE_STEP_RINGS_H_
#define SUPEROFFLOAD_CLIENT_SRC_CORE_STEP_RINGS_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "client/src/mapping.h"
#include "client/src/status.h"
#include "superoffload/v1/step_ring.h"

namespace superoffload::client {

using Deadline = std::optional<std::chrono::steady_clock::time_point>;  // none: wait for ever

class StepRings {
 public:
  // `daemon_gone` tells whether the peer has died; it is asked at least every tenth of a second while waiting.
  StepRings(Mapping memory, std::function<bool()> daemon_gone);

  // Whether the mapping is a ring memory of this version, for this attachment, with everything inside its bounds.
  Status Check(uint64_t attachment_epoch) const;

  // Waits for room, which only a daemon in trouble withholds. UNAVAILABLE: the daemon is gone or ended the attachment.
  // One thread at a time.
  Status WaitSubmit(const superoffload_ring_entry& entry);

  // DEADLINE_EXCEEDED: nothing came. UNAVAILABLE: nothing will come any more. One thread at a time.
  Status WaitCompletion(const Deadline& deadline, superoffload_ring_entry* entry);

  // What an ERROR completion says, in the daemon's latest sentence.
  Status ErrorOf(const superoffload_ring_entry& entry) const { return {static_cast<Code>(entry.index), ErrorText()}; }

 private:
  superoffload_ring_header* header() const { return static_cast<superoffload_ring_header*>(memory_.data()); }
  superoffload_ring_entry* Entries(uint64_t offset) const;
  void Pop(superoffload_ring_entry* entry);
  std::string ErrorText() const;
  bool Ended() const;
  Status EndedStatus() const;

  Mapping memory_;
  std::function<bool()> daemon_gone_;
  uint32_t submission_tail_ = 0;
  uint32_t completion_head_ = 0;
  // Orders what was done before a submission before what is done with the daemon's answer to it: an order that runs
  // through another process is none to C++.
  std::atomic<uint64_t> submitted_{0};
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_CORE_STEP_RINGS_H_
