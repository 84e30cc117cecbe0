// superoffload-plan: reads a PlanRequest from standard input and writes a PlanResponse to standard output; plan.proto
// says what they are.
#include <unistd.h>

#include <cstdio>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/plan/answer.h"
#include "superoffload/v1/exit_status.h"
#include "superoffload/v1/printable.h"

namespace superoffload::plan {
namespace {

constexpr int kWrongRequest = 2;

int Fail(const std::string& sentence, int status) {
  std::fprintf(stderr, "superoffload-plan: %s\n", Printable(sentence).c_str());
  return status;
}

int Run() {
  v1::PlanRequest request;
  if (!request.ParseFromFileDescriptor(STDIN_FILENO)) {
    return Fail("standard input is no PlanRequest of plan.proto; superoffloadctl plan makes one", kWrongRequest);
  }
  // Without what is not known the answer would be that of another question.
  const size_t bytes = request.ByteSizeLong();
  request.DiscardUnknownFields();
  if (request.ByteSizeLong() != bytes) {
    return Fail("the request has fields that superoffload-plan " SUPEROFFLOAD_VERSION
                " does not know; take it and the program that asks from one release",
                kWrongRequest);
  }
  const absl::StatusOr<v1::PlanResponse> response = Answer(request);
  if (!response.ok()) return Fail(std::string(response.status().message()), kWrongRequest);
  if (!response->SerializeToFileDescriptor(STDOUT_FILENO)) {
    return Fail("the plan cannot be written to standard output", 1);
  }
  return 0;
}

}  // namespace
}  // namespace superoffload::plan

int main(int argc, char** argv) {
  if (superoffload::AsksForHelp(argc, argv)) {
    std::printf(
        "superoffload-plan: answers a PlanRequest on standard input; `superoffloadctl plan --help` says what to ask\n");
    return 0;
  }
  if (argc > 1 && std::string_view(argv[1]) == "--version") {
    std::printf("superoffload-plan " SUPEROFFLOAD_VERSION "\n");
    return 0;
  }
  if (argc > 1) {
    return superoffload::plan::Fail(
        std::string("there is no argument \"") + argv[1] + "\"; superoffloadctl plan takes flags", 2);
  }
  return superoffload::plan::Run();
}
