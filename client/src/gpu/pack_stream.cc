#include "client/src/gpu/pack_stream.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "client/src/gpu/gpu_status.h"

namespace superoffload::client {
namespace {

struct Idle {
  std::shared_ptr<const kernels::GpuDevice> device;
  kernels::OwnedStream stream;
};

struct Pool {
  std::mutex mu;
  std::vector<Idle> idle;
};

// Never destroyed: the driver may have ended before the process's static objects do.
Pool& ProcessPool() {
  static auto* const pool = new Pool;
  return *pool;
}

}  // namespace

Status PackStream::Take(std::shared_ptr<const kernels::GpuDevice> device) {
  Pool& pool = ProcessPool();
  {
    std::lock_guard lock(pool.mu);
    const auto found = std::ranges::find_if(
        pool.idle, [&device](const Idle& idle) { return idle.device->context() == device->context(); });
    if (found != pool.idle.end()) {
      device_ = std::move(found->device);
      stream_ = std::move(found->stream);
      pool.idle.erase(found);
      return {};
    }
  }
  device_ = std::move(device);
  return FromCuda(kernels::MakeStream(*device_, &stream_));
}

PackStream::~PackStream() {
  if (stream_.get() == nullptr) return;
  Pool& pool = ProcessPool();
  std::lock_guard lock(pool.mu);
  pool.idle.push_back({std::move(device_), std::move(stream_)});
}

}  // namespace superoffload::client
