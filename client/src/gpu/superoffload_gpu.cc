// superoffload_gpu.h: opaque handles in, status codes out.
#include "superoffload/superoffload_gpu.h"

#include "client/src/c_border.h"
#include "client/src/gpu/collective.h"
#include "client/src/gpu/frozen_units.h"
#include "client/src/gpu/gpu_memory.h"
#include "client/src/gpu/gpu_plane.h"
#include "client/src/gpu/gpu_status.h"
#include "client/src/gpu/measure_cast.h"
#include "client/src/gpu/stream_layout.h"

struct superoffload_frozen_units {
  std::unique_ptr<superoffload::client::FrozenUnits> impl;
};

struct superoffload_collective {
  std::unique_ptr<superoffload::client::Collective> impl;
};

// Shared with attachments.
struct superoffload_gpu_memory {
  std::shared_ptr<superoffload::kernels::SharedGpuMemory> impl;
};

namespace {

using superoffload::client::Code;
using superoffload::client::Collective;
using superoffload::client::Error;
using superoffload::client::FrozenUnits;
using superoffload::client::GpuPlane;
using superoffload::client::Guarded;
using superoffload::client::Status;
using superoffload::client::StepPlane;
using superoffload::client::ToDType;
using superoffload::client::Trainer;
using superoffload::client::WithHandle;
using superoffload::client::WithTrainer;
using superoffload::kernels::CudaStream;
using superoffload::kernels::DType;

CudaStream Stream(uint64_t stream) { return reinterpret_cast<CudaStream>(stream); }

template <typename Call>
int WithGpu(superoffload_attachment* attachment, Call call) {
  return WithHandle(attachment, [&](StepPlane& impl) -> Status {
    GpuPlane* const gpu = impl.plane().gpu();
    return gpu == nullptr || gpu->ended() ? superoffload::client::NoGpu() : call(impl, *gpu);
  });
}

}  // namespace

int superoffload_gpu_attach(int64_t trainer, superoffload_attachment* attachment,
                            const superoffload_gpu_options* options, superoffload_gpu_report* report) {
  return WithTrainer(trainer, [&](Trainer& of) -> Status {
    if (attachment == nullptr || options == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    StepPlane& impl = *attachment->impl;
    if (impl.plane().gpu() != nullptr) {
      return Error(Code::kFailedPrecondition, "the attachment has a GPU already; attach anew");
    }
    if (Status status = impl.WaitIdle(); !status.ok()) return status;
    GpuPlane* const previous = options->previous == nullptr ? nullptr : options->previous->impl->plane().gpu();
    std::unique_ptr<GpuPlane> plane;
    std::shared_ptr<superoffload::kernels::SharedGpuMemory> memory;
    if (options->memory != nullptr) memory = options->memory->impl;
    if (Status status = GpuPlane::Create(of.layout(), *options, &impl, previous, std::move(memory), &plane);
        !status.ok()) {
      return status;
    }
    if (report != nullptr) *report = plane->report();
    impl.UsePlane(std::move(plane));
    return {};
  });
}

int superoffload_gpu_reserve(int64_t trainer, const superoffload_attachment* attachment,
                             const superoffload_gpu_options* options, superoffload_gpu_memory** memory,
                             uint64_t* parameters) {
  return WithTrainer(trainer, [&](Trainer& of) -> Status {
    if (attachment == nullptr || options == nullptr || memory == nullptr || parameters == nullptr) {
      return Error(Code::kInvalidArgument, "NULL argument");
    }
    auto created = std::make_unique<superoffload_gpu_memory>();
    if (Status status = GpuPlane::Reserve(of.layout(), *options, *attachment->impl, &created->impl); !status.ok()) {
      return status;
    }
    *parameters = created->impl->data();
    *memory = created.release();
    return {};
  });
}

int superoffload_gpu_back(superoffload_gpu_memory* memory, uint64_t bytes, uint64_t* piece_bytes,
                          uint64_t* backed_bytes) {
  return Guarded([&]() -> Status {
    if (memory == nullptr || piece_bytes == nullptr || backed_bytes == nullptr) {
      return Error(Code::kInvalidArgument, "NULL argument");
    }
    superoffload::kernels::SharedGpuMemory& impl = *memory->impl;
    if (bytes > impl.bytes()) {
      return Error(Code::kInvalidArgument, bytes, " bytes, but ", impl.bytes(), " are reserved");
    }
    const superoffload::kernels::CurrentDevice current(impl.device());
    Status status = superoffload::client::FromCuda(impl.Back(bytes));
    *piece_bytes = impl.piece_bytes();
    *backed_bytes = impl.backed_bytes();
    return status;
  });
}

int superoffload_gpu_back_units(superoffload_gpu_memory* memory, uint32_t slots) {
  return Guarded([&]() -> Status {
    if (memory == nullptr || slots == 0) return Error(Code::kInvalidArgument, "NULL argument, or no slots");
    const superoffload::kernels::CurrentDevice current(memory->impl->device());
    return superoffload::client::BackUnits(slots, memory->impl.get());
  });
}

int superoffload_gpu_give_back(superoffload_gpu_memory* memory, uint64_t index, uint64_t stream) {
  return Guarded([&]() -> Status {
    if (memory == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    const superoffload::kernels::CurrentDevice current(memory->impl->device());
    return superoffload::client::FromCuda(memory->impl->GiveBack(index, Stream(stream)));
  });
}

void superoffload_gpu_release(superoffload_gpu_memory* memory) { delete memory; }

int superoffload_gpu_measure_cast(int32_t ordinal, uint32_t dtype, uint64_t elements, double* fused_seconds,
                                  double* gpu_fp32_seconds) {
  return Guarded([&]() -> Status {
    DType type{};
    if (fused_seconds == nullptr || gpu_fp32_seconds == nullptr || !ToDType(dtype, &type)) {
      return Error(Code::kInvalidArgument, "NULL argument, or unknown dtype ", dtype);
    }
    superoffload::client::CastSeconds seconds;
    Status status = superoffload::client::MeasureCast(ordinal, type, elements, &seconds);
    *fused_seconds = seconds.fused;
    *gpu_fp32_seconds = seconds.gpu_fp32;
    return status;
  });
}

int superoffload_gpu_lay_out(const superoffload_bucket* buckets, uint32_t bucket_count, uint32_t stream_slots,
                             uint64_t* gpu_offsets, uint64_t* bytes) {
  return Guarded([&]() -> Status {
    if (buckets == nullptr || gpu_offsets == nullptr || bytes == nullptr) {
      return Error(Code::kInvalidArgument, "NULL argument");
    }
    return superoffload::client::LayOutStreams({buckets, bucket_count}, stream_slots, {gpu_offsets, bucket_count},
                                               bytes);
  });
}

int superoffload_gpu_read_unit(superoffload_attachment* attachment, uint32_t unit, uint64_t stream) {
  return WithGpu(attachment, [&](StepPlane&, GpuPlane& gpu) { return gpu.ReadUnit(unit, Stream(stream)); });
}

int superoffload_gpu_has_unit(superoffload_attachment* attachment, uint32_t unit, uint32_t* has) {
  return WithGpu(attachment, [&](StepPlane&, GpuPlane& gpu) -> Status {
    if (has == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    bool held = false, stays = false;
    Status status = gpu.HasUnit(unit, &held, &stays);
    *has = stays ? 2 : held ? 1 : 0;
    return status;
  });
}

int superoffload_gpu_keep_units(superoffload_attachment* attachment, const uint32_t* units, uint32_t unit_count) {
  return WithGpu(attachment, [&](StepPlane& impl, GpuPlane& gpu) -> Status {
    if (units == nullptr && unit_count > 0) return Error(Code::kInvalidArgument, "NULL argument");
    if (Status status = impl.WaitIdle(); !status.ok()) return status;
    return gpu.KeepUnits({units, unit_count});
  });
}

int superoffload_gpu_suspend(superoffload_attachment* attachment) {
  return WithGpu(attachment, [](StepPlane& impl, GpuPlane& gpu) -> Status {
    if (Status status = impl.WaitIdle(); !status.ok()) return status;
    return gpu.Suspend();
  });
}

int superoffload_gpu_resume(superoffload_attachment* attachment) {
  return WithGpu(attachment, [](StepPlane&, GpuPlane& gpu) { return gpu.Resume(); });
}

int superoffload_gpu_give_units_back(superoffload_gpu_memory* memory, uint64_t stream) {
  return Guarded([&]() -> Status {
    if (memory == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    const superoffload::kernels::CurrentDevice current(memory->impl->device());
    return superoffload::client::FromCuda(memory->impl->GiveUnitsBack(Stream(stream)));
  });
}

int superoffload_frozen_open(int32_t ordinal, void* host, uint64_t host_bytes, const uint64_t* unit_bytes,
                             uint32_t unit_count, uint32_t slots, superoffload_frozen_units** units,
                             uint64_t* addresses, uint64_t* slot_bytes) {
  return Guarded([&]() -> Status {
    if (host == nullptr || unit_bytes == nullptr || units == nullptr || addresses == nullptr || slot_bytes == nullptr) {
      return Error(Code::kInvalidArgument, "NULL argument");
    }
    auto opened = std::make_unique<superoffload_frozen_units>();
    if (Status status = FrozenUnits::Open(ordinal, {static_cast<std::byte*>(host), host_bytes},
                                          {unit_bytes, unit_count}, slots, &opened->impl);
        !status.ok()) {
      return status;
    }
    for (uint32_t unit = 0; unit < unit_count; ++unit) addresses[unit] = opened->impl->AddressOf(unit);
    *slot_bytes = opened->impl->slot_bytes();
    *units = opened.release();
    return {};
  });
}

int superoffload_frozen_read(superoffload_frozen_units* units, uint32_t unit, uint64_t stream) {
  return WithHandle(units, [&](FrozenUnits& impl) { return impl.Read(unit, Stream(stream)); });
}

int superoffload_frozen_has(superoffload_frozen_units* units, uint32_t unit, uint32_t* has) {
  return WithHandle(units, [&](FrozenUnits& impl) -> Status {
    if (has == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    return impl.Has(unit, has);
  });
}

int superoffload_frozen_keep(superoffload_frozen_units* units, const uint32_t* kept, uint32_t count) {
  return WithHandle(units, [&](FrozenUnits& impl) -> Status {
    if (kept == nullptr && count > 0) return Error(Code::kInvalidArgument, "NULL argument");
    return impl.Keep({kept, count});
  });
}

void superoffload_frozen_close(superoffload_frozen_units* units) { delete units; }

int superoffload_gpu_copy(superoffload_attachment* attachment, uint32_t direction, uint64_t stream) {
  return WithGpu(attachment, [&](StepPlane&, GpuPlane& gpu) -> Status {
    if (direction == SUPEROFFLOAD_TO_GPU) return gpu.Pull();
    if (direction == SUPEROFFLOAD_FROM_GPU) return gpu.Push(Stream(stream));
    return Error(Code::kInvalidArgument, "parameters are not copied in direction ", direction);
  });
}

int superoffload_gpu_end_landings(superoffload_attachment* attachment) {
  return WithHandle(attachment, [&](StepPlane& impl) -> Status {
    GpuPlane* const gpu = impl.plane().gpu();
    return gpu == nullptr || gpu->ended() ? Status{} : gpu->EndLandings();
  });
}

int superoffload_gpu_set_resident(superoffload_attachment* attachment, uint32_t count) {
  return WithGpu(attachment, [&](StepPlane& impl, GpuPlane& gpu) -> Status {
    if (Status status = impl.WaitIdle(); !status.ok()) return status;
    const superoffload::client::Mapping* state = nullptr;
    if (Status status = impl.State(&state); !status.ok()) return status;
    return gpu.SetResident(count, static_cast<const std::byte*>(state->data()));
  });
}

int superoffload_gpu_resident_masters(superoffload_attachment* attachment, uint32_t bucket, uint64_t* pointer) {
  return WithGpu(attachment, [&](StepPlane&, GpuPlane& gpu) -> Status {
    if (pointer == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    *pointer = gpu.ResidentMasters(bucket);
    if (*pointer == 0) {
      return Error(Code::kFailedPrecondition, "bucket ", bucket,
                   " is not resident on the GPU; superoffload_gpu_set_resident makes it so");
    }
    return {};
  });
}

int superoffload_make_collective_id(superoffload_collective_id* id) {
  return Guarded([&]() -> Status {
    if (id == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    return superoffload::client::MakeCollectiveId(id);
  });
}

int superoffload_join_collective(int32_t ordinal, const superoffload_collective_id* id, uint32_t ranks, uint32_t rank,
                                 superoffload_collective** collective) {
  return Guarded([&]() -> Status {
    if (id == nullptr || collective == nullptr) return Error(Code::kInvalidArgument, "NULL argument");
    auto created = std::make_unique<superoffload_collective>();
    Status status = Collective::Create(ordinal, *id, ranks, rank, &created->impl);
    if (status.ok()) *collective = created.release();
    return status;
  });
}

void superoffload_leave_collective(superoffload_collective* collective) { delete collective; }

int superoffload_reduce_scatter(superoffload_collective* collective, uint64_t from, uint64_t to, uint64_t elements,
                                uint32_t dtype, int average, uint64_t stream) {
  return WithHandle(collective, [&](Collective& impl) -> Status {
    DType type{};
    if (!ToDType(dtype, &type)) return Error(Code::kInvalidArgument, "unknown dtype ", dtype);
    return impl.ReduceScatter(from, to, elements, type, average != 0, Stream(stream));
  });
}

int superoffload_all_gather(superoffload_collective* collective, uint64_t from, uint64_t to, uint64_t elements,
                            uint32_t dtype, uint64_t stream) {
  return WithHandle(collective, [&](Collective& impl) -> Status {
    DType type{};
    if (!ToDType(dtype, &type)) return Error(Code::kInvalidArgument, "unknown dtype ", dtype);
    return impl.AllGather(from, to, elements, type, Stream(stream));
  });
}
