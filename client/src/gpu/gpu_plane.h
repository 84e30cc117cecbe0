// The GPU's side of an attachment: gradients leave it and parameters come back (gpu_moves.h), and who waits for that.
//
// Who submits is the mover's queue of arrivals, so that the trainer's threads never wait in the driver, and an entry is
// submitted only when its gradient is where the daemon will look for it. END_STEP is submitted only when the trainer's
// streams have done what they were given before it: parameters change when the step commits, whoever copies, and
// nothing that was launched before the step's end may see it. A thread of the plane takes completions, so that
// parameters are copied as soon as they come.
//
// The daemon may have died whenever a stream waits: so streams wait for events of this process only.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_PLANE_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_PLANE_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "client/src/core/memory_plane.h"
#include "client/src/core/step_plane.h"
#include "client/src/gpu/device_slot_pool.h"
#include "client/src/gpu/gpu_layout.h"
#include "client/src/gpu/gpu_moves.h"
#include "client/src/gpu/pack_stream.h"
#include "client/src/status.h"
#include "kernels/gpu/mover.h"
#include "kernels/gpu/shared_gpu_memory.h"
#include "superoffload/superoffload_gpu.h"

namespace superoffload::client {

class GpuPlane final : public MemoryPlane {
 public:
  // For an attachment to `model` that outlives it, before its first step; the caller has it use the plane. `previous`
  // may be null; it is ended, and its memory taken over; else `memory` is used, unless that is null
  // (superoffload_gpu_options).
  static Status Create(const ModelLayout& model, const superoffload_gpu_options& options, StepPlane* steps,
                       GpuPlane* previous, std::shared_ptr<kernels::SharedGpuMemory> memory,
                       std::unique_ptr<GpuPlane>* plane);

  // Such memory; see superoffload_gpu_reserve.
  static Status Reserve(const ModelLayout& model, const superoffload_gpu_options& options, const StepPlane& steps,
                        std::shared_ptr<kernels::SharedGpuMemory>* memory);
  ~GpuPlane() override { End(); }

  // What has been issued is done afterwards. The GPU memory stays; submissions and completions are the host's again.
  void End() override;
  bool ended() const { return moves_ == nullptr; }

  const superoffload_gpu_report& report() const { return report_; }
  kernels::CudaPointer parameters() const { return memory_->data(); }
  kernels::CudaStream pack_stream() const { return pack_stream_.get(); }
  const std::shared_ptr<const kernels::GpuDevice>& device() const { return device_; }

  // See superoffload_gpu.h.
  Status Pull();
  Status Push(kernels::CudaStream stream);
  Status PackAfter(kernels::CudaStream stream);
  Status EndLandings();  // unless it has ended

  // The trainer's thread. `entry` is the GRADIENT_READY that becomes due. FAILED_PRECONDITION: passes are not added up.
  Status SubmitGradient(superoffload_ring_entry entry, std::span<const BucketTensor> tensors, kernels::DType dtype,
                        kernels::CudaStream stream, Pass pass);

  // FAILED_PRECONDITION: the stream is being captured into a CUDA graph.
  Status CheckStream(kernels::CudaStream stream) const;

  // The bucket's parameters are final (StepPlane::WaitLatest): `stream` waits for the copy that brings them.
  Status StreamWaits(uint32_t bucket, kernels::CudaStream stream);

  uint32_t unit(uint32_t bucket) const { return buckets_[bucket].unit; }  // that streams; 0: none
  // See superoffload_gpu_read_unit and superoffload_gpu_has_unit.
  Status ReadUnit(uint32_t unit, kernels::CudaStream stream);
  Status HasUnit(uint32_t unit, bool* has, bool* stays) const;

  // See superoffload_gpu_keep_units.
  Status KeepUnits(std::span<const uint32_t> units);

  // See superoffload_gpu_suspend and superoffload_gpu_resume.
  Status Suspend();
  Status Resume();
  Status CheckPresent() const;  // FAILED_PRECONDITION: it is suspended

  Status WaitOnStream(uint32_t bucket, StreamNumber stream, const Deadline& deadline) override;
  double stall_seconds() const override { return stall_seconds_; }

  // See superoffload_gpu_set_resident. `state` is the mapping of the state memory.
  Status SetResident(uint32_t count, const std::byte* state);
  bool resident(uint32_t bucket) const { return moves_->resident(bucket); }
  kernels::CudaPointer ResidentMasters(uint32_t bucket) const { return moves_->ResidentMasters(bucket); }

  Status Submit(const superoffload_ring_entry& entry) override;
  Status WaitUntil(const Deadline& deadline, const Condition& done) override;
  bool runs_ahead() const override { return !ended(); }
  std::unique_ptr<GradientMover> MakeGradientMover(const ModelLayout* layout, StepPlane* steps,
                                                   size_t threads) override;
  GpuPlane* gpu() override { return this; }

 private:
  GpuPlane(StepPlane* steps, std::shared_ptr<const kernels::GpuDevice> device, std::vector<GpuBucket> buckets,
           const GpuLayout& layout, uint32_t stream_slots);

  Status FindUnit(uint32_t unit, uint32_t* index) const;  // INVALID_ARGUMENT: none has the number

  // At the attach.
  Status Open(const ModelLayout& model, const superoffload_gpu_options& options, const kernels::UnitRanges& units,
              std::shared_ptr<kernels::SharedGpuMemory> memory);
  Status OpenMoves(const ModelLayout& model, const superoffload_gpu_options& options);
  Status Probe(uint32_t bucket);
  Status UnmapDevice();

  template <typename Copy>
  Status CopyEach(kernels::CudaStream stream, const char* what, Copy copy);
  kernels::CudaPointer OnGpu(const GpuBucket& bucket) const { return memory_->data() + bucket.gpu_offset; }
  std::byte* OnHost(const GpuBucket& bucket) const {
    return static_cast<std::byte*>(steps_.parameters().data()) + bucket.parameters_offset;
  }

  // The parameters in them, of the step that was ended last, are final.
  Status WaitPublished(std::span<const uint32_t> buckets, const Deadline& deadline);

  // The trainer's thread.
  uint32_t HostSlotOf(uint32_t bucket);
  Status CheckAddsUp() const;
  Status WaitSumIssued(uint32_t bucket);

  // The thread of arrivals.
  void SubmitArrived(const kernels::CudaStatus& done, const superoffload_ring_entry& entry);

  // The completions' thread.
  void TakeCompletions();
  Status OnCompletion(const superoffload_ring_entry& entry);
  void Tell(const superoffload_ring_entry& entry);
  void Stop(const Status& status);

  StepPlane& steps_;  // at the attach, and for what lies in its memory
  StepRings& rings_;
  StepProgress& progress_;
  HostPlane host_;
  superoffload_gpu_report report_{};
  std::atomic<double> stall_seconds_ = 0;

  const std::shared_ptr<const kernels::GpuDevice> device_;
  const std::vector<GpuBucket> buckets_;
  const GpuLayout layout_;
  const uint32_t stream_slots_;
  bool suspended_ = false;
  std::shared_ptr<kernels::SharedGpuMemory> memory_;  // a later plane may take it over, and views outlive both
  DeviceSlotPool slots_;
  PackStream pack_stream_;
  std::unique_ptr<GpuMoves> moves_;

  std::mutex mu_;  // guards the attachment's progress, too
  std::condition_variable changed_;
  Status failure_;       // for the next wait to report
  bool failed_ = false;  // it is the last thing that happened
  uint32_t probes_under_way_ = 0;

  std::atomic<bool> stop_ = false;
  std::thread completions_;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_PLANE_H_
