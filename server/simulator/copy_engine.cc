#include "server/simulator/copy_engine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace superoffload::simulator {

CopyEngine::CopyEngine(VirtualTime* time, SharedBandwidth* host_memory, LinkCurve curve, Lane lane, Timeline* timeline)
    : time_(time), host_memory_(host_memory), curve_(std::move(curve)), lane_(lane), timeline_(timeline) {}

void CopyEngine::Copy(double bytes, std::string name, std::function<void()> done) {
  Copy(bytes, std::numeric_limits<double>::infinity(), std::move(name), std::move(done));
}

void CopyEngine::Copy(double bytes, double limit, std::string name, std::function<void()> done) {
  copies_.push_back({bytes, std::min(limit, curve_.BandwidthOf(bytes)), std::move(name), std::move(done)});
  if (copies_.size() == 1) Begin();
}

void CopyEngine::Begin() {
  begun_ = time_->now();
  if (std::isinf(copies_.front().limit)) {
    time_->After(0, [this] { Finish(); });
  } else {
    host_memory_->Start(copies_.front().bytes, copies_.front().limit, [this] { Finish(); });
  }
}

void CopyEngine::Finish() {
  Request copy = std::move(copies_.front());
  copies_.pop_front();
  busy_seconds_ += time_->now() - begun_;
  if (timeline_ != nullptr) timeline_->Add(lane_, std::move(copy.name), begun_, time_->now());
  if (!copies_.empty()) Begin();
  copy.done();
}

}  // namespace superoffload::simulator
