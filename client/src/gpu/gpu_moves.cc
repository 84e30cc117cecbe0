// Invariant: a bucket's parameters are due, or copied up, before the trainer learns that they are final.
#include "client/src/gpu/gpu_moves.h"

#include <algorithm>
#include <utility>

#include "client/src/gpu/gpu_status.h"
#include "kernels/base/check.h"

namespace superoffload::client {

namespace {

std::vector<bool> HaveOneSlot(const std::vector<GpuBucket>& buckets) {
  std::vector<bool> one_slot;
  for (const GpuBucket& bucket : buckets) one_slot.push_back(bucket.one_slot());
  return one_slot;
}

}  // namespace

using kernels::CudaStatus;
using kernels::CudaStream;
using kernels::CurrentDevice;

GpuMoves::GpuMoves(std::shared_ptr<const kernels::GpuDevice> device, const std::vector<GpuBucket>* buckets,
                   const GpuLayout& layout, const Memory& memory, Events events)
    : device_(std::move(device)),
      buckets_(*buckets),
      layout_(layout),
      memory_(memory),
      events_(std::move(events)),
      waits_(HaveOneSlot(*buckets)) {}

Status GpuMoves::Open(std::shared_ptr<const kernels::GpuDevice> device, const ModelLayout& model,
                      const superoffload_gpu_options& options, const std::vector<GpuBucket>* buckets,
                      const GpuLayout& layout, const Memory& memory, CudaStream pack_stream, Events events,
                      kernels::MakeQueue make_queue, std::unique_ptr<GpuMoves>* moves) {
  std::unique_ptr<GpuMoves> made(new GpuMoves(device, buckets, layout, memory, std::move(events)));
  made->packer_ = std::make_unique<GradientPacker>();
  if (Status status = made->packer_->Open(device, layout, memory.gpu, pack_stream); !status.ok()) return status;
  auto steps = std::make_unique<ResidentSteps>();
  if (Status status = steps->Open(model, options); !status.ok()) return status;
  made->residents_.emplace(device, buckets, std::move(steps));
  made->sums_.emplace(std::move(device), buckets->size());
  if (Status status = made->OpenMover(std::move(make_queue)); !status.ok()) return status;
  std::vector<uint32_t> units;
  for (const GpuBucket& bucket : *buckets) units.push_back(bucket.unit);
  made->weights_ = std::make_unique<kernels::WeightStream>(made->device_, kernels::UnitsOf(units), &made->mover());
  if (Status status = FromCuda(made->weights_->Open(memory.slots)); !status.ok()) return status;
  *moves = std::move(made);
  return {};
}

Status GpuMoves::OpenMover(kernels::MakeQueue make_queue) {
  kernels::MoverMemory memory{
      .gradients = memory_.gradients, .parameters = memory_.parameters, .buckets = {}, .slots = layout_.slots};
  for (const GpuBucket& bucket : buckets_) memory.buckets.push_back(bucket.moved());
  return FromCuda(kernels::Mover::Open(device_, memory_.gpu, std::move(memory),
                                       {.process = "the trainer",
                                        .kernels_reach_host = true,
                                        .upload_thread = false,
                                        .landed = nullptr,
                                        .make_queue = std::move(make_queue)},
                                       &mover_));
}

GpuMoves::~GpuMoves() {
  const CurrentDevice current(*device_);
  if (packer_ != nullptr) (void)packer_->Synchronize();  // it may store into memory that the mover unregisters
  sums_.reset();
  weights_.reset();
  mover_.reset();
  residents_.reset();
  packer_.reset();
}

Status GpuMoves::CheckGradient(uint32_t bucket, std::span<const BucketTensor> tensors, CudaStream stream) const {
  SUPEROFFLOAD_CHECK_LT(bucket, buckets_.size());
  if (Status status = packer_->Check(bucket, buckets_[bucket].elements, tensors); !status.ok()) return status;
  return FromCuda(kernels::CheckNotCapturing(*device_, stream));
}

Status GpuMoves::SubmitGradient(superoffload_ring_entry entry, uint32_t slot, uint32_t host_slot,
                                std::span<const BucketTensor> tensors, kernels::DType dtype, CudaStream stream,
                                Pass pass) {
  if (Status status = Pack(entry.index, slot, host_slot, tensors, dtype, stream, pass); !status.ok()) return status;
  return kind_ == SUPEROFFLOAD_MOVER_DAEMON ? SubmitPacked(entry, slot) : MoveDown(entry, slot, host_slot, pass);
}

Status GpuMoves::Pack(uint32_t bucket, uint32_t slot, uint32_t host_slot, std::span<const BucketTensor> tensors,
                      kernels::DType dtype, CudaStream stream, Pass pass) {
  if (Status status = packer_->After(stream); !status.ok()) return status;
  // Its last parameters must have landed: submitting has the next ones written where they come from.
  if (Status status = FromCuda(mover_->WaitLanded(bucket, packer_->stream())); !status.ok()) return status;
  const kernels::CudaPointer place = memory_.gpu + layout_.slots.slot_offset(slot);
  void* const to = Direct(bucket) ? memory_.gradients.data() + buckets_[bucket].gradient_offsets[host_slot]
                                  : reinterpret_cast<void*>(place);
  if (pass.adds && !Direct(bucket)) {
    if (Status status = sums_->Fetch(*mover_, bucket, host_slot, slot, packer_->stream()); !status.ok()) return status;
  }
  if (Status status = packer_->Pack(buckets_[bucket], slot, tensors, dtype, to, pass); !status.ok()) return status;
  return resident(bucket) && pass.last ? residents_->KeepGradient(bucket, place, packer_->stream()) : Status{};
}

// The daemon copies what has been packed.
Status GpuMoves::SubmitPacked(superoffload_ring_entry entry, uint32_t slot) {
  entry.flags = SUPEROFFLOAD_FLAG_DEVICE_SLOT | FlagsOf(entry.index);
  entry.payload.gradient.slot = slot;
  entry.payload.gradient.gpu_offset = buckets_[entry.index].gpu_offset;
  return waits_.SubmitGradient(entry.index, [this, entry] {
    return FromCuda(mover_->arrivals().After(packer_->stream(),
                                             [this, entry](const CudaStatus& done) { events_.arrived(done, entry); }));
  });
}

// What becomes of the bucket's parameters.
uint16_t GpuMoves::FlagsOf(uint32_t bucket) const {
  uint16_t flags = 0;
  if (!DaemonCopiesUp(bucket)) flags |= SUPEROFFLOAD_FLAG_NO_COPY_BACK;
  if (Logs(bucket)) flags |= SUPEROFFLOAD_FLAG_LOGGED;
  if (StillRead(bucket)) flags |= SUPEROFFLOAD_FLAG_STILL_READ;
  return flags;
}

bool GpuMoves::StillRead(uint32_t bucket) const {
  const std::optional<uint32_t> unit = weights_->Find(buckets_[bucket].unit);
  return unit && !weights_->Stays(*unit);
}

// This process does.
Status GpuMoves::MoveDown(superoffload_ring_entry entry, uint32_t slot, uint32_t host_slot, Pass pass) {
  entry.flags = SUPEROFFLOAD_FLAG_SUM_KNOWN | FlagsOf(entry.index);
  if (Status status = packer_->WaitPacked(mover_->down_stream()); !status.ok()) return status;
  using What = kernels::Mover::What;
  const auto copy = [this, entry, slot, host_slot, pass]() -> Status {
    const What what = Direct(entry.index) ? What::kSums : What::kGradientAndSums;
    const auto arrived = [this, entry, slot, pass](const CudaStatus& done, double sum_of_squares) mutable {
      entry.payload.gradient.sum_of_squares = sum_of_squares;
      if (done.ok()) events_.slot_free(slot);
      if (pass.last || !done.ok()) events_.arrived(done, entry);
    };
    if (Status status = FromCuda(mover_->CopyDown(entry.index, slot, host_slot, what, arrived)); !status.ok()) {
      return status;
    }
    return pass.last ? Status{} : sums_->OnIssued(entry.index, mover_->down_stream());
  };
  if (!pass.last) sums_->OnSubmitted(entry.index);
  return pass.adds ? waits_.Submit(copy)
                   : waits_.SubmitGradient(entry.index, copy);  // the first one has taken the slot
}

uint32_t GpuMoves::HostSlotOf(uint32_t bucket, uint32_t next_slot, uint64_t committed_steps) const {
  if (!Logs(bucket)) return next_slot;
  return static_cast<uint32_t>(committed_steps % buckets_[bucket].log_slots);
}

Status GpuMoves::Submit(superoffload_ring_entry entry) {
  residents_->OnSubmission(entry);
  if (entry.opcode == SUPEROFFLOAD_SUBMIT_END_STEP) {
    Status status;
    const auto wait_for = [&](CudaStream stream) { return (status = packer_->After(stream)).ok(); };
    if (!weights_->EndStep(packer_->stream(), wait_for)) return status;
    if (Status status = packer_->AfterAll(); !status.ok()) return status;
    entry.payload.end.streamed_bytes = mover_->TakeFetchedBytes();
    return waits_.Submit([this, entry] {
      return FromCuda(mover_->arrivals().After(
          packer_->stream(), [this, entry](const CudaStatus& done) { events_.arrived(done, entry); }));
    });
  }
  if (entry.opcode == SUPEROFFLOAD_SUBMIT_ABANDON_STEP) packer_->ForgetStreams();
  return waits_.Submit([this, entry] {
    mover_->arrivals().Then([this, entry](const CudaStatus& done) { events_.arrived(done, entry); });
    return Status{};
  });
}

Status GpuMoves::EndLandings() {
  waits_.Stop();
  mover_->arrivals().WaitEmpty();
  return FromCuda(device_->driver().Status(device_->driver().StreamSynchronize(mover_->down_stream()),
                                           "copying gradients from the GPU"));
}

Status GpuMoves::StreamWaits(uint32_t bucket, CudaStream stream) {
  if (DaemonCopiesUp(bucket)) return {};  // it has landed
  return FromCuda(mover_->WaitLanded(bucket, stream));
}

Status GpuMoves::SetResident(uint32_t count, const std::byte* state) {
  for (uint32_t bucket = static_cast<uint32_t>(buckets_.size() - std::min<size_t>(count, buckets_.size()));
       bucket < buckets_.size(); ++bucket) {
    if (!buckets_[bucket].streams()) continue;
    return Error(Code::kFailedPrecondition, "bucket ", bucket,
                 " streams, so its state cannot be resident on the GPU; keep fewer buckets resident");
  }
  if (Status status = FromCuda(mover_->WaitAllLanded()); !status.ok()) return status;
  const Status status = residents_->SetCount(count, state, mover_->up_stream());
  for (uint32_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (buckets_[bucket].streams()) continue;
    mover_->SetCopiesUp(bucket, kind_ != SUPEROFFLOAD_MOVER_DAEMON && !resident(bucket));
  }
  return status;
}

Status GpuMoves::OnCompletion(const superoffload_ring_entry& entry) {
  if (waits_.any()) {
    const CurrentDevice current(*device_);
    if (Status status = waits_.Take(entry); !status.ok()) return status;
  }
  if (entry.opcode == SUPEROFFLOAD_COMPLETE_VERDICT) return OnVerdict(entry);
  if (entry.opcode != SUPEROFFLOAD_COMPLETE_PARAMETERS_READY || entry.index >= buckets_.size()) return {};
  return FromCuda(mover_->Published(entry.step, entry.index, (entry.flags & SUPEROFFLOAD_FLAG_SPECULATIVE) != 0));
}

Status GpuMoves::OnVerdict(const superoffload_ring_entry& entry) {
  const bool commits = entry.index == SUPEROFFLOAD_VERDICT_COMMIT || entry.index == SUPEROFFLOAD_VERDICT_CLIP;
  if (commits) {
    const CurrentDevice current(*device_);
    if (Status status = residents_->Update(entry.payload.verdict, packer_->kernels(), memory_.gpu, mover_.get());
        !status.ok()) {
      return status;
    }
  }
  const bool stands = (entry.flags & SUPEROFFLOAD_FLAG_SPECULATION_STANDS) != 0;
  return FromCuda(mover_->VerdictReached(entry.step, commits, stands));
}

void GpuMoves::ExpectLandings(StepProgress* progress) const {
  for (uint32_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (DaemonCopiesUp(bucket)) progress->ExpectLanding(bucket);
  }
}

}  // namespace superoffload::client
