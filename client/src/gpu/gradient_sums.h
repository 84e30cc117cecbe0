// Gradients of several passes, added up in the host's gradient slots:
//
//   down stream   sum of the passes before -> host, event
//   sums stream   (wait) host -> device slot, event
//   pack stream   (wait) pack this pass's gradients into that slot, adding
//
// So the GPU has none of a bucket's gradients between two passes.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_GRADIENT_SUMS_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_GRADIENT_SUMS_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "client/src/status.h"
#include "kernels/gpu/cuda_device.h"
#include "kernels/gpu/mover.h"

namespace superoffload::client {

class GradientSums {
 public:
  GradientSums(std::shared_ptr<const kernels::GpuDevice> device, size_t buckets)
      : device_(std::move(device)), sums_(buckets) {}
  // What it has issued is done afterwards; the device must be current.
  ~GradientSums();
  GradientSums(const GradientSums&) = delete;
  GradientSums& operator=(const GradientSums&) = delete;

  // A copy of the bucket's sum to the host is to be issued, some time; it has been, on `down_stream`. The device must
  // be current.
  void OnSubmitted(uint32_t bucket);
  Status OnIssued(uint32_t bucket, kernels::CudaStream down_stream);
  // All that were to be have been: then it may be fetched.
  bool Issued(uint32_t bucket);

  // The device slot has the bucket's sum once `pack_stream` gets to what follows. The device must be current.
  Status Fetch(kernels::Mover& mover, uint32_t bucket, uint32_t host_slot, uint32_t slot,
               kernels::CudaStream pack_stream);

 private:
  struct Sum {
    uint32_t waiting = 0;  // copies to be issued
    kernels::OwnedEvent landed;
  };

  Status Record(const kernels::OwnedEvent& event, kernels::CudaStream stream) const;
  Status Wait(const kernels::OwnedEvent& event, kernels::CudaStream stream) const;

  const std::shared_ptr<const kernels::GpuDevice> device_;
  kernels::OwnedStream stream_;
  kernels::OwnedEvent fetched_;  // recorded anew only after the last wait was issued
  std::mutex mu_;
  std::vector<Sum> sums_;  // by bucket
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_GRADIENT_SUMS_H_
