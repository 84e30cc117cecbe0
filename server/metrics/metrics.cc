#include "server/metrics/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <cmath>
#include <exception>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace superoffload::metrics {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;

constexpr transport::Verdict kVerdicts[] = {transport::Verdict::kCommit, transport::Verdict::kClip,
                                            transport::Verdict::kSkipNonFinite, transport::Verdict::kSkipOverflow,
                                            transport::Verdict::kSkipAbandoned};

const char* VerdictName(transport::Verdict verdict) {
  switch (verdict) {
    case transport::Verdict::kCommit:
      return "commit";
    case transport::Verdict::kClip:
      return "clip";
    case transport::Verdict::kSkipNonFinite:
      return "skip_non_finite";
    case transport::Verdict::kSkipOverflow:
      return "skip_overflow";
    case transport::Verdict::kSkipAbandoned:
      return "skip_abandoned";
  }
  return "unknown";
}

// A connection takes a thread until its request is whole or the time is over: those that say nothing must not take all.
constexpr char kHttpThreads[] = "16";
constexpr char kHttpTimeoutMs[] = "3000";

// 10 us to about 84 s in steps of two.
Histogram::BucketBoundaries SecondsBoundaries() {
  Histogram::BucketBoundaries boundaries;
  for (int i = 0; i <= 23; ++i) boundaries.push_back(1e-5 * std::exp2(i));
  return boundaries;
}

Family<Counter>& CounterFamily(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}

Family<Gauge>& GaugeFamily(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}

Family<Histogram>& HistogramFamily(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
}

}  // namespace

struct Metrics::Families {
  explicit Families(prometheus::Registry& r)
      : steps(CounterFamily(r, "superoffload_steps_total", "Optimizer steps by verdict.")),
        consecutive_skips(GaugeFamily(r, "superoffload_consecutive_skipped_steps", "Steps skipped in a row.")),
        gradient_norm(GaugeFamily(r, "superoffload_gradient_norm", "Global gradient norm of the last measured step.")),
        speculated(CounterFamily(r, "superoffload_speculated_buckets_total", "Buckets published before the verdict.")),
        republished(
            CounterFamily(r, "superoffload_republished_buckets_total", "Buckets whose speculation was undone.")),
        gradient_bytes(CounterFamily(r, "superoffload_gradient_bytes_total", "Gradient bytes handed over.")),
        parameter_bytes(CounterFamily(r, "superoffload_parameter_bytes_total", "Parameter bytes published.")),
        phase_seconds(HistogramFamily(r, "superoffload_step_phase_seconds", "Seconds of each phase of a step.")),
        checkpoints(CounterFamily(r, "superoffload_checkpoints_total", "Checkpoints by result.")),
        checkpoint_seconds(HistogramFamily(r, "superoffload_checkpoint_seconds", "Seconds of a checkpoint written.")),
        checkpoint_bytes(GaugeFamily(r, "superoffload_checkpoint_bytes", "Size of the last checkpoint.")),
        checkpoint_steps(
            GaugeFamily(r, "superoffload_checkpoint_committed_steps", "Committed steps of the last checkpoint.")),
        checkpoint_time(
            GaugeFamily(r, "superoffload_checkpoint_timestamp_seconds", "Unix time of the last checkpoint.")),
        pass_seconds(HistogramFamily(r, "superoffload_pass_seconds", "Seconds of a kernel pass over one bucket.")),
        kernel_bytes(CounterFamily(r, "superoffload_kernel_bytes_total", "Bytes read and written by the kernels.")),
        kernel_seconds(CounterFamily(r, "superoffload_kernel_seconds_total", "Seconds in which the kernels ran.")),
        kernel_rate(GaugeFamily(r, "superoffload_kernel_bytes_per_second", "Bandwidth of the last pass.")) {}

  Family<Counter>& steps;
  Family<Gauge>& consecutive_skips;
  Family<Gauge>& gradient_norm;
  Family<Counter>& speculated;
  Family<Counter>& republished;
  Family<Counter>& gradient_bytes;
  Family<Counter>& parameter_bytes;
  Family<Histogram>& phase_seconds;
  Family<Counter>& checkpoints;
  Family<Histogram>& checkpoint_seconds;
  Family<Gauge>& checkpoint_bytes;
  Family<Gauge>& checkpoint_steps;
  Family<Gauge>& checkpoint_time;
  Family<Histogram>& pass_seconds;
  Family<Counter>& kernel_bytes;
  Family<Counter>& kernel_seconds;
  Family<Gauge>& kernel_rate;
};

struct Metrics::OptimizerSeries {
  std::vector<Counter*> steps;  // in the order of kVerdicts
  Gauge* consecutive_skips;
  Gauge* gradient_norm;
  Counter* speculated;
  Counter* republished;
  Counter* gradient_bytes;
  Counter* parameter_bytes;
  Histogram* receive_seconds;
  Histogram* exposed_seconds;
  Counter* checkpoints_written;
  Counter* checkpoints_failed;
  Histogram* checkpoint_seconds;
  Gauge* checkpoint_bytes;
  Gauge* checkpoint_steps;
  Gauge* checkpoint_time;
};

struct Metrics::PassSeries {
  Histogram* seconds;
  Counter* bytes;
  Counter* total_seconds;
  Gauge* rate;
};

// Reads the daemon's gauges at the time of the scrape.
class Metrics::GaugeCollector final : public prometheus::Collectable {
 public:
  explicit GaugeCollector(std::function<DaemonGauges()> gauges) : gauges_(std::move(gauges)) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    const DaemonGauges now = gauges_();
    std::vector<prometheus::MetricFamily> families{
        Make("superoffload_optimizers", "Optimizers hosted.", "", {{"", static_cast<double>(now.optimizers)}}),
        Make("superoffload_attachments", "Optimizers with a trainer attached.", "",
             {{"", static_cast<double>(now.attachments)}}),
        Make("superoffload_memory_node_bytes", "Bytes held for optimizers, by NUMA node.", "node",
             ByNode(now.bytes_by_node)),
        Make("superoffload_memory_bytes", "Bytes held for optimizers, by use.", "use",
             {{"state", static_cast<double>(now.memory.state_bytes)},
              {"gradients", static_cast<double>(now.memory.gradients_bytes)},
              {"parameters", static_cast<double>(now.memory.parameters_bytes)},
              {"metadata", static_cast<double>(now.memory.metadata_bytes)}})};
    std::map<std::string, Values> by_counter;
    for (const partition::Reading& reading : now.partition) {
      by_counter[reading.counter].emplace_back(reading.group, static_cast<double>(reading.value));
    }
    for (const auto& [counter, values] : by_counter) {
      const std::string name =
          absl::StrCat("superoffload_partition_", counter, counter == "llc_occupancy" ? "_bytes" : "");
      families.push_back(Make(name.c_str(), "Counted by resctrl, by control group.", "group", values));
    }
    AddGpus(now, &families);
    return families;
  }

 private:
  using Labels = std::vector<prometheus::ClientMetric::Label>;

  static void AddGpus(const DaemonGauges& now, std::vector<prometheus::MetricFamily>* families) {
    if (now.gpus.empty()) return;
    prometheus::MetricFamily info = Family("superoffload_gpu_info", "How attached trainers use their GPUs; always 1.");
    prometheus::MetricFamily residents =
        Family("superoffload_gpu_resident_buckets", "Buckets whose state is on the GPU, too.");
    prometheus::MetricFamily seconds =
        Family("superoffload_gpu_mover_seconds", "Seconds of the same copies beside the same kernels, by mover.");
    for (const auto& [id, use] : now.gpus) {
      const Labels optimizer{{"optimizer", id.name}, {"uid", absl::StrCat(id.uid)}};
      const auto with = [&optimizer](Labels more) {
        more.insert(more.begin(), optimizer.begin(), optimizer.end());
        return more;
      };
      Add(with({{"gpu", use.gpu},
                {"mover", use.mover},
                {"sharing", use.sharing},
                {"cast", use.cast},
                {"coherent", use.coherent ? "true" : "false"},
                {"staged", use.staged ? "true" : "false"}}),
          1, &info);
      Add(optimizer, use.resident_buckets, &residents);
      for (const auto& [mover, measured] : use.mover_seconds) Add(with({{"mover", mover}}), measured, &seconds);
    }
    families->insert(families->end(), {std::move(info), std::move(residents), std::move(seconds)});
  }

  static prometheus::MetricFamily Family(const char* name, const char* help) {
    prometheus::MetricFamily family;
    family.name = name;
    family.help = help;
    family.type = prometheus::MetricType::Gauge;
    return family;
  }

  static void Add(Labels labels, double value, prometheus::MetricFamily* family) {
    prometheus::ClientMetric metric;
    metric.label = std::move(labels);
    metric.gauge.value = value;
    family->metric.push_back(std::move(metric));
  }

  using Values = std::vector<std::pair<std::string, double>>;

  static Values ByNode(const std::map<int, uint64_t>& bytes_by_node) {
    Values values;
    for (const auto& [node, bytes] : bytes_by_node) values.emplace_back(absl::StrCat(node), static_cast<double>(bytes));
    return values;
  }

  // Without a label there is one value.
  static prometheus::MetricFamily Make(const char* name, const char* help, const std::string& label,
                                       const Values& by_label) {
    prometheus::MetricFamily family = Family(name, help);
    for (const auto& [key, value] : by_label) Add(label.empty() ? Labels{} : Labels{{label, key}}, value, &family);
    return family;
  }

  const std::function<DaemonGauges()> gauges_;
};

Metrics::Metrics(const DaemonConstants& constants)
    : registry_(std::make_shared<prometheus::Registry>()),
      families_(std::make_unique<Families>(*registry_)),
      passes_(std::make_unique<PassSeries[]>(engine::kPassKinds)) {
  GaugeFamily(*registry_, "superoffload_build_info", "What is running; always 1.")
      .Add({{"version", constants.version}, {"kernel_target", constants.kernel_target}})
      .Set(1);
  GaugeFamily(*registry_, "superoffload_worker_threads", "Threads that run the kernels.")
      .Add({})
      .Set(static_cast<double>(constants.worker_threads));
  GaugeFamily(*registry_, "superoffload_memory_budget_bytes", "Limit of superoffload_memory_bytes in all.")
      .Add({})
      .Set(static_cast<double>(constants.memory_budget_bytes));
  for (size_t i = 0; i < engine::kPassKinds; ++i) {
    const prometheus::Labels labels{{"pass", engine::PassName(static_cast<engine::PassKind>(i))}};
    passes_[i] = {&families_->pass_seconds.Add(labels, SecondsBoundaries()), &families_->kernel_bytes.Add(labels),
                  &families_->kernel_seconds.Add(labels), &families_->kernel_rate.Add(labels)};
  }
}

Metrics::~Metrics() { Close(); }

absl::StatusOr<std::string> Metrics::Expose(const std::string& address, std::function<DaemonGauges()> gauges) {
  gauge_collector_ = std::make_shared<GaugeCollector>(std::move(gauges));
  try {  // civetweb's wrapper throws
    exposer_ = std::make_unique<prometheus::Exposer>(std::vector<std::string>{
        "listening_ports", address, "num_threads", kHttpThreads, "request_timeout_ms", kHttpTimeoutMs});
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("cannot serve metrics on \"", address, "\" (", error.what(),
                                               "); give metrics_address a free IPv4 host:port, or \"off\""));
  }
  exposer_->RegisterCollectable(registry_);
  exposer_->RegisterCollectable(gauge_collector_);
  const std::vector<int> ports = exposer_->GetListeningPorts();
  const size_t colon = address.rfind(':');
  const std::string host = colon == std::string::npos ? "0.0.0.0" : address.substr(0, colon);
  return absl::StrCat(host, ":", ports.empty() ? 0 : ports.front());
}

void Metrics::Close() {
  exposer_.reset();
  gauge_collector_.reset();
}

Metrics::OptimizerSeries& Metrics::SeriesOf(const optimizer::OptimizerId& id) {
  std::unique_ptr<OptimizerSeries>& series = series_[id];
  if (series != nullptr) return *series;
  const prometheus::Labels labels{{"optimizer", id.name}, {"uid", absl::StrCat(id.uid)}};
  series = std::make_unique<OptimizerSeries>();
  for (transport::Verdict verdict : kVerdicts) {
    prometheus::Labels with_verdict = labels;
    with_verdict["verdict"] = VerdictName(verdict);
    series->steps.push_back(&families_->steps.Add(with_verdict));
  }
  series->consecutive_skips = &families_->consecutive_skips.Add(labels);
  series->gradient_norm = &families_->gradient_norm.Add(labels);
  series->speculated = &families_->speculated.Add(labels);
  series->republished = &families_->republished.Add(labels);
  series->gradient_bytes = &families_->gradient_bytes.Add(labels);
  series->parameter_bytes = &families_->parameter_bytes.Add(labels);
  prometheus::Labels with_phase = labels;
  with_phase["phase"] = "receive";
  series->receive_seconds = &families_->phase_seconds.Add(with_phase, SecondsBoundaries());
  with_phase["phase"] = "exposed";
  series->exposed_seconds = &families_->phase_seconds.Add(with_phase, SecondsBoundaries());
  prometheus::Labels with_result = labels;
  with_result["result"] = "written";
  series->checkpoints_written = &families_->checkpoints.Add(with_result);
  with_result["result"] = "failed";
  series->checkpoints_failed = &families_->checkpoints.Add(with_result);
  series->checkpoint_seconds = &families_->checkpoint_seconds.Add(labels, SecondsBoundaries());
  series->checkpoint_bytes = &families_->checkpoint_bytes.Add(labels);
  series->checkpoint_steps = &families_->checkpoint_steps.Add(labels);
  series->checkpoint_time = &families_->checkpoint_time.Add(labels);
  return *series;
}

void Metrics::OnPass(const optimizer::OptimizerId&, const engine::PassReport& report) {
  const PassSeries& pass = passes_[static_cast<size_t>(report.kind)];
  const double seconds = absl::ToDoubleSeconds(report.duration);
  pass.seconds->Observe(seconds);
  pass.bytes->Increment(static_cast<double>(report.bytes));
  pass.total_seconds->Increment(seconds);
  if (seconds > 0) pass.rate->Set(static_cast<double>(report.bytes) / seconds);
}

void Metrics::OnStep(const optimizer::OptimizerId& id, const engine::StepReport& report) {
  absl::MutexLock lock(&mu_);
  const OptimizerSeries& series = SeriesOf(id);
  const transport::VerdictReport& verdict = report.verdict;
  series.steps[static_cast<size_t>(verdict.verdict) - 1]->Increment();
  series.consecutive_skips->Set(verdict.consecutive_skips);
  if (verdict.verdict != transport::Verdict::kSkipAbandoned) series.gradient_norm->Set(verdict.global_norm);
  series.speculated->Increment(verdict.speculated_buckets);
  series.republished->Increment(verdict.republished_buckets);
  series.gradient_bytes->Increment(static_cast<double>(report.gradient_bytes));
  series.parameter_bytes->Increment(static_cast<double>(report.published_bytes));
  series.receive_seconds->Observe(absl::ToDoubleSeconds(report.receive_duration));
  series.exposed_seconds->Observe(absl::ToDoubleSeconds(report.exposed_duration));
}

void Metrics::OnCheckpoint(const optimizer::OptimizerId& id, const optimizer::CheckpointReport& report) {
  absl::MutexLock lock(&mu_);
  const OptimizerSeries& series = SeriesOf(id);
  if (!report.status.ok()) {
    series.checkpoints_failed->Increment();
    return;
  }
  series.checkpoints_written->Increment();
  series.checkpoint_seconds->Observe(absl::ToDoubleSeconds(report.duration));
  series.checkpoint_bytes->Set(static_cast<double>(report.bytes));
  series.checkpoint_steps->Set(static_cast<double>(report.committed_steps));
  series.checkpoint_time->SetToCurrentTime();
}

void Metrics::OnDelete(const optimizer::OptimizerId& id) {
  absl::MutexLock lock(&mu_);
  const auto it = series_.find(id);
  if (it == series_.end()) return;
  const OptimizerSeries& series = *it->second;
  for (Counter* counter : series.steps) families_->steps.Remove(counter);
  families_->consecutive_skips.Remove(series.consecutive_skips);
  families_->gradient_norm.Remove(series.gradient_norm);
  families_->speculated.Remove(series.speculated);
  families_->republished.Remove(series.republished);
  families_->gradient_bytes.Remove(series.gradient_bytes);
  families_->parameter_bytes.Remove(series.parameter_bytes);
  families_->phase_seconds.Remove(series.receive_seconds);
  families_->phase_seconds.Remove(series.exposed_seconds);
  families_->checkpoints.Remove(series.checkpoints_written);
  families_->checkpoints.Remove(series.checkpoints_failed);
  families_->checkpoint_seconds.Remove(series.checkpoint_seconds);
  families_->checkpoint_bytes.Remove(series.checkpoint_bytes);
  families_->checkpoint_steps.Remove(series.checkpoint_steps);
  families_->checkpoint_time.Remove(series.checkpoint_time);
  series_.erase(it);
}

}  // namespace superoffload::metrics
