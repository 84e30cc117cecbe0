// The GPU memory of an attachment: reserved or taken over, and mapped by the daemon where that can be.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_MEMORY_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_MEMORY_H_

#include <cstdint>
#include <memory>

#include "client/src/descriptor_connection.h"
#include "client/src/gpu/gpu_layout.h"
#include "client/src/status.h"
#include "kernels/gpu/shared_gpu_memory.h"
#include "superoffload/superoffload_gpu.h"

namespace superoffload::client {

struct GpuMemoryRequest {
  std::shared_ptr<const kernels::GpuDevice> device;
  const GpuLayout& layout;
  kernels::UnitRanges units;
  uint32_t stream_slots;  // that units share at first
  uint32_t mover;         // enum superoffload_mover
  bool share;             // whoever copies
};

struct DaemonPeer {
  DescriptorConnection& connection;
  uint64_t epoch;
};

// Addresses, and as far as the driver allows no memory yet. The device must be current. UNIMPLEMENTED: there are units,
// and no way to give them memory.
Status ReserveGpuMemory(const GpuMemoryRequest& request, std::shared_ptr<kernels::SharedGpuMemory>* memory);

// Units take turns at so many slots of memory, unless they have some.
Status BackUnits(uint32_t slots, kernels::SharedGpuMemory* memory);

// Backs all of `memory`, which is that of an attachment to the same optimizer which has ended, or reserved, or null to
// reserve it; and has the daemon map it where that may be of use. Fills in `shared` and `notes` of the report. The
// device must be current. FAILED_PRECONDITION: the daemon cannot map what it is asked to.
Status OpenGpuMemory(const GpuMemoryRequest& request, const DaemonPeer& daemon,
                     std::shared_ptr<kernels::SharedGpuMemory>* memory, superoffload_gpu_report* report);

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_MEMORY_H_
