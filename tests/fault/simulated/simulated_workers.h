// Worker threads in virtual time that really run their chunks: the start of a chunk, what it does and its end are
// events of their own, with random delays between them.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_WORKERS_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_WORKERS_H_

#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "server/engine/worker_pool.h"
#include "tests/fault/simulated/ground.h"

namespace superoffload::faults {

class SimulatedWorkers final : public engine::WorkerPool {
 public:
  // `after(event)`: an event of the process whose threads these are, some time from now.
  SimulatedWorkers(Ground* ground, size_t workers, std::function<void(std::function<void()>)> after);

  void Submit(engine::ChunkJob* job, size_t chunks) override;
  size_t worker_count() const override { return workers_.size(); }
  bool idle_work_is_free() const override { return workers_.size() % 2 == 0; }

  bool idle() const { return jobs_.empty(); }

  // The process was killed: every worker that is inside a chunk has come to some point of it.
  void Die();

 private:
  struct Job {
    engine::ChunkJob* job;
    std::vector<size_t> waiting;  // chunks that nobody has started
    size_t unfinished;
  };
  struct Chunk {
    engine::ChunkJob* job;
    size_t index;
    bool run = false;
  };

  void StartChunks();
  void Finish(size_t worker);

  Ground& ground_;
  const std::function<void(std::function<void()>)> after_;
  std::deque<Job> jobs_;
  std::vector<std::optional<Chunk>> workers_;
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_WORKERS_H_
