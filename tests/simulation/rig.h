// The parts of one machine, put together for one simulation.
#ifndef SUPEROFFLOAD_TESTS_SIMULATION_RIG_H_
#define SUPEROFFLOAD_TESTS_SIMULATION_RIG_H_

#include "server/simulator/copy_engine.h"
#include "server/simulator/gpu_stream.h"
#include "server/simulator/machine.h"
#include "server/simulator/shared_bandwidth.h"
#include "server/simulator/timeline.h"
#include "server/simulator/virtual_time.h"
#include "tests/simulation/cpu_queue.h"

namespace superoffload::simulator {

struct Rig {
  explicit Rig(const Machine& machine)
      : host_memory(&time, machine.host.bandwidth),
        h2d(&time, &host_memory, machine.h2d, Lane::kH2D, &timeline),
        d2h(&time, &host_memory, machine.d2h, Lane::kD2H, &timeline) {}

  VirtualTime time;
  Timeline timeline;
  SharedBandwidth host_memory;
  CopyEngine h2d;
  CopyEngine d2h;
  CpuQueue cpu{&time, &host_memory, &timeline};
  GpuStream compute{&time, &timeline};
  GpuStream down{&time, nullptr};  // gradients; its short kernels are not drawn
  GpuStream up{&time, nullptr};    // parameters
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_TESTS_SIMULATION_RIG_H_
