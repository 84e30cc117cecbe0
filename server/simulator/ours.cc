#include "server/simulator/ours.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "server/simulator/simulated_training.h"

namespace superoffload::simulator {
namespace {

constexpr size_t kWarmUp = 2;

// Steps without clips and skips are all alike; else as many as show a tenth.
size_t MeasuredSteps(const RunOptions& options) { return options.clip_rate == 0 && options.skip_rate == 0 ? 2 : 10; }

// As evenly spread as possible: event i happens when i times its rate passes a whole number.
std::vector<engine::Verdict> Verdicts(const RunOptions& options) {
  const auto falls_due = [](size_t i, double rate) {
    return std::floor(static_cast<double>(i + 1) * rate + 1e-9) > std::floor(static_cast<double>(i) * rate + 1e-9);
  };
  std::vector<engine::Verdict> verdicts;
  for (size_t i = 0; i < kWarmUp + MeasuredSteps(options); ++i) {
    if (falls_due(i, options.skip_rate)) {
      verdicts.push_back(engine::Verdict::kSkipNonFinite);
    } else if (falls_due(i, options.clip_rate)) {
      verdicts.push_back(engine::Verdict::kClip);
    } else {
      verdicts.push_back(engine::Verdict::kCommit);
    }
  }
  return verdicts;
}

// Shares of a stall, by what was waited for: each milestone explains the time up to it that those before it do not.
class Causes {
 public:
  void Add(const Stall& stall, const std::vector<StepTimes>& steps) {
    double from = stall.begin;
    const auto until = [&](const char* cause, double milestone) {
      const double to = std::clamp(milestone, from, stall.end);
      seconds_[cause] += to - from;
      from = to;
    };
    if (stall.buckets == nullptr) {
      until("a device slot for a gradient", stall.lacked);
      until("reducing gradients over ranks", stall.gathering);
    } else if (stall.step > 0) {
      const StepTimes& before = steps[stall.step - 1];
      until("reducing gradients over ranks", before.reduced);
      until("the last gradients' way to the host", before.arrived);
      until("passes before the verdict", before.prepared);
      until("the ranks' agreement", before.decided);
      double published = 0;
      for (const uint32_t bucket : *stall.buckets) published = std::max(published, before.published[bucket]);
      until("passes after the verdict", published);
      until("parameters' way back", stall.gathering);
    }
    until("gathering parameters from ranks", stall.end);
  }

  // Per step.
  std::vector<Exposed> Of(size_t steps) const {
    std::vector<Exposed> exposed;
    for (const auto& [cause, seconds] : seconds_) exposed.push_back({cause, seconds / static_cast<double>(steps)});
    return exposed;
  }

 private:
  std::map<std::string, double> seconds_;
};

}  // namespace

Outcome Ours::RunTenths(const Machine& machine, const Workload& workload, const RunOptions& options) const {
  SimulatedTraining training(machine, workload, settings_, Verdicts(options));
  training.Run();
  const std::vector<StepTimes>& steps = training.steps();
  const size_t measured = steps.size() - kWarmUp;
  const double from = steps[kWarmUp - 1].computed, to = steps.back().computed;
  Causes causes;
  for (const Stall& stall : training.stalls()) {
    if (stall.step >= kWarmUp) causes.Add(stall, steps);
  }
  Outcome outcome = MakeOutcome(machine, workload, (to - from) / static_cast<double>(measured), causes.Of(measured));
  if (options.timeline) {
    const double begin = steps[steps.size() - 2].first_kernel;
    for (Span span : training.spans()) {
      if (span.begin < begin || span.begin > to) continue;
      span.begin -= begin;
      span.end -= begin;
      outcome.timeline.push_back(std::move(span));
    }
  }
  return outcome;
}

// A plane through the outcomes at the tenths below the rates and at the next tenth of either.
Outcome Ours::Run(const Machine& machine, const Workload& workload, const RunOptions& options) const {
  const auto tenths = [](double rate) { return std::floor(rate * 10 + 1e-9); };
  const double clip = tenths(options.clip_rate), skip = tenths(options.skip_rate);
  const double clip_part = std::max(options.clip_rate * 10 - clip, 0.0);
  const double skip_part = std::max(options.skip_rate * 10 - skip, 0.0);
  const auto at = [&](double clips, double skips, bool timeline) {
    return RunTenths(machine, workload, {.clip_rate = clips / 10, .skip_rate = skips / 10, .timeline = timeline});
  };
  Outcome base = at(clip, skip, options.timeline);
  if (clip_part < 1e-6 && skip_part < 1e-6) return base;
  double step_seconds = 0;
  std::map<std::string, double> seconds;
  const auto add = [&](double weight, const Outcome& outcome) {
    step_seconds += weight * outcome.step_seconds;
    for (const Exposed& part : outcome.exposed) seconds[part.cause] += weight * part.seconds;
  };
  add(1 - clip_part - skip_part, base);
  if (clip_part >= 1e-6) add(clip_part, at(clip + 1, skip, false));
  if (skip_part >= 1e-6) add(skip_part, at(clip, skip + 1, false));
  std::vector<Exposed> exposed;
  for (const auto& [cause, sum] : seconds) exposed.push_back({cause, sum});
  Outcome outcome = MakeOutcome(machine, workload, step_seconds, std::move(exposed));
  outcome.timeline = std::move(base.timeline);
  return outcome;
}

}  // namespace superoffload::simulator
