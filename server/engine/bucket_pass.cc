#include "server/engine/bucket_pass.h"

#include <utility>

#include "absl/time/clock.h"

namespace superoffload::engine {

const char* PassName(PassKind kind) {
  switch (kind) {
    case PassKind::kNorm:
      return "norm";
    case PassKind::kSpeculate:
      return "speculate";
    case PassKind::kUpdate:
      return "update";
    case PassKind::kRepublish:
      return "republish";
    case PassKind::kRestore:
      return "restore";
    case PassKind::kSettle:
      return "settle";
    case PassKind::kAdopt:
      return "adopt";
  }
  return "unknown";
}

BucketPass::BucketPass(uint32_t bucket, const Layout& layout, const OptimizerMemory& memory, Record* record,
                       std::function<void(uint32_t)> on_done)
    : bucket_(bucket),
      layout_(layout),
      bucket_layout_(layout.buckets[bucket]),
      memory_(memory),
      record_(record),
      on_done_(std::move(on_done)),
      chunk_sums_(bucket_layout_.chunks()) {}

void BucketPass::Start(WorkerPool& pool, const PassArguments& arguments) {
  arguments_ = arguments;
  start_time_ = absl::Now();
  pool.Submit(this, chunk_sums_.size());
}

void BucketPass::RunChunk(size_t index, size_t worker) {
  const auto [n, state, theta, gradients] = ViewChunk(layout_, memory_, bucket_layout_, index);
  const PendingGradient& publish = arguments_.publish;
  const std::optional<PendingGradient>& absorb = arguments_.absorb;
  const size_t chunk = bucket_layout_.first_chunk + index;
  kernels::UndoSlot* const undo = absorb ? record_->BeginAbsorb(worker, chunk, absorb->t) : nullptr;
  switch (arguments_.kind) {
    case PassKind::kNorm:
      chunk_sums_[index] = kernels::SumOfSquares(n, gradients[publish.slot]);
      break;
    case PassKind::kSpeculate:
    case PassKind::kUpdate:
    case PassKind::kRepublish:
      chunk_sums_[index] = absorb ? kernels::Deferred(n, state, absorb->step, gradients[absorb->slot], publish.step,
                                                      gradients[publish.slot], theta, undo)
                                  : kernels::Republish(n, state, publish.step, gradients[publish.slot], theta);
      break;
    case PassKind::kRestore:
      kernels::Narrow(n, state.p, theta);
      break;
    case PassKind::kSettle:
      kernels::Settle(n, state, absorb->step, gradients[absorb->slot], undo);
      break;
    case PassKind::kAdopt:
      kernels::Adopt(n, {theta.data, theta.dtype}, state.p);
      break;
  }
  if (absorb) record_->EndAbsorb(worker, chunk, absorb->t);
}

void BucketPass::Done() {
  duration_ = absl::Now() - start_time_;
  sum_of_squares_ = 0;
  for (double sum : chunk_sums_) sum_of_squares_ += sum;
  on_done_(bucket_);
}

PassReport BucketPass::report() const {
  const uint64_t gradient = kernels::DTypeBytes(bucket_layout_.gradient_dtype);
  const uint64_t theta = kernels::DTypeBytes(bucket_layout_.dtype);
  constexpr uint64_t kStateBytes = 3 * sizeof(float);
  uint64_t per_element = 0;
  switch (arguments_.kind) {
    case PassKind::kNorm:
      per_element = gradient;
      break;
    case PassKind::kSpeculate:
    case PassKind::kUpdate:
    case PassKind::kRepublish:
      per_element = kStateBytes + gradient + theta + (arguments_.absorb ? kStateBytes + gradient : 0);
      break;
    case PassKind::kRestore:
    case PassKind::kAdopt:
      per_element = sizeof(float) + theta;
      break;
    case PassKind::kSettle:
      per_element = 2 * kStateBytes + gradient;
      break;
  }
  return PassReport{arguments_.kind, per_element * bucket_layout_.elements, duration_};
}

}  // namespace superoffload::engine
