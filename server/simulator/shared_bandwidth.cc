#include "server/simulator/shared_bandwidth.h"

#include <algorithm>
#include <cmath>
#include <iterator>
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

SharedBandwidth::Begun SharedBandwidth::Start(double bytes, double limit, double weight, std::function<void()> done) {
  SUPEROFFLOAD_CHECK(std::isfinite(bytes) && bytes >= 0);
  SUPEROFFLOAD_CHECK(std::isfinite(limit) && limit > 0 && std::isfinite(weight) && weight > 0);
  Advance();
  Class& of_kind = ClassOf({limit / weight, limit});
  const double end = of_kind.moved + bytes;
  auto behind = of_kind.flows.end();
  while (behind != of_kind.flows.begin() && std::prev(behind)->end > end) --behind;
  last_ = &*of_kind.flows.insert(behind, Flows{end, bytes, std::move(done)});
  last_class_ = &of_kind;
  ++of_kind.count;
  ++flows_;
  ScheduleUpdate();
  return ++begun_;
}

SharedBandwidth::Class& SharedBandwidth::ClassOf(const Key& key) {
  const auto at = std::ranges::lower_bound(classes_, key, {}, &Class::key);
  return at != classes_.end() && at->key == key ? *at : *classes_.insert(at, Class{.key = key});
}

bool SharedBandwidth::StartAnother(Begun like) {
  if (like != begun_ || last_ == nullptr || time_->now() != advanced_to_) return false;
  ++last_->count;
  ++last_class_->count;
  ++flows_;
  return true;
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
  for (Class& of_kind : classes_) of_kind.moved += of_kind.rate * passed;
}

void SharedBandwidth::FinishFlows() {
  std::vector<Flows> done;
  last_ = nullptr;
  const double tolerance = ToleranceSeconds(time_->now());
  for (Class& of_kind : classes_) {
    while (!of_kind.flows.empty() && of_kind.flows.front().end <= of_kind.moved + of_kind.rate * tolerance) {
      done.push_back(std::move(of_kind.flows.front()));
      of_kind.flows.pop_front();
      of_kind.count -= done.back().count;
      flows_ -= done.back().count;
    }
  }
  std::erase_if(classes_, [](const Class& of_kind) { return of_kind.flows.empty(); });
  for (const Flows& flows : done) {
    bytes_moved_ += flows.bytes * static_cast<double>(flows.count);
    for (size_t i = 0; i < flows.count; ++i) flows.done();
  }
}

void SharedBandwidth::ShareCapacity() {
  double left = capacity_, weights = 0;
  for (const Class& of_kind : classes_) {
    weights += of_kind.key.second / of_kind.key.first * static_cast<double>(of_kind.count);
  }
  for (Class& of_kind : classes_) {
    const auto& [limit_level, limit] = of_kind.key;
    const double weight = limit / limit_level, count = static_cast<double>(of_kind.count);
    const double level = std::max(left, 0.0) / weights;
    of_kind.rate = std::min(limit, level * weight);
    left -= of_kind.rate * count;
    weights -= weight * count;
  }
}

std::optional<double> SharedBandwidth::NextEnd() const {
  std::optional<double> next;
  for (const Class& of_kind : classes_) {
    const double seconds = std::max(of_kind.flows.front().end - of_kind.moved, 0.0) / of_kind.rate;
    next = next ? std::min(*next, seconds) : seconds;
  }
  return next;
}

}  // namespace superoffload::simulator
