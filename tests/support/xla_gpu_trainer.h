// A trainer that XLA's calls are made for on a GPU. XLA's memory is used for the next thing as soon as the stream has
// gone past a call: each gradient comes in the same buffer, and is overwritten with NaNs after it. What streams is read
// before its gradient, and after each step. The step ends outside of XLA's program; StepInsideTrainer
// (xla_step_trainer.h) has it end inside.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_XLA_GPU_TRAINER_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_XLA_GPU_TRAINER_H_

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/gpu_trainer.h"
#include "tests/support/xla_call.h"

namespace superoffload {

class XlaGpuTrainer : public test::ExactTrainer {
 public:
  static constexpr uint64_t kSlices = 3;  // of a parameter whose elements can be divided by it, as of a stack of layers

  // `streams`: parameters of units do.
  explicit XlaGpuTrainer(Attachment* attachment, bool streams = false)
      : attachment_(*attachment), handle_(attachment->handle()) {
    Tensor::Require(kernels::GpuDevice::Open(0, &device_).code);
    MakeCurrent();
    for (kernels::OwnedStream* stream : {&stream_, &other_}) {
      Tensor::Require(kernels::MakeStream(*device_, stream).code);
    }
    size_t most = 0;
    for (const v1::Parameter& parameter : attachment_.optimizer().parameters()) {
      uint64_t elements = 1;
      for (const uint64_t extent : parameter.shape()) elements *= extent;
      const size_t bytes = elements * (parameter.dtype() == v1::DATA_TYPE_FLOAT32 ? 4 : 2);
      elements_.push_back(elements);
      parameters_.push_back(std::make_unique<Tensor>(device_, bytes));
      gradients_.push_back(std::make_unique<Tensor>(device_, bytes));
      read_.push_back(streams && parameter.unit() != 0 ? std::make_unique<Tensor>(device_, bytes) : nullptr);
      most = std::max(most, bytes);
    }
    buffer_ = std::make_unique<Tensor>(device_, most);
    nans_ = std::make_unique<Tensor>(device_, most);
    std::memset(nans_->host(), 0xff, most);
    ToGpu(*nans_, most);
    index_ = std::make_unique<Tensor>(device_, (kSlices + 1) * sizeof(int32_t));
    for (uint64_t i = 0; i < kSlices; ++i) Index(i) = static_cast<int32_t>(i);
    Index(kSlices) = -77;
    for (const v1::ParameterGroup& group : attachment_.optimizer().groups()) {
      scalars_.emplace_back();
      SetScalars(static_cast<uint32_t>(scalars_.size() - 1), group);
      Tensor::Require(SetScalars(static_cast<uint32_t>(scalars_.size() - 1)).ok() ? 0 : 1);
    }
  }

  ~XlaGpuTrainer() override {
    superoffload_close_trainer(submitter());
    for (const kernels::CudaStream stream : {stream_.get(), other_.get()}) driver().StreamSynchronize(stream);
  }

  // For the thread that calls it.
  void MakeCurrent() const { Tensor::Require(driver().CtxSetCurrent(device_->context())); }

  // What comes next is in the order of another stream.
  void SwitchStream() { std::swap(stream_, other_); }

  int64_t submitter() const { return attachment_.trainer(); }
  kernels::CudaStream stream() const { return stream_.get(); }
  const kernels::CudaDriver& driver() const { return device_->driver(); }
  XLA_FFI_DataType dtype(size_t parameter) const {
    switch (attachment_.optimizer().parameters(static_cast<int>(parameter)).dtype()) {
      case v1::DATA_TYPE_BFLOAT16:
        return XLA_FFI_DataType_BF16;
      case v1::DATA_TYPE_FLOAT16:
        return XLA_FFI_DataType_F16;
      default:
        return XLA_FFI_DataType_F32;
    }
  }
  uint64_t elements(size_t parameter) const { return elements_[parameter]; }

  std::byte* Parameter(size_t index) override { return parameters_[index]->host(); }
  std::byte* Gradient(size_t index) override { return gradients_[index]->host(); }

  // As adapters do: through the daemon's memory.
  absl::Status PushParameters() override {
    std::byte* const host = MemoryOf(handle_, SUPEROFFLOAD_REGION_PARAMETERS).data();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const v1::Placement& place = attachment_.optimizer().layout().placements(static_cast<int>(i));
      std::memcpy(host + place.parameters_offset(), parameters_[i]->host(), parameters_[i]->bytes());
    }
    if (absl::Status status = attachment_.PushParameters(); !status.ok()) return status;
    return Said(superoffload_gpu_copy(handle_, SUPEROFFLOAD_TO_GPU, 0));
  }

  // Of this step: they were to be set before its first gradient.
  absl::Status SetGroup(uint32_t group, const v1::ParameterGroup& hyperparameters) override {
    SetScalars(group, hyperparameters);
    if (absl::Status status = SetScalars(group); !status.ok()) return status;
    return attachment_.SetGroup(group, hyperparameters);
  }

  absl::Status BeginStep(double) override { return absl::OkStatus(); }  // the first gradient does

  absl::Status GradientReady(size_t parameter) override {
    if (read_[parameter] != nullptr) {
      if (absl::Status status = ReadStreamed(parameter, *read_[parameter]); !status.ok()) return status;
      ToHost(*read_[parameter]);
      read_in_step_.push_back(parameter);
    }
    Tensor& gradient = *gradients_[parameter];
    const uint64_t slices = elements_[parameter] % kSlices == 0 ? kSlices : 1;
    const size_t bytes = gradient.bytes() / slices;
    for (uint64_t i = slices; i-- > 0;) {  // as backward goes
      Issue(driver().MemcpyHtoDAsync(buffer_->device(), gradient.host() + i * bytes, bytes, stream_.get()));
      if (slices > 1) SetIndex(i);
      test::XlaCall call(stream_.get());
      call.Attribute("submitter", submitter()).Attribute("whole", slices == 1 ? 1 : 0);
      call.Attribute("parameters", std::vector<int64_t>{static_cast<int64_t>(parameter)});
      call.Operand(XLA_FFI_DataType_S32, 1, index_->device());
      call.Operand(dtype(parameter), elements_[parameter] / slices, buffer_->device());
      if (const std::string error = call.Run("hand_over"); !error.empty()) return absl::InternalError(error);
      Overwrite(*buffer_, bytes);
      if (slices > 1) SetIndex(kSlices);
    }
    return absl::OkStatus();
  }

  absl::Status ParameterAbsent(size_t parameter) override { return attachment_.ParameterAbsent(parameter); }

  absl::Status EndStep(double gradient_scale, double max_grad_norm) override {
    if (absl::Status status = Arrived(); !status.ok()) return status;
    return attachment_.EndStep(gradient_scale, max_grad_norm);
  }

  // The first error of a call in this step.
  absl::Status Arrived() const {
    superoffload_open_step_state step;
    std::vector<uint64_t> elements(elements_.size());
    return Said(superoffload_look(submitter(), &step, elements.data()));
  }

  absl::StatusOr<superoffload_verdict> WaitStep() override {
    const absl::StatusOr<superoffload_verdict> verdict = attachment_.WaitStep();
    if (!verdict.ok()) return verdict;
    if (absl::Status status = CheckRead(); !status.ok()) return status;
    if (absl::Status status = Publish(); !status.ok()) return status;
    Read();
    return verdict;
  }

  // What Publish has brought.
  void Read() {
    for (const std::unique_ptr<Tensor>& parameter : parameters_) ToHost(*parameter);
    Tensor::Require(driver().StreamSynchronize(stream_.get()));
  }

  // Into `parameters_` on the GPU; the stream may be behind.
  absl::Status Publish() {
    std::vector<int64_t> stay;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (read_[i] == nullptr) {
        stay.push_back(static_cast<int64_t>(i));
      } else if (absl::Status status = ReadStreamed(i, *parameters_[i]); !status.ok()) {
        return status;
      }
    }
    test::XlaCall call(stream_.get());
    call.Attribute("submitter", submitter()).Attribute("parameters", stay);
    for (const int64_t i : stay) call.Result(dtype(i), elements_[i], parameters_[i]->device());
    return Said(call.Run("publish"));
  }

  absl::Status ReadStreamed(size_t parameter, Tensor& to) {
    test::XlaCall call(stream_.get());
    call.Attribute("submitter", submitter())
        .Attribute("parameters", std::vector<int64_t>{static_cast<int64_t>(parameter)});
    call.Result(dtype(parameter), elements_[parameter], to.device());
    return Said(call.Run("read"));
  }

 protected:
  void Issue(int result) { Tensor::Require(result); }
  void ToGpu(Tensor& tensor, size_t bytes) {
    Issue(driver().MemcpyHtoDAsync(tensor.device(), tensor.host(), bytes, stream_.get()));
  }
  void ToHost(Tensor& tensor) {
    Issue(driver().MemcpyDtoHAsync(tensor.host(), tensor.device(), tensor.bytes(), stream_.get()));
  }
  // As when XLA uses the memory for something else.
  void Overwrite(Tensor& tensor, size_t bytes) {
    Issue(driver().MemcpyDtoDAsync(tensor.device(), nans_->device(), bytes, stream_.get()));
  }
  static absl::Status Said(const std::string& error) {
    return error.empty() ? absl::OkStatus() : absl::InternalError(error);
  }
  static absl::Status Said(int code) {
    return code == 0 ? absl::OkStatus() : absl::InternalError(superoffload_last_error());
  }
  absl::Status SetScalars(uint32_t group) {
    const std::vector<double>& scalars = scalars_[group];
    return Said(superoffload_set_scalars(submitter(), group, scalars.data(), static_cast<uint32_t>(scalars.size())));
  }
  void SetScalars(uint32_t group, const v1::ParameterGroup& hyperparameters) {
    scalars_[group].clear();
    for (const v1::Scalar& scalar : hyperparameters.scalars()) scalars_[group].push_back(scalar.value());
  }

  Attachment& attachment_;
  superoffload_attachment* const handle_;
  std::shared_ptr<const kernels::GpuDevice> device_;
  kernels::OwnedStream stream_, other_;
  std::vector<uint64_t> elements_;
  std::vector<std::unique_ptr<Tensor>> parameters_, gradients_;  // the latter on the host only
  std::vector<std::vector<double>> scalars_;

 private:
  // What was read in the step is what the step before had left.
  absl::Status CheckRead() {
    Issue(driver().StreamSynchronize(stream_.get()));
    for (const size_t i : std::exchange(read_in_step_, {})) {
      if (std::memcmp(read_[i]->host(), parameters_[i]->host(), read_[i]->bytes()) != 0) {
        return absl::InternalError("a parameter that streams was read with other bits");
      }
    }
    return absl::OkStatus();
  }

  int32_t& Index(uint64_t i) { return reinterpret_cast<int32_t*>(index_->host())[i]; }
  void SetIndex(uint64_t i) {
    Issue(driver().MemcpyHtoDAsync(index_->device(), &Index(i), sizeof(int32_t), stream_.get()));
  }

  std::vector<std::unique_ptr<Tensor>> read_;  // of parameters that stream, before their gradients; null: it does not
  std::vector<size_t> read_in_step_;
  std::unique_ptr<Tensor> buffer_, nans_, index_;
};

inline constexpr uint64_t kXlaSeed = 11;  // has steps that are clipped, and some that are skipped
inline constexpr test::Dtypes kFloat32{"Float32", test::DType::kFloat32, test::DType::kFloat32, 1};

struct XlaCase {
  const char* name;
  superoffload_mover mover;
  v1::Speculation speculation;
  test::Dtypes dtypes;
  const char* slow = nullptr;  // a direction
  uint32_t stream_slots = 0;
};

inline void PrintTo(const XlaCase& c, std::ostream* out) { *out << c.name; }

class GpuXlaTest : public GpuTest {
 protected:
  void Prepare(const XlaCase& c) {
    ::setenv("FAKE_CUDA_DELAY", "400", 1);
    if (c.slow != nullptr) ::setenv("FAKE_CUDA_SLOW", c.slow, 1);
    StartDaemon();
    ASSERT_NO_FATAL_FAILURE(Attach(c.speculation, c.dtypes, /*log_slots=*/0, /*gradient_slots=*/0, /*logged=*/0,
                                   /*in_place=*/false, c.stream_slots));
    if (!AttachGpu(c.mover)) GTEST_SKIP() << status_;
    ASSERT_TRUE(status_.ok()) << status_;
  }
};

}  // namespace superoffload

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_XLA_GPU_TRAINER_H_
