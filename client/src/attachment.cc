#include "client/src/attachment.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

namespace superoffload::client {
namespace {

Status Map(const FileDescriptor& file, size_t bytes, int flags, Mapping* mapping) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file.get(), 0);
  if (data == MAP_FAILED) return ErrnoError(Code::kResourceExhausted, "mmap of " + std::to_string(bytes) + " bytes");
  *mapping = Mapping(data, bytes);
  return {};
}

bool IsScale(double scale) { return std::isfinite(scale) && scale != 0; }

Status BadScale(double scale) {
  return Error(Code::kInvalidArgument, "gradient scale is ", scale, " but must be finite and not 0");
}

}  // namespace

Status Attachment::Create(DescriptorConnection* connection, uint64_t epoch, uint64_t last_step, uint32_t bucket_count,
                          std::unique_ptr<Attachment>* attachment) {
  AttachmentFiles files;
  if (Status status = connection->Fetch(epoch, &files); !status.ok()) return status;
  Mapping ring;
  if (Status status =
          Map(files.fds[SUPEROFFLOAD_DESCRIPTOR_RING], files.bytes[SUPEROFFLOAD_DESCRIPTOR_RING], MAP_SHARED, &ring);
      !status.ok()) {
    return status;
  }
  StepRings rings(std::move(ring), [connection] { return connection->DaemonGone(); });
  if (Status status = rings.Check(epoch); !status.ok()) return status;
  std::unique_ptr<Attachment> created(new Attachment(connection, std::move(rings), epoch, last_step, bucket_count));
  const std::pair<superoffload_descriptor, Mapping*> mappings[] = {
      {SUPEROFFLOAD_DESCRIPTOR_PARAMETERS, &created->parameters_},
      {SUPEROFFLOAD_DESCRIPTOR_GRADIENTS, &created->gradients_}};
  for (const auto& [descriptor, mapping] : mappings) {
    if (Status status = Map(files.fds[descriptor], files.bytes[descriptor], MAP_SHARED, mapping); !status.ok()) {
      return status;
    }
  }
  created->state_file_ = std::move(files.fds[SUPEROFFLOAD_DESCRIPTOR_STATE]);
  created->state_bytes_ = files.bytes[SUPEROFFLOAD_DESCRIPTOR_STATE];
  *attachment = std::move(created);
  return {};
}

Attachment::Attachment(DescriptorConnection* connection, StepRings rings, uint64_t epoch, uint64_t last_step,
                       uint32_t bucket_count)
    : connection_(connection),
      epoch_(epoch),
      last_step_(last_step),
      bucket_count_(bucket_count),
      rings_(std::move(rings)),
      step_(last_step),
      handed_over_(bucket_count),
      ended_step_(last_step),
      completing_step_(last_step),
      published_(bucket_count),
      landing_(bucket_count) {}

Attachment::~Attachment() { EndGpu(); }

// What has been issued is done afterwards; the memory stays.
void Attachment::EndGpu() {
  stop_ = true;
  if (completions_.joinable()) completions_.join();
  gpu_.reset();
}

Status Attachment::State(const Mapping** state) {
  if (state_.data() == nullptr) {
    if (Status status = Map(state_file_, state_bytes_, MAP_PRIVATE, &state_); !status.ok()) return status;
  }
  *state = &state_;
  return {};
}

Status Attachment::SetGroup(uint32_t group, double lr, double beta1, double beta2, double eps, double weight_decay) {
  if (Status status = WaitOver(); !status.ok()) return status;
  return Submit(SUPEROFFLOAD_SUBMIT_GROUP, group, {lr, beta1, beta2, eps, weight_decay});
}

Status Attachment::BeginStep(double gradient_scale) {
  if (open_) return Error(Code::kFailedPrecondition, "step ", step_, " is open; end or abandon it first");
  if (!IsScale(gradient_scale)) return BadScale(gradient_scale);
  if (Status status = WaitOver(); !status.ok()) return status;
  ++step_;
  if (Status status = Submit(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, 0, {gradient_scale}); !status.ok()) return status;
  open_ = true;
  handed_over_.assign(bucket_count_, false);
  handed_over_count_ = 0;
  return {};
}

Status Attachment::GradientReady(uint32_t bucket) {
  return HandOver(bucket, [&] { return Submit(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, bucket, {}); });
}

Status Attachment::GpuGradientReady(uint32_t bucket, const superoffload_tensor* tensors, uint32_t count,
                                    kernels::DType dtype, kernels::CudaStream stream) {
  return HandOver(bucket, [&] {
    return gpu_->HandOver(Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, bucket, {}), next_slot_, tensors, count, dtype,
                          stream);
  });
}

template <typename Submission>
Status Attachment::HandOver(uint32_t bucket, Submission submit) {
  if (Status status = CheckGradient(bucket); !status.ok()) return status;
  if (Status status = submit(); !status.ok()) return status;
  handed_over_[bucket] = true;
  ++handed_over_count_;
  return {};
}

Status Attachment::CheckBucket(uint32_t bucket) const {
  if (bucket < bucket_count_) return {};
  return Error(Code::kInvalidArgument, "bucket ", bucket, " does not exist; the plan has ", bucket_count_, " buckets");
}

Status Attachment::CheckGradient(uint32_t bucket) const {
  if (Status status = CheckOpen("gradient_ready"); !status.ok()) return status;
  if (Status status = CheckBucket(bucket); !status.ok()) return status;
  if (handed_over_[bucket]) {
    return Error(Code::kAlreadyExists, "bucket ", bucket, " was already handed over in step ", step_,
                 "; hand each bucket over once per step");
  }
  return {};
}

Status Attachment::MeasureNorm(double gradient_scale) {
  if (Status status = CheckOpen("measure_norm"); !status.ok()) return status;
  if (!IsScale(gradient_scale)) return BadScale(gradient_scale);
  if (Status status = CheckAllHandedOver("measure_norm"); !status.ok()) return status;
  if (Status status = Submit(SUPEROFFLOAD_SUBMIT_MEASURE_NORM, 0, {gradient_scale}); !status.ok()) return status;
  measured_step_.store(step_, std::memory_order_release);
  return {};
}

Status Attachment::EndStep(double gradient_scale, double max_grad_norm) {
  if (Status status = CheckOpen("end_step"); !status.ok()) return status;
  if (!IsScale(gradient_scale)) return BadScale(gradient_scale);
  if (!(max_grad_norm >= 0)) {
    return Error(Code::kInvalidArgument, "max_grad_norm is ", max_grad_norm,
                 " but must be at least 0; 0 means no clipping");
  }
  if (Status status = CheckAllHandedOver("end_step"); !status.ok()) return status;
  if (Status status = Submit(SUPEROFFLOAD_SUBMIT_END_STEP, 0, {gradient_scale, max_grad_norm}); !status.ok()) {
    return status;
  }
  open_ = false;
  stall_seconds_ = 0;
  ended_step_.store(step_, std::memory_order_release);
  return {};
}

Status Attachment::AbandonStep() {
  if (Status status = CheckOpen("abandon_step"); !status.ok()) return status;
  if (Status status = Submit(SUPEROFFLOAD_SUBMIT_ABANDON_STEP, 0, {}); !status.ok()) return status;
  open_ = false;
  ended_step_.store(step_, std::memory_order_release);
  return {};
}

superoffload_ring_entry Attachment::Entry(superoffload_submission opcode, uint32_t index,
                                          std::initializer_list<double> payload) const {
  superoffload_ring_entry entry{.opcode = static_cast<uint16_t>(opcode),
                                .flags = 0,
                                .index = index,
                                .step = step_,
                                .attachment_epoch = epoch_,
                                .payload = {}};
  std::copy(payload.begin(), payload.end(), entry.payload.f64);
  return entry;
}

Status Attachment::Submit(superoffload_submission opcode, uint32_t index, std::initializer_list<double> payload) {
  const superoffload_ring_entry entry = Entry(opcode, index, payload);
  submissions_.fetch_add(1, std::memory_order_release);
  return gpu_ != nullptr ? gpu_->Submit(entry) : rings_.WaitSubmit(entry);
}

// With a GPU the trainer goes on while the tail of its last step is under way; the next one begins when that is over.
Status Attachment::WaitOver() {
  if (gpu_ == nullptr || open_ || ended_step_.load(std::memory_order_relaxed) == last_step_) return {};
  return WaitStep(std::nullopt, nullptr);
}

Status Attachment::CheckOpen(const char* call) const {
  if (open_) return {};
  return Error(Code::kFailedPrecondition, call, " without an open step; call begin_step first");
}

Status Attachment::CheckAllHandedOver(const char* call) const {
  if (handed_over_count_ == bucket_count_) return {};
  const auto missing = std::find(handed_over_.begin(), handed_over_.end(), false) - handed_over_.begin();
  return Error(Code::kFailedPrecondition, call, " of step ", step_, " with ", bucket_count_ - handed_over_count_,
               " of ", bucket_count_, " buckets missing, the first being bucket ", missing,
               "; hand every bucket over or abandon the step");
}

Status Attachment::WaitNorm(const Deadline& deadline, double* global_norm) {
  const Status status =
      WaitUntil(measured_step_.load(std::memory_order_acquire), deadline, [this] { return norm_.has_value(); });
  if (status.ok() && global_norm != nullptr) *global_norm = *norm_;
  return status;
}

Status Attachment::WaitVerdict(const Deadline& deadline, superoffload_verdict* verdict) {
  const Status status =
      WaitUntil(ended_step_.load(std::memory_order_acquire), deadline, [this] { return verdict_.has_value(); });
  if (status.ok() && verdict != nullptr) *verdict = *verdict_;
  return status;
}

Status Attachment::WaitParameters(uint32_t bucket, const Deadline& deadline) {
  if (Status status = CheckBucket(bucket); !status.ok()) return status;
  return WaitUntil(ended_step_.load(std::memory_order_acquire), deadline, [this, bucket] { return Final(bucket); });
}

Status Attachment::WaitStep(const Deadline& deadline, superoffload_verdict* verdict) {
  const Status status = WaitUntil(ended_step_.load(std::memory_order_acquire), deadline,
                                  [this] { return verdict_.has_value() && unfinished_ == 0 && landings_ == 0; });
  if (status.ok() && verdict != nullptr) *verdict = *verdict_;
  return status;
}

Status Attachment::AwaitParameters(uint32_t bucket, const Deadline& deadline, kernels::CudaStream stream) {
  if (Status status = CheckBucket(bucket); !status.ok()) return status;
  if (Status status = gpu_->CheckStream(stream); !status.ok()) return status;
  if (const uint64_t step = ended_step_.load(std::memory_order_acquire); step != last_step_) {
    const auto begin = std::chrono::steady_clock::now();
    // The next step may be open and have completions of its own: it began when this one was over.
    const auto ready = [this, bucket, step] {
      return completing_step_ > step || (gpu_->resident(bucket) ? verdict_.has_value() : Final(bucket));
    };
    if (Status status = WaitUntil(step, deadline, ready); !status.ok()) return status;
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    stall_seconds_ = stall_seconds_ + waited.count();
  }
  return gpu_->StreamWaits(bucket, stream);
}

Status Attachment::AttachGpu(const superoffload_gpu_options& options, Attachment* previous,
                             superoffload_gpu_report* report) {
  if (gpu_ != nullptr) return Error(Code::kFailedPrecondition, "the attachment has a GPU already; attach anew");
  if (open_) return Error(Code::kFailedPrecondition, "step ", step_, " is open; attach the GPU before the first step");
  if (options.bucket_count != bucket_count_) {
    return Error(Code::kInvalidArgument, options.bucket_count, " buckets, but the attachment has ", bucket_count_);
  }
  const auto bytes = [](const Mapping& mapping) {
    return std::span(static_cast<std::byte*>(mapping.data()), mapping.bytes());
  };
  GpuPlane::Attached attached{
      .parameters = bytes(parameters_),
      .gradients = bytes(gradients_),
      .share = [this](superoffload_device_request* request,
                      int descriptor) { return connection_->ShareDevice(epoch_, request, descriptor); },
      .daemon_gone = [this] { return connection_->DaemonGone(); },
      .submit =
          [this](superoffload_ring_entry entry) {
            entry.attachment_epoch = epoch_;
            return rings_.WaitSubmit(entry);
          }};
  if (previous != nullptr) previous->EndGpu();
  if (Status status =
          GpuPlane::Create(options, std::move(attached), previous == nullptr ? nullptr : previous->gpu_memory_, &gpu_);
      !status.ok()) {
    return status;
  }
  gpu_memory_ = gpu_->memory();
  next_slot_ = options.next_slot;
  completions_ = std::thread([this] { TakeCompletions(); });
  if (Status status = gpu_->ChooseMover(); !status.ok()) return status;
  if (report != nullptr) *report = gpu_->report();
  return {};
}

Status Attachment::SetResident(uint32_t count) {
  if (open_) return Error(Code::kFailedPrecondition, "step ", step_, " is open; end or abandon it first");
  if (Status status = WaitOver(); !status.ok()) return status;
  const Mapping* state = nullptr;
  if (Status status = State(&state); !status.ok()) return status;
  return gpu_->SetResident(count, static_cast<const std::byte*>(state->data()));
}

void Attachment::TakeCompletions() {
  constexpr std::chrono::milliseconds kSlice{100};
  while (!stop_) {
    superoffload_ring_entry entry;
    Status status = rings_.WaitCompletion(std::chrono::steady_clock::now() + kSlice, &entry);
    const bool taken = status.ok();
    if (taken) {
      (void)submissions_.load(std::memory_order_acquire);
      status = gpu_->OnCompletion(entry);
    } else if (status.code == Code::kDeadlineExceeded) {
      status = gpu_->failure();
      if (status.ok()) continue;
    }
    if (!status.ok()) gpu_->Fail(status);
    std::lock_guard lock(mu_);
    failed_ = !status.ok();
    if (taken && status.ok()) {
      status = Take(entry);
      if (!status.ok() && entry.step == 0) gpu_->Fail(status);  // it answers a probe
    }
    if (!status.ok()) failure_ = status;
    changed_.notify_all();
    if (failed_) return;
  }
}

template <typename Done>
Status Attachment::WaitUntil(uint64_t step, const Deadline& deadline, Done done) {
  if (step <= last_step_) return Error(Code::kFailedPrecondition, "nothing was asked for that could be waited for");
  const bool takes = gpu_ == nullptr;
  std::unique_lock lock(mu_);
  while (completing_step_ < step || !done()) {
    if (takes) {
      lock.unlock();
      superoffload_ring_entry entry;
      if (Status status = rings_.WaitCompletion(deadline, &entry); !status.ok()) return status;
      lock.lock();
      if (Status status = Take(entry); !status.ok()) return status;
    } else if (!failure_.ok()) {
      return failed_ ? failure_ : std::exchange(failure_, Status{});
    } else if (!deadline) {
      changed_.wait(lock);
    } else if (changed_.wait_until(lock, *deadline) == std::cv_status::timeout) {
      return Error(Code::kDeadlineExceeded, "the daemon has not finished the step yet");
    }
  }
  return {};
}

Status Attachment::Take(const superoffload_ring_entry& entry) {
  if (entry.opcode == SUPEROFFLOAD_COMPLETE_ERROR) return {static_cast<Code>(entry.index), rings_.ErrorText()};
  if (entry.step > completing_step_) {
    completing_step_ = entry.step;
    verdict_.reset();
    norm_.reset();
    std::fill(published_.begin(), published_.end(), Published::kNo);
    landing_.assign(bucket_count_, false);
    landings_ = 0;
  }
  if (entry.opcode == SUPEROFFLOAD_COMPLETE_VERDICT) {
    TakeVerdict(entry);
  } else if (entry.opcode == SUPEROFFLOAD_COMPLETE_GRADIENT_NORM) {
    norm_ = entry.payload.f64[0];
  } else if (entry.opcode == SUPEROFFLOAD_COMPLETE_PARAMETERS_READY && entry.index < bucket_count_) {
    const bool speculative = (entry.flags & SUPEROFFLOAD_FLAG_SPECULATIVE) != 0;
    published_[entry.index] = speculative ? Published::kSpeculative : Published::kFinal;
    if (verdict_) --unfinished_;
  } else if (entry.opcode == SUPEROFFLOAD_COMPLETE_LANDED && entry.index < bucket_count_ &&
             entry.step == completing_step_ && landing_[entry.index]) {
    landing_[entry.index] = false;
    --landings_;
  }
  return {};
}

void Attachment::TakeVerdict(const superoffload_ring_entry& entry) {
  const superoffload_verdict_payload& payload = entry.payload.verdict;
  verdict_ = superoffload_verdict{.kind = entry.index,
                                  .speculated_buckets = payload.speculated_buckets,
                                  .republished_buckets = payload.republished_buckets,
                                  .next_slot = payload.next_slot,
                                  .consecutive_skips = payload.consecutive_skips,
                                  .step = entry.step,
                                  .committed_steps = payload.committed_steps,
                                  .global_norm = payload.global_norm,
                                  .clip_coefficient = payload.clip_coefficient};
  next_slot_ = payload.next_slot;
  const bool stands = (entry.flags & SUPEROFFLOAD_FLAG_SPECULATION_STANDS) != 0;
  const bool skip = entry.index != SUPEROFFLOAD_VERDICT_COMMIT && entry.index != SUPEROFFLOAD_VERDICT_CLIP;
  unfinished_ = 0;
  for (Published& published : published_) {
    // Speculated parameters stand or are published again; the others of a skipped step never changed.
    if (published == Published::kSpeculative ? stands : skip) published = Published::kFinal;
    if (published != Published::kFinal) ++unfinished_;
  }
  for (uint32_t bucket = 0; gpu_ != nullptr && !skip && bucket < bucket_count_; ++bucket) {
    landing_[bucket] = gpu_->WaitsForLanding(bucket);
    landings_ += landing_[bucket] ? 1 : 0;
  }
}

}  // namespace superoffload::client
