#include "server/engine/bucket_pass.h"

#include <algorithm>
#include <utility>

#include "kernels/chunk_sums.h"
#include "server/engine/absorb.h"
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
    case PassKind::kTakeIn:
      return "take_in";
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
      chunk_sums_(bucket_layout_.chunks()) {
  if (layout.algorithm->stages != nullptr) matrices_.emplace(layout, memory, bucket_layout_);
}

void BucketPass::Start(const Platform& platform, PassArguments arguments, bool when_idle) {
  arguments_ = std::move(arguments);
  clock_ = platform.clock;
  start_time_ = clock_->Now();
  set_when_idle(when_idle);
  pool_ = platform.pool;
  rounds_ = RoundsOf(arguments_);
  round_ = 0;
  bytes_ = 0;
  SubmitRound();
}

std::vector<BucketPass::Round> BucketPass::RoundsOf(const PassArguments& arguments) const {
  const bool updates = arguments.kind != PassKind::kNorm && arguments.kind != PassKind::kPublishMasters &&
                       arguments.kind != PassKind::kPush;
  if (!matrices_ || !updates) return {{}};
  std::vector<Round> rounds;
  const auto add = [&](Round::Part part, bool prepared) {
    for (size_t stage = 0; !prepared && stage < layout_.algorithm->stages->count; ++stage) {
      rounds.push_back({part, stage});
    }
    rounds.push_back({part, std::nullopt});
  };
  if (arguments.absorbed_step != 0) {
    add(Round::Part::kAbsorb, record_->HasDirections(bucket_, arguments.absorbed_step));
  }
  if (arguments.kind != PassKind::kAbsorb) add(Round::Part::kPublish, false);
  return rounds;
}

void BucketPass::SubmitRound() { pool_->Submit(this, round().stage ? matrices_->tasks() : chunk_sums_.size()); }

// Chunks that are being written can no longer tell what the directions were made of.
void BucketPass::EndRound() const {
  if (round().part != Round::Part::kAbsorb) return;
  if (!round().stage) {
    record_->DropDirections();
  } else if (*round().stage + 1 == layout_.algorithm->stages->count) {
    record_->KeepDirections(bucket_, arguments_.absorbed_step);
  }
}

void BucketPass::RunStage(size_t index) const {
  const BucketMatrices::Task& task = matrices_->task(index);
  const auto segment = FindSegment(arguments_.segments, task.at);
  if (segment == arguments_.segments.end() || segment->begin > task.at) return;
  const bool absorbs = round().part == Round::Part::kAbsorb;
  const std::optional<kernels::StepConstants>& constants = absorbs ? segment->absorb : segment->publish;
  if (!constants) return;
  const uint32_t slot = SlotOf(absorbs ? arguments_.absorbed_step : arguments_.step);
  matrices_->Run(*layout_.algorithm->stages, *round().stage, task, slot, *constants);
}

void BucketPass::RunChunk(size_t index, size_t worker) {
  if (round().stage) return RunStage(index);
  const ChunkView view = ViewChunk(layout_, memory_, bucket_layout_, index);
  const size_t n = view.elements;
  const kernels::MutableElements theta = view.parameters;
  const kernels::MutableElements masters = {view.state.arrays[0], MasterType()};
  if (arguments_.kind == PassKind::kPublishMasters) return kernels::Publish(n, {masters.data, masters.dtype}, theta);
  if (arguments_.kind == PassKind::kPush) return kernels::Push(n, {theta.data, theta.dtype}, masters);
  if (bucket_layout_.log_slots > 0 && arguments_.kind == PassKind::kAbsorb) return AbsorbLog(index, worker);
  const bool absorbs = round().part != Round::Part::kPublish, publishes = round().part != Round::Part::kAbsorb;
  const uint64_t absorbed_step = absorbs ? arguments_.absorbed_step : 0;
  const kernels::ConstElements gradient = GradientOf(memory_, bucket_layout_, index, arguments_.step, false);
  const kernels::ConstElements pending = GradientOf(memory_, bucket_layout_, index, absorbed_step, false);
  const kernels::AlgorithmKernels& kernels = layout_.FormatOf(bucket_layout_).algorithm->best();
  const size_t chunk = bucket_layout_.first_stretch + index;
  if (matrices_ && absorbed_step != 0 && record_->absorbed(chunk) == absorbed_step) return;  // before a kill
  kernels::UndoSlot* const undo = absorbed_step != 0 ? record_->BeginAbsorb(worker, chunk, absorbed_step) : nullptr;
  kernels::NormLanes lanes;
  kernels::NormLanes* const norm = arguments_.sum_known ? nullptr : &lanes;
  ForEachSegment(arguments_.segments, index, n, [&](size_t first, size_t end, const Segment& segment) {
    const kernels::StateView state = StateOf(layout_, view, segment.parameter, record_->seed());
    if (undo != nullptr && segment.absorb) kernels::BeginRange(*undo, first);
    if (arguments_.kind == PassKind::kNorm) {
      kernels::AddSquares(first, end, gradient, lanes);
    } else if (absorbs && publishes && segment.absorb && segment.publish) {
      kernels.absorb_and_publish(first, end, state, *segment.absorb, pending, *segment.publish, gradient, theta, norm,
                                 undo);
    } else if (absorbs && segment.absorb) {
      kernels.absorb(first, end, state, *segment.absorb, pending, undo);
    } else if (publishes && segment.publish) {
      kernels.publish(first, end, state, *segment.publish, gradient, theta, norm);
    }
  });
  if (absorbed_step != 0) record_->EndAbsorb(worker, chunk, absorbed_step);
  // Nobody needs the gradient any more, whoever dies.
  if (arguments_.kind == PassKind::kTakeIn) kernels::Publish(n, {masters.data, masters.dtype}, theta);
  chunk_sums_[index] = lanes.Sum();
}

// Stretch by stretch, each of which takes in one step after the other while it is in the cache.
void BucketPass::AbsorbLog(size_t index, size_t worker) {
  const ChunkView view = ViewChunk(layout_, memory_, bucket_layout_, index);
  const kernels::AlgorithmKernels& kernels = layout_.FormatOf(bucket_layout_).algorithm->best();
  const auto absorb = [&](size_t begin, uint64_t t, const std::vector<Segment>& segments) {
    const size_t stretch =
        bucket_layout_.first_stretch + (index * kernels::kChunkElements + begin) / kLogStretchElements;
    AbsorbRange(layout_, view, index, {begin, std::min<size_t>(begin + kLogStretchElements, view.elements)}, segments,
                GradientOf(memory_, bucket_layout_, index, t, record_->Logged(t, bucket_)), kernels, record_->seed(),
                record_->BeginAbsorb(worker, stretch, t));
    record_->EndAbsorb(worker, stretch, t);
  };
  for (size_t begin = 0; begin < view.elements; begin += kLogStretchElements) {
    for (const EarlierStep& earlier : arguments_.earlier) absorb(begin, earlier.step, earlier.segments);
    absorb(begin, arguments_.absorbed_step, arguments_.segments);
  }
}

kernels::DType BucketPass::MasterType() const {
  return layout_.FormatOf(bucket_layout_).algorithm->arrays.front().dtype;
}

void BucketPass::Done() {
  EndRound();
  bytes_ += work().bytes;
  if (++round_ < rounds_.size()) return SubmitRound();
  duration_ = clock_->Now() - start_time_;
  sum_of_squares_ = kernels::SumOfChunks(chunk_sums_);
  on_done_(bucket_);
}

JobWork BucketPass::work() const {
  const uint64_t gradient = kernels::DTypeBytes(bucket_layout_.gradient_dtype);
  const uint64_t theta = kernels::DTypeBytes(bucket_layout_.dtype);
  JobWork work;
  if (arguments_.kind == PassKind::kPublishMasters || arguments_.kind == PassKind::kPush) {
    work.bytes = (kernels::DTypeBytes(MasterType()) + theta) * bucket_layout_.elements;
    work.narrowed = bucket_layout_.elements;
  }
  if (arguments_.kind == PassKind::kTakeIn) {  // the masters are in the cache
    work.bytes = theta * bucket_layout_.elements;
    work.narrowed = bucket_layout_.elements;
  }
  const bool absorbs = round().part != Round::Part::kPublish, publishes = round().part != Round::Part::kAbsorb;
  for (const Segment& segment : arguments_.segments) {
    const uint64_t elements = segment.end - segment.begin;
    if (round().stage) {  // reads what it is made of, and writes directions
      const bool runs = (absorbs && segment.absorb) || (publishes && segment.publish);
      if (runs) work.bytes += layout_.FormatOf(bucket_layout_).Bytes(elements) + (gradient + sizeof(float)) * elements;
      continue;
    }
    if (arguments_.kind == PassKind::kNorm) {
      work.bytes += gradient * elements;
      continue;
    }
    // What is absorbed and published is read once.
    const uint64_t state = layout_.FormatOf(bucket_layout_).Bytes(elements);
    const bool absorbed = absorbs && segment.absorb, published = publishes && segment.publish;
    if (absorbed) work.bytes += 2 * state + gradient * elements;
    if (published) work.bytes += (gradient + theta) * elements + (absorbed ? 0 : state);
    if (absorbed) work.absorbed += elements;
    if (published) work.published += elements;
  }
  for (const EarlierStep& earlier : arguments_.earlier) {  // their state is in the cache
    for (const Segment& segment : earlier.segments) {
      work.bytes += gradient * (segment.end - segment.begin);
      work.absorbed += segment.end - segment.begin;
    }
  }
  return work;
}

PassReport BucketPass::report() const { return {arguments_.kind, bytes_, duration_}; }

}  // namespace superoffload::engine
