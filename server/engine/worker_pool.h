// The threads that run the optimizer kernels, shared by all optimizers of the daemon.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_WORKER_POOL_H_
#define SUPEROFFLOAD_SERVER_ENGINE_WORKER_POOL_H_

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace superoffload::engine {

// Work on one bucket, cut into chunks that may run in any order on any worker.
class ChunkJob {
 public:
  virtual ~ChunkJob() = default;

  // Runs chunk `index` on thread `worker` of the pool; called once for each index below the count, concurrently.
  virtual void RunChunk(size_t index, size_t worker) = 0;

  // All chunks have run and no worker touches the job any more; it may be submitted again from here.
  virtual void Done() = 0;

 private:
  friend class WorkerPool;

  // A worker's part of the chunks, from which others help themselves when theirs are done. A cache line each.
  struct alignas(64) Share {
    std::atomic<size_t> next{0};
    size_t end = 0;
  };
  std::unique_ptr<Share[]> shares_;  // one per worker, from the first submission on
  size_t workers_ = 0;               // inside the job; guarded by the pool's mutex
  bool queued_ = false;              // guarded by the pool's mutex
};

// Thread-safe. Jobs run in the order of submission, several at once when the first has no chunk left to start, so an
// optimizer that submits a few jobs at a time gets its turn among others. A worker begins with the same chunks of a job
// every time, so that it meets its pages and caches again, and then helps the others. Workers without work spin for a
// moment, because buckets come in bursts, then park. Per chunk there is neither a lock nor an allocation.
class WorkerPool {
 public:
  // Worker i runs on hardware thread cpus[i mod size]; anywhere when there are none.
  explicit WorkerPool(size_t threads, const std::vector<int>& cpus = {});

  // Runs what was submitted to its end first.
  ~WorkerPool();

  // `job` must live until Done, have at least one chunk, and not be submitted twice at a time.
  void Submit(ChunkJob* job, size_t chunks);

  size_t thread_count() const { return thread_count_; }

 private:
  void RunWorker(size_t worker);
  void RunShares(ChunkJob& job, size_t worker) const;
  void SpinForWork(uint64_t seen) const;
  bool WorkAvailable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !queue_.empty(); }

  std::atomic<uint64_t> submissions_{0};  // lets idle workers look for work without the mutex
  absl::Mutex mu_;
  std::deque<ChunkJob*> queue_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  const size_t thread_count_;
  std::vector<std::thread> threads_;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_WORKER_POOL_H_
