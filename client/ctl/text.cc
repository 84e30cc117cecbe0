#include "client/ctl/text.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "superoffload/v1/printable.h"

namespace superoffload::ctl {
namespace {

using Row = std::vector<std::string>;

// Columns as wide as their widest cell, two spaces apart.
std::string Table(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Printable(row[i]).size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) absl::StrAppendFormat(&line, "%-*s  ", static_cast<int>(widths[i]), Printable(row[i]));
    absl::StrAppend(&text, absl::StripTrailingAsciiWhitespace(line), "\n");
  }
  return text;
}

// ALGORITHM_ADAMW -> adamw
std::string Word(const std::string& enum_name, absl::string_view prefix) {
  return absl::AsciiStrToLower(absl::StripPrefix(enum_name, prefix));
}

std::string DataTypeText(v1::DataType type) { return Word(v1::DataType_Name(type), "DATA_TYPE_"); }
std::string VerdictText(v1::Verdict verdict) { return Word(v1::Verdict_Name(verdict), "VERDICT_"); }

std::string TrainerText(const v1::Optimizer& optimizer) {
  return optimizer.attached() ? absl::StrCat("pid ", optimizer.trainer_pid()) : "none";
}

std::string StateText(const v1::Optimizer& optimizer) {
  return Word(v1::OptimizerState_Name(optimizer.state()), "OPTIMIZER_STATE_");
}

std::string TimeText(const google::protobuf::Timestamp& time) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", absl::FromUnixSeconds(time.seconds()), absl::UTCTimeZone());
}

std::string MillisecondsText(const google::protobuf::Duration& duration) {
  return absl::StrFormat("%.2f ms", static_cast<double>(duration.seconds()) * 1e3 + duration.nanos() * 1e-6);
}

// Numbers as runs: "0-7,16".
std::string CpusText(std::vector<uint32_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  std::vector<std::string> runs;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    runs.push_back(last == i ? absl::StrCat(numbers[i]) : absl::StrCat(numbers[i], "-", numbers[last]));
    i = last + 1;
  }
  return absl::StrJoin(runs, ",");
}

std::vector<uint32_t> AllCpus(const v1::Superchip& superchip) {
  std::vector<uint32_t> cpus;
  for (const v1::Superchip::Core& core : superchip.cores())
    cpus.insert(cpus.end(), core.cpus().begin(), core.cpus().end());
  return cpus;
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
  std::vector<Row> rows{{"GROUP", "LR", "BETA1", "BETA2", "EPS", "WEIGHT_DECAY"}};
  for (int i = 0; i < optimizer.groups_size(); ++i) {
    const v1::ParameterGroup& g = optimizer.groups(i);
    rows.push_back({absl::StrCat(i), absl::StrCat(g.lr()), absl::StrCat(g.beta1()), absl::StrCat(g.beta2()),
                    absl::StrCat(g.eps()), absl::StrCat(g.weight_decay())});
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

google::protobuf::util::JsonPrintOptions JsonOptions() {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  return options;
}

std::string Json(const google::protobuf::Message& message, const google::protobuf::util::JsonPrintOptions& options) {
  std::string text;
  (void)google::protobuf::util::MessageToJsonString(message, &text, options);  // fails for Any only
  return std::string(absl::StripTrailingAsciiWhitespace(text)) + "\n";
}

// Widths hold what a long run prints; a longer cell shifts its line only.
constexpr char kStepFormat[] = "%-24s %10s %-16s %12s %8s %11s %12s %12s %12s\n";

}  // namespace

std::string InfoText(const v1::ServerInfo& info) {
  return Table({{"version", info.version()},
                {"started", TimeText(info.start_time())},
                {"kernels", absl::StrCat(info.kernel_target(), ", ", info.worker_threads(), " workers")},
                {"memory", absl::StrCat(BytesText(info.memory_used_bytes()), " of ",
                                        BytesText(info.memory_budget_bytes()), " used")},
                {"optimizers", absl::StrCat(info.optimizers(), ", ", info.attachments(), " attached")},
                {"metrics",
                 info.metrics_address().empty() ? "off" : absl::StrCat("http://", info.metrics_address(), "/metrics")},
                {"descriptor socket", info.descriptor_socket()}});
}

std::string ListText(const v1::ListOptimizersResponse& response) {
  std::vector<Row> rows{{"NAME", "UID", "STATE", "ALGORITHM", "ELEMENTS", "MEMORY", "STEP", "COMMITTED", "TRAINER"}};
  for (const v1::Optimizer& o : response.optimizers()) {
    if (o.state() == v1::OPTIMIZER_STATE_DAMAGED) {
      rows.push_back({o.name(), absl::StrCat(o.uid()), StateText(o), "?", "?", BytesText(o.memory_bytes()), "?", "?",
                      "none"});
      continue;
    }
    rows.push_back({o.name(), absl::StrCat(o.uid()), StateText(o), Word(v1::Algorithm_Name(o.algorithm()), "ALGORITHM_"),
                    absl::StrCat(o.element_count()), BytesText(o.memory_bytes()), absl::StrCat(o.step()),
                    absl::StrCat(o.committed_steps()), TrainerText(o)});
  }
  return Table(rows);
}

std::string DescriptionText(const v1::Optimizer& o) {
  std::vector<Row> rows{{"name", o.name()},
                        {"uid", absl::StrCat(o.uid())},
                        {"algorithm", Word(v1::Algorithm_Name(o.algorithm()), "ALGORITHM_")},
                        {"created", TimeText(o.create_time())},
                        {"state", o.state() == v1::OPTIMIZER_STATE_READY
                                      ? StateText(o)
                                      : absl::StrCat(StateText(o), ": ", o.state_reason())},
                        {"trainer", TrainerText(o)},
                        {"speculation", Word(v1::Speculation_Name(o.policies().speculation()), "SPECULATION_")},
                        {"checkpoints", ScheduleText(o.policies())},
                        {"lease", LeaseText(o.policies())},
                        {"elements", absl::StrCat(o.element_count(), " in ", o.parameters_size(), " parameters, ",
                                                  o.layout().buckets_size(), " buckets")},
                        {"memory", BytesText(o.memory_bytes())},
                        {"step", absl::StrCat(o.step(), ", ", o.committed_steps(), " of them committed")}};
  for (Row& row : StatisticsRows(o.statistics())) rows.push_back(std::move(row));
  return absl::StrCat(Table(rows), "\n", o.has_gpu() ? GpuText(o.gpu()) : "", GroupsText(o), "\n", BucketsText(o), "\n",
                      ParametersText(o));
}

std::string SettledText(const v1::Optimizer& o) {
  return absl::StrFormat("optimizer \"%s\" is settled at step %d, %d of them committed\n", o.name(), o.step(),
                         o.committed_steps());
}

std::string TopologyText(const v1::Topology& t) {
  std::string text;
  for (int i = 0; i < t.superchips_size(); ++i) {
    const v1::Superchip& s = t.superchips(i);
    const bool used = t.has_used_superchip() && static_cast<int>(t.used_superchip()) == i;
    absl::StrAppend(&text, "superchip ", i, used ? "  <- this daemon\n" : "\n");
    std::vector<Row> rows{{"  ├─", "memory", absl::StrCat("node ", s.memory_node(), ", ", BytesText(s.memory_bytes()))},
                          {"  ├─", "cores", absl::StrCat(s.cores_size(), ", hardware threads ", CpusText(AllCpus(s)))}};
    if (used) {
      rows.push_back({"  │  ", "trainers", CpusText({t.trainer_cpus().begin(), t.trainer_cpus().end()})});
      rows.push_back({"  │  ", "workers", CpusText({t.optimizer_cpus().begin(), t.optimizer_cpus().end()})});
    }
    rows.push_back({"  └─", "gpus", s.gpus().empty() ? "none" : absl::StrJoin(s.gpus(), ", ")});
    absl::StrAppend(&text, Table(rows));
  }
  const std::vector<uint32_t> other(t.nodes_without_cpus().begin(), t.nodes_without_cpus().end());
  if (!other.empty()) absl::StrAppend(&text, "never used: nodes without CPUs ", CpusText(other), "\n");
  if (!t.has_used_superchip()) {
    absl::StrAppend(&text, "the daemon is bound to none of them; start it with --superchip=N to bind it\n");
  }
  return text;
}

std::string RestoredText(const v1::Optimizer& o) {
  return absl::StrFormat("optimizer \"%s\" is restored to step %d\n", o.name(), o.committed_steps());
}

std::string CheckpointText(const v1::CheckpointProgress& p) {
  return absl::StrFormat("step %d, %s, in %s\n", p.committed_steps(), BytesText(p.bytes_written()), Printable(p.directory()));
}

std::string ProgressText(const v1::CheckpointProgress& p) {
  if (p.bytes_total() == 0) return "waiting for the end of the step";
  return absl::StrFormat("%s of %s written", BytesText(p.bytes_written()), BytesText(p.bytes_total()));
}

std::string StepHeading() {
  return absl::StrFormat(kStepFormat, "OPTIMIZER", "STEP", "VERDICT", "NORM", "CLIP", "SPECULATED", "REPUBLISHED",
                         "RECEIVE", "EXPOSED");
}

std::string StepText(const v1::StepReport& r) {
  return absl::StrFormat(kStepFormat, Printable(r.optimizer()), absl::StrCat(r.step()), VerdictText(r.verdict()),
                         absl::StrFormat("%.5g", r.global_norm()), absl::StrFormat("%.4g", r.clip_coefficient()),
                         absl::StrCat(r.speculated_buckets(), "/", r.buckets()), absl::StrCat(r.republished_buckets()),
                         MillisecondsText(r.receive_duration()), MillisecondsText(r.exposed_duration()));
}

std::string JsonText(const google::protobuf::Message& message) {
  auto options = JsonOptions();
  options.add_whitespace = true;
  return Json(message, options);
}

std::string JsonLine(const google::protobuf::Message& message) { return Json(message, JsonOptions()); }

std::string BytesText(uint64_t bytes) {
  static constexpr std::array<const char*, 6> kUnits{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : 1, value, kUnits[unit]);
}

}  // namespace superoffload::ctl
