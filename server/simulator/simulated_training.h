// A trainer and its daemon in virtual time: what ours.h describes, step after step.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_SIMULATED_TRAINING_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_SIMULATED_TRAINING_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/gpu/mover.h"
#include "kernels/gpu/weight_stream.h"
#include "server/engine/step_machine.h"
#include "server/simulator/copy_engine.h"
#include "server/simulator/gpu_stream.h"
#include "server/simulator/model_layout.h"
#include "server/simulator/ours.h"
#include "server/simulator/sharded_units.h"
#include "server/simulator/shared_bandwidth.h"
#include "server/simulator/simulated_cuda.h"
#include "server/simulator/simulated_worker_pool.h"
#include "server/simulator/timeline.h"
#include "server/simulator/virtual_clock.h"
#include "server/simulator/virtual_time.h"

namespace superoffload::simulator {

// When things happened in one step, in seconds.
struct StepTimes {
  engine::Verdict verdict = engine::Verdict::kCommit;
  double first_kernel = 0;        // of its forward pass
  double computed = 0;            // the last kernel of its backward pass has ended
  double absorbed = 0;            // elements until then, of all steps
  double reduced = 0;             // the last gradient, over all ranks
  double arrived = 0;             // the last gradient, in host memory
  double prepared = 0;            // that this rank is, is known to it; alone: the verdict
  double decided = 0;             // the verdict
  std::vector<double> published;  // by bucket: final, in host memory
};

// The compute stream stood still before a kernel.
struct Stall {
  size_t step = 0;                                 // that was being computed
  const std::vector<uint32_t>* buckets = nullptr;  // whose parameters were waited for; null: not the step's first pass
  double begin = 0;
  double lacked = 0, reading = 0, gathering = 0;  // of several ranks, as ShardedUnits has them; else the end
  double read = 0;                                // from here on what streams was waited for
  double returning = 0;                           // from here on a block's input, which had left
  double end = 0;
};

class SimulatedTraining final : private engine::CompletionSink, private engine::StepObserver {
 public:
  // All must outlive this. `verdicts`: one per step to be trained; commit, clip or skip for non-finite gradients.
  SimulatedTraining(const Machine& machine, const Workload& workload, const Ours::Settings& settings,
                    std::vector<engine::Verdict> verdicts);
  ~SimulatedTraining() override;

  void Run();

  const std::vector<StepTimes>& steps() const { return steps_; }
  const std::vector<Stall>& stalls() const { return stalls_; }
  double elements() const;  // that the daemon absorbs of a step which commits
  const std::vector<Span>& spans() const { return timeline_.spans(); }

 private:
  static constexpr uint32_t kEnd = ~uint32_t{0};

  struct Bucket {
    GpuEvent ready, packed;
    GpuEvent summed;                // what passes before have brought is on the host
    bool speculated = false;        // by the step under way
    bool final = true;              // its parameters, and the mover knows
    bool pending = false;           // the gradient of the last committed step, in its only slot
    std::function<void()> landing;  // the copy of the next one, which waits for that
  };

  void SlotFree(uint64_t, uint32_t bucket, uint32_t) override;
  void ParametersReady(uint64_t step, uint32_t bucket, bool speculative) override;
  void NormMeasured(uint64_t, double, double) override {}
  void Prepared(uint64_t step, uint64_t attempt, double sum_of_squares) override;
  void VerdictReached(const engine::VerdictReport& report) override;
  void OnPass(const engine::PassReport& report) override;
  void OnStep(const engine::StepReport&) override;

  void OpenMover();
  void BeginCopy(const GpuCopy& copy, std::function<void()> done);
  bool Resident(uint32_t bucket) const { return bucket >= buckets_.size() - settings_.resident_buckets; }
  void BeginStep();
  void LaunchForward();  // of the units whose parameters are under way; then everything behind them
  void LaunchMicroBatch(bool first, bool last);
  void LaunchBackward(size_t unit, bool first, bool last);  // micro-batch of the step
  void LaunchShardedBackward(size_t unit, bool last);       // the same; its gradients are complete all at once
  void LaunchGradient(uint32_t bucket, const GpuEvent& complete, bool first, bool last);  // of the step's passes
  void Arrive(uint32_t bucket);
  void Deliver();
  void UpdateResidents();
  void Forward(size_t unit, const std::vector<uint32_t>* needed);  // null: not the step's first pass
  void Read(size_t unit);                                          // where it streams
  void ReadOn(GpuStream* stream, size_t unit);
  void Gather(size_t unit);
  bool InputLeaves(size_t unit) const { return unit > 0 && unit <= offloaded_blocks_; }
  void SendInput(size_t unit);   // ahead of its forward pass
  void BringInput(size_t unit);  // ahead of its backward pass
  void FetchInput(size_t unit);
  void Compute(size_t unit, double seconds, std::string name, const std::vector<uint32_t>* needed = nullptr);
  std::optional<double> SumOf(uint32_t bucket) const;

  const Machine& machine_;
  const Workload& workload_;
  const Ours::Settings settings_;
  const std::vector<engine::Verdict> verdicts_;
  engine::Layout layout_;              // this rank's
  const std::vector<BucketUse> uses_;  // by bucket

  VirtualTime time_;
  VirtualClock clock_;
  Timeline timeline_;
  SharedBandwidth host_memory_;
  CopyEngine h2d_, d2h_;
  SimulatedCuda cuda_;
  GpuStream compute_, pack_, leaving_, returning_, sums_;
  std::unique_ptr<ShardedUnits> sharded_;  // of several ranks
  SimulatedWorkerPool pool_;
  std::vector<kernels::UndoSlot> record_;  // aligned as a record is
  std::unique_ptr<engine::StepMachine> engine_;
  std::unique_ptr<kernels::Mover> mover_;
  std::vector<uint32_t> streams_with_;  // by bucket, as StreamedUnits has it
  std::unique_ptr<kernels::WeightStream> weights_;
  std::map<uint64_t, uint32_t> bucket_at_;    // by the offset of its parameters
  std::map<uint64_t, uint32_t> gradient_at_;  // by that of its first slot

  const uint64_t offloaded_blocks_;
  std::map<size_t, GpuEvent> returned_;  // inputs that are on their way back, by unit
  std::vector<Bucket> buckets_;
  std::vector<std::vector<uint32_t>> buckets_of_unit_;  // in the order in which backward completes them
  std::vector<GpuEvent> copied_;                        // by order of submission within the step, modulo the slots
  GpuEvent computed_;
  size_t next_unit_ = 0;           // whose forward pass is to be launched
  size_t gradients_ = 0;           // of the step, launched on their way
  std::deque<uint32_t> arrivals_;  // buckets that the machine has not been given; kEnd ends the step
  bool open_ = false;              // a step of the machine's
  bool launched_ = false;          // the step's kernels, all of them
  double idle_since_ = 0;          // of the compute stream
  // Since when what streams of the unit about to be computed is waited for, and its input.
  std::optional<double> read_at_, returning_at_;

  std::vector<StepTimes> steps_;
  std::vector<Stall> stalls_;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_SIMULATED_TRAINING_H_
