#include "server/engine/recovery.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "server/engine/segments.h"

namespace superoffload::engine {

RecoveryPass::RecoveryPass(const Layout& layout, const OptimizerMemory& memory, Record* record,
                           std::function<void()> on_done)
    : layout_(layout), memory_(memory), record_(*record), on_done_(std::move(on_done)) {
  const uint64_t t = record_.committed();
  values_[t % 2] = record_.Values(t);
  if (t > 1) values_[(t - 1) % 2] = record_.Values(t - 1);
}

void RecoveryPass::Start(const Platform& platform) {
  record_.ForEachTorn([this](const Record::Torn& torn) { Repair(torn); });
  if (layout_.algorithm->stages == nullptr) return platform.pool->Submit(this, layout_.chunks);
  platform_ = &platform;
  const std::optional<size_t> first = record_.directions();
  if (first && *first < layout_.buckets.size()) order_.push_back(static_cast<uint32_t>(*first));
  for (uint32_t i = 0; i < layout_.buckets.size(); ++i) order_.push_back(i);
  AbsorbNextBucket();
}

void RecoveryPass::AbsorbNextBucket() {
  for (; next_ < order_.size(); ++next_) {
    const uint32_t index = order_[next_];
    const BucketLayout& bucket = layout_.buckets[index];
    const uint64_t t = LeastAbsorbed(bucket) + 1;
    if (t > record_.committed()) continue;
    // The one before is the caller: it lives on.
    passes_.push_back(
        std::make_unique<BucketPass>(index, layout_, memory_, &record_, [this](uint32_t) { AbsorbNextBucket(); }));
    return passes_.back()->Start(*platform_, {PassKind::kAbsorb, SegmentsOf(bucket, t), t});
  }
  record_.DropDirections();
  platform_->pool->Submit(this, 1);
}

uint64_t RecoveryPass::LeastAbsorbed(const BucketLayout& bucket) const {
  uint64_t least = record_.committed();
  for (uint64_t i = 0; i < bucket.chunks(); ++i) least = std::min(least, record_.absorbed(bucket.first_chunk + i));
  return least;
}

void RecoveryPass::RunChunk(size_t index, size_t worker) {
  if (platform_ != nullptr) return;  // nothing is left to do
  while (record_.absorbed(index) < record_.committed()) {
    const uint64_t t = record_.absorbed(index) + 1;
    const kernels::Algorithm& algorithm = *layout_.FormatOf(BucketOf(index)).algorithm;
    Absorb(index, t, 0, algorithm.best(), record_.BeginAbsorb(worker, index, t));
    record_.EndAbsorb(worker, index, t);
  }
}

// Finishes a chunk that was cut off under the slot that it was cut off under.
void RecoveryPass::Repair(const Record::Torn& torn) {
  const BucketLayout& bucket = BucketOf(torn.chunk);
  const ChunkView chunk = ViewChunk(layout_, memory_, bucket, torn.chunk - bucket.first_chunk);
  kernels::UndoSlot& slot = record_.slot(torn.worker);
  const kernels::Algorithm& algorithm = *layout_.FormatOf(bucket).algorithm;
  const size_t done = kernels::UndoTornGranule(slot, chunk.elements, algorithm, chunk.state);
  if (done > chunk.elements) return;  // not what BucketPass writes; nothing is known about it
  // Another instruction set may have cut it where no granule of this one begins.
  Absorb(torn.chunk, torn.step, done, algorithm.scalar(), &slot);
  record_.EndAbsorb(torn.worker, torn.chunk, torn.step);
}

const BucketLayout& RecoveryPass::BucketOf(size_t chunk) const {
  const auto after = [](size_t index, const BucketLayout& bucket) { return index < bucket.first_chunk; };
  return *(std::upper_bound(layout_.buckets.begin(), layout_.buckets.end(), chunk, after) - 1);
}

// The gradient of step `t` into chunk `index`, from element `done` on.
void RecoveryPass::Absorb(size_t index, uint64_t t, size_t done, const kernels::AlgorithmKernels& kernels,
                          kernels::UndoSlot* undo) {
  const BucketLayout& bucket = BucketOf(index);
  const ChunkView chunk = ViewChunk(layout_, memory_, bucket, index - bucket.first_chunk);
  ForEachSegment(SegmentsOf(bucket, t), index - bucket.first_chunk, chunk.elements,
                 [&](size_t first, size_t end, const Segment& segment) {
                   if (end <= done) return;
                   first = std::max(first, done);
                   kernels::BeginRange(*undo, first);
                   kernels.absorb(first, end, StateOf(layout_, chunk, segment.parameter, record_.seed()),
                                  *segment.absorb, chunk.gradients[SlotOf(t)], undo);
                 });
}

// What of the bucket absorbs step `t`.
std::vector<Segment> RecoveryPass::SegmentsOf(const BucketLayout& bucket, uint64_t t) const {
  const StepValues& values = values_[t % 2];
  const double* const scalars = values.scalars.data() + bucket.group * layout_.algorithm->scalars.size();
  const auto absorb = [&](uint32_t parameter) -> std::optional<kernels::StepConstants> {
    if (!record_.Had(t, parameter)) return std::nullopt;
    return layout_.algorithm->make_constants(scalars, record_.ParameterSteps(t, parameter), values.gradient_scale);
  };
  const auto nothing = [](uint32_t) { return std::optional<kernels::StepConstants>(); };
  return MakeSegments(layout_, bucket, absorb, nothing);
}

}  // namespace superoffload::engine
