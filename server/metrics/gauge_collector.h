// Daemon gauges as Prometheus reads them: those of now, at every scrape.
#ifndef SUPEROFFLOAD_SERVER_METRICS_GAUGE_COLLECTOR_H_
#define SUPEROFFLOAD_SERVER_METRICS_GAUGE_COLLECTOR_H_

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "server/metrics/daemon_gauges.h"

namespace superoffload::metrics {

class GaugeCollector final : public prometheus::Collectable {
 public:
  using LabelsOf = std::function<std::map<std::string, std::string>(const optimizer::OptimizerId&)>;

  // Both must stay callable as long as it is registered.
  GaugeCollector(std::function<DaemonGauges()> gauges, LabelsOf labels_of)
      : gauges_(std::move(gauges)), labels_of_(std::move(labels_of)) {}

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  void AddGpus(const DaemonGauges& now, std::vector<prometheus::MetricFamily>* families) const;

  const std::function<DaemonGauges()> gauges_;
  const LabelsOf labels_of_;
};

}  // namespace superoffload::metrics

#endif  // SUPEROFFLOAD_SERVER_METRICS_GAUGE_COLLECTOR_H_
