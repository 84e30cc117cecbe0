#include "tests/fault/simulated/simulated_workers.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kernels/base/check.h"

namespace superoffload::faults {

SimulatedWorkers::SimulatedWorkers(Ground* ground, size_t workers, std::function<void(std::function<void()>)> after)
    : ground_(*ground), after_(std::move(after)), workers_(workers) {}

void SimulatedWorkers::Submit(engine::ChunkJob* job, size_t chunks) {
  SUPEROFFLOAD_CHECK_LT(0u, chunks);
  for (const Job& other : jobs_) SUPEROFFLOAD_CHECK(other.job != job, "a job is submitted twice at a time");
  Job added{.job = job, .waiting = std::vector<size_t>(chunks), .unfinished = chunks};
  std::iota(added.waiting.begin(), added.waiting.end(), 0);
  jobs_.push_back(std::move(added));
  StartChunks();
}

// Any idle worker takes any chunk of the first job that has one left; jobs for idle workers come last.
void SimulatedWorkers::StartChunks() {
  for (size_t worker = 0; worker < workers_.size(); ++worker) {
    if (workers_[worker]) continue;
    auto job = std::find_if(jobs_.begin(), jobs_.end(),
                            [](const Job& j) { return !j.waiting.empty() && !j.job->when_idle(); });
    if (job == jobs_.end()) {
      job = std::find_if(jobs_.begin(), jobs_.end(), [](const Job& j) { return !j.waiting.empty(); });
    }
    if (job == jobs_.end()) return;
    std::swap(job->waiting[ground_.random.Below(job->waiting.size())], job->waiting.back());
    workers_[worker] = Chunk{job->job, job->waiting.back()};
    job->waiting.pop_back();
    after_([this, worker] {
      Chunk& chunk = *workers_[worker];
      ground_.log.Add("worker", "runs chunk", worker, chunk.index);
      chunk.run = true;
      chunk.job->RunChunk(chunk.index, worker);
      after_([this, worker] { Finish(worker); });
    });
  }
}

void SimulatedWorkers::Finish(size_t worker) {
  engine::ChunkJob* const done = workers_[worker]->job;
  ground_.log.Add("worker", "finishes chunk", worker, workers_[worker]->index);
  workers_[worker].reset();
  const auto job = std::find_if(jobs_.begin(), jobs_.end(), [done](const Job& j) { return j.job == done; });
  if (--job->unfinished == 0) {
    jobs_.erase(job);
    done->Done();
  }
  StartChunks();
}

void SimulatedWorkers::Die() {
  ground_.deaths.set_dying(true);
  for (size_t worker = 0; worker < workers_.size(); ++worker) {
    const std::optional<Chunk>& chunk = workers_[worker];
    if (!chunk || chunk->run || ground_.random.Chance(0.4)) continue;  // done already, or not begun
    try {
      ground_.log.Add("worker", "dies in chunk", worker, chunk->index);
      chunk->job->RunChunk(chunk->index, worker);
    } catch (const ProcessDied&) {
    }
  }
  ground_.deaths.set_dying(false);
}

}  // namespace superoffload::faults
