// Collects the runs of Google Benchmark, and prints what they mean relative to each other.
#ifndef SUPEROFFLOAD_KERNELS_BENCH_REPORT_H_
#define SUPEROFFLOAD_KERNELS_BENCH_REPORT_H_

#include <benchmark/benchmark.h>

#include <map>
#include <string>
#include <vector>

namespace superoffload::kernels {

struct Kernel {
  std::string name;
  double bytes_per_element = 0;  // read and written, write-allocate included
};

class Report final : public benchmark::BenchmarkReporter {
 public:
  Report(std::vector<Kernel> kernels, size_t elements, int threads)
      : kernels_(std::move(kernels)), elements_(elements), threads_(threads) {}

  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override;

  // Medians over the repetitions. Ratios are of bandwidth to that of `update_in_place`, and of the time of `peer_step`
  // and `peer_cast` together to the kernel's.
  std::string Table() const;
  std::string JsonLines() const;

 private:
  struct Result {
    Kernel kernel;
    double ns_per_element, gb_per_s, ratio_to_limit, speedup_over_peer;
  };
  double MedianSeconds(const std::string& name) const;
  std::vector<Result> Results() const;

  const std::vector<Kernel> kernels_;
  const size_t elements_;
  const int threads_;
  std::map<std::string, std::vector<double>> seconds_;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_BENCH_REPORT_H_
