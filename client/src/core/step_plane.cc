#include "client/src/core/step_plane.h"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/base/check.h"

namespace superoffload::client {
namespace {

Status Map(const FileDescriptor& file, size_t bytes, int flags, Mapping* mapping) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file.get(), 0);
  if (data == MAP_FAILED) return ErrnoError(Code::kResourceExhausted, "mmap of " + std::to_string(bytes) + " bytes");
  *mapping = Mapping(data, bytes);
  return {};
}

bool AreOneFile(int a, int b) {
  struct stat first{}, second{};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

bool IsScale(double scale) { return std::isfinite(scale) && scale != 0; }

Status BadScale(double scale) {
  return Error(Code::kInvalidArgument, "gradient scale is ", scale, " but must be finite and not 0");
}

}  // namespace

Status StepPlane::Create(std::shared_ptr<DescriptorConnection> connection, uint64_t epoch, uint64_t last_step,
                         uint32_t bucket_count, std::unique_ptr<StepPlane>* plane) {
  AttachmentFiles files;
  if (Status status = connection->Fetch(epoch, &files); !status.ok()) return status;
  Mapping ring;
  if (Status status =
          Map(files.fds[SUPEROFFLOAD_DESCRIPTOR_RING], files.bytes[SUPEROFFLOAD_DESCRIPTOR_RING], MAP_SHARED, &ring);
      !status.ok()) {
    return status;
  }
  std::unique_ptr<StepPlane> created(
      new StepPlane(std::move(connection), std::move(ring), epoch, last_step, bucket_count));
  if (Status status = created->rings_.Check(epoch); !status.ok()) return status;
  const std::pair<superoffload_descriptor, Mapping*> mappings[] = {
      {SUPEROFFLOAD_DESCRIPTOR_PARAMETERS, &created->parameters_},
      {SUPEROFFLOAD_DESCRIPTOR_GRADIENTS, &created->gradients_}};
  created->in_place_ = AreOneFile(files.fds[SUPEROFFLOAD_DESCRIPTOR_PARAMETERS].get(),
                                  files.fds[SUPEROFFLOAD_DESCRIPTOR_GRADIENTS].get());
  for (const auto& [descriptor, mapping] : mappings) {
    if (created->in_place_ && descriptor == SUPEROFFLOAD_DESCRIPTOR_PARAMETERS) continue;
    if (Status status = Map(files.fds[descriptor], files.bytes[descriptor], MAP_SHARED, mapping); !status.ok()) {
      return status;
    }
  }
  created->state_file_ = std::move(files.fds[SUPEROFFLOAD_DESCRIPTOR_STATE]);
  created->state_bytes_ = files.bytes[SUPEROFFLOAD_DESCRIPTOR_STATE];
  *plane = std::move(created);
  return {};
}

StepPlane::StepPlane(std::shared_ptr<DescriptorConnection> connection, Mapping ring, uint64_t epoch, uint64_t last_step,
                     uint32_t bucket_count)
    : connection_(std::move(connection)),
      epoch_(epoch),
      last_step_(last_step),
      bucket_count_(bucket_count),
      rings_(std::move(ring), [connection = connection_.get()] { return connection->DaemonGone(); }),
      step_(last_step),
      ended_step_(last_step),
      progress_(last_step, bucket_count),
      plane_(std::make_unique<HostPlane>(&rings_, &progress_)) {}

Status StepPlane::State(const Mapping** state) {
  if (state_.data() == nullptr) {
    if (Status status = Map(state_file_, state_bytes_, MAP_PRIVATE, &state_); !status.ok()) return status;
  }
  *state = &state_;
  return {};
}

Status StepPlane::SetGroup(uint32_t group, std::span<const double> scalars) {
  if (Status status = WaitOver(); !status.ok()) return status;
  for (uint32_t first = 0; first < scalars.size(); first += SUPEROFFLOAD_GROUP_SCALARS) {
    const std::span<const double> some =
        scalars.subspan(first, std::min<size_t>(scalars.size() - first, SUPEROFFLOAD_GROUP_SCALARS));
    superoffload_ring_entry entry = Entry(SUPEROFFLOAD_SUBMIT_GROUP, group, {});
    entry.payload.group = {.first = first, .count = static_cast<uint32_t>(some.size()), .values = {}};
    std::copy(some.begin(), some.end(), entry.payload.group.values);
    if (Status status = plane_->Submit(entry); !status.ok()) return status;
  }
  return {};
}

Status StepPlane::ParameterAbsent(uint32_t parameter) {
  superoffload_ring_entry entry = Entry(SUPEROFFLOAD_SUBMIT_ABSENT, parameter, {});
  entry.payload.absent.count = 1;
  return plane_->Submit(entry);
}

Status StepPlane::BeginStep(double gradient_scale) {
  SUPEROFFLOAD_CHECK(!open_);
  if (!IsScale(gradient_scale)) return BadScale(gradient_scale);
  if (step_ == std::numeric_limits<uint64_t>::max()) {
    return Error(Code::kFailedPrecondition, "step ", step_, " is the last that can be counted; restore a checkpoint");
  }
  if (Status status = WaitOver(); !status.ok()) return status;
  ++step_;
  SUPEROFFLOAD_CHECK_LT(ended_step_.load(std::memory_order_relaxed), step_);
  if (Status status = Submit(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, 0, {gradient_scale}); !status.ok()) return status;
  open_ = true;
  return {};
}

Status StepPlane::CheckBucket(uint32_t bucket) const {
  if (bucket < bucket_count_) return {};
  return Error(Code::kInvalidArgument, "bucket ", bucket, " does not exist; the plan has ", bucket_count_, " buckets");
}

Status StepPlane::MeasureNorm(double gradient_scale) {
  if (!IsScale(gradient_scale)) return BadScale(gradient_scale);
  if (Status status = Submit(SUPEROFFLOAD_SUBMIT_MEASURE_NORM, 0, {gradient_scale}); !status.ok()) return status;
  measured_step_.store(step_, std::memory_order_release);
  return {};
}

Status StepPlane::CheckEnd(double gradient_scale, double max_grad_norm) {
  if (!IsScale(gradient_scale)) return BadScale(gradient_scale);
  if (max_grad_norm >= 0) return {};
  return Error(Code::kInvalidArgument, "max_grad_norm is ", max_grad_norm,
               " but must be at least 0; 0 means no clipping");
}

Status StepPlane::SubmitEnd(superoffload_submission opcode, const superoffload_end_payload& end) {
  superoffload_ring_entry entry = Entry(opcode, 0, {});
  entry.payload.end = end;
  return plane_->Submit(entry);
}

Status StepPlane::EndStep(double gradient_scale, double max_grad_norm) {
  if (Status status = CheckEnd(gradient_scale, max_grad_norm); !status.ok()) return status;
  if (Status status = SubmitEnd(SUPEROFFLOAD_SUBMIT_END_STEP, {gradient_scale, max_grad_norm, 0, 0, 0}); !status.ok()) {
    return status;
  }
  End();
  return {};
}

Status StepPlane::PrepareStep(double gradient_scale, double max_grad_norm) {
  if (Status status = CheckEnd(gradient_scale, max_grad_norm); !status.ok()) return status;
  prepared_attempt_.store(0, std::memory_order_relaxed);
  if (Status status = SubmitEnd(SUPEROFFLOAD_SUBMIT_PREPARE, {gradient_scale, max_grad_norm, 0, 0, 0}); !status.ok()) {
    return status;
  }
  prepared_step_.store(step_, std::memory_order_release);
  return {};
}

Status StepPlane::EndPreparedStep(double gradient_scale, double max_grad_norm, double total_sum_of_squares) {
  if (Status status = CheckEnd(gradient_scale, max_grad_norm); !status.ok()) return status;
  const uint64_t attempt = prepared_attempt_.load(std::memory_order_acquire);
  if (attempt == 0 || prepared_step_.load(std::memory_order_relaxed) != step_) {
    return Error(Code::kFailedPrecondition, "step ", step_,
                 " is not prepared; prepare it, wait for its sum, and gather those of all ranks first");
  }
  if (Status status =
          SubmitEnd(SUPEROFFLOAD_SUBMIT_END_STEP, {gradient_scale, max_grad_norm, total_sum_of_squares, attempt, 0});
      !status.ok()) {
    return status;
  }
  End();
  return {};
}

Status StepPlane::AbandonStep() {
  if (Status status = Submit(SUPEROFFLOAD_SUBMIT_ABANDON_STEP, 0, {}); !status.ok()) return status;
  End();
  return {};
}

void StepPlane::End() {
  SUPEROFFLOAD_CHECK(open_);
  open_ = false;
  ended_step_.store(step_, std::memory_order_release);
}

superoffload_ring_entry StepPlane::Entry(superoffload_submission opcode, uint32_t index,
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

Status StepPlane::Submit(superoffload_submission opcode, uint32_t index, std::initializer_list<double> payload) {
  return plane_->Submit(Entry(opcode, index, payload));
}

Status StepPlane::WaitOver() {
  if (!plane_->runs_ahead() || open_ || ended_step_.load(std::memory_order_relaxed) == last_step_) return {};
  return WaitStep(std::nullopt, nullptr);
}

Status StepPlane::WaitIdle() {
  if (open_) return Error(Code::kFailedPrecondition, "step ", step_, " is open; end or abandon it first");
  return WaitOver();
}

Status StepPlane::WaitNorm(const Deadline& deadline, double* norm, double* sum_of_squares) {
  StepProgress::Norm answer;
  const Status status = WaitUntil(measured_step_.load(std::memory_order_acquire), deadline, [&](const auto& progress) {
    if (progress.norm()) answer = *progress.norm();
    return progress.norm().has_value();
  });
  if (status.ok() && norm != nullptr) *norm = answer.norm;
  if (status.ok() && sum_of_squares != nullptr) *sum_of_squares = answer.sum_of_squares;
  return status;
}

Status StepPlane::WaitPrepared(const Deadline& deadline, double* sum_of_squares) {
  superoffload_prepared_payload answer{};
  const Status status = WaitUntil(prepared_step_.load(std::memory_order_acquire), deadline, [&](const auto& progress) {
    if (progress.prepared()) answer = *progress.prepared();
    return progress.prepared().has_value();
  });
  if (!status.ok()) return status;
  prepared_attempt_.store(answer.attempt, std::memory_order_release);
  if (sum_of_squares != nullptr) *sum_of_squares = answer.sum_of_squares;
  return {};
}

Status StepPlane::WaitVerdict(const Deadline& deadline, superoffload_verdict* verdict) {
  return WaitUntil(ended_step_.load(std::memory_order_acquire), deadline, [verdict](const auto& progress) {
    if (progress.verdict() && verdict != nullptr) *verdict = *progress.verdict();
    return progress.verdict().has_value();
  });
}

Status StepPlane::WaitParameters(uint32_t bucket, const Deadline& deadline) {
  if (Status status = CheckBucket(bucket); !status.ok()) return status;
  return WaitUntil(ended_step_.load(std::memory_order_acquire), deadline,
                   [bucket](const auto& progress) { return progress.IsFinal(bucket); });
}

Status StepPlane::WaitMoreParameters(const Deadline& deadline, std::vector<bool>* final) {
  return WaitUntil(ended_step_.load(std::memory_order_acquire), deadline, [final](const auto& progress) {
    bool more = false;
    for (uint32_t bucket = 0; bucket < final->size(); ++bucket) {
      if ((*final)[bucket] || !progress.IsFinal(bucket)) continue;
      (*final)[bucket] = more = true;
    }
    return more;
  });
}

Status StepPlane::WaitStep(const Deadline& deadline, superoffload_verdict* verdict) {
  return WaitUntil(ended_step_.load(std::memory_order_acquire), deadline, [verdict](const auto& progress) {
    if (progress.IsOver() && verdict != nullptr) *verdict = *progress.verdict();
    return progress.IsOver();
  });
}

Status StepPlane::WaitLatest(uint32_t bucket, bool with_verdict, const Deadline& deadline) {
  if (Status status = CheckBucket(bucket); !status.ok()) return status;
  const uint64_t step = ended_step_.load(std::memory_order_acquire);
  if (step == last_step_) return {};
  return WaitUntil(step, deadline, [&](const auto& progress) {
    // The next step may be open and have completions of its own: it began when this one was over.
    return progress.step() > step || (with_verdict ? progress.verdict().has_value() : progress.IsFinal(bucket));
  });
}

bool StepPlane::IsLatest(uint32_t bucket, const StepProgress& known) const {
  const uint64_t step = ended_step_.load(std::memory_order_acquire);
  return step == last_step_ || known.step() > step || (known.step() == step && known.IsFinal(bucket));
}

Status StepPlane::WaitUntil(uint64_t step, const Deadline& deadline, const MemoryPlane::Condition& done) {
  if (step <= last_step_) return Error(Code::kFailedPrecondition, "nothing was asked for that could be waited for");
  return plane_->WaitUntil(deadline,
                           [&](const StepProgress& progress) { return progress.step() >= step && done(progress); });
}

}  // namespace superoffload::client
