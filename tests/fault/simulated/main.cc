// Runs the engine under simulated faults, one seed after the other, and prints how to repeat the first that fails.
//
//   fault_simulator --seeds=5000                from --first on
//   fault_simulator --seed=17 --verbose         one, with every event
//   fault_simulator --seeds=5000 --repeat       each twice: both runs must be equal, event for event
//   fault_simulator --seeds=500 --planted       there is a bug: fails when no seed finds it
//   fault_simulator --seeds=5000 --gpu          the trainer has a GPU
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "superoffload/v1/exit_status.h"
#include "tests/fault/simulated/simulation.h"

ABSL_FLAG(uint64_t, first, 1, "the first seed");
ABSL_FLAG(uint64_t, seeds, 1000, "how many of them");
ABSL_FLAG(uint64_t, seed, 0, "only this one");
ABSL_FLAG(bool, verbose, false, "print every event");
ABSL_FLAG(bool, repeat, false, "run each seed twice and compare");
ABSL_FLAG(bool, planted, false, "expect that some seed fails");
ABSL_FLAG(bool, gpu, false, "the trainer has a GPU");

namespace {

const char* program = "";
uint64_t seed = 0, tried = 0;
bool planted = false;
superoffload::faults::SimulationOptions options;

// The exit status of a run in which a seed failed.
int Found() {
  if (planted) {
    std::printf("found with seed %llu; seeds tried: %llu\n", static_cast<unsigned long long>(seed),
                static_cast<unsigned long long>(tried));
    return EXIT_SUCCESS;
  }
  std::printf("repeat it: %s --seed=%llu%s --verbose\n", program, static_cast<unsigned long long>(seed),
              options.gpu ? " --gpu" : "");
  return EXIT_FAILURE;
}

// A check of the code has failed, and said so; or worse.
void OnCrash(int signal) {
  std::printf("signal %d\n", signal);
  const int status = Found();
  std::fflush(stdout);
  ::_exit(status);
}

}  // namespace

int main(int argc, char** argv) {
  superoffload::EndWithZeroAfterHelp(argc, argv);
  absl::ParseCommandLine(argc, argv);
  program = argv[0];
  planted = absl::GetFlag(FLAGS_planted);
  options = {.gpu = absl::GetFlag(FLAGS_gpu), .verbose = absl::GetFlag(FLAGS_verbose)};
  static char buffer[BUFSIZ];  // a crash may be in malloc, which would else be asked for one
  std::setvbuf(stdout, buffer, _IOFBF, sizeof(buffer));
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE}) std::signal(signal, OnCrash);
  const uint64_t only = absl::GetFlag(FLAGS_seed);
  const uint64_t first = only != 0 ? only : absl::GetFlag(FLAGS_first);
  const uint64_t count = only != 0 ? 1 : absl::GetFlag(FLAGS_seeds);
  uint64_t events = 0, lives = 0, checkpoints = 0;
  for (seed = first; seed < first + count; ++seed) {
    ++tried;
    const auto result = superoffload::faults::Simulate(seed, options);
    std::string failure = result.failure;
    if (failure.empty() && absl::GetFlag(FLAGS_repeat) &&
        superoffload::faults::Simulate(seed, {.gpu = options.gpu}).hash != result.hash) {
      failure = "the second run differs";
    }
    if (!failure.empty()) {
      std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), failure.c_str());
      return Found();
    }
    events += result.events;
    lives += result.daemon_lives;
    checkpoints += result.checkpoints;
  }
  std::printf("%llu seeds, %llu events, %llu daemons, %llu checkpoints: no fault\n",
              static_cast<unsigned long long>(count), static_cast<unsigned long long>(events),
              static_cast<unsigned long long>(lives), static_cast<unsigned long long>(checkpoints));
  return planted ? EXIT_FAILURE : EXIT_SUCCESS;
}
