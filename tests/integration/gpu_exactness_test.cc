// A trainer on a GPU is exact, too: whoever copies, however many buckets are resident, and however late the GPU's
// streams are. The GPU is a fake whose streams dawdle (tests/support/fake_cuda/), so that a missing wait shows
// as wrong bits; everything above the driver's calls is real. tests/device/run.sh runs the same on a real GPU, without
// what only a fake can do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/gpu_trainer.h"
#include "tests/support/streaming_trainer.h"

namespace superoffload {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 40;                       // random; of 24 now and then too few were clipped
constexpr std::chrono::milliseconds kPause{10};  // between control calls, of which users may not make too many

struct GpuCase {
  const char* name;
  superoffload_mover mover;
  v1::Speculation speculation;
  test::Dtypes dtypes;
  std::function<uint32_t(int)> residents = NoResidents;
  const char* fail_daemon = nullptr;   // calls that fail there
  const char* fail_trainer = nullptr;  // and here
  const char* machine = nullptr;
  const char* slow = nullptr;   // a direction
  uint32_t expected_mover = 0;  // 0: the one asked for
  uint32_t expected_shared = 0;
  uint32_t log_slots = 0;
  uint32_t gradient_slots = 2;
  uint32_t logged = 1000;  // buckets
  bool in_place = false;
  uint32_t stream_slots = 0;
  bool in_passes = false;
};

// Grows, stays, takes in everything and goes back to nothing.
uint32_t ChangingResidents(int step) { return step < 4 ? 0 : step < 10 ? 3 : step < 15 ? 1 : step < 20 ? 1000 : 0; }

const GpuCase kCases[] = {
    {"DaemonDescriptor", SUPEROFFLOAD_MOVER_DAEMON, v1::SPECULATION_ALWAYS, kBFloat16, NoResidents, nullptr, nullptr,
     nullptr, nullptr, 0, 1},
    {"DaemonResident", SUPEROFFLOAD_MOVER_DAEMON, v1::SPECULATION_ADAPTIVE, kFloat16, ChangingResidents, nullptr,
     nullptr, nullptr, nullptr, 0, 1},
    {"DaemonCoherent", SUPEROFFLOAD_MOVER_DAEMON, v1::SPECULATION_NEVER, kFloat32Gradients, NoResidents, nullptr,
     nullptr, "gh200", nullptr, 0, 1},
    {"Trainer", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_ALWAYS, kFloat32Gradients},
    {"TrainerNeverSpeculating", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_NEVER, kBFloat16},
    {"TrainerResident", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_ALWAYS, kBFloat16, ChangingResidents},
    {"TrainerStaged", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_ADAPTIVE, kFloat16, NoResidents, nullptr,
     "cuMemHostRegister_v2=304"},
    {"Direct", SUPEROFFLOAD_MOVER_DIRECT, v1::SPECULATION_ADAPTIVE, kFloat16},
    {"DirectCoherentResident", SUPEROFFLOAD_MOVER_DIRECT, v1::SPECULATION_ALWAYS, kBFloat16, ChangingResidents, nullptr,
     nullptr, "gh200"},
    // The daemon sees no GPU: whoever asks for what is best gets what works.
    {"AutoWithoutTheDaemon", SUPEROFFLOAD_MOVER_AUTO, v1::SPECULATION_ADAPTIVE, kBFloat16, NoResidents, "cuInit=100",
     "cuMemHostRegister_v2=304", nullptr, nullptr, SUPEROFFLOAD_MOVER_TRAINER},
    // Only the GPU that uses the host's page tables needs no registration.
    {"DaemonHmm", SUPEROFFLOAD_MOVER_DAEMON, v1::SPECULATION_ALWAYS, kBFloat16, NoResidents, nullptr, nullptr, "hmm",
     nullptr, 0, 1},
    {"TrainerHmm", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_ALWAYS, kBFloat16, NoResidents, nullptr, nullptr, "hmm"},
    {"AutoHmmUnregistered", SUPEROFFLOAD_MOVER_AUTO, v1::SPECULATION_ALWAYS, kBFloat16, NoResidents,
     "cuMemHostRegister_v2=304", "cuMemHostRegister_v2=304", "hmm", nullptr, SUPEROFFLOAD_MOVER_TRAINER},
    {"DaemonCoherentUnregistered", SUPEROFFLOAD_MOVER_DAEMON, v1::SPECULATION_ALWAYS, kBFloat16, NoResidents,
     "cuMemHostRegister_v2=304", nullptr, "gh200", nullptr, 0, 1},
    {"DirectCoherentUnregistered", SUPEROFFLOAD_MOVER_DIRECT, v1::SPECULATION_ALWAYS, kBFloat16, NoResidents, nullptr,
     "cuMemHostRegister_v2=304", "gh200"},
    {"DirectMig", SUPEROFFLOAD_MOVER_DIRECT, v1::SPECULATION_ALWAYS, kBFloat16, NoResidents, nullptr, nullptr, "mig"},
    {"DaemonSlowDown", SUPEROFFLOAD_MOVER_DAEMON, v1::SPECULATION_ALWAYS, kBFloat16, NoResidents, nullptr, nullptr,
     nullptr, "DtoH=1000", 0, 1},
    {"DaemonSlowUp", SUPEROFFLOAD_MOVER_DAEMON, v1::SPECULATION_ALWAYS, kBFloat16, NoResidents, nullptr, nullptr,
     nullptr, "HtoD=1000", 0, 1},
    {"TrainerSlowDown", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_ALWAYS, kBFloat16, NoResidents, nullptr, nullptr,
     nullptr, "DtoH=1000"},
    {"TrainerSlowUpResident", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_ALWAYS, kBFloat16, ChangingResidents, nullptr,
     nullptr, nullptr, "HtoD=1000"},
    {.name = "DaemonResidentLog",
     .mover = SUPEROFFLOAD_MOVER_DAEMON,
     .speculation = v1::SPECULATION_ADAPTIVE,
     .dtypes = kFloat16,
     .residents = ChangingResidents,
     .expected_shared = 1,
     .log_slots = 5},
    {.name = "TrainerResidentLog",
     .mover = SUPEROFFLOAD_MOVER_TRAINER,
     .speculation = v1::SPECULATION_ALWAYS,
     .dtypes = kFloat32Gradients,
     .residents = ChangingResidents,
     .log_slots = 3},
    {.name = "TrainerSlowDownResidentLogOfOneStep",
     .mover = SUPEROFFLOAD_MOVER_TRAINER,
     .speculation = v1::SPECULATION_NEVER,
     .dtypes = kBFloat16,
     .residents = ChangingResidents,
     .slow = "DtoH=1000",
     .log_slots = 2},
    {.name = "DirectCoherentResidentLog",
     .mover = SUPEROFFLOAD_MOVER_DIRECT,
     .speculation = v1::SPECULATION_ALWAYS,
     .dtypes = kBFloat16,
     .residents = ChangingResidents,
     .machine = "gh200",
     .log_slots = 5},
    {.name = "DaemonOneSlot",
     .mover = SUPEROFFLOAD_MOVER_DAEMON,
     .speculation = v1::SPECULATION_ALWAYS,
     .dtypes = kBFloat16,
     .expected_shared = 1,
     .gradient_slots = 1},
    {.name = "TrainerOneSlotResident",
     .mover = SUPEROFFLOAD_MOVER_TRAINER,
     .speculation = v1::SPECULATION_ADAPTIVE,
     .dtypes = kFloat32Gradients,
     .residents = ChangingResidents,
     .gradient_slots = 1},
    {.name = "TrainerOneSlotSlowDownAndTwoLogs",
     .mover = SUPEROFFLOAD_MOVER_TRAINER,
     .speculation = v1::SPECULATION_ALWAYS,
     .dtypes = kFloat16,
     .residents = ChangingResidents,
     .slow = "DtoH=1000",
     .log_slots = 3,
     .gradient_slots = 1,
     .logged = 2},
    {.name = "DirectCoherentOneSlot",
     .mover = SUPEROFFLOAD_MOVER_DIRECT,
     .speculation = v1::SPECULATION_ALWAYS,
     .dtypes = kBFloat16,
     .machine = "gh200",
     .gradient_slots = 1},
    {.name = "DaemonInPlaceResident",
     .mover = SUPEROFFLOAD_MOVER_DAEMON,
     .speculation = v1::SPECULATION_ALWAYS,
     .dtypes = kFloat16,
     .residents = ChangingResidents,
     .expected_shared = 1,
     .gradient_slots = 1,
     .in_place = true},
    {.name = "TrainerInPlaceSlowDown",
     .mover = SUPEROFFLOAD_MOVER_TRAINER,
     .speculation = v1::SPECULATION_ADAPTIVE,
     .dtypes = kBFloat16,
     .slow = "DtoH=1000",
     .gradient_slots = 1,
     .in_place = true},
    {.name = "DirectCoherentInPlaceResident",
     .mover = SUPEROFFLOAD_MOVER_DIRECT,
     .speculation = v1::SPECULATION_NEVER,
     .dtypes = kBFloat16,
     .residents = ChangingResidents,
     .machine = "gh200",
     .gradient_slots = 1,
     .in_place = true},
    {.name = "DaemonStreams",
     .mover = SUPEROFFLOAD_MOVER_DAEMON,
     .speculation = v1::SPECULATION_ALWAYS,
     .dtypes = kBFloat16,
     .expected_shared = 1,
     .stream_slots = 2},
    {.name = "TrainerStreamsSlowUp",
     .mover = SUPEROFFLOAD_MOVER_TRAINER,
     .speculation = v1::SPECULATION_ALWAYS,
     .dtypes = kFloat16,
     .slow = "HtoD=1000",
     .stream_slots = 3},
    {.name = "TrainerStreamsSlowDownOneGradientSlot",
     .mover = SUPEROFFLOAD_MOVER_TRAINER,
     .speculation = v1::SPECULATION_ADAPTIVE,
     .dtypes = kFloat32Gradients,
     .slow = "DtoH=1000",
     .gradient_slots = 1,
     .stream_slots = 1},
    {.name = "TrainerStreamsStaged",
     .mover = SUPEROFFLOAD_MOVER_TRAINER,
     .speculation = v1::SPECULATION_NEVER,
     .dtypes = kBFloat16,
     .fail_trainer = "cuMemHostRegister_v2=304",
     .stream_slots = 2},
    {.name = "DirectCoherentStreams",
     .mover = SUPEROFFLOAD_MOVER_DIRECT,
     .speculation = v1::SPECULATION_ALWAYS,
     .dtypes = kBFloat16,
     .machine = "gh200",
     .stream_slots = 8},
    {.name = "TrainerPasses",
     .mover = SUPEROFFLOAD_MOVER_TRAINER,
     .speculation = v1::SPECULATION_ADAPTIVE,
     .dtypes = kFloat32Gradients,
     .in_passes = true},
    {.name = "TrainerPassesSlowDownOneSlot",
     .mover = SUPEROFFLOAD_MOVER_TRAINER,
     .speculation = v1::SPECULATION_ALWAYS,
     .dtypes = kBFloat16,
     .slow = "DtoH=1000",
     .gradient_slots = 1,
     .in_passes = true},
    {.name = "TrainerPassesResidentLog",
     .mover = SUPEROFFLOAD_MOVER_TRAINER,
     .speculation = v1::SPECULATION_ALWAYS,
     .dtypes = kBFloat16,
     .residents = ChangingResidents,
     .log_slots = 3,
     .in_passes = true},
    {.name = "DirectCoherentPasses",
     .mover = SUPEROFFLOAD_MOVER_DIRECT,
     .speculation = v1::SPECULATION_ADAPTIVE,
     .dtypes = kFloat16,
     .machine = "gh200",
     .in_passes = true},
};

void PrintTo(const GpuCase& c, std::ostream* out) { *out << c.name; }

class GpuExactnessTest : public GpuTest, public ::testing::WithParamInterface<GpuCase> {};

TEST_P(GpuExactnessTest, EqualsTheScalarReferenceInEveryStep) {
  const GpuCase& c = GetParam();
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  ::setenv("FAKE_CUDA_DELAY", "400", 1);
  if (c.machine != nullptr) ::setenv("FAKE_CUDA_MACHINE", c.machine, 1);
  if (c.slow != nullptr) ::setenv("FAKE_CUDA_SLOW", c.slow, 1);
  // No copy of a step waits in the driver, unless nothing else works; state is copied between steps.
  const auto* const residents = c.residents.target<uint32_t (*)(int)>();
  const bool coherent = c.machine != nullptr && std::string(c.machine) == "gh200";
  const bool staged = c.fail_trainer != nullptr && !coherent;
  if (!staged && *residents == NoResidents) ::setenv("FAKE_CUDA_REFUSE_PAGEABLE", "1", 1);
  if (c.fail_daemon != nullptr) ::setenv("FAKE_CUDA_FAIL", c.fail_daemon, 1);
  StartDaemon();
  ::unsetenv("FAKE_CUDA_FAIL");
  if (c.fail_trainer != nullptr) ::setenv("FAKE_CUDA_FAIL", c.fail_trainer, 1);
  ASSERT_NO_FATAL_FAILURE(
      Attach(c.speculation, c.dtypes, c.log_slots, c.gradient_slots, c.logged, c.in_place, c.stream_slots));
  if (!AttachGpu(c.mover)) GTEST_SKIP() << status_;
  ASSERT_TRUE(status_.ok()) << status_;
  ::unsetenv("FAKE_CUDA_FAIL");
  if (IsFake()) {
    EXPECT_EQ(report_.mover, c.expected_mover != 0 ? c.expected_mover : static_cast<uint32_t>(c.mover));
    EXPECT_EQ(report_.shared, c.expected_shared);
    EXPECT_EQ(report_.coherent, coherent);
    EXPECT_EQ(report_.staged, staged);
  }
  {
    const std::unique_ptr<GpuTrainer> trainer =
        c.in_passes          ? std::make_unique<PassesTrainer>(client_.get(), attachment_.get(), c.residents, seed)
        : c.stream_slots > 0 ? std::make_unique<StreamingTrainer>(client_.get(), attachment_.get(), seed)
                             : std::make_unique<GpuTrainer>(client_.get(), attachment_.get(), c.residents);
    test::ExactTraining(trainer.get(), SpecOf(c.dtypes, c.stream_slots), c.dtypes, seed).Train(kSteps);
  }
  attachment_.reset();
  EXPECT_EQ(daemon_->Stop(), 0);
}

INSTANTIATE_TEST_SUITE_P(All, GpuExactnessTest, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

// Of the fake's, whose memory is files.
int MappingsOfGpuMemory(pid_t pid) {
  std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
  int mappings = 0;
  for (std::string line; std::getline(maps, line);) mappings += line.find("fake-gpu-memory") != std::string::npos;
  return mappings;
}

// Not a test of its own: what the next one kills.
TEST_F(GpuTest, DISABLED_TrainsUntilItIsKilled) {
  client_ = *Client::Connect(std::getenv("GPU_TEST_ENDPOINT"));
  ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_ALWAYS, kBFloat16));
  ASSERT_TRUE(AttachGpu(SUPEROFFLOAD_MOVER_DAEMON) && status_.ok()) << status_;
  GpuTrainer trainer(client_.get(), attachment_.get(), NoResidents);
  test::ExactTraining(&trainer, test::Spec(kBFloat16), kBFloat16, /*seed=*/1).Train(1 << 20);
}

TEST_F(GpuTest, ATrainerThatIsKilledLeavesAHealthyDaemon) {
  ::setenv("FAKE_CUDA_DELAY", "400", 1);
  StartDaemon();
  ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_ALWAYS, kBFloat16));
  if (!AttachGpu(SUPEROFFLOAD_MOVER_DAEMON)) GTEST_SKIP() << status_;
  attachment_.reset();
  ASSERT_TRUE(client_->DeleteOptimizer("exact").ok());
  ::setenv("GPU_TEST_ENDPOINT", daemon_->endpoint().c_str(), 1);
  for (int i = 0; i < 3; ++i) {
    std::string words[] = {"/proc/self/exe", "--gtest_also_run_disabled_tests",
                           "--gtest_filter=*DISABLED_TrainsUntilItIsKilled"};
    char* arguments[] = {words[0].data(), words[1].data(), words[2].data(), nullptr};
    pid_t trainer = 0;
    ASSERT_EQ(::posix_spawn(&trainer, arguments[0], nullptr, nullptr, arguments, environ), 0);
    uint64_t steps = 0;
    while (steps < 2) {
      std::this_thread::sleep_for(kPause);
      ASSERT_NE(::waitpid(trainer, nullptr, WNOHANG), trainer) << "it ended by itself";
      const absl::StatusOr<v1::Optimizer> optimizer = client_->GetOptimizer("exact");
      steps = optimizer.ok() ? optimizer->step() : 0;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(17 * i));
    ::kill(trainer, SIGKILL);
    ::waitpid(trainer, nullptr, 0);
    absl::Status deleted;
    do {
      std::this_thread::sleep_for(kPause);
      deleted = client_->DeleteOptimizer("exact");  // once the daemon has noticed
    } while (deleted.code() == absl::StatusCode::kFailedPrecondition);
    ASSERT_TRUE(deleted.ok()) << deleted;
    EXPECT_EQ(MappingsOfGpuMemory(daemon_->pid()), 0) << "they would keep a dead trainer's GPU memory";
  }
  ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_ALWAYS, kBFloat16));
  ASSERT_TRUE(AttachGpu(SUPEROFFLOAD_MOVER_DAEMON) && status_.ok()) << status_;
  {
    GpuTrainer trainer(client_.get(), attachment_.get(), NoResidents);
    test::ExactTraining(&trainer, test::Spec(kBFloat16), kBFloat16, /*seed=*/2).Train(kSteps);
  }
  attachment_.reset();
  EXPECT_EQ(daemon_->Stop(), 0);
}

TEST_F(GpuTest, ADaemonThatIsKilledLeavesAHealthyTrainer) {
  ::setenv("FAKE_CUDA_DELAY", "400", 1);
  ::setenv("SUPEROFFLOAD_RECONNECT_SECONDS", "0.1", 1);  // nobody comes
  for (const superoffload_mover mover :
       {SUPEROFFLOAD_MOVER_DAEMON, SUPEROFFLOAD_MOVER_TRAINER, SUPEROFFLOAD_MOVER_DIRECT}) {
    SCOPED_TRACE(mover);
    StartDaemon();
    ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_ALWAYS, kBFloat16));
    if (!AttachGpu(mover)) GTEST_SKIP() << status_;
    ASSERT_TRUE(status_.ok()) << status_;
    {
      GpuTrainer trainer(client_.get(), attachment_.get(), NoResidents);
      absl::Status status = trainer.PushParameters();
      std::thread killer([pid = daemon_->pid()] {
        std::this_thread::sleep_for(10 * kPause);
        ::kill(pid, SIGKILL);
      });
      for (int step = 1; status.ok(); ++step) {
        status = trainer.BeginStep(1);
        for (int i = attachment_->optimizer().parameters_size(); status.ok() && i > 0; --i) {
          status = trainer.GradientReady(static_cast<size_t>(i - 1));
        }
        if (status.ok()) status = trainer.EndStep(1, 0);
        if (status.ok()) status = trainer.WaitStep().status();
      }
      killer.join();
      EXPECT_THAT(std::string(status.message()), HasSubstr("daemon"));
    }
    attachment_.reset();
    StartDaemon();
    ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_ALWAYS, kBFloat16));
    ASSERT_TRUE(AttachGpu(mover) && status_.ok()) << status_;
    {
      GpuTrainer trainer(client_.get(), attachment_.get(), NoResidents);
      test::ExactTraining(&trainer, test::Spec(kBFloat16), kBFloat16, /*seed=*/4).Train(kSteps);
    }
    attachment_.reset();
  }
}

// What cannot work is refused with what to do about it.
TEST_F(GpuTest, AMoverThatCannotWorkIsRefused) {
  struct {
    const char *daemon, *trainer, *uuid;
    superoffload_mover mover;
    const char* sentence;
    absl::StatusCode code = absl::StatusCode::kFailedPrecondition;
    const char* machine = "h100-pcie";
  } const cases[] = {
      {"cuInit=100", "", "0", SUPEROFFLOAD_MOVER_DAEMON, "no GPU is visible; check CUDA_VISIBLE_DEVICES"},
      {"", "", "1", SUPEROFFLOAD_MOVER_DAEMON, "no GPU-01000000-0000-0000-0000-000000000000 among the 1 GPUs"},
      {"cuMemImportFromShareableHandle=801", "", "0", SUPEROFFLOAD_MOVER_DAEMON,
       "this driver or container does not allow it"},
      {"", "cuMemExportToShareableHandle=801", "0", SUPEROFFLOAD_MOVER_DAEMON,
       "this driver or container does not allow it"},
      {"cuDevicePrimaryCtxRetain=46", "", "0", SUPEROFFLOAD_MOVER_DAEMON, "use an instance"},
      {"", "cuMemHostRegister_v2=304", "0", SUPEROFFLOAD_MOVER_DIRECT, "raise RLIMIT_MEMLOCK"},
      {"", "cuMemHostRegister_v2=304", "0", SUPEROFFLOAD_MOVER_DIRECT, "raise RLIMIT_MEMLOCK",
       absl::StatusCode::kFailedPrecondition, "hmm"},
      {"cuMemHostRegister_v2=304", "", "0", SUPEROFFLOAD_MOVER_DAEMON, "raise RLIMIT_MEMLOCK",
       absl::StatusCode::kFailedPrecondition, "hmm"},
      {"", "cuDevicePrimaryCtxRetain=100", "0", SUPEROFFLOAD_MOVER_AUTO, "no GPU is visible",
       absl::StatusCode::kUnavailable},
      {"", "cuMemCreate=2", "0", SUPEROFFLOAD_MOVER_AUTO, "free GPU memory", absl::StatusCode::kResourceExhausted},
      {"", "cuStreamSynchronize=214", "0", SUPEROFFLOAD_MOVER_AUTO, "out of service", absl::StatusCode::kDataLoss},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.sentence);
    ::setenv("FAKE_CUDA_MACHINE", c.machine, 1);
    ::setenv("FAKE_CUDA_FAIL", c.daemon, 1);
    StartDaemon();
    ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_ALWAYS, kBFloat16));
    ::setenv("FAKE_CUDA_FAIL", c.trainer, 1);
    ::setenv("FAKE_CUDA_UUID", c.uuid, 1);
    if (!AttachGpu(c.mover)) GTEST_SKIP() << status_;
    if (status_.ok() && !IsFake()) GTEST_SKIP() << "a real GPU does not fail when told to";
    EXPECT_EQ(status_.code(), c.code) << status_;
    EXPECT_THAT(std::string(status_.message()), HasSubstr(c.sentence));
    ::unsetenv("FAKE_CUDA_FAIL");
    ::unsetenv("FAKE_CUDA_UUID");
    attachment_.reset();
    client_.reset();
    EXPECT_EQ(daemon_->Stop(), 0);
  }
}

// Gradients that are copied to try them land where the parameters are.
TEST_F(GpuTest, MoversAreTriedWithoutChangingWhatIsPublishedInPlace) {
  ::setenv("FAKE_CUDA_MACHINE", "gh200", 1);
  StartDaemon();
  ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_NEVER, kBFloat16, /*log_slots=*/0, /*gradient_slots=*/1,
                                 /*logged=*/0, /*in_place=*/true));
  constexpr std::byte kByte{1};
  FillParameters(kByte);
  ASSERT_TRUE(attachment_->PushParameters().ok());
  if (!AttachGpu(SUPEROFFLOAD_MOVER_AUTO)) GTEST_SKIP() << status_;
  ASSERT_TRUE(status_.ok()) << status_;
  if (IsFake()) {
    EXPECT_EQ(std::ranges::count(report_.seconds, 0.0), std::ssize(report_.seconds) - 3) << "three were tried";
  }
  ExpectParameters(kByte);
}

// Another mover would not help.
TEST_F(GpuTest, ADaemonThatIsGoneIsNotOneThatCannotCopy) {
  StartDaemon();
  ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_ALWAYS, kBFloat16));
  EXPECT_EQ(daemon_->Stop(), 0);
  if (!AttachGpu(SUPEROFFLOAD_MOVER_DAEMON)) GTEST_SKIP() << status_;
  EXPECT_EQ(status_.code(), absl::StatusCode::kUnavailable) << status_;
  EXPECT_THAT(std::string(status_.message()), HasSubstr("start it again and attach anew"));
}

TEST_F(GpuTest, GpusAreFoundByWhatTheyAreNotByTheirNumbers) {
  ::setenv("FAKE_CUDA_UUID", "13,7", 1);
  StartDaemon();
  ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_ALWAYS, kBFloat16));
  ::setenv("FAKE_CUDA_UUID", "7,13", 1);  // CUDA_VISIBLE_DEVICES has another order here
  if (!AttachGpu(SUPEROFFLOAD_MOVER_DAEMON)) GTEST_SKIP() << status_;
  EXPECT_TRUE(status_.ok()) << status_;
}

// Every rank has the optimizer of its share: gradients are reduced and scattered before they are submitted, parameters
// gathered after it. One rank per GPU; the fake one is enough for several.
TEST_F(GpuTest, RanksWithoutCollectivesOfTheirOwnTrainTogether) {
  ::setenv("FAKE_CUDA_DELAY", "300", 1);
  StartDaemon();
  ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_ALWAYS, kBFloat16));
  if (!AttachGpu(SUPEROFFLOAD_MOVER_TRAINER)) GTEST_SKIP() << status_;
  superoffload_collective_id id;
  if (superoffload_make_collective_id(&id) != 0) GTEST_SKIP() << superoffload_last_error();
  const uint32_t ranks = IsFake() ? 3 : 1;
  constexpr uint64_t kShare = 2048;
  constexpr float kLearningRate = 0.5f;
  std::vector<std::vector<float>> gathered(ranks);
  const auto run = [&](uint32_t rank) {
    superoffload_collective* collective = nullptr;
    ASSERT_EQ(superoffload_join_collective(0, &id, ranks, rank, &collective), 0) << superoffload_last_error();
    std::unique_ptr<Client> client = *Client::Connect(daemon_->endpoint());
    v1::CreateOptimizerRequest request;
    request.set_name(absl::StrCat("rank", rank));
    request.set_algorithm("adamw");
    v1::ParameterGroup* const group = request.add_groups();
    SetScalar(group, "lr", kLearningRate);
    SetScalar(group, "weight_decay", 0);
    v1::Parameter* share = request.add_parameters();
    share->set_name("share");
    share->add_shape(kShare);
    share->set_dtype(v1::DATA_TYPE_FLOAT32);
    ASSERT_TRUE(client->CreateOptimizer(request).ok());
    v1::AttachOptimizerRequest attach;
    attach.set_name(request.name());
    attach.set_sync(v1::SYNC_PUSH);
    std::unique_ptr<Attachment> attachment = *client->Attach(attach);
    ASSERT_TRUE(attachment->PushParameters().ok());  // zeros
    ASSERT_TRUE(attachment->AttachGpu(0, SUPEROFFLOAD_MOVER_TRAINER).ok()) << superoffload_last_error();
    superoffload_attachment* const handle = attachment->handle();
    ASSERT_EQ(superoffload_gpu_copy(handle, SUPEROFFLOAD_TO_GPU, 0), 0);

    std::shared_ptr<const kernels::GpuDevice> device;
    Tensor::Require(kernels::GpuDevice::Open(0, &device).code);
    const kernels::CudaDriver& driver = device->driver();
    Tensor::Require(driver.CtxSetCurrent(device->context()));
    kernels::OwnedStream owned;
    Tensor::Require(kernels::MakeStream(*device, &owned).code);
    const auto stream = reinterpret_cast<uint64_t>(owned.get());
    Tensor whole(device, ranks * kShare * sizeof(float)), reduced(device, kShare * sizeof(float));
    // The mean over ranks is positive in every second element, and negative in the others.
    auto* const gradient = reinterpret_cast<float*>(whole.host());
    for (uint64_t i = 0; i < ranks * kShare; ++i) {
      gradient[i] = (i % 2 == 0 ? 1.0f : -1.0f) * static_cast<float>(rank + 1);
    }
    Tensor::Require(driver.MemcpyHtoDAsync(whole.device(), whole.host(), whole.bytes(), owned.get()));
    ASSERT_EQ(superoffload_reduce_scatter(collective, whole.device(), reduced.device(), kShare, v1::DATA_TYPE_FLOAT32,
                                          /*average=*/1, stream),
              0);
    const superoffload_piece piece{reduced.device(), 0, kShare, 0, v1::DATA_TYPE_FLOAT32};
    superoffload_gradients source{};
    source.on_gpu = 1;
    source.stream = stream;
    source.stays = SUPEROFFLOAD_STAYS_UNTIL_PACKED;
    ASSERT_TRUE(attachment->HandOver({&piece, 1}, source).ok());
    ASSERT_TRUE(attachment->EndStep().ok());
    const absl::StatusOr<superoffload_verdict> verdict = attachment->WaitVerdict();
    ASSERT_TRUE(verdict.ok()) << verdict.status();
    const double mean = (ranks + 1) / 2.0;
    EXPECT_DOUBLE_EQ(verdict->global_norm, mean * std::sqrt(static_cast<double>(kShare)));
    ASSERT_EQ(AwaitOnGpu(*attachment, 0, stream), 0);
    ASSERT_EQ(superoffload_all_gather(collective, attachment->gpu_report().parameters, whole.device(), kShare,
                                      v1::DATA_TYPE_FLOAT32, stream),
              0);
    Tensor::Require(driver.MemcpyDtoHAsync(whole.host(), whole.device(), whole.bytes(), owned.get()));
    Tensor::Require(driver.StreamSynchronize(owned.get()));
    gathered[rank].assign(gradient, gradient + ranks * kShare);
    superoffload_leave_collective(collective);
  };
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<float>& parameters : gathered) {
    ASSERT_EQ(parameters.size(), ranks * kShare);
    EXPECT_EQ(parameters, gathered[0]);
    // Adam's first step is lr against the gradient's sign, less eps.
    for (size_t i = 0; i < parameters.size(); ++i) {
      ASSERT_NEAR(parameters[i], i % 2 == 0 ? -kLearningRate : kLearningRate, 1e-6) << i;
    }
  }
}

TEST_F(GpuTest, MeasuresWhatWorksAndTakesTheBest) {
  StartDaemon();
  ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_ALWAYS, kBFloat16));
  if (!AttachGpu(SUPEROFFLOAD_MOVER_AUTO)) GTEST_SKIP() << status_;
  ASSERT_TRUE(status_.ok()) << status_;
  for (const uint32_t mover : {SUPEROFFLOAD_MOVER_DAEMON, SUPEROFFLOAD_MOVER_TRAINER}) {
    EXPECT_GT(report_.seconds[mover], 0);
  }
  EXPECT_EQ(report_.seconds[SUPEROFFLOAD_MOVER_DIRECT] > 0, report_.coherent != 0);
  EXPECT_GT(report_.seconds[report_.mover], 0);
  EXPECT_STRNE(report_.gpu, "");
}

}  // namespace
}  // namespace superoffload
