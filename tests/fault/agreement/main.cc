// Explores a run of two ranks (exploration.h). --planted and --without=RULE: something is broken, and it must be found.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "superoffload/v1/exit_status.h"
#include "tests/fault/agreement/exploration.h"

namespace {

using superoffload::faults::Exploration;
using superoffload::faults::ExplorationOptions;

bool Violation(const ExplorationOptions& options) {
  Exploration exploration(options);
  const std::string violation = exploration.Run();
  std::printf("%llu states, %llu calls of a daemon\n%s\n", static_cast<unsigned long long>(exploration.states()),
              static_cast<unsigned long long>(exploration.machines().edges()), violation.c_str());
  return !violation.empty();
}

}  // namespace

int main(int argc, char** argv) {
  if (superoffload::AsksForHelp(argc, argv)) {
    std::printf(
        "Explores all that can happen in a run of two ranks.\n"
        "  --deaths=N --steps=N   at most so many\n"
        "  --without=RULE         one of reports, generations, slots, detach is broken and must be found missing\n"
        "  --planted              ends well when a violation is found\n");
    return 0;
  }
  ExplorationOptions asked;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--deaths=")) asked.deaths = static_cast<uint32_t>(std::atoi(argv[i] + 9));
    if (argument.starts_with("--steps=")) asked.steps = static_cast<uint64_t>(std::atoi(argv[i] + 8));
    asked.planted |= argument == "--planted" || argument.starts_with("--without=");
    if (argument == "--without=reports") asked.decide_early = true;
    if (argument == "--without=generations") asked.mix_generations = true;
    if (argument == "--without=slots") asked.fill_before_agreement = true;
    if (argument == "--without=detach") asked.report_attached = true;
  }
  ExplorationOptions skip = asked, lineage = asked;
  skip.infinite = true;
  skip.steps = 1;
  skip.deaths = std::min(skip.deaths, 1u);  // with 2 it takes a minute
  lineage.other_lineage = true;
  lineage.deaths = 0;
  if (asked.planted) {
    if (Violation(lineage)) return 0;
    for (asked.shallow = 20; asked.shallow <= 45; asked.shallow += 5) {
      if (Violation(asked)) return 0;
    }
    return 1;
  }
  for (const ExplorationOptions& options : {asked, skip, lineage}) {
    if (Violation(options)) return 1;
  }
  return 0;
}
