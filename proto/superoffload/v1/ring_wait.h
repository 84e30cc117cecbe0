/* How a consumer of a step ring waits and a producer wakes it, for both sides (step_ring.h has the rules). */
#ifndef SUPEROFFLOAD_V1_RING_WAIT_H_
#define SUPEROFFLOAD_V1_RING_WAIT_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

namespace superoffload::ring {

inline std::atomic_ref<uint32_t> Shared(uint32_t& word) { return std::atomic_ref<uint32_t>(word); }

inline void FutexWakeAll(uint32_t& word) { ::syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

// A producer has written the entry before `tail`. It leaves the waiting word alone: the consumer may have taken the
// entry meanwhile and announced its next sleep, of which the next producer has to know.
inline void PublishTail(uint32_t& tail_word, uint32_t& waiting_word, uint32_t tail) {
  // Sequentially consistent with the consumer's "store waiting, load tail": one of the two sees the other.
  Shared(tail_word).store(tail, std::memory_order_seq_cst);
  if (Shared(waiting_word).load(std::memory_order_seq_cst) != 0) FutexWakeAll(tail_word);
}

// One wait for the next entry: spins, then sleeps.
//
//   for (TailWait wait(tail_word, waiting_word, head); !wait.Moved();) {
//     if (wait.Spin()) continue;
//     wait.Sleep(timeout, [&] { return ...; });
//   }
class TailWait {
 public:
  // `head`: the consumer's. While the tail equals it the ring is empty.
  TailWait(uint32_t& tail_word, uint32_t& waiting_word, uint32_t head)
      : tail_word_(tail_word),
        waiting_word_(waiting_word),
        head_(head),
        spin_end_(std::chrono::steady_clock::now() + kSpinTime) {}

  bool Moved() const { return Shared(tail_word_).load(std::memory_order_acquire) != head_; }

  // Whether it is still worth looking again at once.
  bool Spin() const {
    if (std::chrono::steady_clock::now() >= spin_end_) return false;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
    return true;
  }

  // Until the tail moves, somebody wakes the word, or the time is over; none: for ever. Not when `unless()` holds once
  // the sleep has been announced.
  template <typename Unless>
  void Sleep(std::optional<std::chrono::nanoseconds> timeout, Unless unless) {
    // Sequentially consistent with the producer's "store tail, load waiting".
    Shared(waiting_word_).store(1, std::memory_order_seq_cst);
    if (Shared(tail_word_).load(std::memory_order_seq_cst) == head_ && !unless()) {
      timespec relative{};
      if (timeout) relative = {.tv_sec = timeout->count() / kSecond, .tv_nsec = timeout->count() % kSecond};
      ::syscall(SYS_futex, &tail_word_, FUTEX_WAIT, head_, timeout ? &relative : nullptr, nullptr, 0);
    }
    Shared(waiting_word_).store(0, std::memory_order_relaxed);
  }

 private:
  // An entry that is about to come arrives within this time; to sleep and be woken takes longer.
  static constexpr std::chrono::microseconds kSpinTime{20};
  static constexpr int64_t kSecond = 1'000'000'000;

  uint32_t& tail_word_;
  uint32_t& waiting_word_;
  const uint32_t head_;
  const std::chrono::steady_clock::time_point spin_end_;
};

}  // namespace superoffload::ring

#endif  // SUPEROFFLOAD_V1_RING_WAIT_H_
