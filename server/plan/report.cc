#include "server/plan/report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "superoffload/v1/printable.h"

namespace superoffload::plan {
namespace {

std::string GiB(uint64_t bytes) { return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / (1 << 30)); }

void AppendMemory(const char* title, const v1::MemoryPlan& plan, std::string& text) {
  absl::StrAppendFormat(&text, "%s: %s of %s, %s\n", title, GiB(plan.total_bytes()), GiB(plan.available_bytes()),
                        plan.fits() ? "fits" : "DOES NOT FIT");
  for (const v1::MemoryItem& item : plan.items()) {
    absl::StrAppendFormat(&text, "  %-22s %12s  %s\n", Printable(item.purpose()), GiB(item.bytes()),
                          Printable(item.formula()));
  }
  absl::StrAppend(&text, "\n");
}

void AppendLargest(const v1::Largest& largest, std::string& text) {
  absl::StrAppend(&text, "largest batch that fits: ", largest.batch(),
                  " at this sequence; largest sequence: ", largest.sequence(), " at this batch\n");
  if (largest.chunked_loss_batch() > largest.batch() || largest.chunked_loss_sequence() > largest.sequence()) {
    absl::StrAppend(&text, "with a chunked loss (--loss=chunked): batch ", largest.chunked_loss_batch(),
                    ", or sequence ", largest.chunked_loss_sequence(), "\n");
  }
  absl::StrAppend(&text, "\n");
}

void AppendPerformance(const v1::PlanResponse& response, std::string& text) {
  if (!response.has_performance()) {
    absl::StrAppend(&text, "performance: unknown. ", response.performance_unknown(), "\n\n");
    return;
  }
  const v1::Performance& p = response.performance();
  absl::StrAppendFormat(&text, "performance: %.3f s per step, %.0f tokens/s, %.0f TFLOPS, MFU %.1f %%",
                        p.step_seconds(), p.tokens_per_second(), p.tflops(), 100 * p.mfu());
  if (p.price_per_million_tokens() > 0) {
    absl::StrAppendFormat(&text, ", price of 1M tokens %.4g", p.price_per_million_tokens());
  }
  if (p.resident_buckets() > 0) {
    absl::StrAppend(&text, "\nwith the optimizer state of ", p.resident_buckets(), " buckets on the GPU, too");
  }
  absl::StrAppendFormat(&text, "\nexposed: %.4f s per step\n", p.exposed_seconds());
  for (const v1::ExposedTime& exposed : p.exposed()) {
    absl::StrAppendFormat(&text, "  %-37s %10.4f s\n", exposed.cause(), exposed.seconds());
  }
  absl::StrAppend(&text, "\n");
}

void AppendSentences(const char* title, const google::protobuf::RepeatedPtrField<std::string>& sentences,
                     std::string& text) {
  if (sentences.empty()) return;
  absl::StrAppend(&text, title, "\n");
  for (const std::string& sentence : sentences) absl::StrAppend(&text, "  - ", Printable(sentence), "\n");
  absl::StrAppend(&text, "\n");
}

}  // namespace

std::string Report(const v1::PlanResponse& response, bool assumptions) {
  std::string text = absl::StrFormat(
      "%s on %s: %.2f B parameters, of which a token's products use %.2f B; %d buckets of at most %.0f MiB\n\n",
      Printable(response.model().empty() ? "the model" : response.model()), Printable(response.machine()),
      static_cast<double>(response.parameters()) / 1e9, static_cast<double>(response.active_parameters()) / 1e9,
      response.buckets(), static_cast<double>(response.largest_bucket_bytes()) / (1 << 20));
  const v1::RankMemory* most = &response.memory(0);
  for (const v1::RankMemory& rank : response.memory()) {
    if (rank.host().total_bytes() > most->host().total_bytes()) most = &rank;
  }
  if (response.memory_size() > 1) {
    absl::StrAppend(&text, "rank ", most->rank(), " of ", response.memory_size(), ", which takes the most:\n\n");
  }
  AppendMemory(response.one_memory() ? "GPU memory, of what the optimizer leaves" : "GPU memory", most->gpu(), text);
  AppendMemory("host memory", most->host(), text);
  AppendLargest(response.largest(), text);
  AppendPerformance(response, text);
  AppendSentences("recommendation", response.recommendation().sentences(), text);
  if (assumptions) {
    AppendSentences("what this rests on", response.assumptions(), text);
    text.pop_back();
  } else {
    absl::StrAppend(&text, "--assumptions says what this rests on.\n");
  }
  return text;
}

}  // namespace superoffload::plan
