#include "server/plan/performance.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/plan/timeline_file.h"
#include "server/plan/tuning.h"
#include "server/simulator/peer_memory.h"
#include "server/simulator/peers.h"
#include "server/simulator/schedule.h"
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

uint64_t PassesOf(const Question& question) {
  return question.gpu.accumulation * question.model.architecture.head_unit();
}

// Why no step is simulated; empty: one is.
std::string Obstacle(const Question& question, const engine::Layout& layout, const MemoryPlan& memory) {
  if (!memory.gpu_fits) return "It does not fit in HBM, so no step was simulated.";
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

void Append(std::string_view name, const simulator::Outcome& outcome, v1::PlanResponse& response) {
  v1::Performance* const out = response.add_performance();
  out->set_schedule(std::string(name));
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

struct PeerSchedule {
  std::string_view name;
  simulator::Peer peer;
  std::unique_ptr<simulator::Schedule> (*make)();
};

constexpr PeerSchedule kPeers[] = {
    {"ddp", simulator::Peer::kDdp, &simulator::MakeDdp},
    {"zero-offload", simulator::Peer::kZeroOffload, [] { return simulator::MakeZeroOffload(); }},
    {"zero-infinity", simulator::Peer::kZeroInfinity, [] { return simulator::MakeZeroInfinity(); }},
    {"superoffload-published", simulator::Peer::kSuperOffload, [] { return simulator::MakePublishedSuperOffload(); }}};

absl::StatusOr<const PeerSchedule*> FindPeer(const std::string& name) {
  std::vector<std::string> names;
  for (const PeerSchedule& peer : kPeers) {
    if (peer.name == name) return &peer;
    names.emplace_back(peer.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("there is no schedule \"", name, "\" to compare with; take some of ", absl::StrJoin(names, ", ")));
}

void AppendPeer(const PeerSchedule& peer, const Question& question, const simulator::Workload& workload,
                const simulator::RunOptions& options, v1::PlanResponse& response) {
  const simulator::Machine& machine = question.machine;
  const auto unknown = [&](std::string why) {
    v1::Performance* const out = response.add_performance();
    out->set_schedule(std::string(peer.name));
    out->set_unknown(std::move(why));
  };
  if (question.ranks > 1) return unknown("known of one rank only");
  if (const engine::OptimizerSpec theirs; question.spec.algorithm != theirs.algorithm) {
    return unknown(absl::StrCat("known with ", std::string(theirs.algorithm->name), " only"));
  }
  if (simulator::PeerGpuMemory(peer.peer, machine, question.model, question.pass) > machine.gpu.memory_bytes ||
      simulator::PeerHostMemory(peer.peer, question.model) > machine.host.memory_bytes) {
    return unknown("does not fit");
  }
  Append(peer.name, peer.make()->Run(machine, workload, options), response);
}

}  // namespace

absl::Status SetPerformance(const Question& asked, const engine::Layout& layout, const MemoryPlan& memory,
                            v1::PlanResponse& response) {
  Question question = asked;
  question.gpu.resident_buckets = std::min(question.gpu.resident_buckets, static_cast<uint32_t>(layout.buckets.size()));
  for (const std::string& name : question.schedules) {
    if (absl::Status status = FindPeer(name).status(); !status.ok()) return status;
  }
  if (std::string obstacle = Obstacle(question, layout, memory); !obstacle.empty()) {
    response.set_performance_unknown(std::move(obstacle));
    return absl::OkStatus();
  }
  const simulator::Workload workload = WorkloadOf(question);
  const simulator::RunOptions options{.clip_rate = question.clip_rate,
                                      .skip_rate = question.skip_rate,
                                      .timeline = question.timeline != v1::TIMELINE_FORMAT_UNSPECIFIED};
  const simulator::Outcome outcome = SimulateOurs(question, workload, options);
  Append("superoffloadd", outcome, response);
  SetTimeline(question, outcome, response);
  if (!question.quick && PassesOf(question) <= kMostSearchedPasses) {
    RecommendBuckets(question, workload, options, outcome.step_seconds, *response.mutable_recommendation());
  }
  for (const std::string& name : question.schedules) {
    AppendPeer(**FindPeer(name), question, workload, {options.clip_rate, options.skip_rate}, response);
  }
  return absl::OkStatus();
}

}  // namespace superoffload::plan
