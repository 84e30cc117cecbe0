// The threads that run the optimizer kernels, shared by all optimizers of the daemon.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_WORKER_THREADS_H_
#define SUPEROFFLOAD_SERVER_ENGINE_WORKER_THREADS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/worker_pool.h"

namespace superoffload::engine {

// Thread-safe. A worker begins with the same chunks of a job every time, so that it meets its pages and caches again,
// and then helps the others. Workers without work spin for a moment, because buckets come in bursts, then park. Per
// chunk there is neither a lock nor an allocation.
class WorkerThreads final : public WorkerPool {
 public:
  // Worker i runs on hardware thread cpus[i mod size], where no trainer runs; anywhere when there are none.
  explicit WorkerThreads(size_t threads, const std::vector<int>& cpus = {});

  // Runs what was submitted to its end first.
  ~WorkerThreads() override;

  void Submit(ChunkJob* job, size_t chunks) override;
  void Hurry(ChunkJob* job) override;
  size_t worker_count() const override { return worker_count_; }
  bool idle_work_is_free() const override { return pinned_; }

 private:
  void RunWorker(size_t worker);
  bool RunShares(ChunkJob& job, size_t worker) const;
  std::deque<ChunkJob*>& QueueOf(const ChunkJob& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return job.when_idle() ? idle_queue_ : queue_;
  }
  void Enqueue(ChunkJob* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Dequeue(ChunkJob* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SpinForWork(uint64_t seen) const;
  bool WorkAvailable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return stopping_ || !queue_.empty() || !idle_queue_.empty();
  }

  std::atomic<uint64_t> submissions_{0};  // lets idle workers look for work without the mutex
  absl::Mutex mu_;
  std::atomic<size_t> waiting_{0};  // size of queue_: tells workers to leave a job for idle ones
  std::deque<ChunkJob*> queue_ ABSL_GUARDED_BY(mu_);
  std::deque<ChunkJob*> idle_queue_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  const size_t worker_count_;
  const bool pinned_;
  std::vector<std::thread> threads_;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_WORKER_THREADS_H_
