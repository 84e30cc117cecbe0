#include "server/metrics/gauge_collector.h"

#include <prometheus/client_metric.h>
#include <prometheus/metric_type.h>

#include "absl/strings/str_cat.h"

namespace superoffload::metrics {
namespace {

using Labels = std::vector<prometheus::ClientMetric::Label>;
using Values = std::vector<std::pair<std::string, double>>;

prometheus::MetricFamily EmptyFamily(const char* name, const char* help) {
  prometheus::MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = prometheus::MetricType::Gauge;
  return family;
}

void Add(Labels labels, double value, prometheus::MetricFamily* family) {
  prometheus::ClientMetric metric;
  metric.label = std::move(labels);
  metric.gauge.value = value;
  family->metric.push_back(std::move(metric));
}

Values ByNode(const std::map<int, uint64_t>& bytes_by_node) {
  Values values;
  for (const auto& [node, bytes] : bytes_by_node) values.emplace_back(absl::StrCat(node), static_cast<double>(bytes));
  return values;
}

// Without a label there is one value.
prometheus::MetricFamily Make(const char* name, const char* help, const std::string& label, const Values& by_label) {
  prometheus::MetricFamily family = EmptyFamily(name, help);
  for (const auto& [key, value] : by_label) Add(label.empty() ? Labels{} : Labels{{label, key}}, value, &family);
  return family;
}

}  // namespace

std::vector<prometheus::MetricFamily> GaugeCollector::Collect() const {
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
            {"metadata", static_cast<double>(now.memory.metadata_bytes)},
            {"lent", static_cast<double>(now.memory.lent_bytes)}}),
      Make("superoffload_elements", "Elements of the parameters of all optimizers hosted.", "",
           {{"", static_cast<double>(now.elements)}})};
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

void GaugeCollector::AddGpus(const DaemonGauges& now, std::vector<prometheus::MetricFamily>* families) const {
  if (now.gpus.empty()) return;
  prometheus::MetricFamily info =
      EmptyFamily("superoffload_gpu_info", "How attached trainers use their GPUs; always 1.");
  prometheus::MetricFamily residents =
      EmptyFamily("superoffload_gpu_resident_buckets", "Buckets whose state is on the GPU, too.");
  prometheus::MetricFamily units =
      EmptyFamily("superoffload_gpu_streamed_units", "Units whose parameters take turns in slots of the GPU's memory.");
  prometheus::MetricFamily seconds =
      EmptyFamily("superoffload_gpu_mover_seconds", "Seconds of the same copies beside the same kernels, by mover.");
  for (const auto& [id, use] : now.gpus) {
    Labels optimizer;
    for (const auto& [name, value] : labels_of_(id)) optimizer.push_back({name, value});
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
    Add(optimizer, use.streamed_units, &units);
    for (const auto& [mover, measured] : use.mover_seconds) Add(with({{"mover", mover}}), measured, &seconds);
  }
  families->insert(families->end(), {std::move(info), std::move(residents), std::move(units), std::move(seconds)});
}

}  // namespace superoffload::metrics
