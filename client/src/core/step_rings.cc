#include "client/src/core/step_rings.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <thread>
#include <utility>

#include "superoffload/v1/ring_wait.h"

namespace superoffload::client {
namespace {

using ring::Shared;
using std::chrono::steady_clock;

// A daemon that is killed wakes nobody: look after it this often.
constexpr std::chrono::milliseconds kSlice{100};

bool RingFits(uint64_t offset, uint32_t entries, size_t bytes) {
  return std::has_single_bit(entries) && offset >= SUPEROFFLOAD_RING_HEADER_BYTES &&
         offset % sizeof(superoffload_ring_entry) == 0 && offset <= bytes &&
         (bytes - offset) / sizeof(superoffload_ring_entry) >= entries;
}

}  // namespace

StepRings::StepRings(Mapping memory, std::function<bool()> daemon_gone)
    : memory_(std::move(memory)), daemon_gone_(std::move(daemon_gone)) {}

Status StepRings::Check(uint64_t attachment_epoch) const {
  if (memory_.bytes() < SUPEROFFLOAD_RING_HEADER_BYTES || header()->magic != SUPEROFFLOAD_RING_MAGIC ||
      header()->version != SUPEROFFLOAD_RING_VERSION) {
    return Error(Code::kUnimplemented, "the daemon's rings are not of version ", SUPEROFFLOAD_RING_VERSION,
                 "; use the client library of its version");
  }
  if (!RingFits(header()->submission_offset, header()->submission_entries, memory_.bytes()) ||
      !RingFits(header()->completion_offset, header()->completion_entries, memory_.bytes())) {
    return Error(Code::kInternal, "the daemon's rings do not fit into their ", memory_.bytes(), " bytes");
  }
  if (header()->attachment_epoch != attachment_epoch) {
    return Error(Code::kInternal, "the rings belong to attachment ", header()->attachment_epoch, ", not ",
                 attachment_epoch);
  }
  return {};
}

superoffload_ring_entry* StepRings::Entries(uint64_t offset) const {
  return reinterpret_cast<superoffload_ring_entry*>(static_cast<char*>(memory_.data()) + offset);
}

Status StepRings::WaitSubmit(const superoffload_ring_entry& entry) {
  const uint32_t entries = header()->submission_entries;
  while (submission_tail_ - Shared(header()->submission_head).load(std::memory_order_acquire) >= entries) {
    if (Ended()) return EndedStatus();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (Shared(header()->closed).load(std::memory_order_acquire) != 0) return EndedStatus();
  std::memcpy(&Entries(header()->submission_offset)[submission_tail_ & (entries - 1)], &entry, sizeof(entry));
  ++submission_tail_;
  submitted_.fetch_add(1, std::memory_order_release);
  ring::PublishTail(header()->submission_tail, header()->submission_waiting, submission_tail_);
  return {};
}

Status StepRings::WaitCompletion(const Deadline& deadline, superoffload_ring_entry* entry) {
  for (ring::TailWait wait(header()->completion_tail, header()->completion_waiting, completion_head_); !wait.Moved();) {
    if (deadline && steady_clock::now() >= *deadline) {
      return Error(Code::kDeadlineExceeded, "the daemon has not finished the step yet");
    }
    if (wait.Spin()) continue;
    if (Ended()) {
      if (wait.Moved()) break;  // pushed just before the end
      return EndedStatus();
    }
    const steady_clock::duration left = deadline ? *deadline - steady_clock::now() : kSlice;
    wait.Sleep(std::clamp<steady_clock::duration>(left, {}, kSlice), [] { return false; });
  }
  Pop(entry);
  return {};
}

void StepRings::Pop(superoffload_ring_entry* entry) {
  (void)submitted_.load(std::memory_order_acquire);
  const uint32_t mask = header()->completion_entries - 1;
  std::memcpy(entry, &Entries(header()->completion_offset)[completion_head_ & mask], sizeof(*entry));
  ++completion_head_;
  Shared(header()->completion_head).store(completion_head_, std::memory_order_release);
}

bool StepRings::Ended() const {
  return Shared(header()->closed).load(std::memory_order_acquire) != 0 || daemon_gone_();
}

Status StepRings::EndedStatus() const {
  if (Shared(header()->closed).load(std::memory_order_acquire) != 0) {
    return Error(Code::kUnavailable, "the daemon ended the attachment: ", ErrorText());
  }
  return Error(Code::kUnavailable, "the daemon is gone; start it again and attach anew");
}

std::string StepRings::ErrorText() const {
  const char* text = header()->error_text;
  return std::string(text, ::strnlen(text, SUPEROFFLOAD_ERROR_TEXT_BYTES));
}

}  // namespace superoffload::client
