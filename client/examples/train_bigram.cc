// A C++ trainer: a byte-level bigram language model, p(next | previous) = softmax(weight[previous] + bias), fitted to a
// text file with AdamW in superoffloadd.
//
//   train_bigram --text=FILE [--steps=200] [--name=bigram] [--endpoint=unix:/path/control.sock]
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "superoffload/client.hpp"

ABSL_FLAG(std::string, text, "", "the file to learn from");
ABSL_FLAG(uint32_t, steps, 200, "optimizer steps");
ABSL_FLAG(std::string, name, "bigram", "name of the optimizer in the daemon; deleted at the end");
ABSL_FLAG(std::string, endpoint, "", "the daemon's endpoint; default: a running daemon's");

namespace {

constexpr size_t kBytes = 256;
constexpr size_t kBatch = 2048;
constexpr double kMaxGradNorm = 0.05;
enum : size_t { kWeight, kBias };  // parameters in the order of creation

superoffload::v1::CreateOptimizerRequest Plan(const std::string& name) {
  superoffload::v1::CreateOptimizerRequest request;
  request.set_name(name);
  request.set_algorithm("adamw");
  auto* group = request.add_groups();  // what is not named has the algorithm's default
  superoffload::SetScalar(group, "lr", 0.05);
  superoffload::SetScalar(group, "weight_decay", 0);
  auto* weight = request.add_parameters();
  weight->set_name("weight");
  weight->add_shape(kBytes);
  weight->add_shape(kBytes);
  weight->set_dtype(superoffload::v1::DATA_TYPE_FLOAT32);
  auto* bias = request.add_parameters();
  bias->set_name("bias");
  bias->add_shape(kBytes);
  bias->set_dtype(superoffload::v1::DATA_TYPE_FLOAT32);
  return request;
}

// Mean cross-entropy of a random batch; its gradients go to the daemon as soon as each is complete.
absl::StatusOr<double> ForwardBackward(superoffload::Attachment& trainer, const std::string& text,
                                       std::mt19937& random) {
  const auto weight = trainer.Parameter<float>(kWeight);
  const auto bias = trainer.Parameter<float>(kBias);
  const auto weight_gradient = trainer.Gradient<float>(kWeight);
  const auto bias_gradient = trainer.Gradient<float>(kBias);
  std::fill(weight_gradient.begin(), weight_gradient.end(), 0.0f);
  std::fill(bias_gradient.begin(), bias_gradient.end(), 0.0f);
  double loss = 0;
  for (size_t i = 0; i < kBatch; ++i) {
    const size_t at = random() % (text.size() - 1);
    const size_t row = static_cast<unsigned char>(text[at]) * kBytes;
    const size_t next = static_cast<unsigned char>(text[at + 1]);
    std::array<float, kBytes> probability;
    float sum = 0;
    for (size_t j = 0; j < kBytes; ++j) sum += probability[j] = std::exp(weight[row + j] + bias[j]);
    for (float& p : probability) p /= sum;
    loss -= std::log(probability[next]) / kBatch;
    probability[next] -= 1;
    for (size_t j = 0; j < kBytes; ++j) {
      weight_gradient[row + j] += probability[j] / kBatch;
      bias_gradient[j] += probability[j] / kBatch;
    }
  }
  for (size_t parameter : {kBias, kWeight}) {
    if (absl::Status status = trainer.GradientReady(parameter); !status.ok()) return status;
  }
  return loss;
}

absl::Status Train(superoffload::Client& client, const std::string& name, const std::string& text, uint32_t steps) {
  superoffload::v1::AttachOptimizerRequest request;
  request.set_name(name);
  request.set_sync(superoffload::v1::SYNC_PUSH);  // this trainer's initial parameters win
  auto trainer = client.Attach(request);
  if (!trainer.ok()) return trainer.status();
  for (size_t parameter : {kWeight, kBias}) {
    const auto values = (*trainer)->Parameter<float>(parameter);
    std::fill(values.begin(), values.end(), 0.0f);
  }
  if (absl::Status status = (*trainer)->PushParameters(); !status.ok()) return status;
  std::mt19937 random(1);
  for (uint32_t step = 1; step <= steps; ++step) {
    if (absl::Status status = (*trainer)->BeginStep(); !status.ok()) return status;
    const auto loss = ForwardBackward(**trainer, text, random);
    if (!loss.ok()) return loss.status();
    if (absl::Status status = (*trainer)->EndStep(1.0, kMaxGradNorm); !status.ok()) return status;
    const auto verdict = (*trainer)->WaitStep();
    if (!verdict.ok()) return verdict.status();
    if (step == 1 || step % 20 == 0 || step == steps) {
      std::printf("step %u loss %.9g norm %.3g%s\n", step, *loss, verdict->global_norm,
                  verdict->clip_coefficient < 1 ? " clipped" : "");
    }
  }
  return absl::OkStatus();
}

absl::Status Run() {
  std::ifstream file(absl::GetFlag(FLAGS_text), std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (text.size() < 2) return absl::InvalidArgumentError("--text must name a file of two bytes or more");
  auto client = superoffload::Client::Connect(absl::GetFlag(FLAGS_endpoint));
  if (!client.ok()) return client.status();
  const std::string name = absl::GetFlag(FLAGS_name);
  if (auto created = (*client)->CreateOptimizer(Plan(name)); !created.ok()) return created.status();
  const absl::Status trained = Train(**client, name, text, absl::GetFlag(FLAGS_steps));
  const absl::Status deleted = (*client)->DeleteOptimizer(name);
  return trained.ok() ? deleted : trained;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "--help") {
    std::printf("train_bigram --text=FILE [--steps=200] [--name=bigram] [--endpoint=unix:/path/control.sock]\n");
    return 0;
  }
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = Run();
  if (!status.ok()) std::fprintf(stderr, "train_bigram: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
