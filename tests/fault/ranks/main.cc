// Trains a run of two ranks with a real daemon under its keeper for each, kills any of the four processes, or several
// at once, at random instants, and demands the weights of an undisturbed run, bit for bit. A rank whose trainer or
// daemon dies goes on with what memory holds: nothing is ever created anew or restored.
//
//   rank_kill_driver --kills=N --seed=S    ends with "kills=N mismatches=M"; exit status 1 when M > 0
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "superoffload/v1/exit_status.h"
#include "tests/fault/ranks/rank.h"
#include "tests/support/daemon_process.h"

ABSL_FLAG(uint32_t, kills, 100, "processes to kill");
ABSL_FLAG(uint64_t, seed, 0, "of the instants and the victims; 0 takes one at random");
ABSL_FLAG(int32_t, rank, -1, "runs as the trainer of that rank, until --steps are committed");
ABSL_FLAG(std::string, endpoint, "", "with --rank: its daemon's");
ABSL_FLAG(std::string, directory, "", "with --rank: where it meets the other one");
ABSL_FLAG(uint64_t, steps, 0, "with --rank");

namespace superoffload::fault {
namespace {

constexpr uint64_t kNoEnd = uint64_t{1} << 40;

// Two daemons, their optimizers of one lineage, and where the trainers meet.
class Machine {
 public:
  explicit Machine(const std::vector<std::string>& flags) {
    std::string directory = std::filesystem::temp_directory_path() / "so-ranks-XXXXXX";
    if (::mkdtemp(directory.data()) == nullptr) std::abort();
    directory_ = directory;
    tally_ = &MapTally(directory_ + "/tally");
    for (uint32_t rank = 0; rank < 2; ++rank) {
      daemons_[rank] = std::make_unique<test::DaemonProcess>(flags);
      const auto client = Client::Connect(daemons_[rank]->endpoint());
      if (!client.ok()) std::abort();
      CreateShard(**client, rank, 1);
    }
  }
  ~Machine() { std::filesystem::remove_all(directory_); }

  pid_t StartTrainer(uint32_t rank, uint64_t steps, uint64_t seed) const {
    return test::Spawn({"/proc/self/exe", "--rank=" + std::to_string(rank), "--endpoint=" + daemons_[rank]->endpoint(),
                        "--directory=" + directory_, "--steps=" + std::to_string(steps),
                        "--seed=" + std::to_string(seed)});
  }

  // Both ranks, undisturbed, until `steps` are committed.
  void Train(uint64_t steps) const {
    const std::array<pid_t, 2> trainers{StartTrainer(0, steps, 0), StartTrainer(1, steps, 0)};
    for (const pid_t trainer : trainers) {
      int status = 0;
      ::waitpid(trainer, &status, 0);
      if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) std::exit(1);  // it has said why
    }
  }

  std::array<Shard, 2> Shards() const {
    return {ReadShard(daemons_[0]->endpoint(), 0), ReadShard(daemons_[1]->endpoint(), 1)};
  }

  const test::DaemonProcess& daemon(uint32_t rank) const { return *daemons_[rank]; }
  const Tally& tally() const { return *tally_; }

 private:
  std::string directory_;
  Tally* tally_ = nullptr;
  std::array<std::unique_ptr<test::DaemonProcess>, 2> daemons_;
};

class Killer {
 public:
  Killer(const Machine& machine, std::mt19937_64& random) : machine_(machine), random_(random) {
    for (uint32_t rank = 0; rank < 2; ++rank) Start(rank);
  }

  // Kills at least one of the four, and at most `most`; returns how many.
  uint32_t Strike(uint32_t most) {
    // Half of the time soon after the last strike, while the survivors agree; else inside of one of the next steps.
    if (random_() % 2 == 0) WaitSteps(1 + random_() % 6);
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 12000));
    std::array<uint32_t, 4> victims{0, 1, 2, 3};
    std::shuffle(victims.begin(), victims.end(), random_);
    const uint32_t count = random_() % 2 == 0 ? 1 : 1 + random_() % 4;
    std::vector<uint32_t> trainers;
    uint32_t killed = 0;
    for (uint32_t i = 0; i < std::min(count, most); ++i) {
      const uint32_t rank = victims[i] / 2;
      if (victims[i] % 2 == 0) {
        ::kill(trainers_[rank], SIGKILL);
        trainers.push_back(rank);
        ++killed;
      } else if (const std::optional<pid_t> daemon = machine_.daemon(rank).kept_daemon()) {
        killed += ::kill(*daemon, SIGKILL) == 0;
      }
    }
    for (const uint32_t rank : trainers) {
      Reap(rank);
      Start(rank);
    }
    return killed;
  }

  void End() {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ::kill(trainers_[rank], SIGKILL);
      Reap(rank);
    }
  }

 private:
  void WaitSteps(uint32_t steps) const {
    const Tally& tally = machine_.tally();
    const uint32_t until = tally.commits + steps;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (tally.commits < until && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  void Start(uint32_t rank) { trainers_[rank] = machine_.StartTrainer(rank, kNoEnd, random_()); }

  void Reap(uint32_t rank) const {
    int status = 0;
    ::waitpid(trainers_[rank], &status, 0);
    if (!WIFSIGNALED(status)) std::exit(1);  // it gave up by itself, and has said why
  }

  const Machine& machine_;
  std::mt19937_64& random_;
  std::array<pid_t, 2> trainers_{};
};

size_t Mismatches(const Shard& actual, const Shard& expected) {
  size_t mismatches = actual.steps != expected.steps;
  for (size_t i = 0; i < expected.weights.size(); ++i) {
    mismatches += std::memcmp(&expected.weights[i], &actual.weights[i], sizeof(float)) != 0;
  }
  return mismatches;
}

// Steps that some rank has committed; the others have at least prepared the last one.
uint64_t LastCommitted(const Machine& machine) {
  uint64_t last = 0;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    for (bool seen = false; !seen;) {
      const auto client = Client::Connect(machine.daemon(rank).endpoint());
      const auto optimizers = client.ok() ? (*client)->ListOptimizers() : client.status();
      if (!optimizers.ok()) continue;  // it is being restarted
      last = std::max(last, optimizers->at(0).committed_steps());
      seen = true;
    }
  }
  return last;
}

int Main() {
  const uint32_t kills = absl::GetFlag(FLAGS_kills);
  const uint64_t seed = absl::GetFlag(FLAGS_seed) != 0 ? absl::GetFlag(FLAGS_seed) : std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  std::mt19937_64 random(seed);
  const Machine machine({"--keeper", "--worker_threads=2"});
  Killer killer(machine, random);
  for (uint32_t killed = 0; killed < kills;) killed += killer.Strike(kills - killed);
  killer.End();
  const uint64_t steps = LastCommitted(machine) + 2;
  machine.Train(steps);
  const std::array<Shard, 2> actual = machine.Shards();
  const Machine undisturbed({"--worker_threads=2"});
  undisturbed.Train(steps);
  const std::array<Shard, 2> expected = undisturbed.Shards();
  const Tally& tally = machine.tally();
  std::printf("%llu steps committed; %u agreements, which rolled %u steps forward and abandoned %u; %u skips\n",
              static_cast<unsigned long long>(steps), tally.agreements.load(), tally.rolled_forward.load(),
              tally.abandoned.load(), tally.skips.load());
  const size_t mismatches = Mismatches(actual[0], expected[0]) + Mismatches(actual[1], expected[1]);
  std::printf("kills=%u mismatches=%zu\n", kills, mismatches);
  return mismatches != 0;
}

}  // namespace
}  // namespace superoffload::fault

int main(int argc, char** argv) {
  superoffload::EndWithZeroAfterHelp(argc, argv);
  absl::ParseCommandLine(argc, argv);
  if (absl::GetFlag(FLAGS_rank) < 0) return superoffload::fault::Main();
  return superoffload::fault::RunRank({.rank = static_cast<uint32_t>(absl::GetFlag(FLAGS_rank)),
                                       .endpoint = absl::GetFlag(FLAGS_endpoint),
                                       .directory = absl::GetFlag(FLAGS_directory),
                                       .steps = absl::GetFlag(FLAGS_steps),
                                       .seed = absl::GetFlag(FLAGS_seed)});
}
