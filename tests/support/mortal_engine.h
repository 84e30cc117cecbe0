// Engines in processes that are killed again and again, over memory that outlives them.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_MORTAL_ENGINE_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_MORTAL_ENGINE_H_

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/engine/chunk_view.h"
#include "server/engine/layout.h"
#include "server/engine/record.h"
#include "server/engine/step_contract.h"

namespace superoffload::test {

// Of an optimizer, shared with children.
class MemoryOfProcesses {
 public:
  // Masters are small numbers that differ, all else is zero.
  explicit MemoryOfProcesses(const engine::Layout& layout)
      : sizes_{layout.parameters_bytes, layout.gradients_bytes, layout.state_bytes + 4096,
               engine::Record::Bytes(layout)},
        in_place_(layout.in_place) {
    for (size_t i = 0; i < sizes_.size(); ++i) {
      mapped_[i] = static_cast<std::byte*>(
          ::mmap(nullptr, sizes_[i], PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    }
    for (const engine::StateFormat& format : layout.formats) {
      float* const masters = reinterpret_cast<float*>(view().state + format.Byte(0, 0));
      for (size_t i = 0; i < format.elements; ++i) masters[i] = static_cast<float>(i % 1000) * 1e-3f;
    }
  }
  ~MemoryOfProcesses() {
    for (size_t i = 0; i < sizes_.size(); ++i) ::munmap(mapped_[i], sizes_[i]);
  }
  MemoryOfProcesses(const MemoryOfProcesses&) = delete;
  MemoryOfProcesses& operator=(const MemoryOfProcesses&) = delete;

  engine::OptimizerMemory view() const { return {mapped_[in_place_ ? 1 : 0], mapped_[1], mapped_[2], mapped_[3]}; }

 private:
  const std::array<size_t, 4> sizes_;
  const bool in_place_;
  std::array<std::byte*, 4> mapped_{};
};

// Calls `live` in a child until one comes to its end; the first `kills` are killed, each some time from its start.
template <typename Live>
void KillAgainAndAgain(size_t kills, std::chrono::microseconds longest, std::mt19937_64& random, Live live) {
  for (int status = -1; !(WIFEXITED(status) && WEXITSTATUS(status) == 0);) {
    const pid_t child = ::fork();
    if (child == 0) {
      live();
      ::_exit(0);
    }
    if (kills > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(1000 + random() % longest.count()));
      ::kill(child, SIGKILL);
      --kills;
    }
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << "exit " << WEXITSTATUS(status);
  }
}

// Which parameters lack gradients in step `t`, in every life.
inline std::vector<bool> AbsentInStep(size_t parameters, uint64_t t) {
  std::vector<bool> absent(parameters);
  for (size_t p = 0; p < parameters; ++p) absent[p] = (7 * t + p) % 5 == 0;
  return absent;
}

// Knows when a step is final, and which buckets' only slots are free.
class FinalSink final : public engine::CompletionSink {
 public:
  explicit FinalSink(uint32_t buckets) : buckets_(buckets), pending_(buckets) {}
  void SlotFree(uint64_t, uint32_t bucket, uint32_t) override {
    absl::MutexLock lock(&mu_);
    pending_[bucket] = false;
  }
  void NormMeasured(uint64_t, double, double) override {}
  void Prepared(uint64_t, uint64_t, double) override {}
  void ParametersReady(uint64_t, uint32_t, bool speculative) override {
    absl::MutexLock lock(&mu_);
    if (!speculative) ++final_;
  }
  void VerdictReached(const engine::VerdictReport& report) override {
    absl::MutexLock lock(&mu_);
    if (!engine::IsSkip(report.verdict)) pending_.assign(buckets_, true);
    expected_ = engine::IsSkip(report.verdict) ? report.republished_buckets
                                               : buckets_ - (report.speculation_stands ? report.speculated_buckets : 0);
  }
  void WaitFinal() {
    absl::MutexLock lock(&mu_);
    const auto done = [&] {
      mu_.AssertHeld();
      return final_ == expected_;
    };
    mu_.Await(absl::Condition(&done));
    final_ = 0;
    expected_.reset();
  }
  // The gradient of the last committed step was absorbed.
  void WaitFree(uint32_t bucket) {
    absl::MutexLock lock(&mu_);
    const auto free = [&] {
      mu_.AssertHeld();
      return !pending_[bucket];
    };
    mu_.Await(absl::Condition(&free));
  }

 private:
  const uint32_t buckets_;
  absl::Mutex mu_;
  uint32_t final_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<uint32_t> expected_ ABSL_GUARDED_BY(mu_);
  std::vector<bool> pending_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::test

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_MORTAL_ENGINE_H_
