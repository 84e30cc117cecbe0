// The whole path is exact: a trainer of the real daemon, over gRPC, descriptors and rings, ends every one of 200 steps
// with the parameters of a sequential scalar optimizer in its own process, bit for bit, and at the end with its state.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>

#include "superoffload/client.hpp"
#include "tests/support/daemon_process.h"
#include "tests/support/sequential_optimizer.h"

namespace superoffload {
namespace {

using kernels::DType;

constexpr int kSteps = 200;

struct Dtypes {
  const char* name;
  DType parameters;
  DType gradients;
  double loss_scale;
};

v1::DataType ToProto(DType dtype) {
  if (dtype == DType::kFloat32) return v1::DATA_TYPE_FLOAT32;
  return dtype == DType::kFloat16 ? v1::DATA_TYPE_FLOAT16 : v1::DATA_TYPE_BFLOAT16;
}

// A small model: two groups, buckets of many parameters and parameters of many buckets.
engine::OptimizerSpec Spec(const Dtypes& dtypes) {
  engine::OptimizerSpec spec;
  spec.groups = {{.lr = 1e-2, .weight_decay = 0.1}, {.lr = 3e-3, .beta2 = 0.95, .weight_decay = 0}};
  const std::vector<std::vector<uint64_t>> shapes = {{37, 19}, {37}, {5000}, {64, 64}, {}, {90, 300}};
  for (size_t i = 0; i < shapes.size(); ++i) {
    spec.parameters.push_back({.name = "layer" + std::to_string(i),
                               .shape = shapes[i],
                               .dtype = dtypes.parameters,
                               .gradient_dtype = dtypes.gradients,
                               .group = static_cast<uint32_t>(i % 2)});
  }
  spec.bucket_bytes = 8192;
  return spec;
}

v1::CreateOptimizerRequest Request(const engine::OptimizerSpec& spec, v1::Speculation speculation) {
  v1::CreateOptimizerRequest request;
  request.set_name("exact");
  request.set_bucket_bytes(spec.bucket_bytes);
  request.mutable_policies()->set_speculation(speculation);
  for (const kernels::AdamHyperparameters& group : spec.groups) {
    v1::ParameterGroup* added = request.add_groups();
    added->set_lr(group.lr);
    added->set_beta1(group.beta1);
    added->set_beta2(group.beta2);
    added->set_eps(group.eps);
    added->set_weight_decay(group.weight_decay);
  }
  for (const engine::ParameterSpec& parameter : spec.parameters) {
    v1::Parameter* added = request.add_parameters();
    added->set_name(parameter.name);
    added->mutable_shape()->Add(parameter.shape.begin(), parameter.shape.end());
    added->set_dtype(ToProto(parameter.dtype));
    added->set_gradient_dtype(ToProto(parameter.gradient_dtype));
    added->set_group(parameter.group);
  }
  return request;
}

class ExactTraining {
 public:
  ExactTraining(Attachment* trainer, const engine::OptimizerSpec& spec, const Dtypes& dtypes, uint64_t seed)
      : trainer_(*trainer),
        spec_(spec),
        dtypes_(dtypes),
        layout_(*engine::PlanLayout(spec)),
        random_(seed),
        mirror_(layout_),
        loss_scale_(dtypes.loss_scale) {}

  void Train() {
    for (size_t i = 0; i < spec_.parameters.size(); ++i) {
      for (uint64_t j = 0; j < ElementCount(spec_.parameters[i]); ++j) {
        test::StoreElement(ParameterBytes(i), j, dtypes_.parameters, normal_(random_));
      }
    }
    ASSERT_TRUE(trainer_.PushParameters().ok());
    SetInitialReference();
    for (int step = 1; step <= kSteps && !::testing::Test::HasFailure(); ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      OneStep();
    }
    EXPECT_GT(clips_, kSteps / 2);
    EXPECT_GT(skips_, 0);
  }

 private:
  std::byte* ParameterBytes(size_t i) { return trainer_.Parameter<std::byte>(i).data(); }
  std::byte* GradientBytes(size_t i) { return trainer_.Gradient<std::byte>(i).data(); }
  size_t BytesOf(size_t i, DType dtype) { return ElementCount(spec_.parameters[i]) * kernels::DTypeBytes(dtype); }
  bool Chance(int percent) { return static_cast<int>(random_() % 100) < percent; }

  void SetInitialReference() {
    for (size_t i = 0; i < spec_.parameters.size(); ++i) {
      const engine::Placement& place = layout_.placements[i];
      std::memcpy(mirror_.parameters.data() + place.parameters_offset, ParameterBytes(i),
                  BytesOf(i, dtypes_.parameters));
      kernels::kScalarKernels.widen(
          ElementCount(spec_.parameters[i]), {ParameterBytes(i), dtypes_.parameters},
          reinterpret_cast<float*>(mirror_.state.data() + layout_.state_array_offsets[0]) + place.state_offset);
    }
    reference_ =
        std::make_unique<test::SequentialOptimizer>(layout_, mirror_.view(), spec_.groups, kernels::kScalarKernels);
  }

  // Two accumulated micro-batches per step, in the gradient's dtype, as a trainer adds them.
  void WriteGradient(size_t i, float size) {
    const uint64_t elements = ElementCount(spec_.parameters[i]);
    std::vector<float> sum(elements);
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      for (float& g : sum) g += size * normal_(random_);
      kernels::kScalarKernels.narrow(elements, sum.data(), {GradientBytes(i), dtypes_.gradients});
      kernels::kScalarKernels.widen(elements, {GradientBytes(i), dtypes_.gradients}, sum.data());
    }
    if (Chance(1)) {
      const float bad[] = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN()};
      test::StoreElement(GradientBytes(i), random_() % elements, dtypes_.gradients, bad[random_() % 3]);
    }
    std::memcpy(mirror_.gradients.data() + layout_.placements[i].gradient_offsets[0], GradientBytes(i),
                BytesOf(i, dtypes_.gradients));
  }

  void OneStep() {
    const double scale = 1 / loss_scale_;
    const double max_grad_norm = Chance(80) ? 0.5 : 0;
    const float size = static_cast<float>(loss_scale_) * 1e-3f * static_cast<float>(1 + random_() % 8);
    std::vector<size_t> order(spec_.parameters.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    ASSERT_TRUE(trainer_.BeginStep(scale).ok());
    for (size_t parameter : order) {
      WriteGradient(parameter, size);
      ASSERT_TRUE(trainer_.GradientReady(parameter).ok());
    }
    if (Chance(20)) {  // a scheduler that comes late
      spec_.groups[1].lr *= 0.9;
      reference_->groups()[1].lr = spec_.groups[1].lr;
      v1::ParameterGroup revised = trainer_.optimizer().groups(1);
      revised.set_lr(spec_.groups[1].lr);
      ASSERT_TRUE(trainer_.SetGroup(1, revised).ok());
    }
    ASSERT_TRUE(trainer_.EndStep(scale, max_grad_norm).ok());
    const absl::StatusOr<superoffload_verdict> verdict = trainer_.WaitStep();
    ASSERT_TRUE(verdict.ok()) << verdict.status();
    const transport::Verdict expected = reference_->Step(mirror_.gradients.data(), 0, scale, max_grad_norm);
    ASSERT_EQ(verdict->kind, static_cast<uint32_t>(expected));
    clips_ += expected == transport::Verdict::kClip;
    if (transport::IsSkip(expected)) {
      ++skips_;
      if (loss_scale_ > 1) loss_scale_ /= 2;  // as a GradScaler would
    } else {
      EXPECT_EQ(verdict->global_norm, reference_->norm());
    }
    for (size_t i = 0; i < spec_.parameters.size(); ++i) {
      EXPECT_EQ(std::memcmp(ParameterBytes(i),
                            reference_->memory().parameters.data() + layout_.placements[i].parameters_offset,
                            BytesOf(i, dtypes_.parameters)),
                0)
          << "parameter " << i;
    }
  }

  Attachment& trainer_;
  engine::OptimizerSpec spec_;
  const Dtypes dtypes_;
  const engine::Layout layout_;
  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
  test::Memory mirror_;  // initial parameters, and the gradients of the step
  std::unique_ptr<test::SequentialOptimizer> reference_;
  double loss_scale_;
  int clips_ = 0;
  int skips_ = 0;
};

class WholePathTest : public ::testing::TestWithParam<std::tuple<v1::Speculation, int, Dtypes>> {};

TEST_P(WholePathTest, EqualsTheScalarReferenceInEveryStep) {
  const auto& [speculation, threads, dtypes] = GetParam();
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  test::DaemonProcess daemon({"--worker_threads=" + std::to_string(threads)});
  auto client = Client::Connect(daemon.endpoint());
  ASSERT_TRUE(client.ok()) << client.status();
  const engine::OptimizerSpec spec = Spec(dtypes);
  const auto created = (*client)->CreateOptimizer(Request(spec, speculation));
  ASSERT_TRUE(created.ok()) << created.status();
  v1::AttachOptimizerRequest request;
  request.set_name("exact");
  request.set_sync(v1::SYNC_PUSH);
  auto trainer = (*client)->Attach(request);
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  ExactTraining(trainer->get(), spec, dtypes, seed).Train();
  trainer->reset();
  EXPECT_EQ(daemon.Stop(), 0);
}

INSTANTIATE_TEST_SUITE_P(
    All, WholePathTest,
    ::testing::Combine(::testing::Values(v1::SPECULATION_ALWAYS, v1::SPECULATION_NEVER, v1::SPECULATION_ADAPTIVE),
                       ::testing::Values(1, 2, 3, 4),
                       ::testing::Values(Dtypes{"BFloat16", DType::kBFloat16, DType::kBFloat16, 1},
                                         Dtypes{"ScaledFloat16", DType::kFloat16, DType::kFloat16, 1024},
                                         Dtypes{"BFloat16FromFloat32", DType::kBFloat16, DType::kFloat32, 1})),
    [](const auto& info) {
      return absl::StrCat(v1::Speculation_Name(std::get<0>(info.param)), "_", std::get<1>(info.param), "_",
                          std::get<2>(info.param).name);
    });

}  // namespace
}  // namespace superoffload
