#include "client/src/agreement.h"

#include <algorithm>
#include <cstring>

namespace superoffload::client {
namespace {

constexpr const char* kRemedy = "; restore all ranks from the same checkpoint, or delete the optimizers of all ranks";

bool SameBits(double a, double b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

// Whether a rank with that report can be brought to step `committed`, the last one that any rank has committed with
// `terms`.
Status CheckReaches(const superoffload_run_report& report, uint32_t rank, uint64_t committed,
                    const superoffload_run_terms& terms) {
  if (report.committed_steps == committed) return {};
  if (report.committed_steps + 1 != committed || report.prepared_step != committed) {
    return Error(Code::kDataLoss, "rank ", rank, " is at step ", report.committed_steps, " and other ranks at step ",
                 committed, ", which it has not prepared: its memory was lost or is of another run", kRemedy);
  }
  if (!SameBits(report.prepared.gradient_scale, terms.gradient_scale) ||
      !SameBits(report.prepared.max_grad_norm, terms.max_grad_norm)) {
    return Error(Code::kDataLoss, "rank ", rank, " has prepared step ", committed, " with gradient scale ",
                 report.prepared.gradient_scale, " and max_grad_norm ", report.prepared.max_grad_norm,
                 " but others have committed it with ", terms.gradient_scale, " and ", terms.max_grad_norm, kRemedy);
  }
  return {};
}

}  // namespace

Status Agree(std::span<const superoffload_run_report> reports, uint32_t rank, superoffload_run_decision* decision) {
  const auto behind = [](const auto& a, const auto& b) { return a.committed_steps < b.committed_steps; };
  const superoffload_run_report& first = *std::max_element(reports.begin(), reports.end(), behind);
  for (uint32_t r = 0; r < reports.size(); ++r) {
    if (reports[r].lineage != reports[0].lineage) {
      return Error(Code::kDataLoss, "rank ", r,
                   " is of another lineage than rank 0: one of them was restored or created ", "without the other",
                   kRemedy);
    }
    if (Status status = CheckReaches(reports[r], r, first.committed_steps, first.last); !status.ok()) return status;
  }
  const superoffload_run_report& own = reports[rank];
  *decision = {};
  if (own.prepared_step == 0) return {};
  decision->attempt = own.prepared_attempt;
  decision->action = own.prepared_step == first.committed_steps ? 1 : 2;
  if (decision->action == 1) decision->commit = first.last;
  return {};
}

}  // namespace superoffload::client
