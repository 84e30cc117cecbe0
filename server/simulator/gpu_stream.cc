#include "server/simulator/gpu_stream.h"

#include <utility>

#include "kernels/base/check.h"
#include "server/simulator/driver/driver.h"

namespace superoffload::simulator {

void GpuStream::Kernel(double seconds, std::string name) {
  Do([this, seconds, name = std::move(name)](std::function<void()> done) mutable {
    const double begin = time_->now();
    time_->After(seconds, [this, begin, name = std::move(name), done = std::move(done)]() mutable {
      busy_seconds_ += time_->now() - begin;
      if (timeline_ != nullptr) timeline_->Add(lane_, std::move(name), begin, time_->now());
      done();
    });
  });
}

void GpuStream::Copy(CopyEngine* engine, double bytes, std::string name, double limit) {
  Do([engine, bytes, limit, name = std::move(name)](std::function<void()> done) mutable {
    engine->Copy(bytes, limit, std::move(name), std::move(done));
  });
}

void GpuStream::Synchronize() {
  Flush();
  SUPEROFFLOAD_CHECK(idle(), "nobody waits in virtual time");
}

kernels::CudaStream GpuStream::handle() {
  if (handle_ == nullptr) lent_ = Lend(this, &handle_);
  return handle_;
}

void GpuStream::Begin() {
  about_to_run_ = true;
  time_->After(0, [this] { Flush(); });
}

void GpuStream::Flush() {
  if (std::exchange(about_to_run_, false)) Run();
}

}  // namespace superoffload::simulator
