// How a GPU plane begins and ends, and what is done between steps.
#include <algorithm>
#include <utility>
#include <vector>

#include "client/src/gpu/choose_mover.h"
#include "client/src/gpu/gpu_memory.h"
#include "client/src/gpu/gpu_options.h"
#include "client/src/gpu/gpu_plane.h"
#include "client/src/gpu/gpu_status.h"
#include "client/src/gpu/stream_layout.h"
#include "kernels/base/check.h"

namespace superoffload::client {
namespace {

using kernels::CudaStream;
using kernels::CurrentDevice;

std::span<std::byte> Bytes(const Mapping& mapping) {
  return {static_cast<std::byte*>(mapping.data()), mapping.bytes()};
}

// Where the options leave the slots open. `memory`, which may be null, was laid out by this function.
Status ChooseSlots(const kernels::GpuDevice& device, const kernels::SharedGpuMemory* memory, const GpuLayout& few,
                   const GpuLayout& many, GpuLayout* layout) {
  bool takes_many = memory != nullptr && memory->bytes() >= many.bytes;
  if (memory == nullptr) {
    const CurrentDevice current(device);
    size_t free_bytes = 0, total_bytes = 0;
    if (Status status = FromCuda(device.driver().Status(device.driver().MemGetInfo(&free_bytes, &total_bytes),
                                                        "asking for the GPU's free memory"));
        !status.ok()) {
      return status;
    }
    takes_many = ManySlotsPay(few.bytes, many.bytes, free_bytes);
  }
  *layout = takes_many ? many : few;
  return {};
}

// What the model, options, which were checked, and the attachment's memory say about the GPU's.
Status Plan(const ModelLayout& model, const superoffload_gpu_options& options, const StepPlane& steps,
            const kernels::GpuDevice& device, const kernels::SharedGpuMemory* memory, std::vector<GpuBucket>* buckets,
            GpuLayout* layout, kernels::UnitRanges* units) {
  if (model.bucket_count() != steps.bucket_count()) {
    return Error(Code::kInvalidArgument, "the trainer has ", model.bucket_count(), " buckets, but the attachment ",
                 steps.bucket_count());
  }
  if (Status status = ParseBuckets(model, steps.parameters().bytes(), steps.gradients().bytes(), steps.in_place(),
                                   options.stream_slots, buckets);
      !status.ok()) {
    return status;
  }
  size_t most_tensors = 1;  // parameters that have elements in one bucket
  for (uint32_t bucket = 0; bucket < model.bucket_count(); ++bucket) {
    most_tensors = std::max(most_tensors, model.parts(bucket).size());
  }
  const auto plan = [&](uint64_t slots) { return PlanGpu(*buckets, slots, most_tensors); };
  if (options.device_slots != 0) {
    *layout = plan(options.device_slots);
  } else if (Status status = ChooseSlots(device, memory, plan(kFewSlots), plan(kManySlots), layout); !status.ok()) {
    return status;
  }
  return FindUnits(*buckets, *layout, units);
}

GpuMemoryRequest MemoryRequest(std::shared_ptr<const kernels::GpuDevice> device, const GpuLayout& layout,
                               const kernels::UnitRanges& units, const superoffload_gpu_options& options) {
  return {.device = std::move(device),
          .layout = layout,
          .units = units,
          .stream_slots = options.stream_slots,
          .mover = options.mover,
          .share = options.share != 0};
}

}  // namespace

Status GpuPlane::Reserve(const ModelLayout& model, const superoffload_gpu_options& options, const StepPlane& steps,
                         std::shared_ptr<kernels::SharedGpuMemory>* memory) {
  if (Status status = CheckOptions(options); !status.ok()) return status;
  std::shared_ptr<const kernels::GpuDevice> device;
  if (Status status = FromCuda(kernels::GpuDevice::Open(options.ordinal, &device)); !status.ok()) return status;
  std::vector<GpuBucket> buckets;
  GpuLayout layout;
  kernels::UnitRanges units;
  if (Status status = Plan(model, options, steps, *device, nullptr, &buckets, &layout, &units); !status.ok()) {
    return status;
  }
  const CurrentDevice current(*device);
  return ReserveGpuMemory(MemoryRequest(device, layout, units, options), memory);
}

Status GpuPlane::Create(const ModelLayout& model, const superoffload_gpu_options& options, StepPlane* steps,
                        GpuPlane* previous, std::shared_ptr<kernels::SharedGpuMemory> memory,
                        std::unique_ptr<GpuPlane>* plane) {
  if (previous != nullptr) previous->End();
  if (previous != nullptr) memory = previous->memory_;
  if (Status status = CheckOptions(options); !status.ok()) return status;
  std::shared_ptr<const kernels::GpuDevice> device;
  if (Status status = FromCuda(kernels::GpuDevice::Open(options.ordinal, &device)); !status.ok()) return status;
  std::vector<GpuBucket> buckets;
  GpuLayout layout;
  kernels::UnitRanges units;
  if (Status status = Plan(model, options, *steps, *device, memory.get(), &buckets, &layout, &units); !status.ok()) {
    return status;
  }
  std::unique_ptr<GpuPlane> created(
      new GpuPlane(steps, std::move(device), std::move(buckets), layout, options.stream_slots));
  if (Status status = created->Open(model, options, units, std::move(memory)); !status.ok()) return status;
  *plane = std::move(created);
  return {};
}

GpuPlane::GpuPlane(StepPlane* steps, std::shared_ptr<const kernels::GpuDevice> device, std::vector<GpuBucket> buckets,
                   const GpuLayout& layout, uint32_t stream_slots)
    : steps_(*steps),
      rings_(steps->rings()),
      progress_(steps->progress()),
      host_(&rings_, &progress_),
      device_(std::move(device)),
      buckets_(std::move(buckets)),
      layout_(layout),
      stream_slots_(stream_slots),
      slots_(static_cast<uint32_t>(layout.slots.count)) {}

Status GpuPlane::Open(const ModelLayout& model, const superoffload_gpu_options& options,
                      const kernels::UnitRanges& units, std::shared_ptr<kernels::SharedGpuMemory> memory) {
  const CurrentDevice current(*device_);
  CopyText(device_->name(), report_.gpu);
  report_.coherent = device_->Has(kernels::kCudaHostPageTables) ? 1 : 0;
  memory_ = std::move(memory);
  if (Status status = OpenGpuMemory(MemoryRequest(device_, layout_, units, options),
                                    {.connection = steps_.connection(), .epoch = steps_.epoch()}, &memory_, &report_);
      !status.ok()) {
    return status;
  }
  report_.gpu_bytes = memory_->bytes();
  if (const kernels::UnitMemory* const units = memory_->units(); units != nullptr) {
    report_.gpu_bytes += units->bytes();
    report_.slot_bytes = units->slot_bytes();
  }
  report_.parameters = memory_->data();
  if (Status status = OpenMoves(model, options); !status.ok()) return status;
  report_.pack_stream = reinterpret_cast<uint64_t>(pack_stream_.get());
  if (options.push != 0) {  // before copies of parameters are measured, which come from the host's
    if (Status status = Push(reinterpret_cast<CudaStream>(options.push_stream)); !status.ok()) return status;
  }
  progress_.SetNext(options.next_slot, options.committed_steps);
  completions_ = std::thread([this] { TakeCompletions(); });
  const MoverTrial trial{.device = *device_,
                         .buckets = buckets_,
                         .packer = moves_->packer(),
                         .mover = moves_->mover(),
                         .gpu = memory_->data(),
                         .host_slot = options.next_slot,
                         .probe = [this](uint32_t bucket) { return Probe(bucket); }};
  if (Status status = ChooseMover(trial, options.mover, &report_); !status.ok()) return status;
  SUPEROFFLOAD_CHECK(report_.mover != SUPEROFFLOAD_MOVER_AUTO);
  moves_->set_kind(report_.mover);
  if (report_.shared != 0 && report_.mover != SUPEROFFLOAD_MOVER_DAEMON) {
    if (Status status = UnmapDevice(); !status.ok()) return status;
  }
  return SetResident(0, nullptr);
}

Status GpuPlane::OpenMoves(const ModelLayout& model, const superoffload_gpu_options& options) {
  const GpuMoves::Memory memory{
      .gpu = memory_->data(),
      .gradients = Bytes(steps_.gradients()),
      .parameters = Bytes(steps_.parameters()),
      .slots = memory_->units() == nullptr ? std::vector<uint32_t>() : memory_->units()->slots()};
  GpuMoves::Events events{
      .arrived = [this](const kernels::CudaStatus& done,
                        const superoffload_ring_entry& entry) { SubmitArrived(done, entry); },
      .slot_free = [this](uint32_t slot) { SUPEROFFLOAD_CHECK(slots_.Free(slot), "device slot ", slot); }};
  if (Status status = pack_stream_.Take(device_); !status.ok()) return status;
  if (Status status = GpuMoves::Open(device_, model, options, &buckets_, layout_, memory, pack_stream_.get(),
                                     std::move(events), /*make_queue=*/{}, &moves_);
      !status.ok()) {
    return status;
  }
  report_.staged = moves_->mover().staged() ? 1 : 0;
  for (const kernels::CudaStatus& status : moves_->mover().unregistered()) Note(status.message, &report_);
  return {};
}

Status GpuPlane::Probe(uint32_t bucket) {
  {
    std::lock_guard lock(mu_);
    ++probes_under_way_;
  }
  superoffload_ring_entry entry{};
  entry.opcode = SUPEROFFLOAD_SUBMIT_PROBE;
  entry.index = bucket;
  entry.payload.gradient.gpu_offset = buckets_[bucket].gpu_offset;
  entry.attachment_epoch = steps_.epoch();
  if (Status status = rings_.WaitSubmit(entry); !status.ok()) return status;
  std::unique_lock lock(mu_);
  changed_.wait(lock, [this] { return probes_under_way_ == 0 || !slots_.failure().ok(); });
  return slots_.failure();
}

// The daemon has no use for a context, a mapping and a registration of its own.
Status GpuPlane::UnmapDevice() {
  superoffload_ring_entry entry{};
  entry.opcode = SUPEROFFLOAD_SUBMIT_UNMAP_DEVICE;
  entry.attachment_epoch = steps_.epoch();
  report_.shared = 0;
  return rings_.WaitSubmit(entry);
}

void GpuPlane::End() {
  stop_ = true;
  if (completions_.joinable()) completions_.join();
  const CurrentDevice current(*device_);
  moves_.reset();
}

Status GpuPlane::Pull() {
  if (Status status = CheckPresent(); !status.ok()) return status;
  const CurrentDevice current(*device_);
  if (Status status = FromCuda(memory_->OpenToPeers()); !status.ok()) return status;
  if (Status status = FromCuda(moves_->mover().WaitAllLanded()); !status.ok()) return status;
  if (Status status = FromCuda(moves_->weights().Renew()); !status.ok()) return status;
  const CudaStream stream = moves_->mover().up_stream();
  return CopyEach(stream, "copying parameters to the GPU",
                  [&](const kernels::CudaDriver& driver, const GpuBucket& bucket) {
                    return driver.MemcpyHtoDAsync(OnGpu(bucket), OnHost(bucket), bucket.parameters_bytes(), stream);
                  });
}

Status GpuPlane::Push(CudaStream stream) {
  if (Status status = CheckPresent(); !status.ok()) return status;
  const CurrentDevice current(*device_);
  if (Status status = FromCuda(memory_->OpenToPeers()); !status.ok()) return status;
  if (Status status = FromCuda(moves_->mover().WaitAllLanded()); !status.ok()) return status;  // they come from there
  if (Status status = FromCuda(moves_->weights().Renew()); !status.ok()) return status;
  const CudaStream down = moves_->mover().down_stream();
  if (Status status = moves_->packer().WaitFor(stream, down); !status.ok()) return status;
  return CopyEach(down, "copying parameters from the GPU",
                  [&](const kernels::CudaDriver& driver, const GpuBucket& bucket) {
                    return driver.MemcpyDtoHAsync(OnHost(bucket), OnGpu(bucket), bucket.parameters_bytes(), down);
                  });
}

// Waits until `copy` of the parameters of each bucket that does not stream, which it gives to the stream, is done.
template <typename Copy>
Status GpuPlane::CopyEach(CudaStream stream, const char* what, Copy copy) {
  const kernels::CudaDriver& driver = device_->driver();
  for (const GpuBucket& bucket : buckets_) {
    if (bucket.streams()) continue;
    if (kernels::CudaStatus status = driver.Status(copy(driver, bucket), what); !status.ok()) return FromCuda(status);
  }
  return FromCuda(driver.Status(driver.StreamSynchronize(stream), what));
}

}  // namespace superoffload::client
