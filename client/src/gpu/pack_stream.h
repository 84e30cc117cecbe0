// The stream on which an attachment's gradients are packed, which outlives the attachment: who has kept memory for it
// (PyTorch's record_stream) may record an event on it whenever that memory is given back. So none is ever destroyed;
// the next attachment takes it.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_PACK_STREAM_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_PACK_STREAM_H_

#include <memory>

#include "client/src/status.h"
#include "kernels/gpu/cuda_device.h"

namespace superoffload::client {

class PackStream {
 public:
  PackStream() = default;
  // What was launched on the stream has run.
  ~PackStream();
  PackStream(const PackStream&) = delete;
  PackStream& operator=(const PackStream&) = delete;

  // Once. Nobody else has the stream while this lives. The device must be current.
  Status Take(std::shared_ptr<const kernels::GpuDevice> device);

  kernels::CudaStream get() const { return stream_.get(); }

 private:
  std::shared_ptr<const kernels::GpuDevice> device_;  // its context lives as long as the stream
  kernels::OwnedStream stream_;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_PACK_STREAM_H_
