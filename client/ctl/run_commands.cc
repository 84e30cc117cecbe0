// report, resolve: of a rank of a run what is prepared and waits for its run, and how an operator ends it.
#include <cstdio>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/commands.h"
#include "client/ctl/output.h"

namespace superoffload::ctl {
namespace {

// All digits, so that it can be typed again without losing a bit.
std::string Exact(double value) { return absl::StrFormat("%.17g", value); }

std::string ReportText(const std::string& name, const v1::RunReport& report) {
  std::string text = absl::StrCat("step ", report.committed_steps(), " is committed");
  if (report.committed_steps() > 0) {
    absl::StrAppend(&text, "; ranks that have only prepared it commit it with\n  superoffloadctl resolve NAME commit ",
                    Exact(report.last().sum_of_squares()), " ", Exact(report.last().gradient_scale()), " ",
                    Exact(report.last().max_grad_norm()));
  }
  if (!report.has_prepared()) return absl::StrCat(text, "\nno step is prepared\n");
  return absl::StrCat(text, "\nstep ", report.prepared().step(),
                      " is prepared; where no rank of the run has committed it, all abandon it with\n"
                      "  superoffloadctl resolve ",
                      name, " abandon\n");
}

absl::Status ParseTerms(const Arguments& arguments, v1::RunTerms* terms) {
  double values[3];
  for (size_t i = 0; i < 3; ++i) {
    const std::string& word = arguments.operands[2 + i];
    if (absl::SimpleAtod(word, &values[i])) continue;
    return absl::InvalidArgumentError(absl::StrCat("\"", word, "\" is no number; SUM SCALE THRESHOLD are those that ",
                                                   "\"superoffloadctl report\" prints for a rank that has committed"));
  }
  terms->set_sum_of_squares(values[0]);
  terms->set_gradient_scale(values[1]);
  terms->set_max_grad_norm(values[2]);
  return absl::OkStatus();
}

}  // namespace

absl::Status Report(Client& client, const Arguments& arguments) {
  return PrintAnswer(client.ReportRun(arguments.name()), arguments.json,
                     [&](const v1::RunReport& report) { return ReportText(arguments.name(), report); });
}

absl::Status Resolve(Client& client, const Arguments& arguments) {
  const std::string& what = arguments.operands[1];
  const bool commit = what == "commit" && arguments.operands.size() == 5;
  if (!commit && !(what == "abandon" && arguments.operands.size() == 2)) {
    return absl::InvalidArgumentError("resolve takes NAME abandon, or NAME commit SUM SCALE THRESHOLD");
  }
  v1::ResolveStepRequest request;
  request.set_name(arguments.name());
  if (commit) {
    if (absl::Status status = ParseTerms(arguments, request.mutable_commit()); !status.ok()) return status;
  }
  const absl::StatusOr<v1::RunReport> report = client.ReportRun(arguments.name());
  if (!report.ok()) return report.status();
  if (!report->has_prepared()) {
    return absl::FailedPreconditionError(absl::StrCat("optimizer ", arguments.name(), " has prepared no step"));
  }
  request.set_attempt(report->prepared().attempt());
  const absl::StatusOr<v1::Optimizer> resolved = client.ResolveStep(request);
  if (!resolved.ok()) return resolved.status();
  if (arguments.json) {
    std::fputs(JsonText(*resolved).c_str(), stdout);
  } else {
    std::printf("step %llu is %s; optimizer \"%s\" is at step %llu\n",
                static_cast<unsigned long long>(report->prepared().step()), commit ? "committed" : "abandoned",
                resolved->name().c_str(), static_cast<unsigned long long>(resolved->committed_steps()));
  }
  return absl::OkStatus();
}

}  // namespace superoffload::ctl
