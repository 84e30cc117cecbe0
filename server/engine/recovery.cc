#include "server/engine/recovery.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "server/engine/absorb.h"
#include "server/engine/segments.h"

namespace superoffload::engine {

RecoveryPass::RecoveryPass(const Layout& layout, const OptimizerMemory& memory, Record* record,
                           std::function<void()> on_done)
    : layout_(layout), memory_(memory), record_(*record), on_done_(std::move(on_done)) {
  const uint64_t t = record_.committed(), kept = layout.kept_steps;
  values_.resize(kept);
  for (uint64_t step = t > kept ? t - kept + 1 : 1; step <= t; ++step) values_[step % kept] = record_.Values(step);
}

void RecoveryPass::Start(const Platform& platform) {
  record_.ForEachTorn([this](const Record::Torn& torn) { Repair(torn); });
  if (layout_.algorithm->stages == nullptr) return platform.pool->Submit(this, layout_.stretches);
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
  for (uint64_t i = 0; i < bucket.stretches(); ++i) {
    least = std::min(least, record_.absorbed(bucket.first_stretch + i));
  }
  return least;
}

void RecoveryPass::RunChunk(size_t index, size_t worker) {
  if (platform_ != nullptr) return;  // nothing is left to do
  while (record_.absorbed(index) < record_.committed()) {
    const uint64_t t = record_.absorbed(index) + 1;
    const StretchPlace place = Find(index);
    const kernels::Algorithm& algorithm = *layout_.FormatOf(*place.bucket).algorithm;
    Absorb(place, t, place.range.begin, algorithm.best(), record_.BeginAbsorb(worker, index, t));
    record_.EndAbsorb(worker, index, t);
  }
}

// Finishes a stretch that was cut off under the slot that it was cut off under.
void RecoveryPass::Repair(const Record::Torn& torn) {
  const StretchPlace place = Find(torn.stretch);
  const ChunkView view = ViewChunk(layout_, memory_, *place.bucket, place.chunk);
  kernels::UndoSlot& slot = record_.slot(torn.worker);
  const kernels::Algorithm& algorithm = *layout_.FormatOf(*place.bucket).algorithm;
  const size_t done =
      std::max(place.range.begin, kernels::UndoTornGranule(slot, place.range.end, algorithm, view.state));
  if (done > place.range.end) return;  // not what BucketPass writes; nothing is known about it
  // Another instruction set may have cut it where no granule of this one begins.
  Absorb(place, torn.step, done, algorithm.scalar(), &slot);
  record_.EndAbsorb(torn.worker, torn.stretch, torn.step);
}

RecoveryPass::StretchPlace RecoveryPass::Find(size_t stretch) const {
  const auto after = [](size_t index, const BucketLayout& bucket) { return index < bucket.first_stretch; };
  const auto bucket = std::upper_bound(layout_.buckets.begin(), layout_.buckets.end(), stretch, after) - 1;
  const uint64_t first = (stretch - bucket->first_stretch) * bucket->stretch_elements();
  const uint64_t end = std::min(first + bucket->stretch_elements(), bucket->elements);
  const uint64_t chunk = first / kernels::kChunkElements, begin = chunk * kernels::kChunkElements;
  return {&*bucket, chunk, {first - begin, end - begin}};
}

// The gradient of step `t` into a stretch, from element `done` of its chunk on.
void RecoveryPass::Absorb(const StretchPlace& place, uint64_t t, size_t done, const kernels::AlgorithmKernels& kernels,
                          kernels::UndoSlot* undo) {
  const BucketLayout& bucket = *place.bucket;
  const bool logged = record_.Logged(t, &bucket - layout_.buckets.data());
  AbsorbRange(layout_, ViewChunk(layout_, memory_, bucket, place.chunk), place.chunk, {done, place.range.end},
              SegmentsOf(bucket, t), GradientOf(memory_, bucket, place.chunk, t, logged), kernels, record_.seed(),
              undo);
}

// What of the bucket absorbs step `t`.
std::vector<Segment> RecoveryPass::SegmentsOf(const BucketLayout& bucket, uint64_t t) const {
  const StepValues& values = values_[t % layout_.kept_steps];
  const double* const scalars = values.scalars.data() + bucket.group * layout_.algorithm->scalars.size();
  const auto absorb = [&](uint32_t parameter) -> std::optional<kernels::StepConstants> {
    if (!record_.Had(t, parameter)) return std::nullopt;
    return layout_.algorithm->make_constants(scalars, record_.ParameterSteps(t, parameter), values.gradient_scale);
  };
  const auto nothing = [](uint32_t) { return std::optional<kernels::StepConstants>(); };
  return MakeSegments(layout_, bucket, absorb, nothing);
}

}  // namespace superoffload::engine
