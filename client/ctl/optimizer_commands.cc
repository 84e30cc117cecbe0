// list, describe, watch, settle, delete: what is hosted, and what it does.
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "client/ctl/commands.h"
#include "client/ctl/output.h"
#include "superoffload/v1/printable.h"

namespace superoffload::ctl {
namespace {

std::string TrainerText(const v1::Optimizer& optimizer) {
  return optimizer.attached() ? absl::StrCat("pid ", optimizer.trainer_pid()) : "none";
}

std::string StateText(const v1::Optimizer& optimizer) {
  // While a trainer is attached a step is prepared for a moment at its end.
  if (optimizer.has_prepared() && !optimizer.attached()) return "prepared";
  return Word(v1::OptimizerState_Name(optimizer.state()), "OPTIMIZER_STATE_");
}

Row ListRow(const v1::Optimizer& o) {
  if (o.state() == v1::OPTIMIZER_STATE_DAMAGED) {
    return {o.name(), absl::StrCat(o.uid()),       "?", StateText(o), "?",
            "?",      BytesText(o.memory_bytes()), "?", "?",          "none"};
  }
  return {o.name(),
          absl::StrCat(o.uid()),
          o.id(),
          StateText(o),
          o.algorithm(),
          absl::StrCat(o.element_count()),
          BytesText(o.memory_bytes()),
          absl::StrCat(o.step()),
          absl::StrCat(o.committed_steps()),
          TrainerText(o)};
}

std::string ListText(const v1::ListOptimizersResponse& response) {
  std::vector<Row> rows{
      {"NAME", "UID", "ID", "STATE", "ALGORITHM", "ELEMENTS", "MEMORY", "STEP", "COMMITTED", "TRAINER"}};
  for (const v1::Optimizer& optimizer : response.optimizers()) rows.push_back(ListRow(optimizer));
  return Table(rows);
}

struct HostedAt {
  std::string endpoint;  // of the daemon
  v1::Optimizer optimizer;
};

std::string ListAllText(const std::vector<HostedAt>& all) {
  std::vector<Row> rows{{"RUN", "RANK", "NAME", "UID", "ID", "STATE", "ALGORITHM", "ELEMENTS", "MEMORY", "STEP",
                         "COMMITTED", "TRAINER", "DAEMON"}};
  for (const auto& [endpoint, optimizer] : all) {
    const v1::RunMember& member = optimizer.member();
    Row row{optimizer.has_member() ? member.run() : "-",
            optimizer.has_member() ? absl::StrCat(member.rank(), "/", member.ranks()) : "-"};
    for (std::string& cell : ListRow(optimizer)) row.push_back(std::move(cell));
    row.push_back(endpoint);
    rows.push_back(std::move(row));
  }
  return Table(rows);
}

// Ranks of a run stand together.
auto Order(const HostedAt& hosted) {
  const v1::RunMember& member = hosted.optimizer.member();
  return std::tuple(member.run(), member.rank(), hosted.endpoint, hosted.optimizer.uid(), hosted.optimizer.name());
}

absl::Status ListAt(const std::string& endpoint, std::vector<HostedAt>* all) {
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(endpoint);
  if (!client.ok()) return client.status();
  absl::StatusOr<std::vector<v1::Optimizer>> optimizers = (*client)->ListOptimizers();
  if (!optimizers.ok()) return optimizers.status();
  for (v1::Optimizer& optimizer : *optimizers) all->push_back({endpoint, std::move(optimizer)});
  return absl::OkStatus();
}

std::string DataTypeText(v1::DataType type) { return Word(v1::DataType_Name(type), "DATA_TYPE_"); }

std::string RunText(const v1::Optimizer& optimizer) {
  const v1::RunMember& member = optimizer.member();
  std::string text = optimizer.has_member()
                         ? absl::StrCat(member.run(), ", rank ", member.rank(), " of ", member.ranks())
                         : "trains alone";
  if (optimizer.has_prepared()) absl::StrAppend(&text, "; step ", optimizer.prepared().step(), " is prepared");
  return text;
}

std::string ScheduleText(const v1::Policies& policies) {
  const v1::CheckpointSchedule& c = policies.checkpoint();
  if (c.every_steps() == 0) return "by hand";
  return absl::StrCat("every ", c.every_steps(), " steps in ", c.directory(),
                      c.keep() == 0 ? "" : absl::StrCat(", the newest ", c.keep(), " are kept"));
}

std::string LeaseText(const v1::Policies& policies) {
  return policies.has_lease() ? absl::FormatDuration(absl::Seconds(policies.lease().seconds())) : "until deleted";
}

std::vector<Row> StatisticsRows(const v1::StepStatistics& s) {
  return {{"commits", absl::StrCat(s.commits())},
          {"clips", absl::StrCat(s.clips())},
          {"skips", absl::StrCat(s.skips_non_finite(), " non-finite, ", s.skips_overflow(), " overflow, ",
                                 s.skips_abandoned(), " abandoned; ", s.consecutive_skips(), " in a row now")},
          {"buckets",
           absl::StrCat(s.speculated_buckets(), " speculated, ", s.republished_buckets(), " of them republished")}};
}

std::string GroupsText(const v1::Optimizer& optimizer) {
  std::vector<Row> rows{{"GROUP"}};
  if (optimizer.groups_size() > 0) {
    for (const v1::Scalar& scalar : optimizer.groups(0).scalars()) {
      rows[0].push_back(absl::AsciiStrToUpper(scalar.name()));
    }
  }
  for (int i = 0; i < optimizer.groups_size(); ++i) {
    Row& row = rows.emplace_back(Row{absl::StrCat(i)});
    for (const v1::Scalar& scalar : optimizer.groups(i).scalars()) row.push_back(absl::StrCat(scalar.value()));
  }
  return Table(rows);
}

std::string BucketsText(const v1::Optimizer& optimizer) {
  std::vector<Row> rows{{"BUCKET", "GROUP", "DTYPE", "GRADIENT", "ELEMENTS"}};
  for (int i = 0; i < optimizer.layout().buckets_size(); ++i) {
    const v1::Bucket& b = optimizer.layout().buckets(i);
    rows.push_back({absl::StrCat(i), absl::StrCat(b.group()), DataTypeText(b.dtype()), DataTypeText(b.gradient_dtype()),
                    absl::StrCat(b.elements())});
  }
  return Table(rows);
}

// What a trainer on a GPU has told, and measured.
std::string GpuText(const v1::GpuUse& gpu) {
  std::vector<Row> rows{{"gpu", gpu.gpu()},
                        {"  mover", gpu.mover()},
                        {"  mapped by the daemon", gpu.sharing().empty() ? "no" : gpu.sharing()},
                        {"  coherent", gpu.coherent() ? "yes" : "no"},
                        {"  cast", gpu.cast()},
                        {"  resident buckets", absl::StrCat(gpu.resident_buckets())},
                        {"  memory", BytesText(gpu.gpu_bytes())}};
  if (gpu.streamed_units() > 0) {
    rows.push_back({"  streamed", absl::StrCat(gpu.streamed_units(), " units, ", BytesText(gpu.streamed_bytes()),
                                               ", in ", gpu.stream_slots(), " slots")});
  }
  if (gpu.staged()) rows.push_back({"  staged", "yes: host memory could not be registered, copies are slow"});
  if (!gpu.notes().empty()) rows.push_back({"  notes", gpu.notes()});
  std::string text = Table(rows);
  if (!gpu.mover_seconds().empty()) {
    const std::map<std::string, double> sorted(gpu.mover_seconds().begin(), gpu.mover_seconds().end());
    std::vector<Row> movers{{"MOVER", "MEASURED"}};
    for (const auto& [mover, seconds] : sorted) movers.push_back({mover, absl::StrFormat("%.3f ms", seconds * 1e3)});
    absl::StrAppend(&text, "\n", Table(movers));
  }
  if (!gpu.cast_timings().empty()) {
    std::vector<Row> casts{{"BUCKET ELEMENTS", "FUSED", "GPU_FP32"}};
    for (const v1::CastTiming& timing : gpu.cast_timings()) {
      casts.push_back({absl::StrCat(timing.elements()), absl::StrFormat("%.3f ms", timing.fused_seconds() * 1e3),
                       absl::StrFormat("%.3f ms", timing.gpu_fp32_seconds() * 1e3)});
    }
    absl::StrAppend(&text, "\n", Table(casts));
  }
  return absl::StrCat(text, "\n");
}

std::string ParametersText(const v1::Optimizer& optimizer) {
  std::vector<Row> rows{{"PARAMETER", "SHAPE", "DTYPE", "GROUP", "BUCKETS"}};
  for (int i = 0; i < optimizer.parameters_size(); ++i) {
    const v1::Parameter& p = optimizer.parameters(i);
    const v1::Placement& place = optimizer.layout().placements(i);
    const uint32_t last = place.first_bucket() + place.bucket_count() - 1;
    rows.push_back({p.name(), absl::StrCat("[", absl::StrJoin(p.shape(), ", "), "]"), DataTypeText(p.dtype()),
                    absl::StrCat(p.group()),
                    last == place.first_bucket() ? absl::StrCat(last) : absl::StrCat(place.first_bucket(), "-", last)});
  }
  return Table(rows);
}

std::string MemoryText(const v1::Optimizer& o) {
  if (o.element_count() == 0) return BytesText(o.memory_bytes());
  const auto per_element = [&o](uint64_t bytes) {
    return absl::StrFormat("%.1f", static_cast<double>(bytes) / static_cast<double>(o.element_count()));
  };
  const std::string all = absl::StrCat(BytesText(o.memory_bytes()), ", ", per_element(o.memory_bytes()),
                                       " bytes per element: ", per_element(o.memory().state_bytes()), " of state, ",
                                       per_element(o.memory().gradients_bytes()), " of gradients");
  if (o.layout().in_place()) return absl::StrCat(all, ", in whose place parameters are published");
  return absl::StrCat(all, ", ", per_element(o.memory().parameters_bytes()), " of parameters");
}

std::string DescriptionText(const v1::Optimizer& o) {
  std::vector<Row> rows{
      {"name", o.name()},
      {"id", o.id()},
      {"uid", absl::StrCat(o.uid())},
      {"algorithm", o.has_seed() ? absl::StrCat(o.algorithm(), ", rounds under seed ", o.seed()) : o.algorithm()},
      {"created", TimeText(o.create_time())},
      {"state",
       o.state() == v1::OPTIMIZER_STATE_READY ? StateText(o) : absl::StrCat(StateText(o), ": ", o.state_reason())},
      {"trainer", TrainerText(o)},
      {"run", RunText(o)},
      {"speculation", Word(v1::Speculation_Name(o.policies().speculation()), "SPECULATION_")},
      {"checkpoints", ScheduleText(o.policies())},
      {"lease", LeaseText(o.policies())},
      {"elements", absl::StrCat(o.element_count(), " in ", o.parameters_size(), " parameters, ",
                                o.layout().buckets_size(), " buckets")},
      {"memory", MemoryText(o)},
      {"step", absl::StrCat(o.step(), ", ", o.committed_steps(), " of them committed")}};
  for (Row& row : StatisticsRows(o.statistics())) rows.push_back(std::move(row));
  return absl::StrCat(Table(rows), "\n", o.has_gpu() ? GpuText(o.gpu()) : "", GroupsText(o), "\n", BucketsText(o), "\n",
                      ParametersText(o));
}

// Widths hold what a long run prints; a longer cell shifts its line only.
constexpr char kStepFormat[] = "%-24s %10s %-16s %12s %8s %11s %12s %12s %12s\n";

std::string MillisecondsText(const google::protobuf::Duration& duration) {
  return absl::StrFormat("%.2f ms", static_cast<double>(duration.seconds()) * 1e3 + duration.nanos() * 1e-6);
}

std::string StepHeading() {
  return absl::StrFormat(kStepFormat, "OPTIMIZER", "STEP", "VERDICT", "NORM", "CLIP", "SPECULATED", "REPUBLISHED",
                         "RECEIVE", "EXPOSED");
}

std::string StepText(const v1::StepReport& r) {
  return absl::StrFormat(kStepFormat, Printable(r.optimizer()), absl::StrCat(r.step()),
                         Word(v1::Verdict_Name(r.verdict()), "VERDICT_"), absl::StrFormat("%.5g", r.global_norm()),
                         absl::StrFormat("%.4g", r.clip_coefficient()),
                         absl::StrCat(r.speculated_buckets(), "/", r.buckets()), absl::StrCat(r.republished_buckets()),
                         r.has_receive_duration() ? MillisecondsText(r.receive_duration()) : "-",
                         r.has_exposed_duration() ? MillisecondsText(r.exposed_duration()) : "-");
}

std::string SettledText(const v1::Optimizer& o) {
  return absl::StrFormat("optimizer \"%s\" is settled at step %d, %d of them committed\n", o.name(), o.step(),
                         o.committed_steps());
}

}  // namespace

absl::Status List(Client& client, const Arguments& arguments) {
  absl::StatusOr<std::vector<v1::Optimizer>> optimizers = client.ListOptimizers();
  if (!optimizers.ok()) return optimizers.status();
  v1::ListOptimizersResponse response;
  response.mutable_optimizers()->Assign(optimizers->begin(), optimizers->end());
  Print(arguments.json ? JsonText(response) : ListText(response));
  return absl::OkStatus();
}

int ListAll(const Arguments& arguments) {
  const std::vector<std::string> named = absl::StrSplit(arguments.endpoint, ',', absl::SkipEmpty());
  const std::vector<std::string> places = named.empty() ? MachineEndpoints() : named;
  if (places.empty()) {
    return ExitStatus(
        absl::UnavailableError("no superoffloadd listens on this machine; name endpoints with --endpoint=A,B"));
  }
  std::vector<HostedAt> all;
  absl::Status last;
  size_t answered = 0;
  for (const std::string& endpoint : places) {
    if (absl::Status status = ListAt(endpoint, &all); status.ok()) {
      ++answered;
    } else {
      std::fprintf(stderr, "superoffloadctl: %s: %s\n", endpoint.c_str(),
                   Printable(std::string(status.message())).c_str());
      last = status;
    }
  }
  std::sort(all.begin(), all.end(), [](const HostedAt& a, const HostedAt& b) { return Order(a) < Order(b); });
  if (arguments.json) {
    for (const HostedAt& hosted : all) Print(JsonLine(hosted.optimizer));
  } else {
    Print(ListAllText(all));
  }
  return ExitStatus(answered == 0 ? last : absl::OkStatus());
}

absl::Status Describe(Client& client, const Arguments& arguments) {
  return PrintAnswer(client.GetOptimizer(arguments.name(), v1::OPTIMIZER_VIEW_FULL), arguments.json, DescriptionText);
}

absl::Status Watch(Client& client, const Arguments& arguments) {
  uint64_t seen = 0;
  return client.WatchSteps(arguments.name(), [&](const v1::StepReport& report) {
    if (!arguments.json && seen % 20 == 0) Print(StepHeading());
    Print(arguments.json ? JsonLine(report) : StepText(report));
    return ++seen != arguments.count;
  });
}

absl::Status Settle(Client& client, const Arguments& arguments) {
  return PrintAnswer(client.SettleOptimizer(arguments.name()), arguments.json, SettledText);
}

absl::Status Delete(Client& client, const Arguments& arguments) { return client.DeleteOptimizer(arguments.name()); }

}  // namespace superoffload::ctl
