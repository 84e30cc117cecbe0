// The GPU's driver in virtual time, as far as kernels/gpu/mover.h and client/src/gpu/gpu_moves.h call it: streams, events
// and copies, kernels, memory, and a queue of completions without a thread. What is above it is the real code.
//
// Copies take what the simulation says: time of a link's model, or random time and real bytes. Nothing waits: whoever
// calls what would wait with a real driver (synchronizing, an empty queue) must know that what is left takes no time.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_SIMULATED_CUDA_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_SIMULATED_CUDA_H_

#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string_view>

#include "kernels/gpu/completion_queue.h"
#include "kernels/gpu/cuda_device.h"
#include "kernels/gpu/cuda_driver.h"
#include "server/simulator/gpu_stream.h"
#include "server/simulator/virtual_time.h"

namespace superoffload::simulator {

// One process's use of one GPU. Not thread-safe.
class SimulatedCuda {
 public:
  struct Copy {
    bool to_gpu;
    kernels::CudaPointer gpu;
    std::byte* host;
    size_t bytes;
  };
  // Begins a copy; `done` is called when its last byte has arrived.
  using Copier = std::function<void(const Copy& copy, std::function<void()> done)>;

  // What is launched, and GPU memory besides that which exists from the start. GPU addresses are the host's then.
  struct Kernels {
    // What the kernel of this name does with the arguments as they are now. A pointer is read when the work runs.
    std::function<std::function<void()>(std::string_view name, void** arguments)> bind;
    // Has the GPU do `work` some time; then calls `done`.
    std::function<void(std::function<void()> work, std::function<void()> done)> run;
    std::function<bool(size_t bytes)> has_memory;
  };

  // `after(event)`: an event of the process whose threads the queues are, some time from now. Without `kernels` nothing
  // is launched or allocated.
  SimulatedCuda(VirtualTime* time, Copier copier, std::function<void(std::function<void()>)> after,
                Kernels kernels = {});

  // Everything that was made of it is gone, or it was killed; no event of its streams is still to come.
  ~SimulatedCuda();

  SimulatedCuda(const SimulatedCuda&) = delete;
  SimulatedCuda& operator=(const SimulatedCuda&) = delete;

  std::shared_ptr<const kernels::GpuDevice> device() const { return device_; }
  std::unique_ptr<kernels::CompletionQueue> MakeQueue();

  // Streams and their handles are the same.
  static GpuStream& StreamOf(kernels::CudaStream stream);
  static kernels::CudaStream HandleOf(GpuStream* stream);

  // No stream has anything to do, and no callback is to come.
  bool idle() const;

  // The process was killed: its streams do nothing more, its queues call nobody. What it had may be destroyed then, and
  // does nothing either.
  void Kill();
  bool killed() const { return killed_; }

 private:
  class Queue;
  friend struct SimulatedDriver;

  VirtualTime* const time_;
  const Copier copier_;
  const std::function<void(std::function<void()>)> after_;
  const Kernels kernels_;
  bool killed_ = false;
  size_t callbacks_ = 0;  // to come
  std::map<kernels::CudaPointer, std::unique_ptr<std::byte[]>> allocated_;
  std::list<GpuStream> streams_;
  std::shared_ptr<const kernels::GpuDevice> device_;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_SIMULATED_CUDA_H_
