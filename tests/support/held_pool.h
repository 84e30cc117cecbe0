// Workers that work when a test says so.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_HELD_POOL_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_HELD_POOL_H_

#include <cstddef>
#include <deque>
#include <utility>

#include "server/engine/worker_pool.h"

namespace superoffload::test {

class HeldPool final : public engine::WorkerPool {
 public:
  void Submit(engine::ChunkJob* job, size_t chunks) override { jobs_.emplace_back(job, chunks); }
  size_t worker_count() const override { return 1; }
  bool idle_work_is_free() const override { return false; }

  size_t jobs() const { return jobs_.size(); }
  // There must be one.
  void RunOne() {
    const auto [job, chunks] = jobs_.front();
    jobs_.pop_front();
    for (size_t chunk = 0; chunk < chunks; ++chunk) job->RunChunk(chunk, 0);
    job->Done();
  }
  void RunAll() {
    while (!jobs_.empty()) RunOne();
  }

 private:
  std::deque<std::pair<engine::ChunkJob*, size_t>> jobs_;
};

}  // namespace superoffload::test

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_HELD_POOL_H_
