// A run of several ranks: what its trainers tell each other, and what becomes of a prepared step.
#include <vector>

#include "client/src/cpp/calls.h"
#include "client/src/cpp/session.h"
#include "superoffload/client.hpp"

namespace superoffload {
namespace {

using Stub = v1::OptimizerService::Stub;

superoffload_run_terms ToC(const v1::RunTerms& terms) {
  return {terms.sum_of_squares(), terms.gradient_scale(), terms.max_grad_norm()};
}

superoffload_run_report ToC(const v1::RunReport& report) {
  return {.lineage = report.lineage(),
          .committed_steps = report.committed_steps(),
          .last = ToC(report.last()),
          .prepared_step = report.prepared().step(),
          .prepared_attempt = report.prepared().attempt(),
          .prepared = ToC(report.prepared().terms())};
}

}  // namespace

absl::StatusOr<v1::ResolveStepRequest> Agree(std::span<const v1::RunReport> reports, uint32_t rank) {
  std::vector<superoffload_run_report> all;
  for (const v1::RunReport& report : reports) all.push_back(ToC(report));
  superoffload_run_decision decision;
  const int code = superoffload_agree(all.data(), static_cast<uint32_t>(all.size()), rank, &decision);
  if (code != 0) return FromC(code);
  v1::ResolveStepRequest request;
  if (decision.action == 0) return request;
  request.set_attempt(decision.attempt);
  if (decision.action == 1) {
    request.mutable_commit()->set_sum_of_squares(decision.commit.sum_of_squares);
    request.mutable_commit()->set_gradient_scale(decision.commit.gradient_scale);
    request.mutable_commit()->set_max_grad_norm(decision.commit.max_grad_norm);
  }
  return request;
}

absl::StatusOr<v1::RunReport> Client::ReportRun(const std::string& name) {
  return session()->Ask(&Stub::ReportRun, Named<v1::ReportRunRequest>(name));
}

absl::StatusOr<v1::Optimizer> Client::ResolveStep(const v1::ResolveStepRequest& request) {
  return session()->Ask(&Stub::ResolveStep, request);
}

absl::Status Attachment::PrepareStep(double gradient_scale, double max_grad_norm) {
  return End(SUPEROFFLOAD_END_PREPARE, gradient_scale, max_grad_norm);
}

absl::StatusOr<double> Attachment::WaitPrepared(absl::Duration timeout) {
  bool committed = false;  // what a dead daemon had prepared refuses to be attached to
  const absl::StatusOr<superoffload_answer> answer = Wait(SUPEROFFLOAD_AWAIT_PREPARED, timeout, &committed);
  if (!answer.ok()) return answer.status();
  return answer->sum_of_squares;
}

absl::Status Attachment::EndPreparedStep(double total_sum_of_squares, double gradient_scale, double max_grad_norm) {
  return End(SUPEROFFLOAD_END_PREPARED, gradient_scale, max_grad_norm, total_sum_of_squares);
}

}  // namespace superoffload
