// Invariants. A device slot is taken by SubmitGradient and freed once: by the arrival of its gradient, or by the
// daemon's GRADIENT_TAKEN. Entries reach the ring in the order in which the trainer submitted them, from the thread of
// arrivals alone.
#include "client/src/gpu/gpu_plane.h"

#include <chrono>
#include <utility>

#include "client/src/core/host_gradients.h"
#include "client/src/gpu/gpu_gradients.h"
#include "client/src/gpu/gpu_status.h"
#include "kernels/base/check.h"

namespace superoffload::client {

using kernels::CudaStatus;
using kernels::CudaStream;
using kernels::CurrentDevice;

Status GpuPlane::PackAfter(CudaStream stream) {
  const CurrentDevice current(*device_);
  return moves_->packer().After(stream);
}

Status GpuPlane::CheckStream(CudaStream stream) const {
  const CurrentDevice current(*device_);
  return FromCuda(kernels::CheckNotCapturing(*device_, stream));
}

Status GpuPlane::SubmitGradient(superoffload_ring_entry entry, std::span<const BucketTensor> tensors,
                                kernels::DType dtype, CudaStream stream, Pass pass) {
  if (Status status = CheckPresent(); !status.ok()) return status;
  if (pass.adds || !pass.last) {
    if (Status status = CheckAddsUp(); !status.ok()) return status;
  }
  const CurrentDevice current(*device_);
  if (Status status = moves_->CheckGradient(entry.index, tensors, stream); !status.ok()) return status;
  if (pass.adds) {
    if (Status status = WaitSumIssued(entry.index); !status.ok()) return status;
  }
  uint32_t slot = 0;
  if (Status status = slots_.Take(&slot); !status.ok()) return status;
  Status status = moves_->SubmitGradient(entry, slot, HostSlotOf(entry.index), tensors, dtype, stream, pass);
  if (!status.ok()) slots_.Fail(status);
  return status;
}

Status GpuPlane::CheckAddsUp() const {
  if (report_.mover == SUPEROFFLOAD_MOVER_DAEMON) {
    return Error(
        Code::kFailedPrecondition,
        "the daemon copies gradients, and takes each for a whole one: let the trainer copy (mover \"trainer\") "
        "to add up those of several passes");
  }
  if (steps_.parameters().data() == steps_.gradients().data()) {
    return Error(Code::kFailedPrecondition,
                 "parameters are published in place of gradients, and a sum would take their place before its step "
                 "ends: create the optimizer without in_place to add up gradients of several passes");
  }
  return {};
}

// A pass before may wait for the daemon to have absorbed the last step's gradient.
Status GpuPlane::WaitSumIssued(uint32_t bucket) {
  constexpr std::chrono::milliseconds kSlice{100};
  std::unique_lock lock(mu_);
  while (!moves_->SumIssued(bucket)) {
    if (Status status = slots_.failure(); !status.ok()) return status;
    changed_.wait_for(lock, kSlice);
  }
  return {};
}

uint32_t GpuPlane::HostSlotOf(uint32_t bucket) {
  std::lock_guard lock(mu_);
  return moves_->HostSlotOf(bucket, progress_.next_slot(), progress_.committed_steps());
}

void GpuPlane::SubmitArrived(const CudaStatus& done, const superoffload_ring_entry& entry) {
  const Status status = done.ok() ? rings_.WaitSubmit(entry) : FromCuda(done);
  if (!status.ok()) slots_.Fail(status);
}

Status GpuPlane::Submit(const superoffload_ring_entry& entry) {
  if (ended()) return host_.Submit(entry);
  const CurrentDevice current(*device_);
  const bool ends_step = entry.opcode == SUPEROFFLOAD_SUBMIT_END_STEP;
  if (ends_step) {  // the parameters that follow may be used from GPUs that this process uses since the last step
    if (Status status = FromCuda(memory_->OpenToPeers()); !status.ok()) return status;
  }
  if (Status status = moves_->Submit(entry); !status.ok()) return status;
  if (ends_step) stall_seconds_ = 0;
  return slots_.failure();
}
std::unique_ptr<GradientMover> GpuPlane::MakeGradientMover(const ModelLayout* layout, StepPlane* steps,
                                                           size_t threads) {
  if (ended()) return std::make_unique<HostGradients>(layout, steps, threads);
  return std::make_unique<GpuGradients>(layout, steps, this);
}

Status GpuPlane::StreamWaits(uint32_t bucket, CudaStream stream) {
  const CurrentDevice current(*device_);
  return moves_->StreamWaits(bucket, stream);
}

Status GpuPlane::WaitPublished(std::span<const uint32_t> buckets, const Deadline& deadline) {
  const auto begin = std::chrono::steady_clock::now();
  for (const uint32_t bucket : buckets) {
    if (Status status = steps_.WaitLatest(bucket, resident(bucket), deadline); !status.ok()) return status;
  }
  stall_seconds_ = stall_seconds_ + std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return {};
}

Status GpuPlane::FindUnit(uint32_t unit, uint32_t* index) const {
  const std::optional<uint32_t> found = moves_->weights().Find(unit);
  if (!found) {
    return Error(Code::kInvalidArgument, "there is no unit ", unit,
                 " that streams; superoffload_bucket.unit names them");
  }
  *index = *found;
  return {};
}

Status GpuPlane::ReadUnit(uint32_t unit, CudaStream stream) {
  kernels::WeightStream& weights = moves_->weights();
  uint32_t index = 0;
  if (Status status = CheckPresent(); !status.ok()) return status;
  if (Status status = FindUnit(unit, &index); !status.ok()) return status;
  if (Status status = CheckStream(stream); !status.ok()) return status;
  if (Status status = WaitPublished(weights.buckets(index), std::nullopt); !status.ok()) return status;
  const CurrentDevice current(*device_);
  return FromCuda(weights.Read(index, stream, [this](uint32_t bucket) {
    std::lock_guard lock(mu_);
    return steps_.IsLatest(bucket, progress_);
  }));
}

Status GpuPlane::HasUnit(uint32_t unit, bool* has, bool* stays) const {
  uint32_t index = 0;
  if (Status status = FindUnit(unit, &index); !status.ok()) return status;
  *has = moves_->weights().Has(index);
  *stays = moves_->weights().Stays(index);
  return {};
}

Status GpuPlane::KeepUnits(std::span<const uint32_t> units) {
  if (Status status = CheckPresent(); !status.ok()) return status;
  kernels::WeightStream& weights = moves_->weights();
  kernels::UnitMemory* const memory = memory_->units();
  std::vector<bool> stays(memory == nullptr ? 0 : memory->count(), false);
  for (const uint32_t unit : units) {
    uint32_t index = 0;
    if (Status status = FindUnit(unit, &index); !status.ok()) return status;
    stays[index] = true;
    if (Status status = WaitPublished(weights.buckets(index), std::nullopt); !status.ok()) return status;
  }
  if (memory == nullptr) return {};
  const CurrentDevice current(*device_);
  return FromCuda(weights.Keep(stays, stream_slots_, memory));
}

Status GpuPlane::Suspend() {
  if (suspended_) return {};
  if (report_.shared != 0) {
    return Error(Code::kFailedPrecondition,
                 "the daemon copies from and to this GPU memory, and has it as well; let the trainer copy (mover "
                 "\"trainer\")");
  }
  const CurrentDevice current(*device_);
  if (Status status = SetResident(0, nullptr); !status.ok()) return status;
  if (Status status = moves_->packer().Synchronize(); !status.ok()) return status;
  if (Status status = FromCuda(moves_->weights().Leave()); !status.ok()) return status;
  if (Status status = FromCuda(moves_->mover().WaitAllLanded()); !status.ok()) return status;
  if (Status status = FromCuda(memory_->GiveAllBack(moves_->mover().up_stream())); !status.ok()) return status;
  suspended_ = true;
  return {};
}

Status GpuPlane::Resume() {
  if (!suspended_) return {};
  const CurrentDevice current(*device_);
  Status status = FromCuda(memory_->Back(memory_->bytes()));
  if (kernels::UnitMemory* const units = memory_->units(); status.ok() && units != nullptr) {
    status = FromCuda(moves_->weights().Keep(std::vector<bool>(units->count(), false), stream_slots_, units));
  }
  if (!status.ok()) {
    (void)memory_->GiveAllBack(moves_->mover().up_stream());
    return status;
  }
  suspended_ = false;
  return Pull();
}

Status GpuPlane::CheckPresent() const {
  if (!suspended_) return {};
  return Error(Code::kFailedPrecondition,
               "the parameters have no GPU memory; call the optimizer's resume() (superoffload_gpu_resume) first");
}

Status GpuPlane::WaitOnStream(uint32_t bucket, StreamNumber stream, const Deadline& deadline) {
  if (ended()) return MemoryPlane::WaitOnStream(bucket, stream, deadline);
  if (bucket < buckets_.size() && buckets_[bucket].streams()) {
    return Error(Code::kFailedPrecondition, "the parameters in bucket ", bucket,
                 " stream, and are on the GPU from superoffload_gpu_read_unit of unit ", buckets_[bucket].unit, " on");
  }
  const auto waiting = reinterpret_cast<CudaStream>(stream);
  if (Status status = CheckStream(waiting); !status.ok()) return status;
  if (Status status = WaitPublished({&bucket, 1}, deadline); !status.ok()) return status;
  return StreamWaits(bucket, waiting);
}

Status GpuPlane::EndLandings() {
  const CurrentDevice current(*device_);
  return moves_->EndLandings();
}

Status GpuPlane::SetResident(uint32_t count, const std::byte* state) {
  if (Status status = CheckPresent(); !status.ok()) return status;
  const CurrentDevice current(*device_);
  return moves_->SetResident(count, state);
}

Status GpuPlane::WaitUntil(const Deadline& deadline, const Condition& done) {
  if (ended()) return host_.WaitUntil(deadline, done);
  std::unique_lock lock(mu_);
  while (!done(progress_)) {
    if (!failure_.ok()) return failed_ ? failure_ : std::exchange(failure_, Status{});
    if (!deadline) {
      changed_.wait(lock);
    } else if (changed_.wait_until(lock, *deadline) == std::cv_status::timeout) {
      return Error(Code::kDeadlineExceeded, "the daemon has not finished the step yet");
    }
  }
  return {};
}

void GpuPlane::TakeCompletions() {
  constexpr std::chrono::milliseconds kSlice{100};
  while (!stop_) {
    superoffload_ring_entry entry;
    Status status = rings_.WaitCompletion(std::chrono::steady_clock::now() + kSlice, &entry);
    if (status.ok()) {
      status = OnCompletion(entry);
    } else if (status.code == Code::kDeadlineExceeded) {
      status = slots_.failure();
    }
    if (!status.ok()) return Stop(status);
  }
}

// Copies what has become due before anybody else learns of it. An error: nothing can go on.
Status GpuPlane::OnCompletion(const superoffload_ring_entry& entry) {
  if (Status status = moves_->OnCompletion(entry); !status.ok()) return status;
  if (entry.opcode == SUPEROFFLOAD_COMPLETE_GRADIENT_TAKEN && entry.step != 0) {
    slots_.Free(entry.index);  // of no slot in flight: ignored
  }
  Tell(entry);
  return {};
}

// For those who wait.
void GpuPlane::Tell(const superoffload_ring_entry& entry) {
  std::lock_guard lock(mu_);
  failed_ = false;
  if (entry.opcode == SUPEROFFLOAD_COMPLETE_ERROR) {
    failure_ = rings_.ErrorOf(entry);
    if (entry.step == 0) slots_.Fail(failure_);  // it answers a probe
  } else if (entry.opcode == SUPEROFFLOAD_COMPLETE_LANDED && entry.step == 0) {
    if (probes_under_way_ > 0) --probes_under_way_;
  } else if (progress_.Take(entry)) {
    moves_->ExpectLandings(&progress_);
  }
  changed_.notify_all();
}

// Nothing will come any more.
void GpuPlane::Stop(const Status& status) {
  slots_.Fail(status);
  std::lock_guard lock(mu_);
  failed_ = true;
  failure_ = status;
  changed_.notify_all();
}

}  // namespace superoffload::client
