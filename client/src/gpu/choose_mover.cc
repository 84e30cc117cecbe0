#include "client/src/gpu/choose_mover.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <vector>

#include "client/src/gpu/gpu_status.h"

namespace superoffload::client {
namespace {

// Enough for a steady state, short enough for an attach.
constexpr int kLeastRounds = 8, kMostRounds = 1000;
constexpr int kProducts = 16;
// One slot is copied while another one is worked on.
constexpr uint32_t kCopiedSlot = 0, kBusySlot = 1;
// Of the kernels' time: differences below are noise.
constexpr double kNoise = 0.02;
constexpr double kMeasured = 1e-9;  // seconds, where nothing was lost

// Where gradients come to where parameters are published, the probes' are those parameters.
Status FillCopiedSlot(const MoverTrial& trial, uint32_t bucket) {
  const kernels::MoverMemory& memory = trial.mover.memory();
  if (memory.parameters.data() != memory.gradients.data()) return {};
  const kernels::CudaDriver& driver = trial.device.driver();
  const kernels::MovedBucket& moved = memory.buckets[bucket];
  const kernels::CudaStream stream = trial.mover.up_stream();
  if (kernels::CudaStatus status = driver.Status(
          driver.MemcpyHtoDAsync(trial.gpu + memory.slots.slot_offset(kCopiedSlot),
                                 memory.parameters.data() + moved.parameters_offset, moved.parameters_bytes, stream),
          "copying parameters to the GPU");
      !status.ok()) {
    return FromCuda(status);
  }
  return FromCuda(driver.Status(driver.StreamSynchronize(stream), "copying parameters to the GPU"));
}

// The kernel that packs reads a slot as one tensor. It writes the host's memory if it is to copy, else the slot itself:
// each element is where it was.
Status ProbePack(const MoverTrial& trial, uint32_t mover, uint32_t bucket) {
  const kernels::MoverMemory& memory = trial.mover.memory();
  const GpuBucket& packed = trial.buckets[bucket];
  const kernels::CudaPointer slot = trial.gpu + memory.slots.slot_offset(kCopiedSlot);
  const BucketTensor whole{slot, 0, packed.elements};
  void* const to = mover == SUPEROFFLOAD_MOVER_DIRECT
                       ? memory.gradients.data() + packed.gradient_offsets[trial.host_slot]
                       : reinterpret_cast<void*>(slot);
  if (Status status = trial.packer.Pack(packed, kCopiedSlot, {&whole, 1}, packed.gradient_dtype, to); !status.ok()) {
    return status;
  }
  return trial.packer.Synchronize();
}

// Products on a stream of their own, between two events.
class Kernels {
 public:
  explicit Kernels(const MoverTrial& trial) : trial_(trial), driver_(trial.device.driver()) {}

  Status Open() {
    if (Status status = FromCuda(kernels::MakeStream(trial_.device, &stream_)); !status.ok()) return status;
    for (kernels::OwnedEvent* event : {&begin_, &end_}) {
      if (Status status = FromCuda(kernels::MakeTimingEvent(trial_.device, event)); !status.ok()) return status;
    }
    return {};
  }

  Status Begin() {
    if (Status status = Record(begin_); !status.ok()) return status;
    for (int i = 0; i < kProducts; ++i) {
      if (Status status = trial_.packer.Multiply(kBusySlot, stream_.get()); !status.ok()) return status;
    }
    return Record(end_);
  }
  bool Run() const { return driver_.EventQuery(end_.get()) == kernels::kCudaNotReady; }
  Status Await(double* seconds) const {
    float milliseconds = 0;
    kernels::CudaStatus status = driver_.Status(driver_.EventSynchronize(end_.get()), "measuring");
    if (status.ok()) {
      status = driver_.Status(driver_.EventElapsedTime(&milliseconds, begin_.get(), end_.get()), "measuring");
    }
    *seconds = milliseconds * 1e-3;
    return FromCuda(status);
  }

 private:
  Status Record(const kernels::OwnedEvent& event) const {
    return FromCuda(driver_.Status(driver_.EventRecord(event.get(), stream_.get()), "recording an event"));
  }

  const MoverTrial& trial_;
  const kernels::CudaDriver& driver_;
  kernels::OwnedStream stream_;
  kernels::OwnedEvent begin_, end_;
};

// The median, of the kernels alone.
Status MeasureAlone(Kernels* kernels, double* seconds) {
  std::array<double, 3> runs;
  for (double& run : runs) {
    if (Status status = kernels->Begin(); !status.ok()) return status;
    if (Status status = kernels->Await(&run); !status.ok()) return status;
  }
  std::ranges::sort(runs);
  *seconds = runs[1];
  return {};
}

// The largest bucket of those that do not stream: a daemon does not map where the others lie.
std::optional<uint32_t> FindBucket(const MoverTrial& trial) {
  std::optional<uint32_t> largest;
  for (uint32_t bucket = 0; bucket < trial.buckets.size(); ++bucket) {
    if (trial.buckets[bucket].streams()) continue;
    if (!largest || trial.buckets[*largest].gradient_bytes() < trial.buckets[bucket].gradient_bytes()) largest = bucket;
  }
  return largest;
}

// Rounds of copies for as long as the kernels run; `alone` is their time without.
Status Measure(const MoverTrial& trial, uint32_t bucket, Kernels* kernels, double alone, MoverTiming* timing,
               int* rounds) {
  if (Status status = FillCopiedSlot(trial, bucket); !status.ok()) return status;
  if (Status status = ProbeRound(trial, timing->mover, bucket); !status.ok()) return status;  // to warm up
  if (Status status = kernels->Begin(); !status.ok()) return status;
  const auto begin = std::chrono::steady_clock::now();
  for (*rounds = 0; *rounds < kLeastRounds || (kernels->Run() && *rounds < kMostRounds); ++*rounds) {
    if (Status status = ProbeRound(trial, timing->mover, bucket); !status.ok()) return status;
  }
  const std::chrono::duration<double> copied = std::chrono::steady_clock::now() - begin;
  double beside = 0;
  if (Status status = kernels->Await(&beside); !status.ok()) return status;
  timing->lost_seconds = std::max(0.0, beside - alone) / *rounds;
  timing->round_seconds = copied.count() / *rounds;
  return {};
}

}  // namespace

Status ProbeRound(const MoverTrial& trial, uint32_t mover, uint32_t bucket) {
  if (Status status = ProbePack(trial, mover, bucket); !status.ok()) return status;
  if (mover == SUPEROFFLOAD_MOVER_DAEMON) return trial.probe(bucket);
  using What = kernels::Mover::What;
  const What what = mover == SUPEROFFLOAD_MOVER_DIRECT ? What::kSums : What::kGradientAndSums;
  if (Status status = FromCuda(trial.mover.CopyDownAndWait(bucket, kCopiedSlot, trial.host_slot, what)); !status.ok()) {
    return status;
  }
  return FromCuda(trial.mover.CopyUpAndWait(bucket));
}

uint32_t BestMover(std::span<const MoverTiming> timings, double kernel_seconds) {
  constexpr double kAboutAsFast = 1.5;
  const MoverTiming* best = &timings.front();
  for (const MoverTiming& timing : timings.subspan(1)) {
    const bool saves = best->lost_seconds - timing.lost_seconds > kNoise * kernel_seconds;
    if (saves && timing.round_seconds <= kAboutAsFast * timings.front().round_seconds) best = &timing;
  }
  return best->mover;
}

Status ChooseMover(const MoverTrial& trial, uint32_t wanted, superoffload_gpu_report* report) {
  report->mover = wanted;
  if (wanted == SUPEROFFLOAD_MOVER_DIRECT && report->staged != 0) {
    return Error(Code::kFailedPrecondition, "the GPU cannot store into the daemon's memory: ", report->notes);
  }
  if (wanted != SUPEROFFLOAD_MOVER_AUTO) return {};
  std::vector<MoverTiming> timings{{SUPEROFFLOAD_MOVER_TRAINER, 0, 0}};
  if (report->shared != 0) timings.push_back({SUPEROFFLOAD_MOVER_DAEMON, 0, 0});
  // Stores over PCIe hold up the multiprocessors that issue them.
  if (report->staged == 0 && trial.device.Has(kernels::kCudaHostPageTables)) {
    timings.push_back({SUPEROFFLOAD_MOVER_DIRECT, 0, 0});
  }
  report->mover = SUPEROFFLOAD_MOVER_TRAINER;
  const std::optional<uint32_t> bucket = FindBucket(trial);
  if (timings.size() == 1 || trial.mover.memory().slots.count == 1 || !bucket) return {};
  Kernels kernels(trial);
  double alone = 0;
  if (Status status = kernels.Open(); !status.ok()) return status;
  if (Status status = MeasureAlone(&kernels, &alone); !status.ok()) return status;
  int first_rounds = 0;
  for (MoverTiming& timing : timings) {
    int rounds = 0;
    if (Status status = Measure(trial, *bucket, &kernels, alone, &timing, &rounds); !status.ok()) return status;
    if (first_rounds == 0) first_rounds = rounds;
    report->seconds[timing.mover] = std::max(timing.lost_seconds, kMeasured);
  }
  report->mover = BestMover(timings, alone / first_rounds);
  return {};
}

}  // namespace superoffload::client
