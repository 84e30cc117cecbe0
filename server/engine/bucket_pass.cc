#include "server/engine/bucket_pass.h"

#include <utility>

#include "kernels/chunk_sums.h"
#include "server/engine/segments.h"

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
    case PassKind::kPublishMasters:
      return "publish_masters";
    case PassKind::kAbsorb:
      return "absorb";
    case PassKind::kPush:
      return "push";
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

void BucketPass::Start(const Platform& platform, PassArguments arguments, bool when_idle) {
  arguments_ = std::move(arguments);
  clock_ = platform.clock;
  start_time_ = clock_->Now();
  set_when_idle(when_idle);
  platform.pool->Submit(this, chunk_sums_.size());
}

void BucketPass::RunChunk(size_t index, size_t worker) {
  const ChunkView view = ViewChunk(layout_, memory_, bucket_layout_, index);
  const size_t n = view.elements;
  const kernels::StateView& state = view.state;
  const kernels::MutableElements theta = view.parameters;
  if (arguments_.kind == PassKind::kPublishMasters) return kernels::Narrow(n, state.Floats(0), theta);
  if (arguments_.kind == PassKind::kPush) return kernels::Push(n, {theta.data, theta.dtype}, state.Floats(0));
  const uint64_t absorbed_step = arguments_.absorbed_step;
  const kernels::ConstElements gradient = view.gradients[arguments_.slot];
  const kernels::ConstElements pending = view.gradients[SlotOf(absorbed_step)];
  const kernels::AlgorithmKernels& kernels = layout_.algorithm->best();
  const size_t chunk = bucket_layout_.first_chunk + index;
  kernels::UndoSlot* const undo = absorbed_step != 0 ? record_->BeginAbsorb(worker, chunk, absorbed_step) : nullptr;
  kernels::NormLanes lanes;
  kernels::NormLanes* const norm = arguments_.sum_known ? nullptr : &lanes;
  ForEachSegment(arguments_.segments, index, n, [&](size_t first, size_t end, const Segment& segment) {
    if (arguments_.kind == PassKind::kNorm) {
      kernels::AddSquares(first, end, gradient, lanes);
    } else if (segment.absorb && segment.publish) {
      kernels.absorb_and_publish(first, end, state, *segment.absorb, pending, *segment.publish, gradient, theta, norm,
                                 undo);
    } else if (segment.absorb) {
      kernels.absorb(first, end, state, *segment.absorb, pending, undo);
    } else {
      kernels.publish(first, end, state, *segment.publish, gradient, theta, norm);
    }
  });
  if (absorbed_step != 0) record_->EndAbsorb(worker, chunk, absorbed_step);
  chunk_sums_[index] = lanes.Sum();
}

void BucketPass::Done() {
  duration_ = clock_->Now() - start_time_;
  sum_of_squares_ = kernels::SumOfChunks(chunk_sums_);
  on_done_(bucket_);
}

JobWork BucketPass::work() const {
  const uint64_t gradient = kernels::DTypeBytes(bucket_layout_.gradient_dtype);
  const uint64_t theta = kernels::DTypeBytes(bucket_layout_.dtype);
  JobWork work;
  if (arguments_.kind == PassKind::kPublishMasters || arguments_.kind == PassKind::kPush) {
    work.bytes = (sizeof(float) + theta) * bucket_layout_.elements;
    work.narrowed = bucket_layout_.elements;
  }
  for (const Segment& segment : arguments_.segments) {
    const uint64_t elements = segment.end - segment.begin;
    if (arguments_.kind == PassKind::kNorm) {
      work.bytes += gradient * elements;
      continue;
    }
    // What is absorbed and published is read once.
    const uint64_t state = layout_.StateBytes(elements);
    if (segment.absorb) work.bytes += 2 * state + gradient * elements;
    if (segment.publish) work.bytes += (gradient + theta) * elements + (segment.absorb ? 0 : state);
    if (segment.absorb) work.absorbed += elements;
    if (segment.publish) work.published += elements;
  }
  return work;
}

PassReport BucketPass::report() const { return {arguments_.kind, work().bytes, duration_}; }

}  // namespace superoffload::engine
