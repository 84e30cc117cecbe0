#include "client/src/step_rings.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <thread>
#include <utility>

namespace superoffload::client {
namespace {

using std::chrono::steady_clock;

// A completion that is about to come arrives within this time; to sleep and be woken takes longer.
constexpr std::chrono::microseconds kSpinTime{20};

// A daemon that is killed wakes nobody: look after it this often.
constexpr std::chrono::milliseconds kSlice{100};

std::atomic_ref<uint32_t> Shared(uint32_t& word) { return std::atomic_ref<uint32_t>(word); }

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void FutexWait(uint32_t* word, uint32_t expected, steady_clock::duration timeout) {
  const int64_t nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(timeout).count();
  const timespec relative{.tv_sec = nanoseconds / 1'000'000'000, .tv_nsec = nanoseconds % 1'000'000'000};
  ::syscall(SYS_futex, word, FUTEX_WAIT, expected, &relative, nullptr, 0);
}

void FutexWake(uint32_t* word) { ::syscall(SYS_futex, word, FUTEX_WAKE, 1, nullptr, nullptr, 0); }

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
  // Sequentially consistent with the daemon's "store waiting, load tail": one of the two sees the other.
  Shared(header()->submission_tail).store(submission_tail_, std::memory_order_seq_cst);
  auto waiting = Shared(header()->submission_waiting);
  if (waiting.load(std::memory_order_seq_cst) != 0) {
    waiting.store(0, std::memory_order_relaxed);
    FutexWake(&header()->submission_tail);
  }
  return {};
}

Status StepRings::WaitCompletion(const Deadline& deadline, superoffload_ring_entry* entry) {
  const auto spin_end = steady_clock::now() + kSpinTime;
  while (!Pop(entry)) {
    const auto now = steady_clock::now();
    if (deadline && now >= *deadline) return Error(Code::kDeadlineExceeded, "the daemon has not finished the step yet");
    if (now < spin_end) {
      Pause();
      continue;
    }
    if (Ended()) {
      if (Pop(entry)) return {};  // pushed just before the end
      return EndedStatus();
    }
    auto tail = Shared(header()->completion_tail);
    Shared(header()->completion_waiting).store(1, std::memory_order_seq_cst);
    if (tail.load(std::memory_order_seq_cst) == completion_head_) {
      const steady_clock::duration left = deadline ? *deadline - now : steady_clock::duration::max();
      FutexWait(&header()->completion_tail, completion_head_, std::min<steady_clock::duration>(left, kSlice));
    }
    Shared(header()->completion_waiting).store(0, std::memory_order_relaxed);
  }
  return {};
}

bool StepRings::Pop(superoffload_ring_entry* entry) {
  if (Shared(header()->completion_tail).load(std::memory_order_acquire) == completion_head_) return false;
  const uint32_t mask = header()->completion_entries - 1;
  std::memcpy(entry, &Entries(header()->completion_offset)[completion_head_ & mask], sizeof(*entry));
  ++completion_head_;
  Shared(header()->completion_head).store(completion_head_, std::memory_order_release);
  return true;
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
