// What a simulated trainer submits, and when.
#include <algorithm>
#include <cstring>

#include "tests/fault/simulated/simulated_trainer.h"

namespace superoffload::faults {

void SimulatedTrainer::Wake() {
  if (!attached_ || waking_ == rings_->epoch() || finished_) return;
  waking_ = rings_->epoch();
  After([this, epoch = rings_->epoch()] {
    if (!attached_ || rings_->epoch() != epoch || finished_) return;
    waking_ = 0;
    if (Act()) Wake();
  });
}

bool SimulatedTrainer::Act() {
  if (changing_residents_) return false;
  if (LookAtSomeBucket()) return true;
  if (gpu_ != nullptr && (oracle_.committed_steps() >= ground_.scenario.steps || ground_.random.Chance(0.3))) {
    if (ReadSomeBucket()) return true;
    if (oracle_.committed_steps() >= ground_.scenario.steps) return false;
  }
  if (stage_ < Stage::kEnd && ground_.random.Chance(0.5) && WriteSomeGradient()) return true;
  if (!over_ && stage_ <= Stage::kBegin) return WriteSomeGradient();  // the step before has not ended
  switch (stage_) {
    case Stage::kEarlyGroups:
      if (gpu_ != nullptr && ChangeWhatStays()) return false;
      if (SubmitGroups(attempt_.early_groups)) return true;
      stage_ = Stage::kBegin;
      [[fallthrough]];
    case Stage::kBegin:
      ++step_;
      over_ = false;
      speculative_.assign(ground_.buckets(), false);
      final_.assign(ground_.buckets(), false);
      Submit(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, attempt_.early_scale);
      stage_ = Stage::kAbsent;
      return true;
    case Stage::kAbsent:
      if (SubmitAbsent()) return true;
      stage_ = Stage::kGradients;
      [[fallthrough]];
    case Stage::kGradients:
      if (attempt_.abandon_after && std::count(submitted_.begin(), submitted_.end(), true) >= *attempt_.abandon_after) {
        Submit(SUPEROFFLOAD_SUBMIT_ABANDON_STEP, 0u);
        stage_ = Stage::kEnded;
        return true;
      }
      if (std::count(submitted_.begin(), submitted_.end(), false) > 0) {
        return gpu_ != nullptr ? HandOverSomeGradient() : SubmitSomeGradient() || WriteSomeGradient();
      }
      stage_ = Stage::kMeasure;
      [[fallthrough]];
    case Stage::kMeasure:
      if (attempt_.measure && !measure_asked_) {
        measure_asked_ = true;
        Submit(SUPEROFFLOAD_SUBMIT_MEASURE_NORM, attempt_.scale);
        return true;
      }
      if (attempt_.measure && !(progress_->step() == step_ && progress_->norm())) return false;
      stage_ = Stage::kGroups;
      [[fallthrough]];
    case Stage::kGroups:
      if (SubmitGroups(attempt_.groups)) return true;
      stage_ = Stage::kPrepare;
      [[fallthrough]];
    case Stage::kPrepare:
      if (ground_.scenario.run && !in_question_) {
        Submit(SUPEROFFLOAD_SUBMIT_PREPARE, attempt_.scale, attempt_.max_grad_norm);
        return in_question_ = true;
      }
      if (ground_.scenario.run && !contribution_) return false;
      stage_ = Stage::kEnd;
      [[fallthrough]];
    case Stage::kEnd:
      // What was launched before the step's end reads the parameters of the step before.
      if (gpu_ != nullptr && ReadSomeBucket()) return true;
      if (gpu_ != nullptr ? std::find(asked_.begin(), asked_.end(), false) != asked_.end() : !has_model_) return false;
      SubmitEnd();
      in_question_ = true;
      stage_ = Stage::kEnded;
      return true;
    case Stage::kEnded:
      return false;
  }
  return false;
}

// A slot is written as soon as what it held is absorbed: often before the step before is over.
bool SimulatedTrainer::WriteSomeGradient() {
  if (gpu_ != nullptr) return false;
  std::vector<uint32_t> may;
  for (uint32_t b = 0; b < ground_.buckets(); ++b) {
    if (!written_[b] && free_[slot_][b]) may.push_back(b);
  }
  if (may.empty()) return false;
  const uint32_t b = may[ground_.random.Below(may.size())];
  const engine::BucketLayout& bucket = ground_.layout.buckets[b];
  ground_.log.Add("trainer", "writes gradient", b, slot_);
  std::memcpy(ground_.memory.gradients.data() + bucket.gradient_offsets[slot_], attempt_.Gradient(bucket),
              bucket.gradient_bytes());
  written_[b] = true;
  return true;
}

bool SimulatedTrainer::SubmitSomeGradient() {
  std::vector<uint32_t> may;
  for (uint32_t b = 0; b < ground_.buckets(); ++b) {
    if (written_[b] && !submitted_[b]) may.push_back(b);
  }
  if (may.empty()) return false;
  const uint32_t b = may[ground_.random.Below(may.size())];
  superoffload_ring_entry entry = {};
  if (attempt_.sums[b]) {
    entry.flags = SUPEROFFLOAD_FLAG_SUM_KNOWN;
    entry.payload.gradient.sum_of_squares = *attempt_.sums[b];
  }
  submitted_[b] = true;
  Submit(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, b, entry);
  return true;
}

bool SimulatedTrainer::SubmitGroups(const std::vector<engine::Scalars>& groups) {
  for (uint32_t g = 0; g < groups.size(); ++g) {
    for (uint32_t first = 0; first < groups[g].size(); first += SUPEROFFLOAD_GROUP_SCALARS) {
      const uint32_t count = std::min<uint32_t>(SUPEROFFLOAD_GROUP_SCALARS, groups[g].size() - first);
      const auto begin = groups[g].begin() + first;
      engine::Scalars& sent = sent_groups_[g];
      if (sent.size() >= first + count && std::equal(begin, begin + count, sent.begin() + first)) continue;
      sent.resize(std::max<size_t>(sent.size(), first + count));
      std::copy(begin, begin + count, sent.begin() + first);
      superoffload_ring_entry entry = {};
      entry.payload.group.first = first;
      entry.payload.group.count = count;
      std::copy(begin, begin + count, entry.payload.group.values);
      Submit(SUPEROFFLOAD_SUBMIT_GROUP, g, entry);
      return true;
    }
  }
  return false;
}

void SimulatedTrainer::SubmitEnd() {
  superoffload_ring_entry entry = {};
  entry.payload.end = {.gradient_scale = attempt_.scale,
                       .max_grad_norm = attempt_.max_grad_norm,
                       .total_sum_of_squares = contribution_ ? contribution_->total : 0,
                       .attempt = contribution_ ? contribution_->attempt : 0,
                       .streamed_bytes = 0};
  Submit(SUPEROFFLOAD_SUBMIT_END_STEP, 0, entry);
}

bool SimulatedTrainer::SubmitAbsent() {
  while (absent_done_ < attempt_.absent.size() && !attempt_.absent[absent_done_]) ++absent_done_;
  if (absent_done_ == attempt_.absent.size()) return false;
  superoffload_ring_entry entry = {};
  entry.payload.absent.count = 1;
  Submit(SUPEROFFLOAD_SUBMIT_ABSENT, static_cast<uint32_t>(absent_done_++), entry);
  return true;
}

void SimulatedTrainer::Submit(superoffload_submission opcode, uint32_t index, superoffload_ring_entry entry) {
  entry.opcode = static_cast<uint16_t>(opcode);
  entry.index = index;
  entry.step = step_;
  entry.attachment_epoch = rings_->epoch();
  ground_.log.Add("trainer", "submits", opcode, index);
  gpu_ == nullptr ? Push(rings_, entry) : gpu_->Submit(entry);
}

void SimulatedTrainer::Push(const std::shared_ptr<SimulatedRings>& rings, const superoffload_ring_entry& entry) {
  rings->submissions.push_back(entry);
  daemon_.Submitted(rings);
}

void SimulatedTrainer::Submit(superoffload_submission opcode, double f64_0, double f64_1) {
  superoffload_ring_entry entry = {};
  entry.payload.f64[0] = f64_0;
  entry.payload.f64[1] = f64_1;
  Submit(opcode, 0, entry);
}

}  // namespace superoffload::faults
