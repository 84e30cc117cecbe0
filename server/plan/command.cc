#include "server/plan/command.h"

#include <cstdio>
#include <string>

#include "absl/status/statusor.h"
#include "server/plan/answer.h"
#include "superoffload/v1/printable.h"

namespace superoffload::plan {
namespace {

int Fail(const std::string& sentence, int status) {
  std::fprintf(stderr, "superoffloadd: %s\n", Printable(sentence).c_str());
  return status;
}

}  // namespace

int RunPlan(int input, int output) {
  v1::PlanRequest request;
  if (!request.ParseFromFileDescriptor(input)) {
    return Fail("standard input is no PlanRequest of plan.proto; superoffloadctl plan makes one", 2);
  }
  const absl::StatusOr<v1::PlanResponse> response = Answer(request);
  if (!response.ok()) return Fail(std::string(response.status().message()), 2);
  if (!response->SerializeToFileDescriptor(output)) return Fail("the plan cannot be written to standard output", 1);
  return 0;
}

}  // namespace superoffload::plan
