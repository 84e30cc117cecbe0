#include "server/simulator/ours.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/simulator/simulated_training.h"

namespace superoffload::simulator {
namespace {

// A simulation's steps. Those without clips and skips are all alike, else as many are measured as show a tenth; but
// buckets with logs are absorbed in turn, each after as many steps as its log has.
struct Window {
  Window(const Ours::Settings& settings, const RunOptions& options) {
    if (settings.resident_buckets > 0 && settings.log_slots > 0) turn = settings.log_slots - 1;
    measured = std::lcm(options.clip_rate == 0 && options.skip_rate == 0 ? 2 : 10, turn);
    if (turn > 1) warm_up += turn;
  }

  size_t turn = 1;  // 1: there are no logs
  size_t warm_up = 2, measured;
};

// As evenly spread as possible: event i happens when i times its rate passes a whole number.
std::vector<engine::Verdict> Verdicts(const RunOptions& options, size_t steps) {
  const auto falls_due = [](size_t i, double rate) {
    return std::floor(static_cast<double>(i + 1) * rate + 1e-9) > std::floor(static_cast<double>(i) * rate + 1e-9);
  };
  std::vector<engine::Verdict> verdicts;
  for (size_t i = 0; i < steps; ++i) {
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

// Parts of a stall, by what was waited for: each milestone explains the time up to it that those before it do not.
std::vector<Span> CausesOf(const Stall& stall, const std::vector<StepTimes>& steps) {
  std::vector<Span> parts;
  double from = stall.begin;
  const auto until = [&](const char* cause, double milestone) {
    const double to = std::clamp(milestone, from, stall.end);
    if (to > from) parts.push_back({Lane::kExposed, cause, from, to});
    from = to;
  };
  if (stall.buckets == nullptr) {
    until(kDeviceSlots, std::min({stall.lacked, stall.read, stall.returning}));
    if (stall.read < stall.end) until("parameters that stream", stall.returning);
    if (stall.returning < stall.end) until("activations' way back", stall.end);
    until("reducing gradients over ranks", stall.reading);
    until("parameters that stream", stall.gathering);
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
  return parts;
}

std::vector<Exposed> ExposedOf(const std::map<std::string, double>& seconds_by_cause) {
  std::vector<Exposed> exposed;
  for (const auto& [cause, seconds] : seconds_by_cause) exposed.push_back({cause, seconds});
  return exposed;
}

std::vector<Exposed> PerStep(const std::vector<Span>& parts, double steps) {
  std::map<std::string, double> seconds;
  for (const Span& part : parts) seconds[part.name] += part.end - part.begin;
  for (auto& [cause, sum] : seconds) sum /= steps;
  return ExposedOf(seconds);
}

// Of what is absorbed in a window: passes that are under way at its ends.
constexpr double kPassesUnderWay = 0.01;

// By how much a window's steps were too fast for what absorbs their gradients, as a fraction: a log hides that
// until it is full, and then each step takes as long as that does.
double Backlog(const SimulatedTraining& training, const Window& window) {
  const std::span<const StepTimes> steps = training.steps();
  const double absorbed = steps.back().absorbed - steps[window.warm_up - 1].absorbed;
  if (window.turn == 1 || absorbed == 0) return 0;
  const auto committed = std::ranges::count_if(steps.subspan(window.warm_up),
                                               [](const StepTimes& step) { return !engine::IsSkip(step.verdict); });
  const double backlog = static_cast<double>(committed) * training.elements() / absorbed - 1;
  return backlog > kPassesUnderWay ? backlog : 0;
}

std::string StepName(const std::vector<StepTimes>& steps, size_t index) {
  const engine::Verdict verdict = steps[index].verdict;
  const char* const what = engine::IsSkip(verdict)             ? "is skipped"
                           : verdict == engine::Verdict::kClip ? "is clipped"
                                                               : "commits";
  return absl::StrCat("step ", index + 1, ", which ", what);
}

// The last two steps. A step lasts from the end of the backward pass before it to the end of its own, as it is
// measured.
std::vector<Span> LastTwoSteps(const SimulatedTraining& training, const std::vector<Span>& exposed) {
  const std::vector<StepTimes>& steps = training.steps();
  const size_t last = steps.size() - 1;
  const double begin = steps[last - 2].computed, middle = steps[last - 1].computed, end = steps[last].computed;
  std::vector<Span> timeline{{Lane::kStep, StepName(steps, last - 1), begin, middle},
                             {Lane::kStep, StepName(steps, last), middle, end}};
  timeline.insert(timeline.end(), exposed.begin(), exposed.end());
  timeline.insert(timeline.end(), training.spans().begin(), training.spans().end());
  std::erase_if(timeline, [&](const Span& span) {
    return span.end < begin || span.begin > end || (span.end > span.begin && (span.end == begin || span.begin == end));
  });
  for (Span& span : timeline) {
    span.begin = std::max(span.begin, begin) - begin;
    span.end = std::min(span.end, end) - begin;
  }
  return timeline;
}

}  // namespace

Outcome Ours::RunTenths(const Machine& machine, const Workload& workload, const RunOptions& options) const {
  const Window window(settings_, options);
  SimulatedTraining training(machine, workload, settings_, Verdicts(options, window.warm_up + window.measured));
  training.Run();
  const std::vector<StepTimes>& steps = training.steps();
  const StepTimes &first = steps[window.warm_up - 1], &last = steps.back();
  const auto measured = static_cast<double>(window.measured);
  std::vector<Span> causes;
  for (const Stall& stall : training.stalls()) {
    if (stall.step < window.warm_up) continue;
    for (Span& part : CausesOf(stall, steps)) causes.push_back(std::move(part));
  }
  double step_seconds = (last.computed - first.computed) / measured;
  std::vector<Exposed> exposed = PerStep(causes, measured);
  if (const double later = step_seconds * Backlog(training, window); later > 0) {
    exposed.push_back({"logs that fill up", later});
    step_seconds += later;
  }
  Outcome outcome = MakeOutcome(machine, workload, step_seconds, std::move(exposed));
  if (options.timeline) outcome.timeline = LastTwoSteps(training, causes);
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
  Outcome outcome = MakeOutcome(machine, workload, step_seconds, ExposedOf(seconds));
  outcome.timeline = std::move(base.timeline);
  return outcome;
}

}  // namespace superoffload::simulator
