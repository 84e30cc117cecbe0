// Trains a small model with gradients of all sizes, clipping, skips and late changes, and compares the parameters after
// every step with those of a sequential scalar optimizer, bit for bit.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_EXACT_TRAINING_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_EXACT_TRAINING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "superoffload/superoffload.h"
#include "superoffload/v1/optimizer.pb.h"
#include "tests/support/algorithm_kinds.h"
#include "tests/support/random_elements.h"
#include "tests/support/scalars.h"
#include "tests/support/sequential_optimizer.h"

namespace superoffload::test {

using kernels::DType;

struct Dtypes {
  const char* name;
  DType parameters;
  DType gradients;
  double loss_scale;
};

inline v1::DataType ToProto(DType dtype) {
  if (dtype == DType::kFloat32) return v1::DATA_TYPE_FLOAT32;
  return dtype == DType::kFloat16 ? v1::DATA_TYPE_FLOAT16 : v1::DATA_TYPE_BFLOAT16;
}

inline v1::ParameterGroup ToProto(const kernels::Algorithm& algorithm, const engine::Scalars& group) {
  v1::ParameterGroup proto;
  for (size_t i = 0; i < group.size(); ++i) {
    v1::Scalar* const scalar = proto.add_scalars();
    scalar->set_name(std::string(algorithm.scalars[i].name));
    scalar->set_value(group[i]);
  }
  return proto;
}

// A small model: two groups, buckets of many parameters and parameters of many buckets.
inline engine::OptimizerSpec Spec(const Dtypes& dtypes,
                                  const kernels::Algorithm& algorithm = *kernels::Algorithms().front()) {
  engine::OptimizerSpec spec;
  spec.algorithm = &algorithm;
  spec.groups = {ScalarsWith(algorithm, {{"lr", 1e-2}, {"weight_decay", 0.1}}),
                 ScalarsWith(algorithm, {{"lr", 3e-3}, {"beta2", 0.95}, {"weight_decay", 0}})};
  const std::vector<std::vector<uint64_t>> shapes = {{37, 19}, {37}, {5000}, {64, 64}, {}, {90, 300}};
  for (size_t i = 0; i < shapes.size(); ++i) {
    spec.parameters.push_back({.name = "layer" + std::to_string(i),
                               .shape = shapes[i],
                               .dtype = dtypes.parameters,
                               .gradient_dtype = dtypes.gradients,
                               .group = static_cast<uint32_t>(i % 2)});
  }
  spec.bucket_bytes = 8192;
  KeepSomeInFp32(spec);
  return spec;
}

inline v1::CreateOptimizerRequest Request(const engine::OptimizerSpec& spec, v1::Speculation speculation) {
  v1::CreateOptimizerRequest request;
  request.set_name("exact");
  request.set_algorithm(std::string(spec.algorithm->name));
  request.set_bucket_bytes(spec.bucket_bytes);
  request.mutable_policies()->set_speculation(speculation);
  for (const engine::Scalars& group : spec.groups) *request.add_groups() = ToProto(*spec.algorithm, group);
  for (const engine::ParameterSpec& parameter : spec.parameters) {
    v1::Parameter* added = request.add_parameters();
    added->set_name(parameter.name);
    added->mutable_shape()->Add(parameter.shape.begin(), parameter.shape.end());
    added->set_dtype(ToProto(parameter.dtype));
    added->set_gradient_dtype(ToProto(parameter.gradient_dtype));
    added->set_group(parameter.group);
    added->set_unit(parameter.unit);
    added->set_state_in_float32(parameter.in_fp32);
  }
  return request;
}

// A trainer, however its memory is reached. Spans hold the elements of a parameter, in the order of creation.
class ExactTrainer {
 public:
  virtual ~ExactTrainer() = default;
  virtual std::byte* Parameter(size_t index) = 0;  // final after WaitStep; to be written before PushParameters
  virtual std::byte* Gradient(size_t index) = 0;   // to be written before GradientReady
  virtual absl::Status PushParameters() = 0;
  virtual absl::Status SetGroup(uint32_t group, const v1::ParameterGroup& hyperparameters) = 0;
  virtual absl::Status BeginStep(double gradient_scale) = 0;
  virtual absl::Status GradientReady(size_t parameter) = 0;
  virtual absl::Status ParameterAbsent(size_t parameter) = 0;  // in its place
  virtual absl::Status EndStep(double gradient_scale, double max_grad_norm) = 0;
  virtual absl::StatusOr<superoffload_verdict> WaitStep() = 0;
};

// Trains and compares.
class ExactTraining {
 public:
  ExactTraining(ExactTrainer* trainer, const engine::OptimizerSpec& spec, const Dtypes& dtypes, uint64_t seed)
      : trainer_(*trainer),
        spec_(spec),
        dtypes_(dtypes),
        layout_(*engine::PlanLayout(spec)),
        random_(seed),
        mirror_(layout_),
        loss_scale_(dtypes.loss_scale) {}

  void Train(int steps) {
    for (size_t i = 0; i < spec_.parameters.size(); ++i) {
      FillNearlyNormal(ElementCount(spec_.parameters[i]), 1, {ParameterBytes(i), dtypes_.parameters}, random_);
    }
    ASSERT_TRUE(trainer_.PushParameters().ok());
    SetInitialReference();
    for (step_ = 1; step_ <= steps && !::testing::Test::HasFailure(); ++step_) {
      SCOPED_TRACE("step " + std::to_string(step_));
      OneStep();
    }
    EXPECT_GT(clips_, steps / 4);
    EXPECT_GT(skips_, 0);
  }

 private:
  static constexpr int kSureSkip = 5;

  std::byte* ParameterBytes(size_t i) { return trainer_.Parameter(i); }
  std::byte* GradientBytes(size_t i) { return trainer_.Gradient(i); }
  size_t BytesOf(size_t i, DType dtype) { return ElementCount(spec_.parameters[i]) * kernels::DTypeBytes(dtype); }
  bool Chance(int percent) { return static_cast<int>(random_() % 100) < percent; }

  void SetInitialReference() {
    for (size_t i = 0; i < spec_.parameters.size(); ++i) {
      const engine::Placement& place = layout_.placements[i];
      std::memcpy(mirror_.parameters.data() + place.parameters_offset, ParameterBytes(i),
                  BytesOf(i, dtypes_.parameters));
      kernels::kScalarElementKernels.widen(
          ElementCount(spec_.parameters[i]), {ParameterBytes(i), dtypes_.parameters},
          reinterpret_cast<float*>(mirror_.state.data() + layout_.FormatOf(place).Byte(0, place.state_offset)));
    }
    reference_ = std::make_unique<SequentialOptimizer>(layout_, mirror_.view(), spec_.groups);
  }

  // Two accumulated micro-batches per step, in the gradient's dtype, as a trainer adds them.
  void WriteGradient(size_t i, float size) {
    const uint64_t elements = ElementCount(spec_.parameters[i]);
    std::vector<float> sum(elements);
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      for (float& g : sum) g += size * NearlyNormal(random_);
      kernels::Narrow(elements, sum.data(), {GradientBytes(i), dtypes_.gradients});
      kernels::Widen(elements, {GradientBytes(i), dtypes_.gradients}, sum.data());
    }
    if (Chance(1) || (i == 0 && step_ == kSureSkip)) {
      const float bad[] = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                           std::numeric_limits<float>::quiet_NaN()};
      StoreElement(GradientBytes(i), random_() % elements, dtypes_.gradients, bad[random_() % 3]);
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
    std::vector<bool> absent(spec_.parameters.size());
    ASSERT_TRUE(trainer_.BeginStep(scale).ok());
    for (size_t parameter : order) {
      absent[parameter] = step_ != kSureSkip && Chance(10);
      if (absent[parameter]) {
        ASSERT_TRUE(trainer_.ParameterAbsent(parameter).ok());
        continue;
      }
      WriteGradient(parameter, size);
      const absl::Status ready = trainer_.GradientReady(parameter);
      ASSERT_TRUE(ready.ok()) << ready;
    }
    if (Chance(20)) {  // a scheduler that comes late
      *FindScalar(*spec_.algorithm, spec_.groups[1], "lr") *= 0.9;
      reference_->groups()[1] = spec_.groups[1];
      const v1::ParameterGroup revised = ToProto(*spec_.algorithm, spec_.groups[1]);
      ASSERT_TRUE(trainer_.SetGroup(1, revised).ok());
    }
    ASSERT_TRUE(trainer_.EndStep(scale, max_grad_norm).ok());
    const absl::StatusOr<superoffload_verdict> verdict = trainer_.WaitStep();
    ASSERT_TRUE(verdict.ok()) << verdict.status();
    const engine::Verdict expected = reference_->Step(mirror_.gradients.data(), 0, scale, max_grad_norm, absent);
    ASSERT_EQ(verdict->kind, static_cast<uint32_t>(expected));
    clips_ += expected == engine::Verdict::kClip;
    if (engine::IsSkip(expected)) {
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

  ExactTrainer& trainer_;
  engine::OptimizerSpec spec_;
  const Dtypes dtypes_;
  const engine::Layout layout_;
  std::mt19937_64 random_;
  Memory mirror_;  // initial parameters, and the gradients of the step
  std::unique_ptr<SequentialOptimizer> reference_;
  double loss_scale_;
  int step_ = 0;
  int clips_ = 0;
  int skips_ = 0;
};

}  // namespace superoffload::test

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_EXACT_TRAINING_H_
