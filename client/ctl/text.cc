#include "client/ctl/text.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/ctl/table.h"
#include "superoffload/v1/printable.h"

namespace superoffload::ctl {
namespace {

std::string VerdictText(v1::Verdict verdict) { return Word(v1::Verdict_Name(verdict), "VERDICT_"); }

std::string MillisecondsText(const google::protobuf::Duration& duration) {
  return absl::StrFormat("%.2f ms", static_cast<double>(duration.seconds()) * 1e3 + duration.nanos() * 1e-6);
}

// Numbers as ranges: "0-7,16".
std::string CpusText(std::vector<uint32_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  std::vector<std::string> ranges;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    ranges.push_back(last == i ? absl::StrCat(numbers[i]) : absl::StrCat(numbers[i], "-", numbers[last]));
    i = last + 1;
  }
  return absl::StrJoin(ranges, ",");
}

std::vector<uint32_t> AllCpus(const v1::Superchip& superchip) {
  std::vector<uint32_t> cpus;
  for (const v1::Superchip::Core& core : superchip.cores())
    cpus.insert(cpus.end(), core.cpus().begin(), core.cpus().end());
  return cpus;
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

std::string ExportText(const v1::ExportOptimizerResponse& response) {
  const std::string what = absl::StrCat(BytesText(response.bytes_written()), " in ", Printable(response.directory()), "\n");
  if (response.doubts().empty()) return absl::StrCat("exact checkpoint of step ", response.committed_steps(), ", ", what);
  return absl::StrCat("NOT GUARANTEED, ", what, Printable(response.doubts()), "\n");
}

std::string CheckpointText(const v1::CheckpointProgress& p) {
  return absl::StrFormat("step %d, %s, in %s%s\n", p.committed_steps(), BytesText(p.bytes_written()),
                         Printable(p.directory()), p.run_whole() ? ", which all ranks have written" : "");
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
                         r.has_receive_duration() ? MillisecondsText(r.receive_duration()) : "-",
                         r.has_exposed_duration() ? MillisecondsText(r.exposed_duration()) : "-");
}

}  // namespace superoffload::ctl
