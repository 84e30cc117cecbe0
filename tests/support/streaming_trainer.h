// A trainer on a GPU whose parameters stream: its forward, its backward and evaluations between them read units in any
// order, and whoever reads must find those of the last committed step.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_STREAMING_TRAINER_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_STREAMING_TRAINER_H_

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "tests/support/gpu_trainer.h"

namespace superoffload {

// All parameters but those of unit 0 stream.
class StreamingTrainer final : public GpuTrainer {
 public:
  StreamingTrainer(Client* client, Attachment* attachment, uint64_t seed)
      : GpuTrainer(client, attachment, NoResidents), random_(seed) {
    for (const auto& parameter : parameters_) seen_.push_back(std::make_unique<Tensor>(device_, parameter->bytes()));
    was_seen_.assign(seen_.size(), false);
  }

  // The streams that have read go with it.
  ~StreamingTrainer() override { superoffload_use_attachment(attachment_.trainer(), nullptr, 0, 0, 0, nullptr); }

  // Those that stream are changed in the host's memory.
  absl::Status PushParameters() override {
    if (superoffload_gpu_copy(handle_, SUPEROFFLOAD_TO_GPU, stream()) != 0) return LastError();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (UnitOf(i) == 0) {
        Tensor::Require(driver().MemcpyHtoDAsync(ParameterOnGpu(i), parameters_[i]->host(), parameters_[i]->bytes(),
                                                 stream_.get()));
      } else {
        std::memcpy(MemoryOf(handle_, SUPEROFFLOAD_REGION_PARAMETERS).data() +
                        layout().placements(static_cast<int>(i)).parameters_offset(),
                    parameters_[i]->host(), parameters_[i]->bytes());
      }
    }
    if (superoffload_gpu_copy(handle_, SUPEROFFLOAD_FROM_GPU, stream()) != 0) return LastError();
    return attachment_.PushParameters();
  }

  // Backward reads the unit, sometimes another one, and sometimes this one again when its gradient has left.
  absl::Status GradientReady(size_t parameter) override {
    if (absl::Status status = See(parameter, parameter); !status.ok()) return status;
    if (absl::Status status = GpuTrainer::GradientReady(parameter); !status.ok()) return status;
    return random_() % 4 == 0 ? SeeAny(parameter) : absl::OkStatus();
  }

  absl::Status EndStep(double gradient_scale, double max_grad_norm) override {
    for (size_t evaluations = random_() % 4; evaluations > 0; --evaluations) {
      if (absl::Status status = SeeAny(evaluations); !status.ok()) return status;
    }
    if (absl::Status status = GpuTrainer::EndStep(gradient_scale, max_grad_norm); !status.ok()) return status;
    if (random_() % 4 != 0) return absl::OkStatus();
    // Whoever reads before the verdict waits for it.
    return random_() % 2 == 0 ? ReadUnit(UnitOf(1), stream_.get()) : absl::OkStatus();
  }

  // The next forward pass, whose kernels run when the units after theirs are asked for.
  absl::StatusOr<superoffload_verdict> WaitStep() override {
    absl::StatusOr<superoffload_verdict> verdict = attachment_.WaitVerdict();
    if (!verdict.ok()) return verdict;
    Compare();
    if (absl::Status status = KeepSomeUnits(); !status.ok()) return status;  // not all are published yet
    const v1::Placement& stays = layout().placements(0);
    for (uint32_t bucket = 0; bucket < stays.bucket_count(); ++bucket) {
      if (AwaitOnGpu(attachment_, stays.first_bucket() + bucket, stream()) != 0) return LastError();
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (absl::Status status = Copy(i, parameters_[i].get(), stream_.get()); !status.ok()) return status;
    }
    Tensor::Require(driver().StreamSynchronize(stream_.get()));
    return verdict;
  }

 private:
  uint32_t UnitOf(size_t i) const { return attachment_.optimizer().parameters(static_cast<int>(i)).unit(); }

  absl::Status ReadUnit(uint32_t unit, kernels::CudaStream stream) {
    if (unit == 0) return absl::OkStatus();
    if (superoffload_gpu_read_unit(handle_, unit, reinterpret_cast<uint64_t>(stream)) != 0) return LastError();
    uint32_t has = 0;
    if (superoffload_gpu_has_unit(handle_, unit, &has) != 0) return LastError();
    EXPECT_GE(has, 1u) << "unit " << unit;
    return absl::OkStatus();
  }

  // Others than before, now and then.
  absl::Status KeepSomeUnits() {
    if (random_() % 2 == 0) return absl::OkStatus();
    std::vector<uint32_t> units;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (UnitOf(i) != 0 && random_() % 2 == 0) units.push_back(UnitOf(i));
    }
    if (superoffload_gpu_keep_units(handle_, units.data(), static_cast<uint32_t>(units.size())) != 0)
      return LastError();
    return absl::OkStatus();
  }

  absl::Status Copy(size_t i, Tensor* to, kernels::CudaStream stream) {
    if (absl::Status status = ReadUnit(UnitOf(i), stream); !status.ok()) return status;
    Tensor::Require(driver().MemcpyDtoHAsync(to->host(), ParameterOnGpu(i), to->bytes(), stream));
    return absl::OkStatus();
  }

  // To be compared when the step is over.
  absl::Status See(size_t i, size_t by) {
    was_seen_[i] = true;
    return Copy(i, seen_[i].get(), (by % 2 == 1 ? busy_stream_ : stream_).get());
  }
  absl::Status SeeAny(size_t by) { return See(random_() % parameters_.size(), by); }

  // What was seen is as it was before the step.
  void Compare() {
    for (const kernels::CudaStream stream : {stream_.get(), busy_stream_.get()}) {
      Tensor::Require(driver().StreamSynchronize(stream));
    }
    for (size_t i = 0; i < seen_.size(); ++i) {
      if (!was_seen_[i]) continue;
      EXPECT_EQ(std::memcmp(seen_[i]->host(), parameters_[i]->host(), seen_[i]->bytes()), 0)
          << "the step has read other bits of parameter " << i;
    }
    was_seen_.assign(seen_.size(), false);
  }

  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Tensor>> seen_;  // of each parameter, what the step has read last
  std::vector<bool> was_seen_;                 // in this step
};

}  // namespace superoffload

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_STREAMING_TRAINER_H_
