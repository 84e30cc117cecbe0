#include "server/engine/worker_pool.h"

#include <gtest/gtest.h>

#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"

namespace superoffload::engine {
namespace {

// Counts how often each chunk ran; resubmits itself until it has run `rounds` times.
class CountingJob final : public ChunkJob {
 public:
  CountingJob(WorkerPool* pool, size_t chunks, int rounds) : pool_(pool), counts_(chunks), rounds_(rounds) {}

  void RunChunk(size_t index, size_t) override { counts_[index].fetch_add(1, std::memory_order_relaxed); }
  void Done() override {
    if (--rounds_ == 0) {
      finished_.Notify();
    } else {
      pool_->Submit(this, counts_.size());
    }
  }

  void Wait() { finished_.WaitForNotification(); }
  const std::vector<std::atomic<int>>& counts() const { return counts_; }

 private:
  WorkerPool* const pool_;
  std::vector<std::atomic<int>> counts_;
  int rounds_;
  absl::Notification finished_;
};

TEST(WorkerPoolTest, EveryChunkRunsOncePerSubmission) {
  for (size_t threads : {1, 2, 4}) {
    WorkerPool pool(threads);
    std::vector<std::unique_ptr<CountingJob>> jobs;
    for (size_t chunks : {1, 2, 7, 100}) jobs.push_back(std::make_unique<CountingJob>(&pool, chunks, 200));
    for (auto& job : jobs) pool.Submit(job.get(), job->counts().size());
    for (auto& job : jobs) {
      job->Wait();
      for (const std::atomic<int>& count : job->counts()) EXPECT_EQ(count.load(), 200);
    }
  }
}

// Blocks until told to go on, and tells which jobs ran before it ended.
class RecordingJob final : public ChunkJob {
 public:
  RecordingJob(int name, std::vector<int>* order, absl::Notification* begin)
      : name_(name), order_(order), begin_(begin) {}
  void RunChunk(size_t, size_t) override { begin_->WaitForNotification(); }
  void Done() override { order_->push_back(name_); }

 private:
  const int name_;
  std::vector<int>* const order_;
  absl::Notification* const begin_;
};

TEST(WorkerPoolTest, JobsOfManyOwnersTakeTurns) {
  std::vector<int> order;
  absl::Notification begin;
  std::vector<std::unique_ptr<RecordingJob>> jobs;
  {
    WorkerPool pool(1);
    for (int name : {1, 2, 1, 3, 2}) {
      jobs.push_back(std::make_unique<RecordingJob>(name, &order, &begin));
      pool.Submit(jobs.back().get(), 3);
    }
    begin.Notify();
  }
  EXPECT_EQ(order, (std::vector<int>{1, 2, 1, 3, 2}));
}

TEST(WorkerPoolTest, DestructionRunsWhatWasSubmitted) {
  CountingJob job(nullptr, 50, 1);
  {
    WorkerPool pool(2);
    pool.Submit(&job, 50);
  }
  for (const std::atomic<int>& count : job.counts()) EXPECT_EQ(count.load(), 1);
}

}  // namespace
}  // namespace superoffload::engine
