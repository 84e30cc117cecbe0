// What a simulated trainer with a GPU does otherwise.
#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/fault/simulated/simulated_trainer.h"

namespace superoffload::faults {

bool SimulatedTrainer::GpuHasEnded() {
  if (gpu_ == nullptr) return true;
  if (!gpu_->idle()) return false;
  // Nobody has changed the parameters since: all of them are there.
  if (left_ == daemon_.lives() && daemon_.alive()) {
    std::vector<std::byte> parameters(model_.size());
    for (uint32_t b = 0; b < ground_.buckets(); ++b) {
      std::ranges::copy(gpu_->parameters(b), parameters.data() + ground_.layout.buckets[b].parameters_offset);
    }
    oracle_.CheckParameters(parameters, "in the GPU after leaving", [this](uint32_t b) { return !gpu_->streams(b); });
  }
  left_.reset();
  retired_gpus_.push_back(std::move(gpu_));
  return true;
}

void SimulatedTrainer::OpenGpu(const Welcome& welcome) {
  const auto submit = [this, rings = rings_](const superoffload_ring_entry& entry) {
    if (entry.opcode == SUPEROFFLOAD_SUBMIT_GRADIENT_READY) CheckSum(entry);
    Push(rings, entry);
  };
  gpu_ = std::make_unique<SimulatedGpu>(
      &ground_, gpu_memory_, SimulatedGpu::Start{welcome.committed_steps, welcome.parameter_steps, welcome.groups},
      [this](std::function<void()> event) { After(std::move(event)); }, submit,
      [this, rings = rings_] {
        if (rings == rings_) Wake();
      });
  gpu_->Pull();
  may_read_all_ = true;
  asked_.assign(ground_.buckets(), true);
  read_.assign(ground_.buckets(), true);
  if (ground_.random.Chance(ground_.scenario.residents)) {  // attaching has settled
    SetResident(static_cast<uint32_t>(ground_.random.Between(1, ground_.buckets())));
  }
}

bool SimulatedTrainer::HandOverSomeGradient() {
  std::vector<uint32_t> may;
  for (uint32_t b = 0; b < ground_.buckets(); ++b) {
    if (!submitted_[b] && gpu_->SumIssued(b)) may.push_back(b);
  }
  if (may.empty() || !gpu_->has_slot()) return false;
  const uint32_t b = may[ground_.random.Below(may.size())];
  const uint32_t host_slot = host_slots_[b] = gpu_->HostSlotOf(b, oracle_.committed_steps());
  if (!free_[host_slot][b]) Fail("bucket ", b, " is handed over before its slot ", host_slot, " is free");
  const AttemptPass& gradients = attempt_.passes[passes_[b]];
  const client::Pass pass{.adds = passes_[b] > 0, .last = passes_[b] + 1 == attempt_.passes.size()};
  ++passes_[b];
  written_[b] = submitted_[b] = pass.last;
  ground_.log.Add("trainer", "hands over gradient", b, host_slot);
  superoffload_ring_entry entry = {};
  entry.opcode = SUPEROFFLOAD_SUBMIT_GRADIENT_READY;
  entry.index = b;
  entry.step = step_;
  entry.attachment_epoch = rings_->epoch();
  gpu_->HandOver(entry, gradients, pass, host_slot);
  return true;
}

// The sum that was copied down. Of an attachment that has ended, the attempt may be another by now.
void SimulatedTrainer::CheckSum(const superoffload_ring_entry& entry) {
  ground_.log.Add("trainer", "submits gradient", entry.index, entry.flags);
  if ((entry.flags & SUPEROFFLOAD_FLAG_SUM_KNOWN) == 0) return;
  if (!attached_ || rings_->epoch() != entry.attachment_epoch) return;
  const double sum = entry.payload.gradient.sum_of_squares, expected = *attempt_.sums[entry.index];
  if (std::memcmp(&sum, &expected, sizeof(sum)) != 0) {
    Fail("bucket ", entry.index, " has the sum ", sum, ", not ", expected);
  }
}

// As many buckets or units as the trainer likes are kept on the GPU from now on. True: it goes on later.
bool SimulatedTrainer::ChangeWhatStays() {
  if (!over_ || !has_model_ || !gpu_->idle() || !std::exchange(may_change_what_stays_, false)) return false;
  if (ground_.random.Chance(ground_.scenario.change_units)) {
    std::vector<bool> stays(gpu_->units());
    for (size_t unit = 0; unit < stays.size(); ++unit) stays[unit] = ground_.random.Chance(0.5);
    ground_.log.Add("trainer", "keeps units", std::ranges::count(stays, true), stays.size());
    gpu_->KeepUnits(stays);
  }
  if (!ground_.random.Chance(ground_.scenario.change_residents)) return false;
  const auto count = static_cast<uint32_t>(ground_.random.Below(ground_.buckets() + 1));
  const uint32_t most = std::max(count, gpu_->residents());
  if (count <= gpu_->residents() && !ground_.layout.has_logs) {
    SetResident(count);
    return false;
  }
  changing_residents_ = true;
  daemon_.Settle(rings_, ground_.buckets() - most, [this, rings = rings_, count, most] {
    After([this, rings, count, most] {
      if (rings != rings_ || !attached_) return;
      changing_residents_ = false;
      // Whether or not SLOT_FREE of what was settled has come.
      for (std::vector<bool>& slot : free_) std::fill(slot.end() - most, slot.end(), true);
      SetResident(count);
      Wake();
    });
  });
  return true;
}

void SimulatedTrainer::SetResident(uint32_t count) {
  ground_.log.Add("trainer", "keeps residents", gpu_->SetResident(count), count);
}

// The model's next forward pass reads a bucket, whenever it likes: even when the next step has begun.
bool SimulatedTrainer::ReadSomeBucket() {
  std::vector<uint32_t> may;
  for (uint32_t b = 0; b < ground_.buckets(); ++b) {
    if (!asked_[b] && MayRead(b)) may.push_back(b);
  }
  if (may.empty()) return false;
  const uint32_t b = may[ground_.random.Below(may.size())];
  asked_[b] = true;
  Read(b, [this, b, reading = reading_](const std::byte* parameters) {
    const engine::BucketLayout& bucket = ground_.layout.buckets[b];
    std::memcpy(model_.data() + bucket.parameters_offset, parameters, bucket.parameters_bytes());
    After([this, b, reading] {
      if (reading == reading_ && attached_) HasRead(b);
    });
  });
  return true;
}

// Backward passes, recomputation and evaluations do, until the step ends: also when the gradient has left.
bool SimulatedTrainer::LookAtSomeBucket() {
  if (gpu_ == nullptr || stage_ >= Stage::kEnded || !ground_.random.Chance(ground_.scenario.look)) return false;
  std::vector<uint32_t> may;
  for (uint32_t b = 0; b < ground_.buckets(); ++b) {
    if (gpu_->streams(b) && MayRead(b)) may.push_back(b);
  }
  if (may.empty()) return false;
  Read(may[ground_.random.Below(may.size())], [](const std::byte*) {});
  return true;
}

bool SimulatedTrainer::MayRead(uint32_t bucket) const {
  return may_read_all_ || std::ranges::all_of(gpu_->ReadTogether(bucket), [this](uint32_t b) {
           return progress_->IsFinal(b) || (gpu_->resident(b) && progress_->verdict());
         });
}

// Then `read`, of the bits of the last committed step.
void SimulatedTrainer::Read(uint32_t b, std::function<void(const std::byte* parameters)> read) {
  ground_.log.Add("trainer", "reads", b);
  const engine::BucketLayout& bucket = ground_.layout.buckets[b];
  const auto now = oracle_.parameters().begin() + static_cast<ptrdiff_t>(bucket.parameters_offset);
  gpu_->Read(
      b, [this](uint32_t other) { return may_read_all_ || progress_->IsFinal(other); },
      [b, read = std::move(read),
       expected = std::vector(now, now + static_cast<ptrdiff_t>(bucket.parameters_bytes()))](const std::byte* seen) {
        if (std::memcmp(seen, expected.data(), expected.size()) != 0) Fail("the model reads other bits of bucket ", b);
        read(seen);
      });
}

void SimulatedTrainer::HasRead(uint32_t bucket) {
  ground_.log.Add("trainer", "has read", bucket);
  read_[bucket] = true;
  if (std::find(read_.begin(), read_.end(), false) != read_.end()) return Wake();
  oracle_.CheckParameters(model_, "in the GPU after a step");
  has_model_ = true;
  if (over_ && oracle_.committed_steps() >= ground_.scenario.steps) return NextAttempt();
  Wake();
}

}  // namespace superoffload::faults
