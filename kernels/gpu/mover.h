// Copies gradients from GPU memory to host memory and parameters back: one class, whichever side copies. The daemon has
// one for the `daemon` mover, a trainer one for `trainer` and `direct`.
//
//   CopyDown              device slot -> host gradients, and the slot's sums of squares; then its callback
//   Published, Verdict    what is due is copied up: host parameters -> GPU memory, in the order of upload_order.h, a
//   few
//                         at a time
//   WaitLanded            a bucket that is due and has not been issued goes at once
//
// It uses copy engines only, and its streams wait for events of this process only: a peer that dies leaves copies that
// end, or fail; nothing hangs. Parameters go up when a step has committed, never before: the host's memory is the
// second buffer.
#ifndef SUPEROFFLOAD_KERNELS_GPU_MOVER_H_
#define SUPEROFFLOAD_KERNELS_GPU_MOVER_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/gpu/completion_queue.h"
#include "kernels/gpu/cuda_device.h"
#include "kernels/gpu/pinned_memory.h"
#include "kernels/gpu/upload_order.h"

namespace superoffload::kernels {

// Where a bucket lies on either side. Offsets and sizes are in bytes.
struct MovedBucket {
  std::array<uint64_t, 2> gradient_offsets{};  // into the host's gradients, per slot of the host
  uint64_t gradient_bytes = 0;
  // Of the bucket's log, if it has one: the first two slots are those above, and the others lie one after the other.
  uint64_t log_offset = 0, log_slot_bytes = 0;
  uint32_t log_slots = 0;
  uint64_t parameters_offset = 0;  // into the host's parameters
  uint64_t gpu_offset = 0;         // into the GPU memory: of the parameters, at first (Mover::SetGpuOffset)
  uint64_t parameters_bytes = 0;
  uint64_t chunks = 0;

  uint32_t host_slots() const { return std::max(2u, log_slots); }
  uint64_t GradientOffset(uint32_t host_slot) const {
    return host_slot < 2 ? gradient_offsets[host_slot] : log_offset + (host_slot - 2) * log_slot_bytes;
  }
};

// Gradient slots in GPU memory, and the sums of squares of their chunks. Offsets and sizes are in bytes.
struct DeviceSlots {
  uint64_t count = 0;
  uint64_t offset = 0, bytes = 0;            // per slot
  uint64_t sums_offset = 0, sums_bytes = 0;  // per slot

  uint64_t slot_offset(uint64_t slot) const { return offset + slot * bytes; }
  uint64_t sums_of(uint64_t slot) const { return sums_offset + slot * sums_bytes; }
};

struct MoverMemory {
  std::span<std::byte> gradients, parameters;  // the host's
  std::vector<MovedBucket> buckets;
  DeviceSlots slots;
};

using MakeQueue = std::function<std::unique_ptr<CompletionQueue>(std::shared_ptr<const GpuDevice>, const char* name)>;

class Mover {
 public:
  struct Options {
    std::string process{};            // "the daemon", "the trainer": whose limits an error names
    bool kernels_reach_host = false;  // kernels store into the host's gradients
    // Who tells of parameters must not enter the driver: a queue of the mover's issues the copies.
    bool upload_thread = false;
    // Each copy of parameters has ended, or failed, or could not be issued. Called from queues of the mover's. Without
    // it, streams wait for the copies (WaitLanded).
    std::function<void(uint64_t step, uint32_t bucket, const CudaStatus&)> landed{};
    // Whose callbacks are the mover's threads. Empty: a thread each.
    MakeQueue make_queue{};
    size_t uploads_in_flight = UploadOrder::kInFlight;
  };
  // A gradient has arrived with this sum of squares, or failed.
  using Arrived = std::function<void(const CudaStatus&, double sum_of_squares)>;
  enum class What { kGradientAndSums, kSums };

  // `gpu`: base of the GPU memory; it and the host's memory outlive the mover. The device must be current.
  // RESOURCE_EXHAUSTED: no memory, or no threads.
  static CudaStatus Open(std::shared_ptr<const GpuDevice> device, CudaPointer gpu, MoverMemory memory, Options options,
                         std::unique_ptr<Mover>* mover);

  // Waits for what it has issued, and runs the callbacks. What is due and was not issued goes first where streams wait
  // for it; who is told of copies is not told of those. Nobody may call it any more.
  ~Mover();
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  const MoverMemory& memory() const { return memory_; }
  CudaStream down_stream() const { return down_.get(); }
  CudaStream up_stream() const { return up_.get(); }

  // What could not be registered with the driver, and why.
  const std::vector<CudaStatus>& unregistered() const { return unregistered_; }
  // Copies wait in the driver, because host memory is not registered and the GPU does not use the host's page tables.
  bool staged() const { return staged_; }

  // The copy's callback runs in the order of the calls, with those of `arrivals`. It begins when the down stream has
  // done what it was given before. An error: it will not run. One thread at a time; the device must be current.
  CudaStatus CopyDown(uint32_t bucket, uint32_t slot, uint32_t host_slot, What what, Arrived arrived);

  // Host gradients -> device slot, on `stream`: what more is to be added to. The device must be current.
  CudaStatus CopyToSlot(uint32_t bucket, uint32_t host_slot, uint32_t slot, CudaStream stream);

  // At once, without telling anybody: for measuring. The device must be current.
  CudaStatus CopyDownAndWait(uint32_t bucket, uint32_t slot, uint32_t host_slot, What what = What::kGradientAndSums);
  CudaStatus CopyUpAndWait(uint32_t bucket);

  // For what has to come after gradients.
  CompletionQueue& arrivals() { return *arrivals_; }

  // Whether the bucket's parameters become due when a step commits; true at first. False: they are not due any more.
  // Any thread.
  void SetCopiesUp(uint32_t bucket, bool copies);

  // Where in the GPU memory the bucket's parameters lie from now on. None of its copies is due or under way.
  void SetGpuOffset(uint32_t bucket, uint64_t offset);

  // What the step has brought; any thread. An error: of some copy up, unless a queue issues them; then neither
  // waits for anything nor calls the driver.
  CudaStatus Published(uint64_t step, uint32_t bucket, bool speculative);
  CudaStatus VerdictReached(uint64_t step, bool commits, bool speculation_stands);

  // Those of a bucket that becomes due when a step commits are due now, unless they have become so since SetCopiesUp.
  // Any thread. Errors as Published.
  CudaStatus Fetch(uint32_t bucket);

  // Bytes that Fetch has made due since they were taken last. Any thread.
  uint64_t TakeFetchedBytes();

  // Copies a bucket's parameters up at once, due or not; `landed` is told. The device must be current.
  CudaStatus CopyUp(uint64_t step, uint32_t bucket);

  // Without `landed`: the up stream has been given what brings the bucket's parameters, and `stream` waits for the
  // latest of it; if they are due and not under way, they are from now on. The device must be current. An error: also
  // of an earlier copy up, for which nobody will wait any more.
  CudaStatus RecordLanded(uint32_t bucket);
  CudaStatus WaitLanded(uint32_t bucket, CudaStream stream);

  // Issues what is due, and waits until everything that was issued has landed. The device must be current.
  CudaStatus WaitAllLanded();

 private:
  using Upload = UploadOrder::Upload;

  Mover(std::shared_ptr<const GpuDevice> device, CudaPointer gpu, MoverMemory memory, Options options);
  CudaStatus Prepare();
  void Register(std::span<std::byte> host);
  CudaStatus IssueUp(uint32_t bucket);
  CudaStatus IssueDown(uint32_t bucket, uint32_t slot, uint32_t host_slot, What what);
  double SumOf(uint32_t bucket, uint32_t slot) const;
  double* SumsOf(uint64_t slot) const { return reinterpret_cast<double*>(sums_.data()) + slot * max_chunks_; }
  CudaStatus StartUploads();
  void RunUploads();
  std::optional<Upload> Next();
  CudaStatus IssueUploads(const std::function<std::optional<Upload>()>& take);
  CudaStatus Issue(const Upload& upload);
  void OnLanded(const Upload& upload, const CudaStatus& done);

  const std::shared_ptr<const GpuDevice> device_;
  const CudaDriver& driver_;
  const CudaPointer gpu_;
  const MoverMemory memory_;
  const Options options_;
  uint64_t max_chunks_ = 0;  // of a bucket
  bool staged_ = false;
  std::vector<CudaStatus> unregistered_;
  std::vector<std::byte*> registered_;
  PinnedMemory sums_;  // doubles: of squares, per slot and chunk
  OwnedStream down_, up_;
  // Per bucket, without `landed`. One is recorded anew only after its last wait was issued: the bucket's next
  // parameters come of its next gradient, which is packed after a wait for it.
  std::vector<OwnedEvent> landed_;

  // Held while copies are taken and issued, so that they are issued in the order in which they are taken, and whoever
  // finds that one is not due finds it issued. Before up_mu_.
  std::mutex issuing_mu_;
  std::mutex up_mu_;                   // never held in a call of the driver
  bool ends_ = false;                  // up_mu_
  bool starting_ = false;              // up_mu_: `starts_` is about to issue
  UploadOrder uploads_;                // up_mu_
  uint64_t fetched_bytes_ = 0;         // up_mu_
  std::optional<Upload> issuing_;      // up_mu_: taken, and perhaps not issued yet
  CudaStatus up_failure_;              // up_mu_: of the first copy up that failed
  std::vector<uint64_t> gpu_offsets_;  // up_mu_: of the buckets' parameters

  std::unique_ptr<CompletionQueue> arrivals_, landings_, starts_;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_GPU_MOVER_H_
