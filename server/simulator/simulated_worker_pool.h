// The daemon's workers in virtual time: chunks take time and compute nothing.
//
// A chunk is a flow over the host's memory that moves the bytes its pass reads and writes. It is no faster than one
// core can read, nor than one core can compute; what all flows together ask for is shared (shared_bandwidth.h). Workers
// take chunks as the daemon's threads do: of the first job that has one left to start.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_SIMULATED_WORKER_POOL_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_SIMULATED_WORKER_POOL_H_

#include <cstddef>
#include <list>

#include "server/engine/worker_pool.h"
#include "server/simulator/machine.h"
#include "server/simulator/shared_bandwidth.h"

namespace superoffload::simulator {

class SimulatedWorkerPool final : public engine::WorkerPool {
 public:
  // `host_memory` must outlive this. `costs`: of the algorithm's passes.
  SimulatedWorkerPool(SharedBandwidth* host_memory, const Machine& machine, const PassCosts& costs);

  void Submit(engine::ChunkJob* job, size_t chunks) override;
  size_t worker_count() const override { return workers_; }
  bool idle_work_is_free() const override { return true; }

  // Elements that were absorbed so far, as often as they were.
  double absorbed() const { return absorbed_; }

 private:
  struct Job {
    engine::ChunkJob* job;
    size_t to_start;
    size_t to_finish;
    double chunk_bytes, chunk_absorbed;
    double limit;                      // bytes per second of a chunk alone
    SharedBandwidth::Begun begun = 0;  // chunks, last
  };

  void StartChunks();
  void StartChunksOf(std::list<Job>::iterator job);
  void ChunkDone(std::list<Job>::iterator job);
  double LimitOf(const engine::JobWork& work) const;

  SharedBandwidth* const host_memory_;
  const double core_bandwidth_;
  const PassCosts costs_;
  const size_t workers_;
  size_t idle_;
  double absorbed_ = 0;
  std::list<Job> jobs_;  // in the order of submission
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_SIMULATED_WORKER_POOL_H_
