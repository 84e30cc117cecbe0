#include "server/engine/worker_pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

namespace superoffload::engine {
namespace {

// The next bucket of a burst comes within this time; to park and be woken takes longer.
constexpr std::chrono::microseconds kSpinTime{20};

}  // namespace

WorkerPool::WorkerPool(size_t threads, const std::vector<int>& cpus) : thread_count_(threads) {
  threads_.reserve(threads);
  for (size_t i = 0; i < threads; ++i) {
    threads_.emplace_back([this, i] { RunWorker(i); });
    pthread_setname_np(threads_.back().native_handle(), "so-worker");
    if (cpus.empty()) continue;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[i % cpus.size()], &set);
    pthread_setaffinity_np(threads_.back().native_handle(), sizeof(set), &set);  // a wish: cpusets may forbid it
  }
}

WorkerPool::~WorkerPool() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::Submit(ChunkJob* job, size_t chunks) {
  absl::MutexLock lock(&mu_);
  if (job->shares_ == nullptr) job->shares_ = std::make_unique<ChunkJob::Share[]>(thread_count_);
  for (size_t i = 0; i < thread_count_; ++i) {
    ChunkJob::Share& share = job->shares_[i];
    share.next.store(chunks * i / thread_count_, std::memory_order_relaxed);  // the mutex publishes it
    share.end = chunks * (i + 1) / thread_count_;
  }
  job->workers_ = 0;
  job->queued_ = true;
  queue_.push_back(job);
  submissions_.fetch_add(1, std::memory_order_release);
}

void WorkerPool::RunShares(ChunkJob& job, size_t worker) const {
  for (size_t i = 0; i < thread_count_; ++i) {
    ChunkJob::Share& share = job.shares_[(worker + i) % thread_count_];
    for (size_t chunk; (chunk = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;)
      job.RunChunk(chunk, worker);
  }
}

void WorkerPool::SpinForWork(uint64_t seen) const {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  while (submissions_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < end) {
  }
}

void WorkerPool::RunWorker(size_t worker) {
  while (true) {
    ChunkJob* job = nullptr;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &WorkerPool::WorkAvailable));
      if (queue_.empty()) return;
      job = queue_.front();
      ++job->workers_;
    }
    RunShares(*job, worker);
    bool last, idle;
    uint64_t seen;
    {
      absl::MutexLock lock(&mu_);
      if (job->queued_) {
        queue_.erase(std::find(queue_.begin(), queue_.end(), job));
        job->queued_ = false;
      }
      last = --job->workers_ == 0;
      idle = queue_.empty();
      seen = submissions_.load(std::memory_order_relaxed);
    }
    if (last) job->Done();
    if (idle) SpinForWork(seen);
  }
}

}  // namespace superoffload::engine
