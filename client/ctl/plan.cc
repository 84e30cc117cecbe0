#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/ctl/commands.h"
#include "client/ctl/model_families.h"
#include "client/ctl/output.h"
#include "client/ctl/plan_arguments.h"
#include "client/ctl/programs.h"
#include "superoffload/v1/plan.pb.h"
#include "superoffload/v1/printable.h"

namespace superoffload::ctl {
namespace {

constexpr char kPlanUsage[] =
    R"(what training a model on a machine would take, and how fast it would be; neither is needed

  superoffloadctl plan --model=NAME|DIRECTORY|FILE --machine=NAME|FILE --batch=N --sequence=N [FLAG...]

A DIRECTORY has the config.json of a Hugging Face model; the path of a .json file will do as well. It may be of these
architectures: %s.
`superoffload plan` (the Python package) takes all that transformers makes. Any other FILE is a ModelDescription or a
MachineDescription of plan.proto as protobuf text; its name has a "/" or ends with ".textproto". `superoffloadctl bench
--machine_output=FILE` measures a machine.

  --json             print the whole PlanResponse as JSON
  --timeline=FILE    write two simulated steps: a picture (.svg), or a trace that Perfetto opens (.json). Where no step
                     is simulated, as of what does not fit, no file is written

Exit status: 0; 1 when superoffload-plan cannot be asked, or there is no step to draw; 2 when the request is wrong; 3
when the answer is that it does not fit, in HBM or in the daemon's budget. All other flags are fields of PlanRequest in
plan.proto, which describes them:

)";

int Fail(int status, const std::string& sentence) {
  std::fprintf(stderr, "superoffloadctl: %s\n", Printable(sentence).c_str());
  return status;
}

bool WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  return static_cast<bool>(file << bytes) && static_cast<bool>(file.flush());
}

constexpr int kDoesNotFit = 3;

bool Fits(const v1::PlanResponse& response) {
  return std::all_of(response.memory().begin(), response.memory().end(),
                     [](const v1::RankMemory& rank) { return rank.gpu().fits() && rank.host().fits(); });
}

int Print(v1::PlanResponse response, const PlanArguments& arguments) {
  const bool drawn = !response.timeline_file().empty();
  if (drawn && !WriteFile(arguments.timeline, response.timeline_file())) {
    return Fail(1, absl::StrCat("cannot write ", arguments.timeline));
  }
  const std::string report = response.report();
  response.clear_timeline_file();
  response.clear_report();
  const std::string text = arguments.json ? JsonText(response) : report;
  std::fwrite(text.data(), 1, text.size(), stdout);
  if (std::fflush(stdout) != 0) return Fail(1, "cannot write to standard output");
  const int status = Fits(response) ? 0 : kDoesNotFit;
  if (arguments.timeline.empty() || drawn) return status;
  return Fail(
      std::max(status, 1),
      absl::StrCat(arguments.timeline, " is not written, there is no step to draw: ", response.performance_unknown()));
}

}  // namespace

int RunPlan(int argc, char** argv) {
  const absl::StatusOr<PlanArguments> arguments = ParsePlanArguments({argv + 2, argv + argc});
  if (!arguments.ok()) return Fail(2, std::string(arguments.status().message()));
  if (arguments->help) {
    std::printf(kPlanUsage, absl::StrJoin(FamilyNames(), ", ").c_str());
    std::printf("%s", PlanFlags().c_str());
    return 0;
  }
  const std::string program = std::filesystem::path(DaemonProgram()).replace_filename("superoffload-plan");
  const ChildResult child = RunChild({program}, arguments->request.SerializeAsString());
  if (child.status == 2) return 2;  // it has said why
  v1::PlanResponse response;
  if (child.status != 0 || !response.ParseFromString(child.output) || response.report().empty()) {
    return Fail(1, absl::StrCat(program,
                                " gives no answer; install superoffloadd of this release, which brings it, or point "
                                "$SUPEROFFLOAD_DAEMON at a superoffloadd that lies beside one"));
  }
  return Print(std::move(response), *arguments);
}

}  // namespace superoffload::ctl
