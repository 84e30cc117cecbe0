// The daemon's Prometheus metrics: the catalogue, and the HTTP exposer.
//
//   superoffload_build_info{version,kernel_target}                     1
//   superoffload_steps_total{optimizer,uid,verdict}                    steps by verdict
//   superoffload_consecutive_skipped_steps{optimizer,uid}              0 after a step that was applied
//   superoffload_gradient_norm{optimizer,uid}                          global norm of the last step that had one
//   superoffload_speculated_buckets_total{optimizer,uid}               published before the verdict
//   superoffload_republished_buckets_total{optimizer,uid}              speculation undone by the verdict
//   superoffload_gradient_bytes_total{optimizer,uid}                   submitted by trainers
//   superoffload_parameter_bytes_total{optimizer,uid}                  published to trainers
//   superoffload_streamed_bytes_total{optimizer,uid}                   of parameters, copied to a GPU's slots again
//   superoffload_step_phase_seconds{optimizer,uid,phase}               histogram; receive: to END_STEP, exposed: after
//   superoffload_checkpoints_total{optimizer,uid,result}               written, failed
//   superoffload_checkpoint_seconds{optimizer,uid}                     histogram of those written
//   superoffload_checkpoint_bytes{optimizer,uid}                       of the last one written
//   superoffload_checkpoint_committed_steps{optimizer,uid}             likewise
//   superoffload_checkpoint_timestamp_seconds{optimizer,uid}           likewise
//   superoffload_pass_seconds{pass}                                    histogram of kernel passes over one bucket
//   superoffload_kernel_bytes_total{pass}                              read and written by the kernels; over
//   superoffload_kernel_seconds_total{pass}                            these seconds it is the kernels' bandwidth
//   superoffload_kernel_bytes_per_second{pass}                         of the last pass of a kind
//   superoffload_optimizers, superoffload_attachments                  hosted, attached
//   superoffload_memory_bytes{use}, superoffload_memory_budget_bytes  state, gradients, parameters, metadata, lent; max
//   superoffload_elements                                              of the parameters hosted
//   superoffload_memory_node_bytes{node}                               where optimizers' memory lies (NUMA)
//   superoffload_partition_llc_occupancy_bytes{group}                  last-level cache held: trainer, optimizer
//   superoffload_partition_mbm_total_bytes{group}                      memory traffic so far, where it is counted
//   superoffload_partition_mbm_local_bytes{group}                      likewise, to memory of the same node
//   superoffload_gpu_info{optimizer,uid,gpu,mover,sharing,cast,coherent,staged}  1 while its trainer is attached
//   superoffload_gpu_resident_buckets{optimizer,uid}                   whose state is on the GPU, too
//   superoffload_gpu_streamed_units{optimizer,uid}                     whose parameters take turns in slots
//   superoffload_gpu_mover_seconds{optimizer,uid,mover}                measured when it attached; the least was taken
//   superoffload_worker_threads
//
// "optimizer" is the optimizer's id, and there is no "uid"; where metric_labels are names it is the name. Series of a
// rank of a run have "run" and "rank", too: "run" is a hash of the user and the run's name, the same in all daemons, or
// the name.
#ifndef SUPEROFFLOAD_SERVER_METRICS_METRICS_H_
#define SUPEROFFLOAD_SERVER_METRICS_METRICS_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/metrics/daemon_gauges.h"
#include "server/optimizer/optimizer_observer.h"

namespace prometheus {
class Exposer;
class Registry;
}  // namespace prometheus

namespace superoffload::metrics {

class GaugeCollector;

struct DaemonConstants {
  std::string version;
  std::string kernel_target;
  size_t worker_threads = 0;
  uint64_t memory_budget_bytes = 0;
  bool labels_are_names = false;
};

// Thread-safe.
class Metrics final : public optimizer::OptimizerObserver {
 public:
  explicit Metrics(const DaemonConstants& constants);
  ~Metrics() override;

  // Serves /metrics on "host:port" (IPv4; port 0 takes a free one) and returns the address bound.
  // INVALID_ARGUMENT or UNAVAILABLE when that address cannot be served. `gauges` must stay callable until Close.
  absl::StatusOr<std::string> Expose(const std::string& address, std::function<DaemonGauges()> gauges);
  void Close();

  void OnPass(const optimizer::OptimizerId& id, const engine::PassReport& report) override;
  void OnStep(const optimizer::OptimizerId& id, const engine::StepReport& report) override;
  void OnCheckpoint(const optimizer::OptimizerId& id, const optimizer::CheckpointReport& report) override;
  void OnHost(const optimizer::OptimizerId& id, const std::string& unique_id, const engine::RunMember& member) override;
  void OnDelete(const optimizer::OptimizerId& id) override;

 private:
  struct Hosted {
    std::string unique_id;
    engine::RunMember member;
  };
  struct Families;
  struct OptimizerSeries;
  struct PassSeries;

  // What tells the series of an optimizer from those of others.
  std::map<std::string, std::string> LabelsOf(const optimizer::OptimizerId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  OptimizerSeries& SeriesOf(const optimizer::OptimizerId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const bool labels_are_names_;
  std::shared_ptr<prometheus::Registry> registry_;  // the exposer holds it weakly
  std::unique_ptr<Families> families_;
  std::unique_ptr<PassSeries[]> passes_;
  std::shared_ptr<GaugeCollector> gauge_collector_;  // likewise
  std::unique_ptr<prometheus::Exposer> exposer_;
  std::string exposed_host_;
  absl::Mutex mu_;
  std::map<optimizer::OptimizerId, Hosted> hosted_ ABSL_GUARDED_BY(mu_);
  std::map<optimizer::OptimizerId, std::unique_ptr<OptimizerSeries>> series_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::metrics

#endif  // SUPEROFFLOAD_SERVER_METRICS_METRICS_H_
