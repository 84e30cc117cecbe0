#include "server/metrics/metrics.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/memory/thread.h"
#include "server/metrics/gauge_collector.h"

namespace superoffload::metrics {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;

constexpr engine::Verdict kVerdicts[] = {engine::Verdict::kCommit, engine::Verdict::kClip,
                                         engine::Verdict::kSkipNonFinite, engine::Verdict::kSkipOverflow,
                                         engine::Verdict::kSkipAbandoned};

const char* VerdictName(engine::Verdict verdict) {
  switch (verdict) {
    case engine::Verdict::kCommit:
      return "commit";
    case engine::Verdict::kClip:
      return "clip";
    case engine::Verdict::kSkipNonFinite:
      return "skip_non_finite";
    case engine::Verdict::kSkipOverflow:
      return "skip_overflow";
    case engine::Verdict::kSkipAbandoned:
      return "skip_abandoned";
  }
  return "unknown";
}

// FNV-1a: the same in all daemons, so that a run's ranks can be found together.
std::string RunId(uid_t uid, const std::string& run) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : absl::StrCat(uid, "/", run)) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  return absl::StrCat(absl::Hex(hash, absl::kZeroPad16));
}

// A connection takes a thread until its request is whole or the time is over: those that say nothing must not take all.
constexpr char kHttpThreads[] = "16";
constexpr char kHttpTimeoutMs[] = "3000";

// Connects to who listens at host:port and says nothing.
void Knock(const std::string& host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  const int knock = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (knock < 0) return;
  if (::inet_pton(AF_INET, host.c_str(), &address.sin_addr) == 1) {
    (void)::connect(knock, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  }
  ::close(knock);
}

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
        gradient_bytes(CounterFamily(r, "superoffload_gradient_bytes_total", "Gradient bytes submitted.")),
        parameter_bytes(CounterFamily(r, "superoffload_parameter_bytes_total", "Parameter bytes published.")),
        streamed_bytes(CounterFamily(r, "superoffload_streamed_bytes_total",
                                     "Parameter bytes that trainers copied to their GPUs' slots again.")),
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
  Family<Counter>& streamed_bytes;
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
  Counter* streamed_bytes;
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

Metrics::Metrics(const DaemonConstants& constants)
    : labels_are_names_(constants.labels_are_names),
      registry_(std::make_shared<prometheus::Registry>()),
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
  gauge_collector_ = std::make_shared<GaugeCollector>(std::move(gauges), [this](const optimizer::OptimizerId& id) {
    absl::MutexLock lock(&mu_);
    return LabelsOf(id);
  });
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
  exposed_host_ = colon == std::string::npos ? "0.0.0.0" : address.substr(0, colon);
  return absl::StrCat(exposed_host_, ":", ports.empty() ? 0 : ports.front());
}

void Metrics::Close() {
  if (exposer_ != nullptr) {
    // civetweb's thread looks whether it is to end after each connection, else every two seconds.
    absl::Notification ended;
    const std::vector<int> ports = exposer_->GetListeningPorts();
    absl::StatusOr<std::thread> knocking = memory::StartThread("so-knock", [&] {
      while (!ports.empty() && !ended.WaitForNotificationWithTimeout(absl::Milliseconds(5))) {
        Knock(exposed_host_, ports.front());
      }
    });
    exposer_.reset();
    ended.Notify();
    if (knocking.ok()) knocking->join();
  }
  gauge_collector_.reset();
}

void Metrics::OnHost(const optimizer::OptimizerId& id, const std::string& unique_id, const engine::RunMember& member) {
  absl::MutexLock lock(&mu_);
  hosted_[id] = {unique_id, member};
  SeriesOf(id);  // at zero: rate() sees the first step, too
}

std::map<std::string, std::string> Metrics::LabelsOf(const optimizer::OptimizerId& id) {
  const auto found = hosted_.find(id);
  const Hosted hosted = found == hosted_.end() ? Hosted() : found->second;
  std::map<std::string, std::string> labels{{"optimizer", labels_are_names_ ? id.name : hosted.unique_id}};
  if (labels_are_names_) labels["uid"] = absl::StrCat(id.uid);
  if (hosted.member.run.empty()) return labels;
  labels["run"] = labels_are_names_ ? hosted.member.run : RunId(id.uid, hosted.member.run);
  labels["rank"] = absl::StrCat(hosted.member.rank);
  return labels;
}

Metrics::OptimizerSeries& Metrics::SeriesOf(const optimizer::OptimizerId& id) {
  std::unique_ptr<OptimizerSeries>& series = series_[id];
  if (series != nullptr) return *series;
  const prometheus::Labels labels = LabelsOf(id);
  series = std::make_unique<OptimizerSeries>();
  for (engine::Verdict verdict : kVerdicts) {
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
  series->streamed_bytes = &families_->streamed_bytes.Add(labels);
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
  const engine::VerdictReport& verdict = report.verdict;
  series.steps[static_cast<size_t>(verdict.verdict) - 1]->Increment();
  series.consecutive_skips->Set(verdict.consecutive_skips);
  if (verdict.verdict != engine::Verdict::kSkipAbandoned) series.gradient_norm->Set(verdict.global_norm);
  series.speculated->Increment(verdict.speculated_buckets);
  series.republished->Increment(verdict.republished_buckets);
  series.gradient_bytes->Increment(static_cast<double>(report.gradient_bytes));
  series.parameter_bytes->Increment(static_cast<double>(report.published_bytes));
  series.streamed_bytes->Increment(static_cast<double>(report.streamed_bytes));
  if (report.by_agreement) return;
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
  hosted_.erase(id);
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
  families_->streamed_bytes.Remove(series.streamed_bytes);
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
