#include "tests/fault/simulated/simulated_gpu.h"

#include <algorithm>
#include <string>
#include <utility>

#include "client/src/gpu/gpu_status.h"

namespace superoffload::faults {
namespace {

using simulator::SimulatedCuda;

void Check(const client::Status& status) {
  if (!status.ok()) Fail("the trainer's GPU: ", status.message);
}

// What an attach response has the trainer say.
struct GpuOptions {
  GpuOptions(const Ground& ground, const SimulatedGpuMemory& memory, const SimulatedGpu::Start& start)
      : algorithm(ground.layout.algorithm->name) {
    std::vector<superoffload_bucket> buckets;
    for (const client::GpuBucket& bucket : memory.buckets()) {
      buckets.push_back({.elements = bucket.elements,
                         .parameters_offset = bucket.parameters_offset,
                         .gpu_offset = bucket.gpu_offset,
                         .gradient_offsets = {bucket.gradient_offsets[0], bucket.gradient_offsets[1]},
                         .state_offset = bucket.state_offset,
                         .dtype = NumberOf(bucket.dtype),
                         .gradient_dtype = NumberOf(bucket.gradient_dtype),
                         .group = bucket.group,
                         .log_slots = bucket.log_slots,
                         .log_offset = bucket.log_offset,
                         .format = bucket.format,
                         .unit = bucket.unit});
    }
    std::vector<superoffload_parameter> parameters;
    for (size_t i = 0; i < ground.layout.placements.size(); ++i) {
      const engine::Placement& place = ground.layout.placements[i];
      const superoffload_bucket& bucket = buckets[place.first_bucket];
      parameters.push_back({.name = ground.scenario.spec.parameters[i].name.c_str(),
                            .elements = engine::ElementCount(ground.scenario.spec.parameters[i]),
                            .parameters_offset = place.parameters_offset,
                            .gpu_offset = bucket.gpu_offset + place.parameters_offset - bucket.parameters_offset,
                            .gradient_offsets = {place.gradient_offsets[0], place.gradient_offsets[1]},
                            .state_offset = place.state_offset,
                            .first_bucket = place.first_bucket,
                            .bucket_count = place.bucket_count,
                            .dtype = bucket.dtype,
                            .gradient_dtype = bucket.gradient_dtype});
    }
    Check(client::ModelLayout::Create({.parameters = parameters.data(),
                                       .buckets = buckets.data(),
                                       .parameter_count = static_cast<uint32_t>(parameters.size()),
                                       .bucket_count = static_cast<uint32_t>(buckets.size()),
                                       .group_count = static_cast<uint32_t>(start.groups.size()),
                                       .scalar_count = static_cast<uint32_t>(start.groups[0].size()),
                                       .threads = 1,
                                       .reserved = 0},
                                      &model));
    for (const engine::Scalars& group : start.groups) scalars.insert(scalars.end(), group.begin(), group.end());
    for (const engine::StateFormat& format : ground.layout.formats) {
      for (const engine::ArrayLayout& array : format.arrays) array_offsets.push_back(array.offset);
    }
    options.array_count = static_cast<uint32_t>(array_offsets.size());
    options.algorithm = algorithm.c_str();
    options.scalars = scalars.data();
    options.array_offsets = array_offsets.data();
    options.parameter_steps = start.parameter_steps.data();
    options.committed_steps = start.committed_steps;
    options.stream_slots = ground.scenario.stream_slots;
  }
  client::ModelLayout model;
  std::string algorithm;
  std::vector<double> scalars;
  std::vector<uint64_t> array_offsets;
  superoffload_gpu_options options{};
};

// The gradients that a bucket has, each where autograd left it.
std::vector<client::BucketTensor> TensorsOf(const Ground& ground, uint32_t index, const AttemptPass& pass) {
  const engine::BucketLayout& bucket = ground.layout.buckets[index];
  std::vector<client::BucketTensor> tensors;
  uint64_t first = 0;
  for (const engine::Part& part : ground.layout.PartsOf(bucket)) {
    const uint64_t end = ground.layout.placements[part.parameter].state_offset +
                         engine::ElementCount(ground.scenario.spec.parameters[part.parameter]);
    const uint64_t elements = std::min(part.elements, end - std::min(end, bucket.state_offset + first));  // without gap
    if (!pass.absent[part.parameter] && elements > 0) {
      client::BucketTensor tensor{};
      tensor.data = reinterpret_cast<decltype(tensor.data)>(pass.gradients.data() + bucket.gradient_offsets[0] +
                                                            first * kernels::DTypeBytes(bucket.gradient_dtype));
      tensor.first = first;
      tensor.elements = elements;
      tensors.push_back(tensor);
    }
    first += part.elements;
  }
  return tensors;
}

}  // namespace

SimulatedGpu::SimulatedGpu(Ground* ground, std::shared_ptr<SimulatedGpuMemory> memory, const Start& start,
                           std::function<void(std::function<void()>)> after,
                           std::function<void(const superoffload_ring_entry&)> submit, std::function<void()> slot_free)
    : ground_(*ground),
      memory_(std::move(memory)),
      submit_(std::move(submit)),
      slot_free_(std::move(slot_free)),
      cuda_(
          &ground->time,
          [this](simulator::Clock* clock) {
            return memory_->MakeProcess(clock, [this] { return !cuda_.killed(); }, [this] { return waits_; });
          },
          std::move(after)),
      compute_(&ground->time, nullptr),
      beside_(&ground->time, nullptr) {
  for (uint32_t slot = 0; slot < memory_->layout().slots.count; ++slot) free_slots_.push_back(slot);
  const GpuOptions given(ground_, *memory_, start);
  const kernels::CurrentDevice current(*cuda_.device());
  Check(client::FromCuda(kernels::MakeStream(*cuda_.device(), &pack_stream_)));
  Check(client::GpuMoves::Open(
      cuda_.device(), given.model, given.options, &memory_->buckets(), memory_->layout(),
      {.gpu = memory_->base(),
       .gradients = ground_.memory.gradients,
       .parameters = ground_.published(),
       .slots = memory_->slots()},
      pack_stream_.get(),
      {.arrived = [this](const kernels::CudaStatus&, const superoffload_ring_entry& entry) { submit_(entry); },
       .slot_free = [this](uint32_t slot) { FreeSlot(slot); }},
      [this](const auto&, const char*) { return cuda_.MakeQueue(); }, &moves_));
  moves_->set_kind(ground_.scenario.mover);
  SetResident(0);
}

SimulatedGpu::~SimulatedGpu() { Kill(); }

void SimulatedGpu::Pull() {
  for (uint32_t bucket = 0; bucket < ground_.buckets(); ++bucket) {
    if (streams(bucket)) continue;
    const std::span<std::byte> to = memory_->parameters(bucket);
    std::copy_n(ground_.published().data() + ground_.layout.buckets[bucket].parameters_offset, to.size(), to.begin());
  }
}

void SimulatedGpu::OnCompletion(const superoffload_ring_entry& entry) {
  Check(moves_->OnCompletion(entry));
  if (entry.opcode == SUPEROFFLOAD_COMPLETE_GRADIENT_TAKEN) FreeSlot(entry.index);
}

void SimulatedGpu::FreeSlot(uint32_t slot) {
  if (std::find(free_slots_.begin(), free_slots_.end(), slot) != free_slots_.end()) {
    Fail("device slot ", slot, " is freed twice");
  }
  free_slots_.push_back(slot);
  slot_free_();
}

void SimulatedGpu::HandOver(const superoffload_ring_entry& entry, const AttemptPass& gradients, client::Pass pass,
                            uint32_t host_slot) {
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  simulator::GpuStream* const stream = ground_.random.Chance(0.5) ? &compute_ : &beside_;
  compute_is_named_ |= stream == &compute_;
  const kernels::CurrentDevice current(*cuda_.device());
  Check(moves_->SubmitGradient(entry, slot, host_slot, TensorsOf(ground_, entry.index, gradients),
                               memory_->buckets()[entry.index].gradient_dtype, SimulatedCuda::HandleOf(stream), pass));
}

void SimulatedGpu::Submit(const superoffload_ring_entry& entry) {
  const kernels::CurrentDevice current(*cuda_.device());
  const bool ends = entry.opcode == SUPEROFFLOAD_SUBMIT_END_STEP;
  if (ends && !compute_is_named_) Check(moves_->packer().After(SimulatedCuda::HandleOf(&compute_)));
  if (ends || entry.opcode == SUPEROFFLOAD_SUBMIT_ABANDON_STEP) compute_is_named_ = false;
  Check(moves_->Submit(entry));
}

// As client/python/superoffload/torch/gpu/residents.py does it.
uint32_t SimulatedGpu::SetResident(uint32_t count) {
  constexpr auto kNoRoom = client::Code::kResourceExhausted;
  const kernels::CurrentDevice current(*cuda_.device());
  waits_ = true;
  memory_->LetAllocationsFail(true);
  client::Status status = moves_->SetResident(count, ground_.memory.state.data());
  while (status.code == kNoRoom && count > 0) status = moves_->SetResident(--count, ground_.memory.state.data());
  memory_->LetAllocationsFail(false);
  waits_ = false;
  Check(status);
  if (residents() != count) Fail(residents(), " buckets are resident, not ", count);
  return count;
}

void SimulatedGpu::KeepUnits(const std::vector<bool>& stays) {
  const kernels::CurrentDevice current(*cuda_.device());
  waits_ = true;
  Check(client::FromCuda(moves_->weights().Leave()));
  waits_ = false;
  memory_->MapUnits(kernels::SlotsOf(stays, ground_.scenario.stream_slots));
  Check(client::FromCuda(moves_->weights().Enter(memory_->slots())));
}

uint32_t SimulatedGpu::residents() const {
  uint32_t count = 0;
  while (count < ground_.buckets() && resident(ground_.buckets() - 1 - count)) ++count;
  return count;
}

void SimulatedGpu::StreamWaits(uint32_t bucket) {
  const kernels::CurrentDevice current(*cuda_.device());
  Check(moves_->StreamWaits(bucket, SimulatedCuda::HandleOf(&compute_)));
}

std::span<const uint32_t> SimulatedGpu::ReadTogether(const uint32_t& bucket) const {
  if (!streams(bucket)) return {&bucket, 1};
  return moves_->weights().buckets(UnitOf(bucket));
}

uint32_t SimulatedGpu::UnitOf(uint32_t bucket) const {
  return *moves_->weights().Find(memory_->buckets()[bucket].unit);
}

void SimulatedGpu::Read(uint32_t bucket, const std::function<bool(uint32_t)>& is_final,
                        std::function<void(const std::byte*)> read) {
  simulator::GpuStream* stream = &compute_;
  if (streams(bucket)) {
    if (ground_.random.Chance(0.5)) stream = &beside_;
    const kernels::CurrentDevice current(*cuda_.device());
    Check(client::FromCuda(moves_->weights().Read(UnitOf(bucket), SimulatedCuda::HandleOf(stream), is_final)));
  } else {
    StreamWaits(bucket);
  }
  stream->Do([this, bucket, read = std::move(read)](std::function<void()> done) {
    Later([this, bucket, read = std::move(read), done = std::move(done)] {
      read(memory_->parameters(bucket).data());
      done();
    });
  });
}

// As the mover does when it ends, but it would wait.
void SimulatedGpu::End() {
  for (uint32_t bucket = 0; bucket < ground_.buckets(); ++bucket) StreamWaits(bucket);
}

void SimulatedGpu::Kill() {
  cuda_.Kill();
  compute_.Abort();
  beside_.Abort();
  moves_.reset();
}

void SimulatedGpu::Later(std::function<void()> event) {
  ground_.time.After(ground_.random.Delay(), [this, event = std::move(event)] {
    if (!cuda_.killed()) event();
  });
}

}  // namespace superoffload::faults
