#include "server/transport/ring_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "superoffload/v1/ring_wait.h"

namespace superoffload::transport {
namespace {

using ring::Shared;

uint32_t RingEntries(size_t needed) {
  SUPEROFFLOAD_CHECK_LE(needed, size_t{1} << 31, "entries of a ring, whose indices have 32 bits");
  return std::bit_ceil(static_cast<uint32_t>(std::max<size_t>(needed, 64)));
}

}  // namespace

absl::StatusOr<RingMemory> RingMemory::Create(uint64_t attachment_epoch, size_t buckets, size_t groups) {
  // A step submits two rounds of groups, its buckets, begin and end; it completes each bucket at most
  // six times: the slot is free, its gradient is taken, and twice parameters are ready and have landed.
  const uint32_t submission_entries = RingEntries(buckets + 2 * groups + 2);
  const uint32_t completion_entries = RingEntries(6 * buckets + 16);
  const size_t submission_bytes = size_t{submission_entries} * sizeof(superoffload_ring_entry);
  const size_t completion_bytes = size_t{completion_entries} * sizeof(superoffload_ring_entry);
  memory::Binding binding;
  binding.from_pool = false;
  absl::StatusOr<memory::SharedMemory> memory = memory::SharedMemory::Create(
      "superoffload-ring", SUPEROFFLOAD_RING_HEADER_BYTES + submission_bytes + completion_bytes, binding);
  if (!memory.ok()) return memory.status();
  RingMemory ring(*std::move(memory), submission_entries, completion_entries);
  superoffload_ring_header* header = ring.header();
  header->magic = SUPEROFFLOAD_RING_MAGIC;
  header->version = SUPEROFFLOAD_RING_VERSION;
  header->header_bytes = SUPEROFFLOAD_RING_HEADER_BYTES;
  header->submission_entries = submission_entries;
  header->completion_entries = completion_entries;
  header->submission_offset = SUPEROFFLOAD_RING_HEADER_BYTES;
  header->completion_offset = SUPEROFFLOAD_RING_HEADER_BYTES + submission_bytes;
  header->attachment_epoch = attachment_epoch;
  return ring;
}

RingMemory::RingMemory(memory::SharedMemory memory, uint32_t submission_entries, uint32_t completion_entries)
    : memory_(std::move(memory)),
      submission_entries_(submission_entries),
      completion_entries_(completion_entries),
      submissions_(reinterpret_cast<superoffload_ring_entry*>(memory_.data() + SUPEROFFLOAD_RING_HEADER_BYTES)),
      completions_(submissions_ + submission_entries) {
  SUPEROFFLOAD_CHECK(std::has_single_bit(submission_entries) && std::has_single_bit(completion_entries),
                     submission_entries, " and ", completion_entries, " entries");
  SUPEROFFLOAD_CHECK_LE(SUPEROFFLOAD_RING_HEADER_BYTES +
                            (size_t{submission_entries} + completion_entries) * sizeof(superoffload_ring_entry),
                        memory_.bytes(), "the rings and their memory");
}

absl::StatusOr<superoffload_ring_entry> RingMemory::WaitPop(const std::atomic<bool>& stop) {
  uint32_t& tail = header()->submission_tail;
  ring::TailWait wait(tail, header()->submission_waiting, submission_head_);
  while (!wait.Moved()) {
    if (stop.load(std::memory_order_acquire)) return absl::CancelledError("the attachment has ended");
    if (!wait.Spin()) wait.Sleep(std::nullopt, [&stop] { return stop.load(std::memory_order_acquire); });
  }
  const uint32_t available = Shared(tail).load(std::memory_order_acquire) - submission_head_;
  if (available > submission_entries_) {
    return absl::InvalidArgumentError(absl::StrCat("the submission ring claims ", available, " entries but holds ",
                                                   submission_entries_, "; the trainer corrupted it, attach again"));
  }
  superoffload_ring_entry entry;
  std::memcpy(&entry, &submissions_[submission_head_ & (submission_entries_ - 1)], sizeof(entry));
  ++submission_head_;
  Shared(header()->submission_head).store(submission_head_, std::memory_order_release);
  return entry;
}

void RingMemory::Wake() { ring::FutexWakeAll(header()->submission_tail); }

absl::Status RingMemory::Push(const superoffload_ring_entry& entry) {
  const uint32_t used = completion_tail_ - Shared(header()->completion_head).load(std::memory_order_acquire);
  if (used >= completion_entries_) {
    return absl::ResourceExhaustedError("the completion ring is full; the trainer does not consume completions");
  }
  std::memcpy(&completions_[completion_tail_ & (completion_entries_ - 1)], &entry, sizeof(entry));
  ++completion_tail_;
  ring::PublishTail(header()->completion_tail, header()->completion_waiting, completion_tail_);
  return absl::OkStatus();
}

void RingMemory::SetErrorText(const std::string& text) {
  const size_t length = std::min<size_t>(text.size(), SUPEROFFLOAD_ERROR_TEXT_BYTES - 1);
  std::memcpy(header()->error_text, text.data(), length);
  header()->error_text[length] = '\0';
}

void RingMemory::Close() {
  Shared(header()->closed).store(1, std::memory_order_seq_cst);
  ring::FutexWakeAll(header()->completion_tail);
}

}  // namespace superoffload::transport
