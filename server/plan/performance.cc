#include "server/plan/performance.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/plan/narrower_state.h"
#include "server/plan/timeline_file.h"
#include "server/plan/tuning.h"
#include "server/simulator/outcome.h"
#include "server/simulator/workload.h"

namespace superoffload::plan {
namespace {

// Simulating as many takes some ten seconds.
constexpr size_t kMostBuckets = 20000;

// Of all blocks in one step: each is launched on its own, and they are all in memory at once.
constexpr uint64_t kMostPasses = 1 << 17;
constexpr uint64_t kMostSearchedPasses = kMostPasses / 8;  // a search simulates some eight steps

// The layout of the simulation has one parameter group.
simulator::Workload WorkloadOf(const Question& question) {
  simulator::Model model = question.model;
  for (engine::ParameterSpec& parameter : model.parameters) parameter.group = 0;
  simulator::Workload workload =
      simulator::MakeWorkload(question.machine.gpu, std::move(model), question.pass, question.gpu.accumulation);
  workload.ranks = question.ranks;
  return workload;
}

// Makes it as fast as what was measured, which is of one rank; returns the factor, 1 where nothing was.
// INVALID_ARGUMENT: faster than the GPU's peak.
absl::StatusOr<double> ScaleToMeasured(const Question& question, simulator::Workload& workload) {
  if (question.measured_tokens_per_second == 0) return 1.0;
  const double seconds = workload.tokens_per_step() / question.measured_tokens_per_second;
  const double most = workload.tokens_per_step() * question.machine.gpu.peak_flops / workload.flops_per_step;
  if (question.measured_tokens_per_second > most) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "measured_tokens_per_second is %.12g but %s computes at most %.0f of this model at its peak; give that of one "
        "rank",
        question.measured_tokens_per_second, question.machine.name, most));
  }
  const double factor = seconds / workload.compute_seconds();
  for (simulator::UnitSeconds& unit : workload.units) {
    unit.forward *= factor;
    unit.backward *= factor;
  }
  return factor;
}

uint64_t PassesOf(const Question& question) {
  return question.gpu.accumulation * question.model.architecture.head_unit();
}

// Why no step is simulated; empty: one is.
std::string Obstacle(const Question& question, const engine::Layout& layout, const MemoryPlan& memory) {
  if (!memory.gpu_fits) {
    return absl::StrCat("It does not fit in ", question.machine.one_memory ? "the memory of GPU and host" : "HBM",
                        ", so no step was simulated.");
  }
  if (static_cast<double>(simulator::TotalBytes(memory.ranks.front().host)) > question.machine.host.memory_bytes) {
    return "The optimizer does not fit in the host's memory, so no step was simulated.";
  }
  if (layout.buckets.size() > kMostBuckets) {
    return absl::StrCat(layout.buckets.size(), " buckets are too many to be simulated; the most are ", kMostBuckets,
                        ".");
  }
  if (const uint64_t passes = PassesOf(question); passes > kMostPasses) {
    return absl::StrCat("An accumulation of ", question.gpu.accumulation, " means ", passes,
                        " passes of blocks in a step, too many to be simulated; the most are ", kMostPasses,
                        ". Ask with a smaller accumulation: each further pass takes as long as the one before.");
  }
  return "";
}

void SetStep(const simulator::Outcome& outcome, v1::PlanResponse& response) {
  v1::Performance* const out = response.mutable_performance();
  out->set_step_seconds(outcome.step_seconds);
  out->set_tokens_per_second(outcome.tokens_per_second);
  out->set_tflops(outcome.flops_per_second / 1e12);
  out->set_mfu(outcome.utilisation);
  out->set_exposed_seconds(outcome.exposed_seconds);
  for (const simulator::Exposed& exposed : outcome.exposed) {
    v1::ExposedTime* const part = out->add_exposed();
    part->set_cause(exposed.cause);
    part->set_seconds(exposed.seconds);
  }
}

void SetTimeline(const Question& question, const simulator::Outcome& outcome, v1::PlanResponse& response) {
  const std::string title = absl::StrCat(question.model.name, " on ", question.machine.name, ", ", question.pass.batch,
                                         " x ", question.pass.sequence, " tokens");
  switch (question.timeline) {
    case v1::TIMELINE_FORMAT_SPANS:
      for (const simulator::Span& span : outcome.timeline) {
        v1::TimelineSpan* const out = response.add_timeline();
        out->set_lane(std::string(simulator::kLaneNames[static_cast<size_t>(span.lane)]));
        out->set_name(span.name);
        out->set_begin_seconds(span.begin);
        out->set_end_seconds(span.end);
      }
      break;
    case v1::TIMELINE_FORMAT_SVG:
      response.set_timeline_file(TimelineSvg(outcome.timeline, title));
      break;
    case v1::TIMELINE_FORMAT_TRACE:
      response.set_timeline_file(TimelineTrace(outcome.timeline, title));
      break;
    default:
      break;
  }
}

// What the step would be with other numbers that the machine may have.
absl::Status AddAlternatives(const Question& question, const simulator::RunOptions& options,
                             v1::PlanResponse& response) {
  const auto add = [&](const std::string& with, Question changed) -> absl::Status {
    simulator::Workload workload = WorkloadOf(changed);
    if (absl::Status status = ScaleToMeasured(changed, workload).status(); !status.ok()) return status;
    response.add_assumptions(
        absl::StrFormat("With %s a step takes %.3f s.", with, SimulateOurs(changed, workload, options).step_seconds));
    return absl::OkStatus();
  };
  for (const bool most : {false, true}) {
    simulator::RangeEnd end = simulator::AtEndOfRanges(question.machine, question.known_machine, most);
    if (end.changes.empty()) break;
    Question changed = question;
    changed.machine = std::move(end.machine);
    const std::string with =
        absl::StrCat("the ", most ? "most" : "least", " that sources give (", absl::StrJoin(end.changes, ", "), ")");
    if (absl::Status status = add(with, std::move(changed)); !status.ok()) return status;
  }
  if (question.measured_tokens_per_second > 0) return absl::OkStatus();
  Question changed = question;
  changed.machine.gpu = simulator::WithPapersTrainer(question.machine.gpu);
  return add("the GPU numbers that the SuperOffload paper's rows of training fit, instead of those of fused kernels,",
             std::move(changed));
}

}  // namespace

absl::Status SetPerformance(const Question& asked, const engine::Layout& layout, const MemoryPlan& memory,
                            v1::PlanResponse& response) {
  Question question = asked;
  question.gpu.resident_buckets = std::min(question.gpu.resident_buckets, static_cast<uint32_t>(layout.buckets.size()));
  if (std::string obstacle = Obstacle(question, layout, memory); !obstacle.empty()) {
    response.set_performance_unknown(std::move(obstacle));
    return absl::OkStatus();
  }
  simulator::Workload workload = WorkloadOf(question);
  const absl::StatusOr<double> factor = ScaleToMeasured(question, workload);
  if (!factor.ok()) return factor.status();
  if (question.measured_tokens_per_second > 0) {
    response.add_assumptions(absl::StrFormat(
        "The GPU computes for %.3g times as long as its numbers above say, so that a pass without an optimizer has the "
        "measured %.6g tokens per second.",
        *factor, question.measured_tokens_per_second));
  }
  const simulator::RunOptions options{.clip_rate = question.clip_rate,
                                      .skip_rate = question.skip_rate,
                                      .timeline = question.timeline != v1::TIMELINE_FORMAT_UNSPECIFIED};
  simulator::Outcome outcome = SimulateOurs(question, workload, options);
  if (std::optional<Question> with = WithAutoResidents(question, workload, options, outcome)) {
    question = *std::move(with);
    outcome = SimulateOurs(question, workload, options);
  }
  SetStep(outcome, response);
  response.mutable_performance()->set_resident_buckets(question.gpu.resident_buckets);
  SetTimeline(question, outcome, response);
  const bool searches = !question.quick && PassesOf(question) <= kMostSearchedPasses;
  if (question.spec.gradient_slots == 1) {
    response.mutable_recommendation()->add_sentences(
        PriceOfLessRoom(question, workload, options, outcome.step_seconds));
  }
  if (searches) {
    const std::optional<std::string> gain = GainOfNarrowerState(question, workload, options, outcome.step_seconds);
    if (gain) response.mutable_recommendation()->add_sentences(*gain);
    RecommendBuckets(question, workload, options, outcome.step_seconds, *response.mutable_recommendation());
  }
  if (simulator::HidesOffloading(outcome)) {
    response.add_assumptions(
        "Less than 5 % of the step is exposed, so its time is that of the GPU's numbers and says next to nothing about "
        "offloading.");
  }
  if (!searches) return absl::OkStatus();
  return AddAlternatives(question, {options.clip_rate, options.skip_rate}, response);
}

}  // namespace superoffload::plan
