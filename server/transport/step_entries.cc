#include "server/transport/step_entries.h"

#include <span>

#include "absl/strings/str_cat.h"

namespace superoffload::transport {
namespace {

absl::Status SetScalars(uint32_t group, const superoffload_group_payload& payload, engine::StepHandler& handler) {
  if (payload.count == 0 || payload.count > SUPEROFFLOAD_GROUP_SCALARS) {
    return absl::InvalidArgumentError(
        absl::StrCat("GROUP has ", payload.count, " hyper-parameters but must have 1 to ", SUPEROFFLOAD_GROUP_SCALARS));
  }
  return handler.SetScalars(group, payload.first, std::span(payload.values, payload.count));
}

absl::Status EndStep(uint64_t step, const superoffload_end_payload& end, engine::StepHandler& handler) {
  if (end.attempt == 0) return handler.EndStep(step, end.gradient_scale, end.max_grad_norm, end.streamed_bytes);
  return handler.EndPreparedStep(step, end.gradient_scale, end.max_grad_norm,
                                 {.sum_of_squares = end.total_sum_of_squares, .attempt = end.attempt});
}

engine::Landing LandingOf(const superoffload_ring_entry& entry) {
  if ((entry.flags & SUPEROFFLOAD_FLAG_LOGGED) != 0) return engine::Landing::kLog;
  const bool still_read = (entry.flags & SUPEROFFLOAD_FLAG_STILL_READ) != 0;
  return still_read ? engine::Landing::kSlotStillRead : engine::Landing::kSlot;
}

}  // namespace

absl::Status CheckEpoch(const superoffload_ring_entry& entry, uint64_t attachment_epoch) {
  if (entry.attachment_epoch == attachment_epoch) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("an entry of attachment ", entry.attachment_epoch,
                                                    " on the ring of attachment ", attachment_epoch, "; attach again"));
}

absl::Status DeliverEntry(const superoffload_ring_entry& entry, uint64_t attachment_epoch,
                          std::optional<double> sum_of_squares, engine::StepHandler& handler) {
  if (absl::Status status = CheckEpoch(entry, attachment_epoch); !status.ok()) return status;
  const double* f64 = entry.payload.f64;
  switch (entry.opcode) {
    case SUPEROFFLOAD_SUBMIT_GROUP:
      return SetScalars(entry.index, entry.payload.group, handler);
    case SUPEROFFLOAD_SUBMIT_BEGIN_STEP:
      return handler.BeginStep(entry.step, f64[0]);
    case SUPEROFFLOAD_SUBMIT_ABSENT:
      return handler.ParametersAbsent(entry.step, entry.index, entry.payload.absent.count);
    case SUPEROFFLOAD_SUBMIT_GRADIENT_READY:
      if ((entry.flags & SUPEROFFLOAD_FLAG_SUM_KNOWN) != 0) sum_of_squares = entry.payload.gradient.sum_of_squares;
      return handler.GradientReady(entry.step, entry.index, sum_of_squares, LandingOf(entry));
    case SUPEROFFLOAD_SUBMIT_END_STEP:
      return EndStep(entry.step, entry.payload.end, handler);
    case SUPEROFFLOAD_SUBMIT_PREPARE:
      return handler.PrepareStep(entry.step, entry.payload.end.gradient_scale, entry.payload.end.max_grad_norm);
    case SUPEROFFLOAD_SUBMIT_ABANDON_STEP:
      return handler.AbandonStep(entry.step);
    case SUPEROFFLOAD_SUBMIT_MEASURE_NORM:
      return handler.MeasureNorm(entry.step, f64[0]);
    default:
      return absl::UnimplementedError(
          absl::StrCat("unknown submission opcode ", entry.opcode, "; use a client library of this daemon's version"));
  }
}

superoffload_ring_entry CompletionEntries::Completion(superoffload_completion opcode, uint32_t index, uint64_t step,
                                                      int flags) const {
  return {.opcode = static_cast<uint16_t>(opcode),
          .flags = static_cast<uint16_t>(flags),
          .index = index,
          .step = step,
          .attachment_epoch = attachment_epoch_,
          .payload = {}};
}

void CompletionEntries::SlotFree(uint64_t step, uint32_t bucket, uint32_t slot) {
  superoffload_ring_entry entry = Completion(SUPEROFFLOAD_COMPLETE_SLOT_FREE, bucket, step);
  entry.payload.gradient.slot = slot;
  Push(entry);
}

void CompletionEntries::ParametersReady(uint64_t step, uint32_t bucket, bool speculative) {
  Push(Completion(SUPEROFFLOAD_COMPLETE_PARAMETERS_READY, bucket, step,
                  speculative ? SUPEROFFLOAD_FLAG_SPECULATIVE : 0));
}

void CompletionEntries::NormMeasured(uint64_t step, double norm, double sum_of_squares) {
  superoffload_ring_entry entry = Completion(SUPEROFFLOAD_COMPLETE_GRADIENT_NORM, 0, step);
  entry.payload.f64[0] = norm;
  entry.payload.f64[1] = sum_of_squares;
  Push(entry);
}

void CompletionEntries::Prepared(uint64_t step, uint64_t attempt, double sum_of_squares) {
  superoffload_ring_entry entry = Completion(SUPEROFFLOAD_COMPLETE_PREPARED, 0, step);
  entry.payload.prepared = {.sum_of_squares = sum_of_squares, .attempt = attempt};
  Push(entry);
}

void CompletionEntries::VerdictReached(const engine::VerdictReport& report) {
  superoffload_ring_entry entry =
      Completion(SUPEROFFLOAD_COMPLETE_VERDICT, static_cast<uint32_t>(report.verdict), report.step,
                 report.speculation_stands ? SUPEROFFLOAD_FLAG_SPECULATION_STANDS : 0);
  entry.payload.verdict = {.global_norm = report.global_norm,
                           .clip_coefficient = report.clip_coefficient,
                           .committed_steps = report.committed_steps,
                           .speculated_buckets = report.speculated_buckets,
                           .republished_buckets = report.republished_buckets,
                           .next_slot = report.next_slot,
                           .consecutive_skips = report.consecutive_skips};
  Push(entry);
}

}  // namespace superoffload::transport
