#include "kernels/bench/report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace superoffload::kernels {

void Report::ReportRuns(const std::vector<Run>& runs) {
  for (const Run& run : runs) {
    if (run.run_type == Run::RT_Iteration) {
      seconds_[run.run_name.function_name].push_back(run.real_accumulated_time / static_cast<double>(run.iterations));
    }
  }
}

double Report::MedianSeconds(const std::string& name) const {
  std::vector<double> sorted = seconds_.at(name);
  std::sort(sorted.begin(), sorted.end());
  return sorted[sorted.size() / 2];
}

std::vector<Report::Result> Report::Results() const {
  const auto ns = [&](const std::string& name) { return MedianSeconds(name) * 1e9 / static_cast<double>(elements_); };
  const auto bytes = [&](const std::string& name) {
    return std::find_if(kernels_.begin(), kernels_.end(), [&](const Kernel& k) { return k.name == name; })
        ->bytes_per_element;
  };
  const double limit = bytes("update_in_place") / ns("update_in_place");
  const double peer = ns("peer_step") + ns("peer_cast");
  std::vector<Result> results;
  for (const Kernel& kernel : kernels_) {
    const double time = ns(kernel.name);
    results.push_back(
        {kernel, time, kernel.bytes_per_element / time, kernel.bytes_per_element / time / limit, peer / time});
  }
  return results;
}

std::string Report::Table() const {
  std::string text =
      absl::StrFormat("%d threads, %d Mi elements\n%-18s %6s %12s %8s %15s %18s\n", threads_, elements_ >> 20, "kernel",
                      "bytes", "ns/element", "GB/s", "ratio to limit", "speedup over peer");
  for (const Result& r : Results()) {
    absl::StrAppendFormat(&text, "%-18s %6.0f %12.3f %8.1f %15.2f %18.2f\n", r.kernel.name, r.kernel.bytes_per_element,
                          r.ns_per_element, r.gb_per_s, r.ratio_to_limit, r.speedup_over_peer);
  }
  return text;
}

std::string Report::JsonLines() const {
  std::string text;
  for (const Result& r : Results()) {
    absl::StrAppendFormat(&text,
                          "{\"name\": \"%s\", \"threads\": %d, \"elements\": %d, \"bytes_per_element\": %g, "
                          "\"ns_per_element\": %.4f, \"gb_per_s\": %.2f, \"ratio_to_limit\": %.4f, "
                          "\"speedup_over_peer\": %.4f}\n",
                          r.kernel.name, threads_, elements_, r.kernel.bytes_per_element, r.ns_per_element, r.gb_per_s,
                          r.ratio_to_limit, r.speedup_over_peer);
  }
  return text;
}

}  // namespace superoffload::kernels
