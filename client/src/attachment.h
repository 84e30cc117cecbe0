// One attachment: its mappings, and its steps as the trainer sees them.
//
// Submitting and waiting touch different members, so that one thread may do each. Without a GPU, whoever waits takes
// completions from the ring; with one, a thread of the attachment does, and has parameters copied as soon as they come.
#ifndef SUPEROFFLOAD_CLIENT_SRC_ATTACHMENT_H_
#define SUPEROFFLOAD_CLIENT_SRC_ATTACHMENT_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "client/src/descriptor_connection.h"
#include "client/src/gpu/gpu_plane.h"
#include "client/src/step_rings.h"
#include "superoffload/superoffload.h"

namespace superoffload::client {

class Attachment {
 public:
  // `last_step` is the optimizer's count of steps so far. `connection` must outlive the attachment.
  static Status Create(DescriptorConnection* connection, uint64_t epoch, uint64_t last_step, uint32_t bucket_count,
                       std::unique_ptr<Attachment>* attachment);

  ~Attachment();

  const Mapping& parameters() const { return parameters_; }
  const Mapping& gradients() const { return gradients_; }

  // Private copy-on-write view, mapped on first use.
  Status State(const Mapping** state);

  // The GPU; see superoffload_gpu.h.
  // `previous` may be null; see superoffload_gpu_options.
  Status AttachGpu(const superoffload_gpu_options& options, Attachment* previous, superoffload_gpu_report* report);
  GpuPlane* gpu() const { return gpu_.get(); }
  Status GpuGradientReady(uint32_t bucket, const superoffload_tensor* tensors, uint32_t count, kernels::DType dtype,
                          kernels::CudaStream stream);
  Status AwaitParameters(uint32_t bucket, const Deadline& deadline, kernels::CudaStream stream);
  Status SetResident(uint32_t count);
  double stall_seconds() const { return stall_seconds_; }

  // Submitting; see superoffload.h.
  Status SetGroup(uint32_t group, double lr, double beta1, double beta2, double eps, double weight_decay);
  Status BeginStep(double gradient_scale);
  Status GradientReady(uint32_t bucket);
  Status MeasureNorm(double gradient_scale);
  Status EndStep(double gradient_scale, double max_grad_norm);
  Status AbandonStep();

  // Waiting; see superoffload.h.
  Status WaitNorm(const Deadline& deadline, double* global_norm);
  Status WaitVerdict(const Deadline& deadline, superoffload_verdict* verdict);
  Status WaitParameters(uint32_t bucket, const Deadline& deadline);
  Status WaitStep(const Deadline& deadline, superoffload_verdict* verdict);

 private:
  enum class Published : uint8_t { kNo, kSpeculative, kFinal };

  Attachment(DescriptorConnection* connection, StepRings rings, uint64_t epoch, uint64_t last_step,
             uint32_t bucket_count);
  superoffload_ring_entry Entry(superoffload_submission opcode, uint32_t index,
                                std::initializer_list<double> payload) const;
  Status Submit(superoffload_submission opcode, uint32_t index, std::initializer_list<double> payload);
  Status CheckOpen(const char* call) const;
  Status CheckBucket(uint32_t bucket) const;
  Status CheckGradient(uint32_t bucket) const;
  template <typename Submission>
  Status HandOver(uint32_t bucket, Submission submit);
  Status CheckAllHandedOver(const char* call) const;
  Status WaitOver();

  // Waits, or takes completions, until `done()` holds of `step`.
  template <typename Done>
  Status WaitUntil(uint64_t step, const Deadline& deadline, Done done);
  Status Take(const superoffload_ring_entry& entry);
  void TakeVerdict(const superoffload_ring_entry& entry);
  void TakeCompletions();
  void EndGpu();
  bool Final(uint32_t bucket) const {
    return verdict_ && published_[bucket] == Published::kFinal && !landing_[bucket];
  }

  DescriptorConnection* const connection_;
  const uint64_t epoch_;
  const uint64_t last_step_;  // before this attachment
  const uint32_t bucket_count_;
  StepRings rings_;
  Mapping parameters_, gradients_, state_;
  FileDescriptor state_file_;
  size_t state_bytes_ = 0;

  // Submitting.
  uint64_t step_;
  bool open_ = false;
  std::vector<bool> handed_over_;
  uint32_t handed_over_count_ = 0;

  // Orders what was done before a submission before what is done with the daemon's answer to it: an order that runs through
  // another process is none to C++.
  std::atomic<uint64_t> submissions_{0};

  // What the waiting thread waits for.
  std::atomic<uint64_t> ended_step_;
  std::atomic<uint64_t> measured_step_ = 0;

  // Waiting; `mu_` guards it where the attachment has a thread for completions.
  std::mutex mu_;
  std::condition_variable changed_;
  Status failure_;       // for the next wait to report
  bool failed_ = false;  // it is the last thing that happened
  uint64_t completing_step_;
  std::optional<superoffload_verdict> verdict_;  // of completing_step_
  std::optional<double> norm_;                   // of completing_step_
  std::vector<Published> published_;
  uint32_t unfinished_ = 0;                // buckets whose parameters the verdict left to come
  std::vector<bool> landing_;              // per bucket: the daemon has yet to copy its parameters to the GPU
  uint32_t landings_ = 0;                  // buckets of which that holds
  uint32_t next_slot_ = 0;                 // of host gradients; with a GPU
  std::atomic<double> stall_seconds_ = 0;  // in AwaitParameters, of the step ended last

  std::shared_ptr<kernels::SharedGpuMemory> gpu_memory_;  // the plane's, which views may outlive
  std::unique_ptr<GpuPlane> gpu_;
  std::atomic<bool> stop_ = false;
  std::thread completions_;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_ATTACHMENT_H_
