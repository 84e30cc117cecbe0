#include "server/engine/worker_threads.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

#include "kernels/base/check.h"

namespace superoffload::engine {
namespace {

// The next bucket of a burst comes within this time; to park and be woken takes longer.
constexpr std::chrono::microseconds kSpinTime{20};

}  // namespace

WorkerThreads::WorkerThreads(size_t threads, const std::vector<int>& cpus)
    : worker_count_(threads), pinned_(!cpus.empty()) {
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

WorkerThreads::~WorkerThreads() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void WorkerThreads::Submit(ChunkJob* job, size_t chunks) {
  SUPEROFFLOAD_CHECK_LT(size_t{0}, chunks);
  absl::MutexLock lock(&mu_);
  SUPEROFFLOAD_CHECK(!job->queued_ && job->workers_ == 0, "a job is submitted while ", job->workers_,
                     " workers are inside it");
  if (job->shares_ == nullptr) job->shares_ = std::make_unique<ChunkJob::Share[]>(worker_count_);
  for (size_t i = 0; i < worker_count_; ++i) {
    ChunkJob::Share& share = job->shares_[i];
    share.next.store(chunks * i / worker_count_, std::memory_order_relaxed);  // the mutex publishes it
    share.end = chunks * (i + 1) / worker_count_;
  }
  Enqueue(job);
}

void WorkerThreads::Enqueue(ChunkJob* job) {
  job->queued_ = true;
  QueueOf(*job).push_back(job);
  waiting_.store(queue_.size(), std::memory_order_relaxed);
  submissions_.fetch_add(1, std::memory_order_release);
}

void WorkerThreads::Dequeue(ChunkJob* job) {
  std::deque<ChunkJob*>& queue = QueueOf(*job);
  const auto place = std::find(queue.begin(), queue.end(), job);
  SUPEROFFLOAD_CHECK(place != queue.end(), "a queued job is not in the queue of ", queue.size());
  queue.erase(place);
  job->queued_ = false;
  waiting_.store(queue_.size(), std::memory_order_relaxed);
}

void WorkerThreads::Hurry(ChunkJob* job) {
  absl::MutexLock lock(&mu_);
  if (!job->when_idle()) return;
  const bool queued = job->queued_;
  if (queued) Dequeue(job);
  job->set_when_idle(false);
  if (queued) Enqueue(job);
}

// False: chunks are left, and other work comes first.
bool WorkerThreads::RunShares(ChunkJob& job, size_t worker) const {
  for (size_t i = 0; i < worker_count_; ++i) {
    ChunkJob::Share& share = job.shares_[(worker + i) % worker_count_];
    while (true) {
      if (job.when_idle() && waiting_.load(std::memory_order_relaxed) > 0) return false;
      const size_t chunk = share.next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= share.end) break;
      job.RunChunk(chunk, worker);
    }
  }
  return true;
}

void WorkerThreads::SpinForWork(uint64_t seen) const {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  while (submissions_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < end) {
  }
}

void WorkerThreads::RunWorker(size_t worker) {
  while (true) {
    ChunkJob* job = nullptr;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &WorkerThreads::WorkAvailable));
      if (queue_.empty() && idle_queue_.empty()) return;
      job = queue_.empty() ? idle_queue_.front() : queue_.front();
      ++job->workers_;
    }
    const bool all_started = RunShares(*job, worker);
    bool last, idle;
    uint64_t seen;
    {
      absl::MutexLock lock(&mu_);
      if (all_started && job->queued_) Dequeue(job);
      SUPEROFFLOAD_CHECK_LT(size_t{0}, job->workers_, "worker ", worker, " leaves a job");
      last = --job->workers_ == 0 && !job->queued_;
      idle = queue_.empty() && idle_queue_.empty();
      seen = submissions_.load(std::memory_order_relaxed);
    }
    if (last) job->Done();
    if (idle) SpinForWork(seen);
  }
}

}  // namespace superoffload::engine
