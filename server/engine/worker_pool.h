// The work of an optimizer's kernels, and who runs it.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_WORKER_POOL_H_
#define SUPEROFFLOAD_SERVER_ENGINE_WORKER_POOL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace superoffload::engine {

// What the chunks of a job cost together.
struct JobWork {
  uint64_t bytes = 0;  // read and written by the kernels, without write-allocate traffic
  // Elements, by what is done with them.
  uint64_t absorbed = 0;
  uint64_t published = 0;
  uint64_t narrowed = 0;  // masters to parameters
};

// Work on one bucket, cut into chunks that may run in any order on any worker.
class ChunkJob {
 public:
  virtual ~ChunkJob() = default;

  // Runs chunk `index` on worker `worker` of the pool; called once for each index below the count, concurrently.
  virtual void RunChunk(size_t index, size_t worker) = 0;

  // All chunks have run and no worker touches the job any more; it may be submitted again from here.
  virtual void Done() = 0;

  virtual JobWork work() const { return {}; }

  // Only when no other job has a chunk left to start. Set while not submitted; WorkerPool::Hurry ends it.
  void set_when_idle(bool when_idle) { when_idle_.store(when_idle, std::memory_order_relaxed); }
  bool when_idle() const { return when_idle_.load(std::memory_order_relaxed); }

 private:
  friend class WorkerThreads;

  // A worker's part of the chunks, from which others help themselves when theirs are done. A cache line each.
  struct alignas(64) Share {
    std::atomic<size_t> next{0};
    size_t end = 0;
  };
  std::atomic<bool> when_idle_{false};
  std::unique_ptr<Share[]> shares_;  // one per worker, from the first submission on
  size_t workers_ = 0;               // inside the job; guarded by the pool's mutex
  bool queued_ = false;              // guarded by the pool's mutex
};

// Runs jobs in the order of submission, several at once when the first has no chunk left to start, so an optimizer that
// submits a few jobs at a time gets its turn among others. Jobs for idle workers come behind all others, whoever
// submitted them: from one chunk to the next their workers leave them for work that has come meanwhile.
class WorkerPool {
 public:
  virtual ~WorkerPool() = default;

  // `job` must live until Done, have at least one chunk, and not be submitted twice at a time. Returns before Done.
  virtual void Submit(ChunkJob* job, size_t chunks) = 0;

  // Somebody waits for the job, which was submitted and may be done: it is no longer one for idle workers.
  virtual void Hurry(ChunkJob* job) { job->set_when_idle(false); }

  virtual size_t worker_count() const = 0;

  // Whether the workers have cores of their own, so that what idle ones do takes nothing from trainers.
  virtual bool idle_work_is_free() const = 0;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_WORKER_POOL_H_
