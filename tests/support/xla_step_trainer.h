// A trainer on a GPU whose whole steps are calls of XLA's program: "count", then "step", which leaves the parameters
// where the gradients were.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_XLA_STEP_TRAINER_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_XLA_STEP_TRAINER_H_

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "superoffload/v1/step_ring.h"
#include "tests/support/xla_gpu_trainer.h"

namespace superoffload {

class StepInsideTrainer final : public XlaGpuTrainer {
 public:
  explicit StepInsideTrainer(Attachment* attachment) : XlaGpuTrainer(attachment), present_(elements_.size()) {
    const size_t most = scalars_.size() * scalars_.front().size();
    for (auto [tensor, bytes] : {std::pair{&count_, sizeof(int32_t)},
                                 {&scale_, sizeof(float)},
                                 {&values_, most * sizeof(float)},
                                 {&numbers_, 6 * sizeof(int32_t)},
                                 {&reals_, 2 * sizeof(float)}}) {
      *tensor = std::make_unique<Tensor>(device_, bytes);
    }
  }

  ~StepInsideTrainer() override { driver().StreamSynchronize(stream()); }

  absl::Status SetGroup(uint32_t group, const v1::ParameterGroup& hyperparameters) override {
    SetScalars(group, hyperparameters);
    return absl::OkStatus();
  }

  absl::Status BeginStep(double) override {
    present_.assign(present_.size(), false);
    return absl::OkStatus();
  }

  absl::Status GradientReady(size_t parameter) override {
    ToGpu(*gradients_[parameter], gradients_[parameter]->bytes());
    present_[parameter] = true;
    return absl::OkStatus();
  }

  absl::Status ParameterAbsent(size_t parameter) override {
    Overwrite(*parameters_[parameter], parameters_[parameter]->bytes());
    return absl::OkStatus();
  }

  // As the schedules' part of the program, and the step's.
  absl::Status EndStep(double gradient_scale, double max_grad_norm) override {
    std::vector<int64_t> scheduled;
    if (absl::Status status = Schedule(&scheduled); !status.ok()) return status;
    if (const std::string error = Count(); !error.empty()) return absl::InternalError(error);
    *reinterpret_cast<float*>(scale_->host()) = static_cast<float>(gradient_scale);
    ToGpu(*scale_, sizeof(float));
    const std::string error = Step(scheduled, max_grad_norm);
    for (Tensor* operand : {count_.get(), scale_.get(), values_.get()}) Overwrite(*operand, operand->bytes());
    return error.empty() ? absl::OkStatus() : absl::InternalError(error);
  }

  // It is over already; XLA's stream may be behind.
  absl::StatusOr<superoffload_verdict> WaitStep() override {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      Issue(driver().MemcpyDtoHAsync(Parameter(i), Result(i).device(), Result(i).bytes(), stream()));
    }
    ToHost(*numbers_);
    ToHost(*reals_);
    Tensor::Require(driver().StreamSynchronize(stream()));
    superoffload_open_step_state step;
    if (absl::Status status = Said(superoffload_look(submitter(), &step, nullptr)); !status.ok()) return status;
    const superoffload_verdict& verdict = step.verdict;
    const auto* numbers = reinterpret_cast<const int32_t*>(numbers_->host());
    const auto* reals = reinterpret_cast<const float*>(reals_->host());
    EXPECT_EQ(numbers[0], static_cast<int32_t>(verdict.kind));
    EXPECT_EQ(numbers[1], static_cast<int32_t>(verdict.step));
    EXPECT_EQ(numbers[2], static_cast<int32_t>(verdict.committed_steps));
    EXPECT_EQ(numbers[5], static_cast<int32_t>(verdict.consecutive_skips));
    if (verdict.kind <= SUPEROFFLOAD_VERDICT_CLIP) {
      EXPECT_EQ(reals[0], static_cast<float>(verdict.global_norm));
      EXPECT_EQ(reals[1], static_cast<float>(verdict.clip_coefficient));
    }
    return verdict;
  }

  // The calls' errors.
  std::string Count() {
    test::XlaCall call(stream());
    call.Attribute("submitter", submitter()).Operand(dtype(0), 1, gradients_[0]->device());
    return call.Result(XLA_FFI_DataType_S32, 1, count_->device()).Run("count");
  }
  std::string Step(const std::vector<int64_t>& scheduled, double max_grad_norm) {
    test::XlaCall call(stream());
    std::vector<int64_t> parameters, absent;
    call.Operand(XLA_FFI_DataType_S32, 1, count_->device()).Operand(XLA_FFI_DataType_F32, 1, scale_->device());
    call.Operand(XLA_FFI_DataType_F32, scheduled.size(), values_->device());
    call.Result(XLA_FFI_DataType_S32, 6, numbers_->device()).Result(XLA_FFI_DataType_F32, 2, reals_->device());
    for (size_t i = 0; i < present_.size(); ++i) {
      (present_[i] ? parameters : absent).push_back(static_cast<int64_t>(i));
      if (present_[i]) call.Operand(dtype(i), elements(i), gradients_[i]->device());
      call.Result(dtype(i), elements(i), Result(i).device());
    }
    call.Attribute("submitter", submitter()).Attribute("parameters", parameters).Attribute("absent", absent);
    return call.Attribute("scheduled", scheduled).Real("max_grad_norm", max_grad_norm).Run("step");
  }

 private:
  // Where XLA has the step leave a parameter.
  Tensor& Result(size_t i) { return *(present_[i] ? gradients_ : parameters_)[i]; }

  // Scalars that a float holds come with the step; the submitter has others in their places.
  absl::Status Schedule(std::vector<int64_t>* scheduled) {
    auto* const values = reinterpret_cast<float*>(values_->host());
    const std::vector<std::vector<double>> wanted = scalars_;
    int64_t place = 0;
    for (uint32_t group = 0; group < wanted.size(); ++group) {
      for (size_t i = 0; i < wanted[group].size(); ++i, ++place) {
        const auto value = static_cast<float>(wanted[group][i]);
        if (value != wanted[group][i]) continue;
        values[scheduled->size()] = value;
        scheduled->push_back(place);
        scalars_[group][i] = 77;
      }
      if (absl::Status status = SetScalars(group); !status.ok()) return status;
    }
    scalars_ = wanted;
    ToGpu(*values_, values_->bytes());
    return absl::OkStatus();
  }
  using XlaGpuTrainer::SetScalars;

  std::vector<bool> present_;
  std::unique_ptr<Tensor> count_, scale_, values_, numbers_, reals_;
};

}  // namespace superoffload

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_XLA_STEP_TRAINER_H_
