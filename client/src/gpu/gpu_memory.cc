#include "client/src/gpu/gpu_memory.h"

#include <cstring>
#include <utility>
#include <vector>

#include "client/src/gpu/gpu_options.h"
#include "client/src/gpu/gpu_status.h"
#include "superoffload/v1/file_descriptor.h"

namespace superoffload::client {
namespace {

using kernels::Export;
using kernels::SharedGpuMemory;

// Has the daemon map it.
Status Share(const GpuMemoryRequest& request, const DaemonPeer& daemon, const SharedGpuMemory& memory) {
  superoffload_device_request message{};
  std::memcpy(message.device_uuid, request.device->uuid().bytes, sizeof(message.device_uuid));
  message.slots = static_cast<uint32_t>(request.layout.slots.count);
  message.memory_bytes = memory.bytes();
  message.piece_bytes = memory.piece_bytes();
  message.slots_offset = request.layout.slots.offset;
  message.slot_bytes = request.layout.slots.bytes;
  message.sums_offset = request.layout.slots.sums_offset;
  message.sums_bytes = request.layout.slots.sums_bytes;
  std::vector<int> descriptors;
  const Status exported = FromCuda(memory.ExportTo(&descriptors));
  std::vector<FileDescriptor> owned;
  for (const int descriptor : descriptors) owned.emplace_back(descriptor);
  return exported.ok() ? daemon.connection.ShareDevice(daemon.epoch, &message, descriptors) : exported;
}

bool CopiesItself(uint32_t mover) { return mover == SUPEROFFLOAD_MOVER_TRAINER || mover == SUPEROFFLOAD_MOVER_DIRECT; }

// Whether the daemon may have to map the memory.
bool Shares(const GpuMemoryRequest& request) { return request.share || !CopiesItself(request.mover); }

}  // namespace

Status ReserveGpuMemory(const GpuMemoryRequest& request, std::shared_ptr<SharedGpuMemory>* memory) {
  std::unique_ptr<SharedGpuMemory> made;
  Status status;
  if (request.device->Has(kernels::kCudaVmmSupported)) {
    const bool exports = Shares(request) && request.device->Has(kernels::kCudaVmmDescriptorSupported);
    status =
        FromCuda(SharedGpuMemory::Reserve(request.device, request.layout.bytes, SUPEROFFLOAD_MAX_DEVICE_PIECES,
                                          exports ? Export::kAsDescriptors : Export::kNever, request.units, &made));
  } else if (request.units.count > 0) {
    status = Error(Code::kUnimplemented,
                   "weights cannot stream: the driver has no virtual memory management for this GPU; let them stay");
  } else {
    status = FromCuda(SharedGpuMemory::Allocate(request.device, request.layout.bytes, &made));
  }
  *memory = std::move(made);
  return status;
}

Status BackUnits(uint32_t slots, SharedGpuMemory* memory) {
  kernels::UnitMemory* const units = memory->units();
  if (units == nullptr || !units->slots().empty()) return {};
  return FromCuda(units->Map(kernels::SlotsOf(std::vector<bool>(units->count(), false), slots)));
}

Status OpenGpuMemory(const GpuMemoryRequest& request, const DaemonPeer& daemon,
                     std::shared_ptr<SharedGpuMemory>* memory, superoffload_gpu_report* report) {
  if (*memory == nullptr) {
    if (Status status = ReserveGpuMemory(request, memory); !status.ok()) return status;
  }
  const uint64_t units = (*memory)->units() == nullptr ? 0 : (*memory)->units()->count();
  if ((*memory)->bytes() < request.layout.bytes || units != request.units.count) {
    return Error(Code::kInvalidArgument, "the GPU memory is of another optimizer; reserve it with the same options");
  }
  if (Status status = FromCuda((*memory)->Back((*memory)->bytes())); !status.ok()) return status;
  if (Status status = BackUnits(request.stream_slots, memory->get()); !status.ok()) return status;
  if (Status status = FromCuda((*memory)->OpenToPeers()); !status.ok()) return status;
  if (!Shares(request)) return {};
  Status shared = (*memory)->exportable()
                      ? Share(request, daemon, **memory)
                      : Error(Code::kFailedPrecondition, "this memory of the GPU has no descriptors");
  if (shared.ok()) {
    report->shared = 1;
    return {};
  }
  if (daemon.connection.DaemonGone()) {
    return Error(Code::kUnavailable, "the daemon is gone; start it again and attach anew");
  }
  Note("the daemon cannot copy: " + shared.message, report);
  if (request.mover == SUPEROFFLOAD_MOVER_AUTO || (CopiesItself(request.mover) && !request.share)) return {};
  return {Code::kFailedPrecondition, shared.message + "; or let the trainer copy (mover \"auto\" or \"trainer\")"};
}

}  // namespace superoffload::client
