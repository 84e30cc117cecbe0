// The GPU's driver (driver/driver.h) in virtual time, and a queue of completions without a thread. What is above it, as
// kernels/gpu/mover.h and client/src/gpu/gpu_moves.h, is the real code.
//
// Nothing waits: whoever calls what would wait with a real driver (synchronizing, an empty queue) must know that what
// is left takes no time. There is no default stream.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_SIMULATED_CUDA_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_SIMULATED_CUDA_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/gpu/completion_queue.h"
#include "kernels/gpu/cuda_device.h"
#include "kernels/gpu/cuda_driver.h"
#include "server/simulator/driver/driver.h"
#include "server/simulator/gpu_stream.h"
#include "server/simulator/virtual_time.h"

namespace superoffload::simulator {

// One process's use of one GPU. Not thread-safe.
class SimulatedCuda : private Clock {
 public:
  // Begins a copy; `done` is called when its last byte has arrived.
  using Copier = std::function<void(const GpuCopy& copy, std::function<void()> done)>;
  // An event of the process whose threads the queues are, some time from now.
  using After = std::function<void(std::function<void()> event)>;

  // A GPU whose memory is nowhere: copies take the time that `copier` says, nothing is allocated or launched.
  SimulatedCuda(VirtualTime* time, Copier copier, After after);

  // `make_process(clock)`: what there is besides contexts, streams and events.
  using MakeProcess = std::function<std::unique_ptr<Process>(Clock* clock)>;
  SimulatedCuda(VirtualTime* time, const MakeProcess& make_process, After after);

  // Everything that was made of it is gone, also where it was killed; no event of its streams is still to come.
  ~SimulatedCuda() override;

  SimulatedCuda(const SimulatedCuda&) = delete;
  SimulatedCuda& operator=(const SimulatedCuda&) = delete;

  std::shared_ptr<const kernels::GpuDevice> device() const { return device_; }
  std::unique_ptr<kernels::CompletionQueue> MakeQueue();

  // Every stream here is one of these.
  static GpuStream& StreamOf(kernels::CudaStream stream);
  static kernels::CudaStream HandleOf(GpuStream* stream) { return stream->handle(); }

  // No stream has anything to do, and no callback is to come.
  bool idle() const;

  // The process was killed: its streams do nothing more, its queues call nobody. What it had may be destroyed then, and
  // does nothing either.
  void Kill();
  bool killed() const { return killed_; }

 private:
  class Queue;

  std::shared_ptr<Stream> MakeStream() override;
  int DoNow(const Stream::Operation& operation) override;
  void Await(const EventRecord& record) override;
  double Now() const override { return time_->now(); }

  VirtualTime* const time_;
  const After after_;
  bool killed_ = false;
  size_t callbacks_ = 0;                             // to come
  std::vector<std::shared_ptr<GpuStream>> streams_;  // to the end: an event may still be on its way to one
  const std::unique_ptr<Process> process_;
  std::shared_ptr<const kernels::GpuDevice> device_;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_SIMULATED_CUDA_H_
