// The whole path is exact: a trainer of the real daemon, over gRPC, descriptors and rings, ends every one of 200 steps
// with the parameters of a sequential scalar optimizer in its own process, bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <tuple>

#include "superoffload/client.hpp"
#include "tests/support/daemon_process.h"
#include "tests/support/exact_training.h"

namespace superoffload {
namespace {

using test::Dtypes;

constexpr int kSteps = 200;

class HostTrainer final : public test::ExactTrainer {
 public:
  explicit HostTrainer(Attachment* attachment) : attachment_(*attachment) {}
  std::byte* Parameter(size_t index) override { return attachment_.Parameter<std::byte>(index).data(); }
  std::byte* Gradient(size_t index) override { return attachment_.Gradient<std::byte>(index).data(); }
  absl::Status PushParameters() override { return attachment_.PushParameters(); }
  absl::Status SetGroup(uint32_t group, const v1::ParameterGroup& hyperparameters) override {
    return attachment_.SetGroup(group, hyperparameters);
  }
  absl::Status BeginStep(double gradient_scale) override { return attachment_.BeginStep(gradient_scale); }
  absl::Status GradientReady(size_t parameter) override { return attachment_.GradientReady(parameter); }
  absl::Status ParameterAbsent(size_t parameter) override { return attachment_.ParameterAbsent(parameter); }
  absl::Status EndStep(double gradient_scale, double max_grad_norm) override {
    return attachment_.EndStep(gradient_scale, max_grad_norm);
  }
  absl::StatusOr<superoffload_verdict> WaitStep() override { return attachment_.WaitStep(); }

 private:
  Attachment& attachment_;
};

class WholePathTest : public ::testing::TestWithParam<std::tuple<v1::Speculation, int, Dtypes>> {};

TEST_P(WholePathTest, EqualsTheScalarReferenceInEveryStep) {
  const auto& [speculation, threads, dtypes] = GetParam();
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  test::DaemonProcess daemon({"--worker_threads=" + std::to_string(threads)});
  auto client = Client::Connect(daemon.endpoint());
  ASSERT_TRUE(client.ok()) << client.status();
  const engine::OptimizerSpec spec = test::Spec(dtypes);
  const auto created = (*client)->CreateOptimizer(test::Request(spec, speculation));
  ASSERT_TRUE(created.ok()) << created.status();
  v1::AttachOptimizerRequest request;
  request.set_name("exact");
  request.set_sync(v1::SYNC_PUSH);
  auto trainer = (*client)->Attach(request);
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  HostTrainer host(trainer->get());
  test::ExactTraining(&host, spec, dtypes, seed).Train(kSteps);
  trainer->reset();
  EXPECT_EQ(daemon.Stop(), 0);
}

INSTANTIATE_TEST_SUITE_P(
    All, WholePathTest,
    ::testing::Combine(::testing::Values(v1::SPECULATION_ALWAYS, v1::SPECULATION_NEVER, v1::SPECULATION_ADAPTIVE),
                       ::testing::Values(1, 2, 3, 4),
                       ::testing::Values(Dtypes{"BFloat16", test::DType::kBFloat16, test::DType::kBFloat16, 1},
                                         Dtypes{"ScaledFloat16", test::DType::kFloat16, test::DType::kFloat16, 1024},
                                         Dtypes{"BFloat16FromFloat32", test::DType::kBFloat16, test::DType::kFloat32,
                                                1})),
    [](const auto& info) {
      return absl::StrCat(v1::Speculation_Name(std::get<0>(info.param)), "_", std::get<1>(info.param), "_",
                          std::get<2>(info.param).name);
    });

}  // namespace
}  // namespace superoffload
