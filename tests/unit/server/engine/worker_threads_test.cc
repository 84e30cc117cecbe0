#include "server/engine/worker_threads.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
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

TEST(WorkerThreadsTest, EveryChunkRunsOncePerSubmission) {
  for (size_t threads : {1, 2, 4}) {
    WorkerThreads pool(threads);
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

TEST(WorkerThreadsTest, JobsOfManyOwnersTakeTurns) {
  std::vector<int> order;
  absl::Notification begin;
  std::vector<std::unique_ptr<RecordingJob>> jobs;
  {
    WorkerThreads pool(1);
    for (int name : {1, 2, 1, 3, 2}) {
      jobs.push_back(std::make_unique<RecordingJob>(name, &order, &begin));
      pool.Submit(jobs.back().get(), 3);
    }
    begin.Notify();
  }
  EXPECT_EQ(order, (std::vector<int>{1, 2, 1, 3, 2}));
}

TEST(WorkerThreadsTest, DestructionRunsWhatWasSubmitted) {
  CountingJob job(nullptr, 50, 1);
  {
    WorkerThreads pool(2);
    pool.Submit(&job, 50);
  }
  for (const std::atomic<int>& count : job.counts()) EXPECT_EQ(count.load(), 1);
}

// Notes in which order chunks run; holds the first one back until it is told to go on.
class TracedJob final : public ChunkJob {
 public:
  TracedJob(char name, std::string* trace, absl::Notification* hold = nullptr)
      : name_(name), trace_(trace), hold_(hold) {}
  void RunChunk(size_t, size_t) override {
    trace_->push_back(name_);
    if (hold_ == nullptr) return;
    started.Notify();
    std::exchange(hold_, nullptr)->WaitForNotification();
  }
  void Done() override { done.Notify(); }
  absl::Notification started, done;

 private:
  const char name_;
  std::string* const trace_;  // of one worker
  absl::Notification* hold_;
};

TEST(WorkerThreadsTest, WorkForIdleWorkersIsLeftForOtherWorkFromOneChunkToTheNext) {
  WorkerThreads pool(1);
  std::string trace;
  absl::Notification go_on;
  TracedJob idle('i', &trace, &go_on), first('a', &trace), second('b', &trace);
  idle.set_when_idle(true);
  pool.Submit(&idle, 3);
  idle.started.WaitForNotification();
  pool.Submit(&first, 2);
  pool.Submit(&second, 1);
  go_on.Notify();
  for (TracedJob* const job : {&idle, &first, &second}) job->done.WaitForNotification();
  EXPECT_EQ(trace, "iaabii");
}

TEST(WorkerThreadsTest, WorkThatSomebodyWaitsForIsNoLongerForIdleWorkers) {
  WorkerThreads pool(1);
  std::string trace;
  absl::Notification go_on;
  TracedJob held('h', &trace, &go_on), idle('i', &trace), other('j', &trace), late('l', &trace);
  pool.Submit(&held, 1);
  held.started.WaitForNotification();
  for (TracedJob* const job : {&other, &idle}) {
    job->set_when_idle(true);
    pool.Submit(job, 2);
  }
  pool.Hurry(&idle);
  pool.Submit(&late, 1);
  go_on.Notify();
  for (TracedJob* const job : {&held, &idle, &other, &late}) job->done.WaitForNotification();
  EXPECT_EQ(trace, "hiiljj");
  pool.Hurry(&idle);  // it is done: nothing happens
}

TEST(WorkerThreadsTest, ManyWorkersLeaveAndReturnAndRunEveryChunkOnce) {
  WorkerThreads pool(4);
  std::vector<std::unique_ptr<CountingJob>> jobs;
  for (int i = 0; i < 6; ++i) {
    jobs.push_back(std::make_unique<CountingJob>(&pool, 200, 30));
    jobs.back()->set_when_idle(i % 2 == 0);
    pool.Submit(jobs.back().get(), 200);
  }
  for (int i = 0; i < 100; ++i) pool.Hurry(jobs[i % 6].get());
  for (const auto& job : jobs) {
    job->Wait();
    for (const std::atomic<int>& count : job->counts()) EXPECT_EQ(count, 30);
  }
}

TEST(WorkerThreadsDeathTest, AJobIsSubmittedOnceAtATime) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  WorkerThreads pool(1);
  std::vector<int> order;
  absl::Notification begin;
  RecordingJob job(0, &order, &begin);
  EXPECT_DEATH(pool.Submit(&job, 0), "size_t\\{0\\} < chunks \\(0, 0\\)");
  EXPECT_DEATH(
      {
        pool.Submit(&job, 1);
        pool.Submit(&job, 1);
      },
      "a job is submitted while");
}

}  // namespace
}  // namespace superoffload::engine
