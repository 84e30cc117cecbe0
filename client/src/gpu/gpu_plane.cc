#include "client/src/gpu/gpu_plane.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "client/src/file_descriptor.h"

namespace superoffload::client {
namespace {

using kernels::CudaPointer;
using kernels::CudaStatus;
using kernels::CudaStream;
using kernels::CurrentDevice;
using kernels::PackedTensor;
using kernels::Sharing;

uint32_t SlotCount(const superoffload_gpu_options& options) {
  constexpr uint32_t kDefault = 4;
  return options.slots == 0 ? kDefault : options.slots;
}

// Enough for a steady state, short enough for an attach.
constexpr int kProbes = 8;
constexpr int kLoadKernels = 64;

template <typename T>
T* DeviceData(CudaPointer pointer) {
  return reinterpret_cast<T*>(pointer);
}

void CopyText(const std::string& text, std::span<char> field) {
  const size_t length = std::min(text.size(), field.size() - 1);
  std::memcpy(field.data(), text.data(), length);
  field[length] = '\0';
}

}  // namespace

Status GpuPlane::Create(const superoffload_gpu_options& options, Attached attached,
                        std::shared_ptr<kernels::SharedGpuMemory> memory, std::unique_ptr<GpuPlane>* plane) {
  if (options.mover > SUPEROFFLOAD_MOVER_DIRECT || options.sharing > SUPEROFFLOAD_SHARING_DESCRIPTOR ||
      options.slots > SUPEROFFLOAD_MAX_DEVICE_SLOTS || options.next_slot > 1 || options.bucket_count == 0 ||
      options.buckets == nullptr || options.group_count == 0 || options.groups == nullptr ||
      options.max_bucket_tensors == 0) {
    return Error(Code::kInvalidArgument,
                 "ill-formed superoffload_gpu_options; take buckets and groups from the attach response, at most ",
                 SUPEROFFLOAD_MAX_DEVICE_SLOTS, " slots and at least one tensor per bucket");
  }
  std::unique_ptr<GpuPlane> created(new GpuPlane(options, std::move(attached), std::move(memory)));
  if (Status status = created->Open(options); !status.ok()) return status;
  *plane = std::move(created);
  return {};
}

GpuPlane::GpuPlane(const superoffload_gpu_options& options, Attached attached,
                   std::shared_ptr<kernels::SharedGpuMemory> memory)
    : attached_(std::move(attached)),
      wanted_mover_(options.mover),
      wanted_sharing_(static_cast<Sharing>(options.sharing)),
      next_slot_(options.next_slot),
      memory_(std::move(memory)),
      slots_(SlotCount(options)),
      first_resident_(options.bucket_count),
      state_offsets_{options.state_offsets[0], options.state_offsets[1], options.state_offsets[2]} {
  constexpr uint32_t kAdam = 2;  // Algorithm of optimizer.proto
  for (uint32_t i = 0; i < options.group_count; ++i) {
    const superoffload_group& group = options.groups[i];
    groups_.push_back(
        {.lr = group.lr,
         .beta1 = group.beta1,
         .beta2 = group.beta2,
         .eps = group.eps,
         .weight_decay = group.weight_decay,
         .decay_form = options.algorithm == kAdam ? kernels::WeightDecay::kL2 : kernels::WeightDecay::kDecoupled});
  }
}

Status GpuPlane::Open(const superoffload_gpu_options& options) {
  for (uint32_t i = 0; i < options.bucket_count; ++i) {
    const superoffload_bucket& given = options.buckets[i];
    GpuBucket bucket{.elements = given.elements,
                     .parameters_offset = given.parameters_offset,
                     .gradient_offsets = {given.gradient_offsets[0], given.gradient_offsets[1]},
                     .state_offset = given.state_offset,
                     .group = given.group};
    const auto inside = [](uint64_t offset, uint64_t bytes, size_t size) {
      return offset <= size && bytes <= size - offset;
    };
    if (!ToDType(given.dtype, &bucket.dtype) || !ToDType(given.gradient_dtype, &bucket.gradient_dtype) ||
        given.elements > attached_.parameters.size() || given.group >= options.group_count ||
        !inside(given.parameters_offset, bucket.parameters_bytes(), attached_.parameters.size()) ||
        !inside(given.gradient_offsets[0], bucket.gradient_bytes(), attached_.gradients.size()) ||
        !inside(given.gradient_offsets[1], bucket.gradient_bytes(), attached_.gradients.size())) {
      return Error(Code::kInvalidArgument, "bucket ", i,
                   " does not fit the attachment; take the buckets from the attach response");
    }
    max_chunks_ = std::max(max_chunks_, bucket.chunks());
    buckets_.push_back(bucket);
  }
  if (Status status = FromCuda(kernels::GpuDevice::Open(options.ordinal, &device_)); !status.ok()) return status;
  const CurrentDevice current(*device_);
  if (Status status = FromCuda(kernels_.Load(device_->driver())); !status.ok()) return status;
  const uint32_t slots = SlotCount(options);
  layout_ = PlanGpu(buckets_, attached_.parameters.size(), slots, options.max_bucket_tensors);
  for (kernels::OwnedStream* stream : {&pack_, &down_, &up_}) {
    if (Status status = FromCuda(kernels::MakeStream(*device_, stream)); !status.ok()) return status;
  }
  landed_.resize(buckets_.size());
  for (kernels::OwnedEvent* event : {&ready_, &packed_}) {
    if (Status status = FromCuda(kernels::MakeEvent(*device_, event)); !status.ok()) return status;
  }
  for (kernels::OwnedEvent& event : landed_) {
    if (Status status = FromCuda(kernels::MakeEvent(*device_, &event)); !status.ok()) return status;
  }
  CopyText(device_->name(), report_.gpu);
  if (Status status = Share(); !status.ok()) return status;
  report_.gpu_bytes = memory_->bytes();
  report_.coherent = device_->Has(kernels::kCudaHostPageTables) ? 1 : 0;

  const uint64_t tables_bytes = slots * layout_.table_tensors * sizeof(PackedTensor);
  if (Status status = FromCuda(
          kernels::PinnedMemory::Allocate(device_, tables_bytes + slots * max_chunks_ * sizeof(double), &staging_));
      !status.ok()) {
    return status;
  }
  tables_ = reinterpret_cast<PackedTensor*>(staging_.data());
  sums_ = reinterpret_cast<double*>(staging_.data() + tables_bytes);
  Register(attached_.gradients);
  Register(attached_.parameters);
  queue_.emplace(device_);
  return {};
}

// Allocates the memory, in the way in which the daemon can map it; when it cannot, this process copies alone.
Status GpuPlane::Share() {
  const bool explicit_daemon = wanted_mover_ == SUPEROFFLOAD_MOVER_DAEMON;
  const bool no_daemon = wanted_mover_ == SUPEROFFLOAD_MOVER_TRAINER || wanted_mover_ == SUPEROFFLOAD_MOVER_DIRECT;
  const bool taken_over = memory_ != nullptr;
  std::vector<Sharing> ways;
  if (memory_ != nullptr) {
    if (memory_->bytes() < layout_.bytes) {
      return Error(Code::kInvalidArgument, "the previous attachment's GPU memory is of another optimizer");
    }
    if (memory_->sharing() != Sharing::kNone && !no_daemon) ways = {memory_->sharing()};
  } else if (wanted_sharing_ != Sharing::kNone) {
    ways = {wanted_sharing_};
  } else if (!no_daemon) {
    ways = {Sharing::kDescriptor, Sharing::kLegacy};
    if (!device_->Has(kernels::kCudaVmmDescriptorSupported)) ways = {Sharing::kLegacy};
  }
  Status last;
  for (const Sharing way : ways) {
    last = taken_over ? Status{} : Allocate(way);
    if (last.code == Code::kResourceExhausted) return last;  // it would be the same the other way
    if (last.ok()) {
      superoffload_device_request request{};
      std::memcpy(request.device_uuid, device_->uuid().bytes, sizeof(request.device_uuid));
      request.sharing = static_cast<uint32_t>(way);
      request.slots = static_cast<uint32_t>(layout_.slots);
      request.slots_offset = layout_.slots_offset;
      request.slot_bytes = layout_.slot_bytes;
      request.sums_offset = layout_.sums_offset;
      request.sums_bytes = layout_.sums_bytes;
      kernels::SharedGpuMemoryTicket ticket;
      int descriptor = -1;
      last = FromCuda(memory_->Export(&ticket, &descriptor));
      const FileDescriptor owned(descriptor);
      if (last.ok()) {
        std::memcpy(request.memory_handle, ticket.handle.bytes, sizeof(request.memory_handle));
        request.memory_offset = ticket.offset;
        request.memory_bytes = ticket.bytes;
        last = attached_.share(&request, descriptor);
      }
    }
    if (last.ok()) {
      report_.sharing = static_cast<uint32_t>(way);
      return {};
    }
    if (attached_.daemon_gone()) {
      return Error(Code::kUnavailable, "the daemon is gone; start it again and attach anew");
    }
    Note("the daemon cannot copy: " + last.message);
  }
  if (explicit_daemon || (wanted_sharing_ != Sharing::kNone && !no_daemon)) {
    return {Code::kFailedPrecondition, last.message + "; or let the trainer copy (mover \"auto\" or \"trainer\")"};
  }
  return taken_over ? Status{} : Allocate(Sharing::kNone);
}

Status GpuPlane::Allocate(Sharing sharing) {
  memory_.reset();
  std::unique_ptr<kernels::SharedGpuMemory> memory;
  Status status = FromCuda(kernels::SharedGpuMemory::Allocate(device_, layout_.bytes, sharing, &memory));
  memory_ = std::move(memory);
  return status;
}

void GpuPlane::Register(std::span<std::byte> host) {
  const kernels::CudaDriver& driver = device_->driver();
  const CudaStatus status = driver.Status(
      driver.MemHostRegister(host.data(), host.size(),
                             kernels::kCudaHostRegisterPortable | kernels::kCudaHostRegisterDeviceMap),
      "registering " + std::to_string(host.size()) + " bytes of host memory (raise RLIMIT_MEMLOCK, LimitMEMLOCK=)");
  if (status.ok()) {
    registered_.push_back(host.data());
  } else {
    // Only a GPU that uses the host's page tables copies pageable memory without waiting and stores into it without
    // faults. That it can reach such memory at all (HMM) is not enough.
    if (report_.coherent == 0) report_.staged = 1;
    Note(status.message);
  }
}

void GpuPlane::Note(const std::string& text) {
  const std::string notes = report_.notes;
  CopyText(notes.empty() ? text : notes + "; " + text, report_.notes);
}

GpuPlane::~GpuPlane() {
  if (device_ == nullptr) return;
  const CurrentDevice current(*device_);
  queue_.reset();
  const kernels::CudaDriver& driver = device_->driver();
  for (const kernels::OwnedStream* stream : {&pack_, &down_, &up_}) {
    if (stream->get() != nullptr) driver.StreamSynchronize(stream->get());
  }
  kernels_.Unload();
  for (std::byte* host : registered_) driver.MemHostUnregister(host);
  resident_ = {};
  memory_.reset();
  ready_ = {};
  packed_ = {};
  landed_.clear();
  pack_ = {};
  down_ = {};
  up_ = {};
}

Status GpuPlane::ChooseMover() {
  if (wanted_mover_ != SUPEROFFLOAD_MOVER_AUTO) {
    if (wanted_mover_ == SUPEROFFLOAD_MOVER_DIRECT && report_.staged != 0) {
      return Error(Code::kFailedPrecondition, "the GPU cannot store into the daemon's memory: ", report_.notes);
    }
    mover_ = report_.mover = wanted_mover_;
    return {};
  }
  // One slot is copied while another one is worked on.
  std::vector<uint32_t> movers{SUPEROFFLOAD_MOVER_TRAINER};
  if (report_.sharing != 0) movers.push_back(SUPEROFFLOAD_MOVER_DAEMON);
  if (report_.staged == 0) movers.push_back(SUPEROFFLOAD_MOVER_DIRECT);
  uint32_t best = movers.front();
  if (movers.size() > 1 && layout_.slots > 1) {
    for (const uint32_t mover : movers) {
      if (Status status = Measure(mover, &report_.seconds[mover]); !status.ok()) return status;
      if (report_.seconds[mover] < report_.seconds[best]) best = mover;
    }
  }
  mover_ = report_.mover = best;
  return {};
}

// Rounds of copies beside kernels that keep the GPU busy, until both are over.
Status GpuPlane::Measure(uint32_t mover, double* seconds) {
  const CurrentDevice current(*device_);
  const auto largest = std::max_element(buckets_.begin(), buckets_.end(), [](const GpuBucket& a, const GpuBucket& b) {
    return a.gradient_bytes() < b.gradient_bytes();
  });
  const auto index = static_cast<uint32_t>(largest - buckets_.begin());
  kernels::OwnedStream load;
  if (Status status = FromCuda(kernels::MakeStream(*device_, &load)); !status.ok()) return status;
  const CudaPointer busy = memory_->data() + layout_.slot_offset(1);
  const PackedTensor whole{DeviceData<const void>(busy), 0, largest->elements};
  tables_[layout_.table_tensors] = whole;
  const CudaPointer table = memory_->data() + layout_.table_of(1);
  if (Status status =
          Check(device_->driver().MemcpyHtoDAsync(table, &tables_[layout_.table_tensors], sizeof(whole), load.get()),
                "copying a table to the GPU");
      !status.ok()) {
    return status;
  }
  const kernels::PackArguments work{.tensors = DeviceData<const PackedTensor>(table),
                                    .tensor_count = 1,
                                    .dtype = largest->gradient_dtype,
                                    .slot = {DeviceData<void>(busy), largest->gradient_dtype},
                                    .elements = largest->elements,
                                    .chunk_sums = DeviceData<double>(memory_->data() + layout_.sums_of(1))};
  // The first round is for warming up.
  std::chrono::steady_clock::time_point begin;
  for (int round = -1; round < kProbes; ++round) {
    if (round == 0) {
      begin = std::chrono::steady_clock::now();
      for (int i = 0; i < kLoadKernels; ++i) {
        if (Status status = FromCuda(kernels_.Pack(work, load.get())); !status.ok()) return status;
      }
    }
    if (Status status = ProbeRound(mover, index); !status.ok()) return status;
  }
  if (Status status = Check(device_->driver().StreamSynchronize(load.get()), "measuring"); !status.ok()) return status;
  *seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return {};
}

// One gradient out, one bucket of parameters back, of no consequence.
Status GpuPlane::ProbeRound(uint32_t mover, uint32_t index) {
  constexpr uint32_t kSlot = 0;
  if (mover == SUPEROFFLOAD_MOVER_DAEMON) {
    {
      std::lock_guard lock(probe_mu_);
      ++probes_under_way_;
    }
    superoffload_ring_entry entry{};
    entry.opcode = SUPEROFFLOAD_SUBMIT_PROBE;
    entry.index = index;
    entry.payload.gradient.slot = kSlot;
    if (Status status = attached_.submit(entry); !status.ok()) return status;
    std::unique_lock lock(probe_mu_);
    probed_.wait(lock, [this] { return probes_under_way_ == 0 || !slots_.failure().ok(); });
    return slots_.failure();
  }
  if (mover == SUPEROFFLOAD_MOVER_DIRECT) {
    const superoffload_tensor whole{memory_->data() + layout_.slot_offset(kSlot), 0, buckets_[index].elements};
    mover_ = mover;
    if (Status status = Pack(index, kSlot, next_slot_, &whole, 1, buckets_[index].gradient_dtype); !status.ok()) {
      return status;
    }
    if (Status status = Check(device_->driver().StreamSynchronize(pack_.get()), "measuring"); !status.ok()) {
      return status;
    }
  } else {
    if (Status status = CopyDown(index, kSlot, next_slot_); !status.ok()) return status;
    if (Status status = Check(device_->driver().StreamSynchronize(down_.get()), "measuring"); !status.ok()) {
      return status;
    }
  }
  if (Status status = CopyUp(index); !status.ok()) return status;
  return Check(device_->driver().StreamSynchronize(up_.get()), "measuring");
}

Status GpuPlane::Pull() {
  const CurrentDevice current(*device_);
  const std::span<std::byte> host = attached_.parameters;
  if (Status status = Check(device_->driver().MemcpyHtoDAsync(memory_->data(), host.data(), host.size(), up_.get()),
                            "copying parameters to the GPU");
      !status.ok()) {
    return status;
  }
  return Check(device_->driver().StreamSynchronize(up_.get()), "copying parameters to the GPU");
}

Status GpuPlane::Push(CudaStream stream) {
  const CurrentDevice current(*device_);
  const kernels::CudaDriver& driver = device_->driver();
  const std::span<std::byte> host = attached_.parameters;
  if (Status status = WaitFor(stream, down_.get()); !status.ok()) return status;
  if (Status status = Check(driver.MemcpyDtoHAsync(host.data(), memory_->data(), host.size(), down_.get()),
                            "copying parameters from the GPU");
      !status.ok()) {
    return status;
  }
  return Check(driver.StreamSynchronize(down_.get()), "copying parameters from the GPU");
}

Status GpuPlane::PackAfter(CudaStream stream) {
  const CurrentDevice current(*device_);
  if (Status status = WaitFor(stream, pack_.get()); !status.ok()) return status;
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
  return {};
}

Status GpuPlane::WaitFor(CudaStream stream, CudaStream side_stream) {
  const kernels::CudaDriver& driver = device_->driver();
  if (Status status = FromCuda(kernels::CheckNotCapturing(*device_, stream)); !status.ok()) return status;
  if (Status status = Check(driver.EventRecord(ready_.get(), stream), "recording an event"); !status.ok()) {
    return status;
  }
  return Check(driver.StreamWaitEvent(side_stream, ready_.get(), 0), "waiting for the trainer's stream");
}

Status GpuPlane::HandOver(superoffload_ring_entry entry, uint32_t gradient_slot, const superoffload_tensor* tensors,
                          uint32_t count, kernels::DType dtype, CudaStream stream) {
  const GpuBucket& bucket = buckets_[entry.index];
  if (count > layout_.table_tensors) {
    return Error(Code::kInvalidArgument, count, " tensors for bucket ", entry.index, ", but max_bucket_tensors is ",
                 layout_.table_tensors);
  }
  uint64_t end = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (tensors[i].first < end || tensors[i].elements > bucket.elements - std::min(tensors[i].first, bucket.elements)) {
      return Error(Code::kInvalidArgument, "tensor ", i, " of bucket ", entry.index,
                   " overlaps the one before it or the end of the bucket; sort them and keep them inside");
    }
    end = tensors[i].first + tensors[i].elements;
  }
  const CurrentDevice current(*device_);
  if (Status status = FromCuda(kernels::CheckNotCapturing(*device_, stream)); !status.ok()) return status;
  uint32_t slot = 0;
  if (Status status = slots_.Take(&slot); !status.ok()) return status;
  const kernels::CudaDriver& driver = device_->driver();
  Status status = PackAfter(stream);
  // Its last parameters must have landed: handing over has the next ones written where they come from.
  if (status.ok()) {
    status = Check(driver.StreamWaitEvent(pack_.get(), landed_[entry.index].get(), 0), "waiting for parameters");
  }
  if (status.ok()) status = Pack(entry.index, slot, gradient_slot, tensors, count, dtype);
  if (status.ok() && resident(entry.index)) {
    status = resident_.KeepGradient(entry.index, memory_->data() + layout_.slot_offset(slot), pack_.get());
  }
  if (mover_ == SUPEROFFLOAD_MOVER_DAEMON) {
    entry.flags = SUPEROFFLOAD_FLAG_DEVICE_SLOT;
    if (resident(entry.index)) entry.flags |= SUPEROFFLOAD_FLAG_NO_COPY_BACK;
    entry.payload.gradient.slot = slot;
    const auto submit = [this, entry](const CudaStatus& done) {
      if (Status submitted = done.ok() ? attached_.submit(entry) : FromCuda(done); !submitted.ok()) {
        slots_.Fail(submitted);
      }
    };
    if (status.ok()) status = FromCuda(queue_->After(pack_.get(), submit));
  } else {
    entry.flags = SUPEROFFLOAD_FLAG_SUM_KNOWN | SUPEROFFLOAD_FLAG_NO_COPY_BACK;
    const auto on_down = [this, entry, slot](const CudaStatus& done) { OnDown(entry, slot, done); };
    if (status.ok()) status = Check(driver.EventRecord(packed_.get(), pack_.get()), "recording an event");
    if (status.ok()) status = Check(driver.StreamWaitEvent(down_.get(), packed_.get(), 0), "waiting for a slot");
    if (status.ok() && report_.staged != 0) {
      // Such a copy waits in the driver: the queue's thread may, the trainer's not.
      queue_->Then([this, entry, slot, gradient_slot, on_down](const CudaStatus&) {
        Status copied = CopyDown(entry.index, slot, gradient_slot);
        if (copied.ok()) copied = Check(device_->driver().StreamSynchronize(down_.get()), "copying a gradient");
        on_down({static_cast<int>(copied.code), copied.message});
      });
    } else if (status.ok()) {
      status = CopyDown(entry.index, slot, gradient_slot);
      if (status.ok()) status = FromCuda(queue_->After(down_.get(), on_down));
    }
  }
  if (!status.ok()) slots_.Fail(status);
  return status;
}

Status GpuPlane::Pack(uint32_t index, uint32_t slot, uint32_t gradient_slot, const superoffload_tensor* tensors,
                      uint32_t count, kernels::DType dtype) {
  const GpuBucket& bucket = buckets_[index];
  // The host's table of a slot is read by the copy below, which is over long before the slot is free again.
  PackedTensor* const table = &tables_[slot * layout_.table_tensors];
  for (uint32_t i = 0; i < count; ++i) {
    table[i] = {DeviceData<const void>(tensors[i].data), tensors[i].first, tensors[i].elements};
  }
  const CudaPointer gpu_table = memory_->data() + layout_.table_of(slot);
  if (count > 0) {
    if (Status status = Check(device_->driver().MemcpyHtoDAsync(gpu_table, table, count * sizeof(*table), pack_.get()),
                              "copying a table to the GPU");
        !status.ok()) {
      return status;
    }
  }
  const bool direct = mover_ == SUPEROFFLOAD_MOVER_DIRECT && !resident(index);
  void* const to = direct ? attached_.gradients.data() + bucket.gradient_offsets[gradient_slot]
                          : DeviceData<void>(memory_->data() + layout_.slot_offset(slot));
  return FromCuda(kernels_.Pack({.tensors = DeviceData<const PackedTensor>(gpu_table),
                                 .tensor_count = count,
                                 .dtype = dtype,
                                 .slot = {to, bucket.gradient_dtype},
                                 .elements = bucket.elements,
                                 .chunk_sums = DeviceData<double>(memory_->data() + layout_.sums_of(slot))},
                                pack_.get()));
}

Status GpuPlane::CopyDown(uint32_t index, uint32_t slot, uint32_t gradient_slot) {
  const GpuBucket& bucket = buckets_[index];
  const kernels::CudaDriver& driver = device_->driver();
  if (mover_ != SUPEROFFLOAD_MOVER_DIRECT || resident(index)) {
    if (Status status = Check(
            driver.MemcpyDtoHAsync(attached_.gradients.data() + bucket.gradient_offsets[gradient_slot],
                                   memory_->data() + layout_.slot_offset(slot), bucket.gradient_bytes(), down_.get()),
            "copying a gradient from the GPU");
        !status.ok()) {
      return status;
    }
  }
  return Check(driver.MemcpyDtoHAsync(&sums_[slot * max_chunks_], memory_->data() + layout_.sums_of(slot),
                                      bucket.chunks() * sizeof(double), down_.get()),
               "copying sums from the GPU");
}

void GpuPlane::OnDown(superoffload_ring_entry entry, uint32_t slot, const CudaStatus& status) {
  Status submitted = FromCuda(status);
  if (submitted.ok()) {
    double sum = 0;
    for (uint64_t chunk = 0; chunk < buckets_[entry.index].chunks(); ++chunk) sum += sums_[slot * max_chunks_ + chunk];
    entry.payload.gradient.sum_of_squares = sum;
    slots_.Free(slot);
    submitted = attached_.submit(entry);
  }
  if (!submitted.ok()) slots_.Fail(submitted);
}

Status GpuPlane::Submit(const superoffload_ring_entry& entry) {
  if (entry.opcode == SUPEROFFLOAD_SUBMIT_GROUP && entry.index < groups_.size()) {
    const double* f64 = entry.payload.f64;
    groups_[entry.index] = {f64[0], f64[1], f64[2], f64[3], f64[4], groups_[entry.index].decay_form};
  } else if (entry.opcode == SUPEROFFLOAD_SUBMIT_END_STEP) {
    return SubmitEnd(entry);
  }
  if (entry.opcode == SUPEROFFLOAD_SUBMIT_ABANDON_STEP) streams_.clear();
  queue_->Then([this, entry](const CudaStatus&) {
    if (Status status = attached_.submit(entry); !status.ok()) slots_.Fail(status);
  });
  return slots_.failure();
}

// Once everything that may still read the parameters has run.
Status GpuPlane::SubmitEnd(const superoffload_ring_entry& entry) {
  const CurrentDevice current(*device_);
  for (const CudaStream stream : streams_) {
    if (Status status = WaitFor(stream, pack_.get()); !status.ok()) return status;
  }
  streams_.clear();
  {
    std::lock_guard lock(ended_mu_);
    ended_groups_ = groups_;
    ended_scale_ = entry.payload.f64[0];
  }
  const auto submit = [this, entry](const CudaStatus& done) {
    if (Status status = done.ok() ? attached_.submit(entry) : FromCuda(done); !status.ok()) slots_.Fail(status);
  };
  if (Status status = FromCuda(queue_->After(pack_.get(), submit)); !status.ok()) return status;
  return slots_.failure();
}

Status GpuPlane::OnCompletion(const superoffload_ring_entry& entry) {
  const bool commits = entry.index == SUPEROFFLOAD_VERDICT_COMMIT || entry.index == SUPEROFFLOAD_VERDICT_CLIP;
  switch (entry.opcode) {
    case SUPEROFFLOAD_COMPLETE_PARAMETERS_READY:
      if (entry.index >= buckets_.size()) return {};
      uploads_.OnPublished(entry.step, entry.index, (entry.flags & SUPEROFFLOAD_FLAG_SPECULATIVE) != 0);
      return CopyUpWhatIsDue();
    case SUPEROFFLOAD_COMPLETE_GRADIENT_TAKEN:
      if (entry.step != 0 && entry.index < layout_.slots) slots_.Free(entry.index);
      return {};
    case SUPEROFFLOAD_COMPLETE_LANDED:
      if (entry.step == 0) {
        std::lock_guard lock(probe_mu_);
        --probes_under_way_;
        probed_.notify_all();
      }
      return {};
    case SUPEROFFLOAD_COMPLETE_VERDICT:
      uploads_.OnVerdict(entry.step, commits, (entry.flags & SUPEROFFLOAD_FLAG_SPECULATION_STANDS) != 0);
      if (commits) {
        if (Status status = UpdateResident(entry); !status.ok()) return status;
      }
      return CopyUpWhatIsDue();
    default:
      return {};
  }
}

void GpuPlane::Fail(const Status& status) {
  slots_.Fail(status);
  std::lock_guard lock(probe_mu_);
  probed_.notify_all();
}

Status GpuPlane::CopyUpWhatIsDue() {
  while (const std::optional<uint32_t> index = uploads_.Take()) {
    if (mover_ == SUPEROFFLOAD_MOVER_DAEMON || resident(*index)) continue;
    if (Status status = CopyUp(*index); !status.ok()) return status;
  }
  return {};
}

Status GpuPlane::CopyUp(uint32_t index) {
  const GpuBucket& bucket = buckets_[index];
  const kernels::CudaDriver& driver = device_->driver();
  const CurrentDevice current(*device_);
  if (Status status = Check(driver.MemcpyHtoDAsync(memory_->data() + bucket.parameters_offset,
                                                   attached_.parameters.data() + bucket.parameters_offset,
                                                   bucket.parameters_bytes(), up_.get()),
                            "copying parameters to the GPU");
      !status.ok()) {
    return status;
  }
  return Check(driver.EventRecord(landed_[index].get(), up_.get()), "recording an event");
}

Status GpuPlane::CheckStream(CudaStream stream) const {
  const CurrentDevice current(*device_);
  return FromCuda(kernels::CheckNotCapturing(*device_, stream));
}

Status GpuPlane::StreamWaits(uint32_t bucket, CudaStream stream) {
  if (WaitsForLanding(bucket)) return {};  // whoever asks knows already that it has landed
  const CurrentDevice current(*device_);
  return Check(device_->driver().StreamWaitEvent(stream, landed_[bucket].get(), 0), "waiting for parameters");
}

Status GpuPlane::SetResident(uint32_t count, const std::byte* state) {
  const auto total = static_cast<uint32_t>(buckets_.size());
  if (count > total) {
    return Error(Code::kInvalidArgument, count, " resident buckets, but there are ", total);
  }
  const CurrentDevice current(*device_);
  for (; first_resident_ < total - count; ++first_resident_) resident_.Remove(first_resident_);
  while (first_resident_ > total - count) {
    const uint32_t index = first_resident_ - 1;
    std::array<const float*, 3> arrays{};
    for (size_t i = 0; i < arrays.size(); ++i) {
      arrays[i] = reinterpret_cast<const float*>(state + state_offsets_[i]) + buckets_[index].state_offset;
    }
    if (Status status = resident_.Add(device_, index, buckets_[index], arrays, up_.get()); !status.ok()) return status;
    first_resident_ = index;
  }
  return {};
}

Status GpuPlane::UpdateResident(const superoffload_ring_entry& verdict) {
  if (resident_.empty()) return {};
  const superoffload_verdict_payload& payload = verdict.payload.verdict;
  std::vector<kernels::AdamStep> steps;
  {
    std::lock_guard lock(ended_mu_);
    for (const kernels::AdamHyperparameters& group : ended_groups_) {
      steps.push_back(kernels::MakeAdamStep(group, payload.committed_steps, ended_scale_ * payload.clip_coefficient));
    }
  }
  const CurrentDevice current(*device_);
  for (auto index = static_cast<uint32_t>(buckets_.size()); index-- > first_resident_;) {
    const GpuBucket& bucket = buckets_[index];
    // Its gradient is complete: the daemon would not know the verdict otherwise.
    if (Status status = resident_.Update(index, kernels_, steps[bucket.group],
                                         memory_->data() + bucket.parameters_offset, up_.get());
        !status.ok()) {
      return status;
    }
    if (Status status = Check(device_->driver().EventRecord(landed_[index].get(), up_.get()), "recording an event");
        !status.ok()) {
      return status;
    }
  }
  return {};
}

}  // namespace superoffload::client
