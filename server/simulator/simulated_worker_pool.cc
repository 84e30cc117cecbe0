#include "server/simulator/simulated_worker_pool.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace superoffload::simulator {

SimulatedWorkerPool::SimulatedWorkerPool(SharedBandwidth* host_memory, const Machine& machine, const PassCosts& costs)
    : host_memory_(host_memory),
      core_bandwidth_(machine.host.core_bandwidth),
      costs_(costs),
      workers_(machine.worker_cores()),
      idle_(workers_) {
  SUPEROFFLOAD_CHECK_LT(size_t{0}, workers_);
}

double SimulatedWorkerPool::LimitOf(const engine::JobWork& work) const {
  const double compute_seconds = static_cast<double>(work.absorbed) * costs_.absorb +
                                 static_cast<double>(work.published) * costs_.publish +
                                 static_cast<double>(work.narrowed) * costs_.publish_masters;
  const double bytes = static_cast<double>(work.bytes);
  return std::max(1.0, compute_seconds > 0 ? std::min(core_bandwidth_, bytes / compute_seconds) : core_bandwidth_);
}

void SimulatedWorkerPool::Submit(engine::ChunkJob* job, size_t chunks) {
  SUPEROFFLOAD_CHECK_LT(size_t{0}, chunks);
  const engine::JobWork work = job->work();
  jobs_.push_back({.job = job,
                   .to_start = chunks,
                   .to_finish = chunks,
                   .chunk_bytes = static_cast<double>(work.bytes) / static_cast<double>(chunks),
                   .chunk_absorbed = static_cast<double>(work.absorbed) / static_cast<double>(chunks),
                   .limit = LimitOf(work)});
  StartChunks();
}

void SimulatedWorkerPool::StartChunks() {
  for (const bool when_idle : {false, true}) {
    for (auto job = jobs_.begin(); job != jobs_.end() && idle_ > 0; ++job) {
      if (job->job->when_idle() == when_idle) StartChunksOf(job);
    }
  }
}

void SimulatedWorkerPool::StartChunksOf(std::list<Job>::iterator job) {
  while (job->to_start > 0 && idle_ > 0) {
    --job->to_start;
    --idle_;
    if (host_memory_->StartAnother(job->begun)) continue;
    job->begun = host_memory_->Start(job->chunk_bytes, job->limit, [this, job] { ChunkDone(job); });
  }
}

void SimulatedWorkerPool::ChunkDone(std::list<Job>::iterator job) {
  ++idle_;
  SUPEROFFLOAD_CHECK_LE(idle_, workers_);
  absorbed_ += job->chunk_absorbed;
  if (--job->to_finish == 0) {
    engine::ChunkJob* const done = job->job;
    jobs_.erase(job);
    done->Done();
  }
  StartChunks();
}

}  // namespace superoffload::simulator
