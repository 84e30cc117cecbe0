#include "server/simulator/simulated_training.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/gpu/unit_memory.h"
#include "server/engine/bucket_pass.h"

namespace superoffload::simulator {
namespace {

// The largest norm that is not clipped.
constexpr double kMaxGradNorm = 1;

// Where memory would be if there were any. Nobody reads or writes it.
constexpr uintptr_t kHostGradients = uintptr_t{1} << 44, kHostParameters = uintptr_t{2} << 44;
constexpr kernels::CudaPointer kGpu = kernels::CudaPointer{3} << 44;

std::span<std::byte> Nowhere(uintptr_t address, size_t bytes) { return {reinterpret_cast<std::byte*>(address), bytes}; }

void Check(const kernels::CudaStatus& status) { SUPEROFFLOAD_CHECK(status.ok(), status.message); }

engine::OptimizerSpec SpecOf(const Ours::Settings& settings) {
  engine::OptimizerSpec spec;
  spec.algorithm = settings.algorithm;
  spec.bucket_bytes = settings.bucket_bytes;
  spec.logged_buckets = settings.log_slots == 0 ? 0 : settings.resident_buckets;
  spec.log_slots = spec.logged_buckets == 0 ? 0 : settings.log_slots;
  spec.gradient_slots = settings.gradient_slots;
  spec.in_place = settings.in_place;
  return spec;
}

}  // namespace

SimulatedTraining::SimulatedTraining(const Machine& machine, const Workload& workload, const Ours::Settings& settings,
                                     std::vector<engine::Verdict> verdicts)
    : machine_(machine),
      workload_(workload),
      settings_(settings),
      verdicts_(std::move(verdicts)),
      layout_(LayoutOf(workload.model, SpecOf(settings), workload.ranks)),
      uses_(BucketUses(workload.model, layout_)),
      clock_(&time_),
      host_memory_(&time_, machine.host.bandwidth),
      h2d_(&time_, &host_memory_, machine.h2d, Lane::kH2D, &timeline_),
      d2h_(&time_, &host_memory_, machine.d2h, Lane::kD2H, &timeline_),
      cuda_(
          &time_, [this](const GpuCopy& copy, std::function<void()> done) { BeginCopy(copy, std::move(done)); },
          [this](std::function<void()> event) { time_.After(0, std::move(event)); }),
      compute_(&time_, &timeline_),
      pack_(&time_, nullptr),
      leaving_(&time_, nullptr),
      returning_(&time_, nullptr),
      sums_(&time_, nullptr),
      pool_(&host_memory_, machine, CostsOf(machine.passes, *settings.algorithm)),
      record_(engine::Record::Bytes(layout_) / sizeof(kernels::UndoSlot) + 1),
      offloaded_blocks_(OffloadedBlocks(workload.model.architecture, workload.pass)),
      buckets_(layout_.buckets.size()),
      buckets_of_unit_(BucketsOfUnits(uses_, workload.units.size())),
      copied_(settings.device_slots) {
  SUPEROFFLOAD_CHECK_LT(0u, settings.device_slots);
  SUPEROFFLOAD_CHECK_LE(settings.resident_buckets, buckets_.size());
  SUPEROFFLOAD_CHECK(!settings.sums_on_host || (workload.ranks == 1 && !settings.in_place),
                     "gradients are added up on the host of one rank, not in place");
  SUPEROFFLOAD_CHECK(settings.streamed_weights == 0 || settings.resident_buckets == 0,
                     "weights stream without residents");
  streams_with_ = StreamedUnits(workload.model.architecture, uses_, settings.streamed_weights);
  if (workload.ranks > 1) {
    sharded_ = std::make_unique<ShardedUnits>(&time_, &timeline_, &compute_, machine.network, workload);
  }
  OpenMover();
  // The passes compute nothing: nobody reads parameters, gradients or state.
  const engine::OptimizerMemory memory{.record = reinterpret_cast<std::byte*>(record_.data())};
  engine::StepObserver* const observer = this;  // a private base: only visible here
  engine_ = std::make_unique<engine::StepMachine>(
      &layout_, std::vector<engine::Scalars>{layout_.algorithm->DefaultScalars()}, memory, settings.speculation,
      engine::Platform(&pool_, &clock_, &engine::RealDeaths()), observer,
      [this](uint32_t pass) { engine_->PassDone(pass); });
  engine_->Recover([] {});
  if (sharded_ != nullptr) engine_->RequireTotals();
  engine_->Attach(this);
}

SimulatedTraining::~SimulatedTraining() = default;

void SimulatedTraining::OpenMover() {
  kernels::MoverMemory memory{.gradients = Nowhere(kHostGradients, layout_.gradients_bytes),
                              .parameters = Nowhere(kHostParameters, layout_.parameters_bytes),
                              .buckets = {},
                              .slots = {.count = settings_.device_slots}};
  uint64_t chunks = 0;
  for (uint32_t i = 0; i < buckets_.size(); ++i) {
    const engine::BucketLayout& bucket = layout_.buckets[i];
    memory.buckets.push_back({.gradient_offsets = {bucket.gradient_offsets[0], bucket.gradient_offsets[1]},
                              .gradient_bytes = bucket.gradient_bytes(),
                              .parameters_offset = bucket.parameters_offset,
                              .gpu_offset = bucket.parameters_offset,
                              .parameters_bytes = bucket.parameters_bytes(),
                              .chunks = bucket.chunks()});
    bucket_at_[bucket.parameters_offset] = i;
    gradient_at_[bucket.gradient_offsets[0]] = i;
    memory.slots.bytes = std::max(memory.slots.bytes, bucket.gradient_bytes());
    chunks = std::max<uint64_t>(chunks, bucket.chunks());
  }
  memory.slots.offset = layout_.parameters_bytes;
  memory.slots.sums_offset = memory.slots.slot_offset(memory.slots.count);
  memory.slots.sums_bytes = chunks * sizeof(double);
  kernels::Mover::Options options{.process = "the trainer",
                                  .landed = nullptr,
                                  .make_queue = [this](const auto&, const char*) { return cuda_.MakeQueue(); },
                                  .uploads_in_flight = settings_.uploads_in_flight};
  const kernels::CurrentDevice current(*cuda_.device());
  Check(kernels::Mover::Open(cuda_.device(), kGpu, std::move(memory), std::move(options), &mover_));
  for (uint32_t i = 0; i < buckets_.size(); ++i) mover_->SetCopiesUp(i, !Resident(i));
  std::vector<kernels::StreamedUnit> units = kernels::UnitsOf(streams_with_);
  const std::vector<bool> stays(units.size(), false);
  weights_ = std::make_unique<kernels::WeightStream>(cuda_.device(), std::move(units), mover_.get());
  Check(weights_->Open(kernels::SlotsOf(stays, settings_.stream_slots)));
}

// The link moves parameters, gradients and their sums.
void SimulatedTraining::BeginCopy(const GpuCopy& copy, std::function<void()> done) {
  const double bytes = static_cast<double>(copy.bytes);
  if (copy.to_gpu) {
    return h2d_.Copy(bytes, absl::StrCat("parameters ", bucket_at_.at(copy.gpu - kGpu)), std::move(done));
  }
  const bool sums = copy.gpu - kGpu >= mover_->memory().slots.sums_offset;
  auto begin = [this, bytes, sums, done = std::move(done)] { d2h_.Copy(bytes, sums ? "sums" : "gradient", done); };
  const auto bucket = gradient_at_.find(reinterpret_cast<uintptr_t>(copy.host) - kHostGradients);
  const bool waits = !sums && bucket != gradient_at_.end() && layout_.buckets[bucket->second].one_slot() &&
                     buckets_[bucket->second].pending;
  if (!waits) return begin();
  buckets_[bucket->second].landing = std::move(begin);
}

double SimulatedTraining::elements() const {
  double elements = 0;
  for (const engine::BucketLayout& bucket : layout_.buckets) elements += static_cast<double>(bucket.elements);
  return elements;
}

// Copies down wait for each other, and so behind one that waits for its slot.
void SimulatedTraining::SlotFree(uint64_t, uint32_t bucket, uint32_t) {
  buckets_[bucket].pending = false;
  if (const std::function<void()> begin = std::exchange(buckets_[bucket].landing, nullptr)) begin();
}

void SimulatedTraining::Run() {
  if (verdicts_.empty()) return;
  BeginStep();
  time_.Run();
  SUPEROFFLOAD_CHECK(steps_.size() == verdicts_.size() && engine_->BetweenSteps(),
                     "the simulation has got stuck in step ", steps_.size());
}

void SimulatedTraining::BeginStep() {
  steps_.emplace_back();
  steps_.back().published.resize(buckets_.size());
  next_unit_ = gradients_ = 0;
  launched_ = false;
  if (sharded_ != nullptr) sharded_->BeginPass();
  LaunchForward();
}

void SimulatedTraining::LaunchForward() {
  if (launched_ || steps_.empty()) return;
  const kernels::CurrentDevice current(*cuda_.device());
  GpuStream* const reader = sharded_ == nullptr ? &compute_ : sharded_->network();
  for (; next_unit_ < workload_.units.size(); ++next_unit_) {
    const std::vector<uint32_t>& needed = buckets_of_unit_[next_unit_];
    for (auto bucket = needed.rbegin(); bucket != needed.rend(); ++bucket) {
      if (!buckets_[*bucket].final) return;
      if (streams_with_[*bucket] == 0) Check(mover_->WaitLanded(*bucket, SimulatedCuda::HandleOf(reader)));
    }
    Forward(next_unit_, &needed);
  }
  launched_ = true;
  for (uint64_t i = 0; i < workload_.accumulation; ++i) LaunchMicroBatch(i == 0, i + 1 == workload_.accumulation);
  compute_.Record(&computed_);
  compute_.HostCall([this] {
    steps_.back().computed = idle_since_;
    steps_.back().absorbed = pool_.absorbed();
  });
  // The end of the step says that nobody reads the parameters any more. A rank's follows its last gradient.
  GpuStream& last = sharded_ == nullptr ? pack_ : SimulatedCuda::StreamOf(mover_->down_stream());
  last.Wait(computed_);
  weights_->EndStep(SimulatedCuda::HandleOf(&last), [](kernels::CudaStream) { return true; });  // they are computed
  Check(mover_->arrivals().After(SimulatedCuda::HandleOf(&last), [this](const auto&) { Arrive(kEnd); }));
}

// But for the first one's forward pass.
void SimulatedTraining::LaunchMicroBatch(bool first, bool last) {
  if (!first && sharded_ != nullptr) sharded_->BeginPass();
  for (size_t unit = 0; !first && unit < workload_.units.size(); ++unit) Forward(unit, nullptr);
  for (size_t unit = workload_.units.size(); unit-- > 0;) {
    sharded_ == nullptr ? LaunchBackward(unit, first, last) : LaunchShardedBackward(unit, last);
  }
}

void SimulatedTraining::Forward(size_t unit, const std::vector<uint32_t>* needed) {
  sharded_ != nullptr ? Gather(unit) : Read(unit);
  SendInput(unit);
  Compute(unit, workload_.units[unit].forward, absl::StrCat("forward ", unit), needed);
}

// These three are client/python/superoffload/torch/gpu/activations.py.
void SimulatedTraining::SendInput(size_t unit) {
  if (!InputLeaves(unit)) return;
  for (GpuStream* const stream : {&compute_, &returning_}) {
    GpuEvent given;
    stream->Record(&given);
    leaving_.Wait(given);
  }
  leaving_.Copy(&d2h_, BlockInputBytes(workload_.model.architecture, workload_.pass), absl::StrCat("input ", unit));
}

void SimulatedTraining::BringInput(size_t unit) {
  if (!InputLeaves(unit)) return;
  if (!returned_.contains(unit)) FetchInput(unit);
  compute_.HostCall([this] { returning_at_ = time_.now(); });
  compute_.Wait(returned_.at(unit));
  returned_.erase(unit);
  if (InputLeaves(unit - 1)) FetchInput(unit - 1);
}

void SimulatedTraining::FetchInput(size_t unit) {
  for (GpuStream* const stream : {&compute_, &leaving_}) {
    GpuEvent given;
    stream->Record(&given);
    returning_.Wait(given);
  }
  returning_.Copy(&h2d_, BlockInputBytes(workload_.model.architecture, workload_.pass), absl::StrCat("input ", unit));
  returning_.Record(&returned_[unit]);
}

void SimulatedTraining::Read(size_t unit) {
  if (!weights_->Find(static_cast<uint32_t>(unit))) return;
  compute_.HostCall([this] { read_at_ = time_.now(); });
  ReadOn(&compute_, unit);
}

void SimulatedTraining::ReadOn(GpuStream* stream, size_t unit) {
  const std::optional<uint32_t> index = weights_->Find(static_cast<uint32_t>(unit));
  if (!index) return;
  const kernels::CurrentDevice current(*cuda_.device());
  Check(weights_->Read(*index, SimulatedCuda::HandleOf(stream),
                       [this](uint32_t bucket) { return buckets_[bucket].final; }));
}

void SimulatedTraining::Gather(size_t unit) {
  sharded_->Gather(unit, [this, unit] { ReadOn(sharded_->network(), unit); });
}

void SimulatedTraining::LaunchBackward(size_t unit, bool first, bool last) {
  Read(unit);
  BringInput(unit);
  const double seconds = workload_.units[unit].backward;
  const std::string name = absl::StrCat("backward ", unit);
  double launched = 0;  // part of the unit's pass
  for (const uint32_t bucket : buckets_of_unit_[unit]) {
    if (!(last || settings_.sums_on_host) || uses_[bucket].units.front() != unit) continue;
    const double until = std::max(launched, uses_[bucket].complete_at);
    if (until > launched) Compute(unit, (until - launched) * seconds, name);
    launched = until;
    compute_.Record(&buckets_[bucket].ready);
    LaunchGradient(bucket, buckets_[bucket].ready, first, last);
  }
  if (launched < 1) Compute(unit, (1 - launched) * seconds, name);
}

void SimulatedTraining::LaunchShardedBackward(size_t unit, bool last) {
  BringInput(unit);
  Compute(unit, workload_.units[unit].backward, absl::StrCat("backward ", unit));
  if (unit > 0) Gather(unit - 1);
  sharded_->Reduce(unit, [this] { steps_.back().reduced = time_.now(); });
  for (const uint32_t bucket : buckets_of_unit_[unit]) {
    if (last && uses_[bucket].units.front() == unit) {
      LaunchGradient(bucket, sharded_->Reduced(unit), /*first=*/true, last);
    }
  }
}

void SimulatedTraining::LaunchGradient(uint32_t index, const GpuEvent& complete, bool first, bool last) {
  Bucket& bucket = buckets_[index];
  const auto slot = static_cast<uint32_t>(gradients_++ % copied_.size());
  const double bytes = static_cast<double>(layout_.buckets[index].gradient_bytes());
  const kernels::CurrentDevice current(*cuda_.device());
  pack_.Wait(complete);
  Check(mover_->WaitLanded(index, SimulatedCuda::HandleOf(&pack_)));
  pack_.Wait(copied_[slot]);
  compute_.Wait(copied_[slot]);  // the hook waits for a slot, and launches nothing meanwhile
  if (settings_.sums_on_host && !first) {
    GpuEvent fetched;
    sums_.Wait(bucket.summed);
    sums_.Wait(copied_[slot]);
    sums_.Copy(&h2d_, bytes, "sum");
    sums_.Record(&fetched);
    pack_.Wait(fetched);
  }
  pack_.Kernel(2 * bytes / machine_.gpu.memory_bandwidth, "pack");
  pack_.Record(&bucket.packed);
  GpuStream& down = SimulatedCuda::StreamOf(mover_->down_stream());
  down.Wait(bucket.packed);
  if (!last) {
    down.Copy(&d2h_, bytes, "sum");
    down.Record(&bucket.summed);
    down.Record(&copied_[slot]);
    return;
  }
  Check(mover_->CopyDown(index, slot, steps_.size() % 2, kernels::Mover::What::kGradientAndSums,
                         [this, index](const auto&, double) { Arrive(index); }));
  down.Record(&copied_[slot]);
}

void SimulatedTraining::Compute(size_t unit, double seconds, std::string name, const std::vector<uint32_t>* needed) {
  if (sharded_ != nullptr) sharded_->Begin(unit);
  compute_.HostCall([this, unit, needed] {
    StepTimes& step = steps_.back();
    const double now = time_.now();
    if (step.first_kernel == 0) step.first_kernel = now;
    if (now == idle_since_) return;
    const double lacked = sharded_ == nullptr ? now : sharded_->lacked(unit);
    const double reading = sharded_ == nullptr ? now : sharded_->reading(unit);
    const double gathering = sharded_ == nullptr ? now : sharded_->gathering(unit);
    stalls_.push_back({steps_.size() - 1, needed, idle_since_, lacked, reading, gathering, read_at_.value_or(now),
                       returning_at_.value_or(now), now});
  });
  compute_.Kernel(seconds, std::move(name));
  compute_.HostCall([this] {
    idle_since_ = time_.now();
    read_at_.reset();
    returning_at_.reset();
  });
}

void SimulatedTraining::Arrive(uint32_t bucket) {
  steps_.back().arrived = time_.now();
  arrivals_.push_back(bucket);
  Deliver();
}

// A step begins when the passes of the one before, which may be those of a skip, have ended.
void SimulatedTraining::Deliver() {
  const uint64_t number = steps_.size();
  while (!arrivals_.empty()) {
    if (engine_->statistics().step != number) {
      if (open_) return;
      open_ = true;
      SUPEROFFLOAD_CHECK(engine_->BeginStep(number, 1).ok(), "BEGIN_STEP ", number);
    }
    const uint32_t bucket = arrivals_.front();
    arrivals_.pop_front();
    const bool logs = bucket != kEnd && layout_.buckets[bucket].log_slots > 0;
    const bool streams = bucket != kEnd && streams_with_[bucket] != 0;
    const engine::Landing landing = logs      ? engine::Landing::kLog
                                    : streams ? engine::Landing::kSlotStillRead
                                              : engine::Landing::kSlot;
    const absl::Status status = bucket != kEnd        ? engine_->GradientReady(number, bucket, SumOf(bucket), landing)
                                : sharded_ == nullptr ? engine_->EndStep(number, 1, kMaxGradNorm)
                                                      : engine_->PrepareStep(number, 1, kMaxGradNorm);
    SUPEROFFLOAD_CHECK(status.ok(), "bucket ", bucket, " of step ", number);
  }
}

std::optional<double> SimulatedTraining::SumOf(uint32_t bucket) const {
  if (!settings_.sums_with_gradients) return std::nullopt;
  const double count = static_cast<double>(buckets_.size());
  switch (verdicts_[steps_.size() - 1]) {
    case engine::Verdict::kCommit:
      return kMaxGradNorm / 4 / count;
    case engine::Verdict::kClip:
      return kMaxGradNorm * 4 / count;
    default:  // one of the gradients is infinite
      return bucket + 1 == buckets_.size() ? std::numeric_limits<double>::infinity() : 0;
  }
}

// The other ranks are where this one is, and their gradients are zero.
void SimulatedTraining::Prepared(uint64_t step, uint64_t attempt, double sum_of_squares) {
  steps_[step - 1].prepared = time_.now();
  time_.After(machine_.network.agreement_seconds, [this, step, attempt, sum_of_squares] {
    const absl::Status status = engine_->EndPreparedStep(step, 1, kMaxGradNorm, {sum_of_squares, attempt});
    SUPEROFFLOAD_CHECK(status.ok(), "END_STEP ", step);
  });
}

void SimulatedTraining::ParametersReady(uint64_t step, uint32_t bucket, bool speculative) {
  steps_[step - 1].published[bucket] = time_.now();
  Check(mover_->Published(step, bucket, speculative));
  (speculative ? buckets_[bucket].speculated : buckets_[bucket].final) = true;
  if (steps_.size() == step + 1) LaunchForward();
}

void SimulatedTraining::VerdictReached(const engine::VerdictReport& report) {
  StepTimes& step = steps_.back();
  step.verdict = report.verdict;
  step.decided = time_.now();
  if (sharded_ == nullptr) step.prepared = step.decided;
  const char* const what = engine::IsSkip(report.verdict) ? "skip" : report.clip_coefficient < 1 ? "clip" : "commit";
  timeline_.Add(Lane::kVerdict, absl::StrCat(what, " of step ", steps_.size()), time_.now(), time_.now());
  const bool commits = !engine::IsSkip(report.verdict);
  for (Bucket& bucket : buckets_) {
    bucket.pending = commits;
    bucket.final = !commits || (report.speculation_stands && bucket.speculated);
    bucket.speculated = false;
  }
  if (commits) UpdateResidents();
  Check(mover_->VerdictReached(report.step, commits, report.speculation_stands));
  if (steps_.size() < verdicts_.size()) BeginStep();
}

// Masters and moments are read and written, gradient and parameters pass once.
void SimulatedTraining::UpdateResidents() {
  const kernels::CurrentDevice current(*cuda_.device());
  for (auto i = static_cast<uint32_t>(buckets_.size()); i-- > 0 && Resident(i);) {
    const engine::BucketLayout& bucket = layout_.buckets[i];
    const double bytes = 2.0 * static_cast<double>(layout_.FormatOf(bucket).Bytes(bucket.elements)) +
                         static_cast<double>(bucket.gradient_bytes() + bucket.parameters_bytes());
    SimulatedCuda::StreamOf(mover_->up_stream()).Kernel(bytes / machine_.gpu.memory_bandwidth, "update");
    Check(mover_->RecordLanded(i));
    buckets_[i].final = true;
  }
}

void SimulatedTraining::OnPass(const engine::PassReport& report) {
  timeline_.Add(Lane::kCpu, engine::PassName(report.kind), time_.now() - absl::ToDoubleSeconds(report.duration),
                time_.now());
}

void SimulatedTraining::OnStep(const engine::StepReport&) {
  open_ = false;
  if (!arrivals_.empty()) time_.After(0, [this] { Deliver(); });
}

}  // namespace superoffload::simulator
