// Trains a byte-level bigram language model on real text through a real daemon under its keeper, kills the trainer or
// the daemon at random instants, and demands the weights of an undisturbed run, bit for bit.
//
//   kill_driver --kills=N --seed=S --text=FILE [--algorithm=NAME]    ends with "kills=N mismatches=M"; exit status 1
//   when M > 0
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "kernels/float_conversion.h"
#include "superoffload/client.hpp"
#include "superoffload/v1/exit_status.h"
#include "superoffload/v1/step_ring.h"
#include "tests/support/daemon_process.h"

ABSL_FLAG(uint32_t, kills, 100, "processes to kill");
ABSL_FLAG(uint64_t, seed, 0, "of the instants and the victims; 0 takes one at random");
ABSL_FLAG(std::string, text, "", "the file to learn from");
ABSL_FLAG(std::string, algorithm, "adamw", "of narrower state the weight has some, the bias keeps fp32");
ABSL_FLAG(std::string, trainer, "", "endpoint; runs as the trainer, until --steps are committed");
ABSL_FLAG(uint64_t, steps, 0, "with --trainer");

namespace superoffload {
namespace {

constexpr char kName[] = "killed";
constexpr size_t kBytes = 256, kBatch = 256;
enum : size_t { kWeight, kBias };

// Masters in bf16 are those of a weight in bf16.
bool WeightIsNarrow() { return absl::GetFlag(FLAGS_algorithm).ends_with("_masters"); }

v1::CreateOptimizerRequest Plan() {
  v1::CreateOptimizerRequest request;
  request.set_name(kName);
  request.set_bucket_bytes(64 << 10);
  const std::string algorithm = absl::GetFlag(FLAGS_algorithm);
  request.set_algorithm(algorithm);
  v1::ParameterGroup* group = request.add_groups();
  SetScalar(group, "lr", 0.02);
  SetScalar(group, "weight_decay", 0);
  v1::Parameter* weight = request.add_parameters();
  weight->set_name("weight");
  weight->add_shape(kBytes);
  weight->add_shape(kBytes);
  weight->set_dtype(WeightIsNarrow() ? v1::DATA_TYPE_BFLOAT16 : v1::DATA_TYPE_FLOAT32);
  v1::Parameter* bias = request.add_parameters();
  bias->set_name("bias");
  bias->add_shape(kBytes);
  bias->set_dtype(v1::DATA_TYPE_FLOAT32);
  bias->set_state_in_float32(algorithm.find('_') != std::string::npos);
  return request;
}

// An optimizer whose parameters are zeros.
void Create(Client& client) {
  v1::AttachOptimizerRequest request;
  request.set_name(kName);
  request.set_sync(v1::SYNC_PUSH);
  if (!client.CreateOptimizer(Plan()).ok()) std::abort();
  const auto attachment = client.Attach(request);
  if (!attachment.ok() || !(*attachment)->PushParameters().ok()) std::abort();
}

std::string ReadText() {
  std::ifstream file(absl::GetFlag(FLAGS_text), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<float> Weight(const Attachment& trainer) {
  if (WeightIsNarrow()) {
    const auto stored = trainer.Parameter<uint16_t>(kWeight);
    std::vector<float> numbers(stored.size());
    std::ranges::transform(stored, numbers.begin(), kernels::WidenBFloat16);
    return numbers;
  }
  const auto numbers = trainer.Parameter<float>(kWeight);
  return {numbers.begin(), numbers.end()};
}

void WriteWeightGradient(Attachment& trainer, const std::vector<float>& gradient) {
  if (WeightIsNarrow()) {
    std::ranges::transform(gradient, trainer.Gradient<uint16_t>(kWeight).begin(), kernels::NarrowToBFloat16);
  } else {
    std::ranges::copy(gradient, trainer.Gradient<float>(kWeight).begin());
  }
}

// The gradients of committed step `t` depend on the parameters and on t alone.
absl::Status Backward(Attachment& trainer, const std::string& text, uint64_t t) {
  const std::vector<float> weight = Weight(trainer);
  const auto bias = trainer.Parameter<float>(kBias), bias_gradient = trainer.Gradient<float>(kBias);
  std::vector<float> weight_gradient(weight.size());
  std::ranges::fill(bias_gradient, 0.0f);
  std::mt19937_64 random(t);
  for (size_t i = 0; i < kBatch; ++i) {
    const size_t at = random() % (text.size() - 1);
    const size_t row = static_cast<unsigned char>(text[at]) * kBytes, next = static_cast<unsigned char>(text[at + 1]);
    std::array<float, kBytes> probability;
    float sum = 0;
    for (size_t j = 0; j < kBytes; ++j) sum += probability[j] = std::exp(weight[row + j] + bias[j]);
    for (float& p : probability) p /= sum;
    probability[next] -= 1;
    for (size_t j = 0; j < kBytes; ++j) {
      weight_gradient[row + j] += probability[j] / kBatch;
      bias_gradient[j] += probability[j] / kBatch;
    }
  }
  WriteWeightGradient(trainer, weight_gradient);
  if (absl::Status status = trainer.GradientReady(kBias); !status.ok()) return status;
  return trainer.GradientReady(kWeight);
}

// One attachment's life: trains until `steps` are committed, or until the daemon is gone.
absl::Status TrainAttached(Client& client, const std::string& text, uint64_t steps) {
  v1::AttachOptimizerRequest request;
  request.set_name(kName);
  request.set_sync(v1::SYNC_PULL);
  const auto trainer = client.Attach(request);
  if (!trainer.ok()) return trainer.status();
  for (uint64_t t = (*trainer)->optimizer().committed_steps() + 1; t <= steps; ++t) {
    if (absl::Status status = (*trainer)->BeginStep(); !status.ok()) return status;
    if (absl::Status status = Backward(**trainer, text, t); !status.ok()) return status;
    if (absl::Status status = (*trainer)->EndStep(1, 0.1); !status.ok()) return status;
    if (const auto verdict = (*trainer)->WaitStep(); !verdict.ok()) return verdict.status();
  }
  return absl::OkStatus();
}

int RunTrainer() {
  const std::string text = ReadText();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (std::chrono::steady_clock::now() < deadline) {
    auto client = Client::Connect(absl::GetFlag(FLAGS_trainer));
    absl::Status status = client.status();
    if (status.ok()) status = TrainAttached(**client, text, absl::GetFlag(FLAGS_steps));
    if (status.ok()) return 0;
    // UNAVAILABLE: the daemon is being restarted. FAILED_PRECONDITION: it has not yet seen that the last trainer died.
    if (status.code() != absl::StatusCode::kUnavailable && status.code() != absl::StatusCode::kFailedPrecondition) {
      std::fprintf(stderr, "trainer: %s\n", status.ToString().c_str());
      return 1;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::fprintf(stderr, "trainer: the daemon did not come back\n");
  return 1;
}

pid_t StartTrainer(const std::string& endpoint, uint64_t steps) {
  return test::Spawn({"/proc/self/exe", "--trainer=" + endpoint, "--text=" + absl::GetFlag(FLAGS_text),
                      "--steps=" + std::to_string(steps), "--algorithm=" + absl::GetFlag(FLAGS_algorithm)});
}

std::unique_ptr<Client> ConnectPatiently(const std::string& endpoint) {
  for (;;) {
    if (auto client = Client::Connect(endpoint); client.ok()) return *std::move(client);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

struct Trained {
  uint64_t steps = 0;
  std::vector<float> weights;
};

// What the daemon has, once no trainer is attached any more.
Trained Result(const std::string& endpoint) {
  for (;;) {
    const auto client = ConnectPatiently(endpoint);
    v1::AttachOptimizerRequest request;
    request.set_name(kName);
    request.set_sync(v1::SYNC_PULL);
    const auto attachment = client->Attach(request);
    if (!attachment.ok()) continue;
    const auto bias = (*attachment)->Parameter<float>(kBias);
    Trained trained{(*attachment)->optimizer().committed_steps(), Weight(**attachment)};
    trained.weights.insert(trained.weights.end(), bias.begin(), bias.end());
    return trained;
  }
}

Trained TrainUndisturbed(uint64_t steps) {
  test::DaemonProcess daemon;
  Create(*ConnectPatiently(daemon.endpoint()));
  int status = 0;
  ::waitpid(StartTrainer(daemon.endpoint(), steps), &status, 0);
  return Result(daemon.endpoint());
}

Trained TrainUnderFire(uint32_t kills, std::mt19937_64& random) {
  constexpr uint64_t kNoEnd = uint64_t{1} << 40;
  test::DaemonProcess daemon({"--keeper"});
  Create(*ConnectPatiently(daemon.endpoint()));
  pid_t trainer = StartTrainer(daemon.endpoint(), kNoEnd);
  const auto end_trainer = [&] {
    ::kill(trainer, SIGKILL);
    int status = 0;
    ::waitpid(trainer, &status, 0);
    if (!WIFSIGNALED(status)) std::exit(1);  // it gave up by itself
  };
  for (uint32_t killed = 0; killed < kills; ++killed) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 60000));
    if (random() % 2 == 0) {
      end_trainer();
      trainer = StartTrainer(daemon.endpoint(), kNoEnd);
    } else if (const std::optional<pid_t> victim = daemon.kept_daemon()) {
      ::kill(*victim, SIGKILL);
    } else {
      --killed;  // the last one is not yet replaced
    }
  }
  end_trainer();
  return Result(daemon.endpoint());
}

int Main() {
  const uint32_t kills = absl::GetFlag(FLAGS_kills);
  const uint64_t seed = absl::GetFlag(FLAGS_seed) != 0 ? absl::GetFlag(FLAGS_seed) : std::random_device{}();
  if (ReadText().size() < 2) {
    std::fprintf(stderr, "kill_driver: --text must name a file of two bytes or more\n");
    return 2;
  }
  std::mt19937_64 random(seed);
  const Trained actual = TrainUnderFire(kills, random);
  const Trained expected = TrainUndisturbed(actual.steps);
  size_t mismatches = expected.steps != actual.steps;
  for (size_t i = 0; i < expected.weights.size(); ++i) {
    mismatches += std::memcmp(&expected.weights[i], &actual.weights[i], sizeof(float)) != 0;
  }
  std::printf("seed %llu, %llu steps committed\nkills=%u mismatches=%zu\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(actual.steps), kills, mismatches);
  return mismatches != 0;
}

}  // namespace
}  // namespace superoffload

int main(int argc, char** argv) {
  superoffload::EndWithZeroAfterHelp(argc, argv);
  absl::ParseCommandLine(argc, argv);
  return absl::GetFlag(FLAGS_trainer).empty() ? superoffload::Main() : superoffload::RunTrainer();
}
