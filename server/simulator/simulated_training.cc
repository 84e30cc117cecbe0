#include "server/simulator/simulated_training.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "server/engine/bucket_pass.h"

namespace superoffload::simulator {
namespace {

uint64_t GradientBytes(const engine::BucketLayout& bucket) {
  return bucket.elements * kernels::DTypeBytes(bucket.gradient_dtype);
}

uint64_t ParameterBytes(const engine::BucketLayout& bucket) {
  return bucket.elements * kernels::DTypeBytes(bucket.dtype);
}

// The largest norm that is not clipped.
constexpr double kMaxGradNorm = 1;

// Where memory would be if there were any. Nobody reads or writes it.
constexpr uintptr_t kHostGradients = uintptr_t{1} << 44, kHostParameters = uintptr_t{2} << 44;
constexpr kernels::CudaPointer kGpu = kernels::CudaPointer{3} << 44;

std::span<std::byte> Nowhere(uintptr_t address, size_t bytes) { return {reinterpret_cast<std::byte*>(address), bytes}; }

void Check(const kernels::CudaStatus& status) { SUPEROFFLOAD_CHECK(status.ok(), status.message); }

}  // namespace

engine::Layout LayoutOf(const Model& model, uint64_t bucket_bytes, const kernels::Algorithm* algorithm) {
  engine::OptimizerSpec spec;
  spec.algorithm = algorithm;
  spec.groups = {spec.algorithm->DefaultScalars()};
  spec.parameters = model.parameters;
  for (engine::ParameterSpec& parameter : spec.parameters) parameter.unit = 0;
  spec.bucket_bytes = bucket_bytes;
  absl::StatusOr<engine::Layout> layout = engine::PlanLayout(spec);
  SUPEROFFLOAD_CHECK(layout.ok(), "the model must be valid");
  return *std::move(layout);
}

SimulatedTraining::SimulatedTraining(const Machine& machine, const Workload& workload, const Ours::Settings& settings,
                                     std::vector<engine::Verdict> verdicts)
    : machine_(machine),
      workload_(workload),
      settings_(settings),
      verdicts_(std::move(verdicts)),
      layout_(LayoutOf(workload.model, settings.bucket_bytes, settings.algorithm)),
      clock_(&time_),
      host_memory_(&time_, machine.host.bandwidth),
      h2d_(&time_, &host_memory_, machine.h2d, Lane::kH2D, &timeline_),
      d2h_(&time_, &host_memory_, machine.d2h, Lane::kD2H, &timeline_),
      cuda_(
          &time_,
          [this](const SimulatedCuda::Copy& copy, std::function<void()> done) { BeginCopy(copy, std::move(done)); },
          [this](std::function<void()> event) { time_.After(0, std::move(event)); }),
      compute_(&time_, &timeline_),
      pack_(&time_, nullptr),
      pool_(&host_memory_, machine),
      record_(engine::Record::Bytes(layout_) / sizeof(kernels::UndoSlot) + 1),
      buckets_(layout_.buckets.size()),
      buckets_of_unit_(workload.units.size()),
      copied_(settings.device_slots) {
  SUPEROFFLOAD_CHECK_LT(0u, settings.device_slots);
  SUPEROFFLOAD_CHECK_LE(settings.resident_buckets, buckets_.size());
  MapUnits();
  OpenMover();
  // The passes compute nothing: nobody reads parameters, gradients or state.
  const engine::OptimizerMemory memory{.record = reinterpret_cast<std::byte*>(record_.data())};
  engine::StepObserver* const observer = this;  // a private base: only visible here
  engine_ = std::make_unique<engine::StepMachine>(
      &layout_, std::vector<engine::Scalars>{layout_.algorithm->DefaultScalars()}, memory, settings.speculation,
      engine::Platform(&pool_, &clock_, &engine::RealDeaths()), observer, [this](uint32_t pass) { engine_->PassDone(pass); });
  engine_->Recover([] {});
  engine_->Attach(this);
}

SimulatedTraining::~SimulatedTraining() = default;

// Within a unit gradients are complete in reverse order of registration, as far apart as their sizes: a product's time
// goes with its matrix.
void SimulatedTraining::MapUnits() {
  const std::vector<engine::ParameterSpec>& parameters = workload_.model.parameters;
  std::vector<double> complete_at(parameters.size());
  std::vector<double> elements(workload_.units.size());
  for (size_t i = parameters.size(); i-- > 0;) {
    complete_at[i] = elements[parameters[i].unit] += static_cast<double>(engine::ElementCount(parameters[i]));
  }
  for (uint32_t i = 0; i < buckets_.size(); ++i) {
    Bucket& bucket = buckets_[i];
    const std::span<const engine::Part> parts = layout_.PartsOf(layout_.buckets[i]);
    for (const engine::Part& part : parts) bucket.units.push_back(parameters[part.parameter].unit);
    std::sort(bucket.units.begin(), bucket.units.end());
    bucket.units.erase(std::unique(bucket.units.begin(), bucket.units.end()), bucket.units.end());
    const size_t last_unit = bucket.units.front();
    bucket.complete_at = 0;
    for (const engine::Part& part : parts) {
      if (parameters[part.parameter].unit != last_unit) continue;
      bucket.complete_at = std::max(bucket.complete_at, complete_at[part.parameter] / elements[last_unit]);
    }
    for (const size_t unit : bucket.units) buckets_of_unit_[unit].push_back(i);
  }
}

void SimulatedTraining::OpenMover() {
  kernels::MoverMemory memory{.gradients = Nowhere(kHostGradients, layout_.gradients_bytes),
                              .parameters = Nowhere(kHostParameters, layout_.parameters_bytes),
                              .buckets = {},
                              .slots = {.count = settings_.device_slots}};
  uint64_t chunks = 0;
  for (uint32_t i = 0; i < buckets_.size(); ++i) {
    const engine::BucketLayout& bucket = layout_.buckets[i];
    memory.buckets.push_back({.gradient_offsets = {bucket.gradient_offsets[0], bucket.gradient_offsets[1]},
                              .gradient_bytes = GradientBytes(bucket),
                              .parameters_offset = bucket.parameters_offset,
                              .parameters_bytes = ParameterBytes(bucket),
                              .chunks = bucket.chunks()});
    bucket_at_[bucket.parameters_offset] = i;
    memory.slots.bytes = std::max(memory.slots.bytes, GradientBytes(bucket));
    chunks = std::max<uint64_t>(chunks, bucket.chunks());
  }
  memory.slots.offset = layout_.parameters_bytes;
  memory.slots.sums_offset = memory.slots.slot_offset(memory.slots.count);
  memory.slots.sums_bytes = chunks * sizeof(double);
  kernels::Mover::Options options{
      .process = "the trainer",
      .landed = nullptr,
      .make_queue = [this](const auto&, const char*) { return cuda_.MakeQueue(); },
      .uploads_in_flight = settings_.uploads_in_flight};
  const kernels::CurrentDevice current(*cuda_.device());
  Check(kernels::Mover::Open(cuda_.device(), kGpu, std::move(memory), std::move(options), &mover_));
  for (uint32_t i = 0; i < buckets_.size(); ++i) mover_->SetCopiesUp(i, !Resident(i));
}

// The link moves parameters, gradients and their sums.
void SimulatedTraining::BeginCopy(const SimulatedCuda::Copy& copy, std::function<void()> done) {
  const double bytes = static_cast<double>(copy.bytes);
  if (copy.to_gpu) {
    return h2d_.Copy(bytes, absl::StrCat("parameters ", bucket_at_.at(copy.gpu - kGpu)), std::move(done));
  }
  const bool sums = copy.gpu - kGpu >= mover_->memory().slots.sums_offset;
  d2h_.Copy(bytes, sums ? "sums" : "gradient", std::move(done));
}

void SimulatedTraining::Run() {
  if (verdicts_.empty()) return;
  BeginStep();
  time_.Run();
  SUPEROFFLOAD_CHECK(steps_.size() == verdicts_.size() && engine_->BetweenSteps(), "the simulation has got stuck in step ",
                     steps_.size());
}

void SimulatedTraining::BeginStep() {
  steps_.emplace_back();
  steps_.back().published.resize(buckets_.size());
  next_unit_ = 0;
  launched_ = false;
  LaunchForward();
}

void SimulatedTraining::LaunchForward() {
  if (launched_ || steps_.empty()) return;
  for (; next_unit_ < workload_.units.size(); ++next_unit_) {
    const std::vector<uint32_t>& needed = buckets_of_unit_[next_unit_];
    for (auto bucket = needed.rbegin(); bucket != needed.rend(); ++bucket) {
      if (!buckets_[*bucket].final) return;
      Check(mover_->WaitLanded(*bucket, SimulatedCuda::HandleOf(&compute_)));
    }
    Compute(workload_.units[next_unit_].forward, absl::StrCat("forward ", next_unit_), /*forward=*/true, needed);
  }
  launched_ = true;
  for (uint64_t i = 0; i < workload_.accumulation; ++i) LaunchMicroBatch(i == 0, i + 1 == workload_.accumulation);
  compute_.Record(&computed_);
  compute_.HostCall([this] { steps_.back().computed = idle_since_; });
  pack_.Wait(computed_);  // END_STEP says that nobody reads the parameters any more
  Check(mover_->arrivals().After(SimulatedCuda::HandleOf(&pack_), [this](const auto&) { Arrive(kEnd); }));
}

// But for the first one's forward pass.
void SimulatedTraining::LaunchMicroBatch(bool first, bool last) {
  for (size_t unit = 0; !first && unit < workload_.units.size(); ++unit) {
    Compute(workload_.units[unit].forward, absl::StrCat("forward ", unit), /*forward=*/true, {});
  }
  size_t order = 0;
  for (size_t unit = workload_.units.size(); unit-- > 0;) {
    const double seconds = workload_.units[unit].backward;
    const std::string name = absl::StrCat("backward ", unit);
    double launched = 0;  // part of the unit's pass
    for (const uint32_t bucket : buckets_of_unit_[unit]) {
      if (!last || buckets_[bucket].units.front() != unit) continue;
      const double until = std::max(launched, buckets_[bucket].complete_at);
      if (until > launched) Compute((until - launched) * seconds, name, /*forward=*/false, {});
      launched = until;
      LaunchGradient(bucket, order++);
    }
    if (launched < 1) Compute((1 - launched) * seconds, name, /*forward=*/false, {});
  }
}

void SimulatedTraining::LaunchGradient(uint32_t index, size_t order) {
  Bucket& bucket = buckets_[index];
  const auto slot = static_cast<uint32_t>(order % copied_.size());
  const double bytes = static_cast<double>(GradientBytes(layout_.buckets[index]));
  compute_.Record(&bucket.ready);
  pack_.Wait(bucket.ready);
  Check(mover_->WaitLanded(index, SimulatedCuda::HandleOf(&pack_)));
  pack_.Wait(copied_[slot]);
  compute_.Wait(copied_[slot]);  // the hook waits for a slot, and launches nothing meanwhile
  pack_.Kernel(2 * bytes / machine_.gpu.memory_bandwidth, "pack");
  pack_.Record(&bucket.packed);
  GpuStream& down = SimulatedCuda::StreamOf(mover_->down_stream());
  down.Wait(bucket.packed);
  const kernels::CurrentDevice current(*cuda_.device());
  Check(mover_->CopyDown(index, slot, steps_.size() % 2, kernels::Mover::What::kGradientAndSums,
                         [this, index](const auto&, double) { Arrive(index); }));
  down.Record(&copied_[slot]);
}

void SimulatedTraining::Compute(double seconds, std::string name, bool forward, std::vector<uint32_t> waits_for) {
  compute_.HostCall([this, forward, waits_for = std::move(waits_for)] {
    StepTimes& step = steps_.back();
    if (step.first_kernel == 0) step.first_kernel = time_.now();
    if (time_.now() > idle_since_) {
      stalls_.push_back({steps_.size() - 1, forward, waits_for, idle_since_, time_.now()});
    }
  });
  compute_.Kernel(seconds, std::move(name));
  compute_.HostCall([this] { idle_since_ = time_.now(); });
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
    const absl::Status status = bucket == kEnd ? engine_->EndStep(number, 1, kMaxGradNorm)
                                               : engine_->GradientReady(number, bucket, SumOf(bucket));
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
  timeline_.Add(Lane::kVerdict, engine::IsSkip(report.verdict) ? "skip" : report.clip_coefficient < 1 ? "clip" : "commit",
                time_.now(), time_.now());
  const bool commits = !engine::IsSkip(report.verdict);
  for (Bucket& bucket : buckets_) {
    bucket.final = !commits || (report.speculation_stands && bucket.speculated);
    bucket.speculated = false;
  }
  if (commits) UpdateResidents();
  Check(mover_->VerdictReached(report.step, commits, report.speculation_stands));
  if (steps_.size() < verdicts_.size()) BeginStep();
}

// Masters and moments are read and written, gradient and parameters pass once.
void SimulatedTraining::UpdateResidents() {
  double state = 0;
  for (const engine::ArrayLayout& array : layout_.state_arrays) state += 2.0 * kernels::DTypeBytes(array.dtype);
  for (auto i = static_cast<uint32_t>(buckets_.size()); i-- > 0 && Resident(i);) {
    const engine::BucketLayout& bucket = layout_.buckets[i];
    const double bytes = state * static_cast<double>(bucket.elements) +
                         static_cast<double>(GradientBytes(bucket) + ParameterBytes(bucket));
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
