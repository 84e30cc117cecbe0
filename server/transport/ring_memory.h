// The daemon's side of the two step rings (proto/superoffload/v1/step_ring.h): creation, consuming submissions,
// producing completions. Sizes, offsets and own indices are kept here; from the shared memory only the peer's
// indices and entries are read, and never trusted.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_RING_MEMORY_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_RING_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/memory/shared_memory.h"
#include "superoffload/v1/step_ring.h"

namespace superoffload::transport {

class RingMemory {
 public:
  // Room for a step of `buckets` buckets and `group_entries` GROUP entries without waiting, on either side.
  static absl::StatusOr<RingMemory> Create(uint64_t attachment_epoch, size_t buckets, size_t group_entries);

  RingMemory(RingMemory&&) = default;

  // Waits for the next submission and copies it. OK with an entry; CANCELLED once `stop` is set (and Wake was called);
  // INVALID_ARGUMENT when the trainer's index is impossible, after which the ring is unusable. One thread.
  absl::StatusOr<superoffload_ring_entry> WaitPop(const std::atomic<bool>& stop);

  // Makes WaitPop look at `stop` again.
  void Wake();

  // RESOURCE_EXHAUSTED when the trainer does not consume. One thread at a time.
  absl::Status Push(const superoffload_ring_entry& entry);

  // Leaves a sentence for the trainer, before the ERROR completion that announces it or before Close.
  void SetErrorText(const std::string& text);

  // Tells the trainer that nothing will be answered any more.
  void Close();

  const memory::SharedMemory& memory() const { return memory_; }

 private:
  RingMemory(memory::SharedMemory memory, uint32_t submission_entries, uint32_t completion_entries);
  superoffload_ring_header* header() const { return reinterpret_cast<superoffload_ring_header*>(memory_.data()); }

  memory::SharedMemory memory_;
  uint32_t submission_entries_;
  uint32_t completion_entries_;
  superoffload_ring_entry* submissions_;
  superoffload_ring_entry* completions_;
  uint32_t submission_head_ = 0;
  uint32_t completion_tail_ = 0;
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_RING_MEMORY_H_
