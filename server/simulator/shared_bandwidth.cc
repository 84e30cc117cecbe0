#include "server/simulator/shared_bandwidth.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/base/check.h"

namespace superoffload::simulator {
namespace {

// Sums of bytes are rounded: what is this close to its end has ended. So is the time: an end so close to `now` that the
// sum of both is `now` would never be reached.
double ToleranceSeconds(double now) { return 1e-10 + 4 * std::numeric_limits<double>::epsilon() * now; }

}  // namespace

SharedBandwidth::SharedBandwidth(VirtualTime* time, double capacity) : time_(time), capacity_(capacity) {
  SUPEROFFLOAD_CHECK(std::isfinite(capacity) && capacity > 0);
}

void SharedBandwidth::Start(double bytes, double limit, double weight, std::function<void()> done) {
  SUPEROFFLOAD_CHECK(std::isfinite(bytes) && bytes >= 0);
  SUPEROFFLOAD_CHECK(std::isfinite(limit) && limit > 0 && std::isfinite(weight) && weight > 0);
  Advance();
  Class& of_kind = classes_[Key(limit / weight, limit)];
  of_kind.ends.emplace(of_kind.moved + bytes, Flow{bytes, std::move(done)});
  ++flows_;
  ScheduleUpdate();
}

// All flows that begin and end at one time change the rates once.
void SharedBandwidth::ScheduleUpdate() {
  if (update_is_now_) return;
  if (update_) time_->Cancel(*update_);
  update_is_now_ = true;
  update_ = time_->After(0, [this] { Update(); });
}

void SharedBandwidth::Update() {
  update_.reset();
  update_is_now_ = false;
  Advance();
  FinishFlows();
  if (update_is_now_) return;  // a flow that is done began others
  ShareCapacity();
  if (const std::optional<double> next = NextEnd()) update_ = time_->After(*next, [this] { Update(); });
}

void SharedBandwidth::Advance() {
  const double passed = time_->now() - advanced_to_;
  advanced_to_ = time_->now();
  if (passed == 0) return;
  for (auto& [key, of_kind] : classes_) of_kind.moved += of_kind.rate * passed;
}

void SharedBandwidth::FinishFlows() {
  std::vector<std::function<void()>> done;
  const double tolerance = ToleranceSeconds(time_->now());
  for (auto kind = classes_.begin(); kind != classes_.end();) {
    Class& of_kind = kind->second;
    while (!of_kind.ends.empty() && of_kind.ends.begin()->first <= of_kind.moved + of_kind.rate * tolerance) {
      bytes_moved_ += of_kind.ends.begin()->second.bytes;
      done.push_back(std::move(of_kind.ends.begin()->second.done));
      of_kind.ends.erase(of_kind.ends.begin());
      --flows_;
    }
    kind = of_kind.ends.empty() ? classes_.erase(kind) : std::next(kind);
  }
  for (const std::function<void()>& call : done) call();
}

void SharedBandwidth::ShareCapacity() {
  double left = capacity_, weights = 0;
  for (const auto& [key, of_kind] : classes_) weights += key.second / key.first * of_kind.ends.size();
  for (auto& [key, of_kind] : classes_) {
    const auto& [limit_level, limit] = key;
    const double weight = limit / limit_level, count = of_kind.ends.size();
    const double level = std::max(left, 0.0) / weights;
    of_kind.rate = std::min(limit, level * weight);
    left -= of_kind.rate * count;
    weights -= weight * count;
  }
}

std::optional<double> SharedBandwidth::NextEnd() const {
  std::optional<double> next;
  for (const auto& [key, of_kind] : classes_) {
    const double seconds = std::max(of_kind.ends.begin()->first - of_kind.moved, 0.0) / of_kind.rate;
    next = next ? std::min(*next, seconds) : seconds;
  }
  return next;
}

}  // namespace superoffload::simulator
