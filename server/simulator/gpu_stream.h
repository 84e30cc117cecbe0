// A stream of a GPU in virtual time.
//
// Kernels of several streams run side by side at their own speed: the pack and cast kernels beside backward are short
// and move few bytes against what backward moves.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_GPU_STREAM_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_GPU_STREAM_H_

#include <limits>
#include <memory>
#include <string>

#include "kernels/gpu/cuda_driver.h"
#include "server/simulator/copy_engine.h"
#include "server/simulator/driver/stream.h"
#include "server/simulator/timeline.h"
#include "server/simulator/virtual_time.h"

namespace superoffload::simulator {

class GpuStream final : public Stream {
 public:
  // `time` and `timeline` must outlive this; `timeline` may be null. `lane`: where its kernels are shown.
  GpuStream(VirtualTime* time, Timeline* timeline, Lane lane = Lane::kGpu)
      : time_(time), timeline_(timeline), lane_(lane) {}

  // Both return at once; the stream must be alive until they have run.
  void Kernel(double seconds, std::string name);
  void Copy(CopyEngine* engine, double bytes, std::string name, double limit = std::numeric_limits<double>::infinity());

  // Does now what takes no time, instead of after whoever enqueued it: for who waits for that. What is left is a
  // mistake.
  void Synchronize() override;

  double busy_seconds() const { return busy_seconds_; }  // of kernels that are done

  // The driver's name for it.
  kernels::CudaStream handle();

 private:
  void Begin() override;
  void Continue() override { Run(); }
  double Now() const override { return time_->now(); }
  void Flush();

  VirtualTime* const time_;
  Timeline* const timeline_;
  const Lane lane_;
  bool about_to_run_ = false;
  double busy_seconds_ = 0;
  std::shared_ptr<void> lent_;
  kernels::CudaStream handle_ = nullptr;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_GPU_STREAM_H_
