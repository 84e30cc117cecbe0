// A trainer on a GPU through the C interface, fake or real, and the daemon that it trains with.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_GPU_TRAINER_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_GPU_TRAINER_H_

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/gpu/cuda_device.h"
#include "kernels/gpu/pinned_memory.h"
#include "superoffload/client.hpp"
#include "tests/support/daemon_process.h"
#include "tests/support/exact_training.h"

namespace superoffload {

inline constexpr test::Dtypes kBFloat16{"BFloat16", test::DType::kBFloat16, test::DType::kBFloat16, 1};
inline constexpr test::Dtypes kFloat16{"Float16", test::DType::kFloat16, test::DType::kFloat16, 1024};
inline constexpr test::Dtypes kFloat32Gradients{"Float32", test::DType::kBFloat16, test::DType::kFloat32, 1};

// A function of the driver, whichever it is; null where it has none of this name.
template <typename Function>
Function* OfDriver(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(::dlopen("libcuda.so.1", RTLD_NOW), name));
}

// GPU memory of a tensor, and pinned host memory beside it.
class Tensor {
 public:
  Tensor(const std::shared_ptr<const kernels::GpuDevice>& device, size_t bytes)
      : driver_(device->driver()), bytes_(bytes) {
    Require(driver_.MemAlloc(&device_, bytes));
    Require(kernels::PinnedMemory::Allocate(device, bytes, &host_).code);
    std::memset(host_.data(), 0, bytes);
  }
  ~Tensor() { driver_.MemFree(device_); }
  static void Require(int result) {
    if (result != 0) std::abort();
  }
  std::byte* host() { return host_.data(); }
  kernels::CudaPointer device() const { return device_; }
  size_t bytes() const { return bytes_; }

 private:
  const kernels::CudaDriver& driver_;
  const size_t bytes_;
  kernels::PinnedMemory host_;
  kernels::CudaPointer device_ = 0;
};

// Has a stream wait for the parameters in a bucket. Returns the status code.
inline int AwaitOnGpu(const Attachment& attachment, uint32_t bucket, uint64_t stream, int64_t milliseconds = -1) {
  const superoffload_awaited awaited{SUPEROFFLOAD_AWAIT_BUCKET_ON_GPU, bucket, stream};
  return superoffload_wait(attachment.trainer(), &awaited, milliseconds, nullptr);
}

// A region of an attachment's memory.
inline std::span<std::byte> MemoryOf(superoffload_attachment* attachment, superoffload_region region) {
  void* data = nullptr;
  size_t bytes = 0;
  EXPECT_EQ(superoffload_memory(attachment, region, &data, &bytes), 0) << superoffload_last_error();
  return {static_cast<std::byte*>(data), bytes};
}

class GpuTrainer : public test::ExactTrainer {
 public:
  // `residents(step)`: how many buckets are resident from that step on.
  GpuTrainer(Client* client, Attachment* attachment, std::function<uint32_t(int)> residents)
      : client_(*client), attachment_(*attachment), handle_(attachment->handle()), residents_(std::move(residents)) {
    Tensor::Require(kernels::GpuDevice::Open(0, &device_).code);
    Tensor::Require(driver().CtxSetCurrent(device_->context()));
    Tensor::Require(kernels::MakeStream(*device_, &stream_).code);
    Tensor::Require(kernels::MakeStream(*device_, &busy_stream_).code);
    work_ = std::make_unique<Tensor>(device_, 8);
    Tensor::Require(driver().MemcpyHtoDAsync(work_->device(), work_->host(), work_->bytes(), stream_.get()));
    Tensor::Require(driver().StreamSynchronize(stream_.get()));
    for (int i = 0; i < attachment_.optimizer().parameters_size(); ++i) {
      const v1::Parameter& parameter = attachment_.optimizer().parameters(i);
      uint64_t elements = 1;
      for (const uint64_t extent : parameter.shape()) elements *= extent;
      elements_.push_back(elements);
      const auto bytes = [&](v1::DataType dtype) { return elements * (dtype == v1::DATA_TYPE_FLOAT32 ? 4 : 2); };
      parameters_.push_back(std::make_unique<Tensor>(device_, bytes(parameter.dtype())));
      gradients_.push_back(std::make_unique<Tensor>(device_, bytes(parameter.gradient_dtype())));
    }
  }

  // Nothing reads its tensors any more.
  ~GpuTrainer() override {
    const auto pack_stream = reinterpret_cast<kernels::CudaStream>(attachment_.gpu_report().pack_stream);
    for (const kernels::CudaStream stream : {stream_.get(), busy_stream_.get(), pack_stream}) {
      driver().StreamSynchronize(stream);
    }
  }

  std::byte* Parameter(size_t index) override { return parameters_[index]->host(); }
  std::byte* Gradient(size_t index) override { return gradients_[index]->host(); }

  // The gaps between them, too, have something to be copied.
  absl::Status PushParameters() override {
    if (superoffload_gpu_copy(handle_, SUPEROFFLOAD_TO_GPU, stream()) != 0) return LastError();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      Tensor::Require(
          driver().MemcpyHtoDAsync(ParameterOnGpu(i), parameters_[i]->host(), parameters_[i]->bytes(), stream_.get()));
    }
    if (superoffload_gpu_copy(handle_, SUPEROFFLOAD_FROM_GPU, stream()) != 0) return LastError();
    return attachment_.PushParameters();
  }

  absl::Status SetGroup(uint32_t group, const v1::ParameterGroup& hyperparameters) override {
    return attachment_.SetGroup(group, hyperparameters);
  }

  absl::Status BeginStep(double gradient_scale) override {
    if (const uint32_t residents = std::min(residents_(++step_), static_cast<uint32_t>(layout().buckets_size()));
        residents != present_residents_) {
      if (step_ > 1) {
        if (absl::Status status = attachment_.WaitStep().status(); !status.ok()) return status;
      }
      if (absl::Status status = client_.SettleOptimizer(attachment_.optimizer().name()).status(); !status.ok()) {
        return status;
      }
      if (superoffload_gpu_set_resident(handle_, residents) != 0) return LastError();
      present_residents_ = residents;
    }
    return attachment_.BeginStep(gradient_scale);
  }

  absl::Status GradientReady(size_t parameter) override { return HandOver(parameter, *gradients_[parameter], {}); }

  // Backward: the gradient appears some time later, every other one on a stream that has more to do before.
  absl::Status HandOver(size_t parameter, Tensor& gradient, superoffload_gradients source) {
    const bool busy = parameter % 2 == 1;
    const kernels::CudaStream stream = (busy ? busy_stream_ : stream_).get();
    for (int i = 0; i < (busy ? 4 : 0); ++i) {
      Tensor::Require(driver().MemcpyDtoHAsync(work_->host(), work_->device(), work_->bytes(), stream));
    }
    Tensor::Require(driver().MemcpyHtoDAsync(gradient.device(), gradient.host(), gradient.bytes(), stream));
    return HandOverAt(parameter, gradient.device(), reinterpret_cast<uint64_t>(stream), source);
  }

  // 0: there is none.
  absl::Status HandOverAt(size_t parameter, kernels::CudaPointer gradient, uint64_t stream,
                          superoffload_gradients source) {
    const v1::Parameter& of = attachment_.optimizer().parameters(static_cast<int>(parameter));
    source.on_gpu = 1;
    source.stream = stream;
    source.stays = SUPEROFFLOAD_STAYS_UNTIL_PACKED;
    const superoffload_piece piece{gradient, 0, elements_[parameter], static_cast<uint32_t>(parameter),
                                   static_cast<uint32_t>(of.gradient_dtype())};
    return attachment_.HandOver({&piece, 1}, source);
  }

  absl::Status ParameterAbsent(size_t parameter) override { return attachment_.ParameterAbsent(parameter); }

  absl::Status EndStep(double gradient_scale, double max_grad_norm) override {
    return attachment_.EndStep(gradient_scale, max_grad_norm);
  }

  // The verdict, and then a forward pass, which reads all parameters as they become ready.
  absl::StatusOr<superoffload_verdict> WaitStep() override {
    absl::StatusOr<superoffload_verdict> verdict = attachment_.WaitVerdict();
    if (!verdict.ok()) return verdict;
    for (uint32_t bucket = static_cast<uint32_t>(layout().buckets_size()); bucket > 0; --bucket) {
      if (AwaitOnGpu(attachment_, bucket - 1, stream()) != 0) return LastError();
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      Tensor::Require(
          driver().MemcpyDtoHAsync(parameters_[i]->host(), ParameterOnGpu(i), parameters_[i]->bytes(), stream_.get()));
    }
    Tensor::Require(driver().StreamSynchronize(stream_.get()));
    return verdict;
  }

 protected:
  const kernels::CudaDriver& driver() const { return device_->driver(); }
  const v1::Layout& layout() const { return attachment_.optimizer().layout(); }
  uint64_t stream() const { return reinterpret_cast<uint64_t>(stream_.get()); }
  kernels::CudaPointer ParameterOnGpu(size_t i) const {
    return attachment_.gpu_report().parameters + attachment_.GpuOffset(i);
  }
  static absl::Status LastError() { return absl::InternalError(superoffload_last_error()); }

  Client& client_;
  Attachment& attachment_;
  superoffload_attachment* const handle_;
  const std::function<uint32_t(int)> residents_;
  std::shared_ptr<const kernels::GpuDevice> device_;
  kernels::OwnedStream stream_, busy_stream_;
  std::unique_ptr<Tensor> work_;
  std::vector<uint64_t> elements_;
  std::vector<std::unique_ptr<Tensor>> parameters_, gradients_;
  int step_ = 0;
  uint32_t present_residents_ = 0;
};

inline uint32_t NoResidents(int) { return 0; }

// Whose gradients come in several passes: each element in one of them, which others leave as it is.
class PassesTrainer : public GpuTrainer {
 public:
  PassesTrainer(Client* client, Attachment* attachment, std::function<uint32_t(int)> residents, uint64_t seed)
      : GpuTrainer(client, attachment, std::move(residents)), random_(seed) {
    for (size_t i = 0; i < gradients_.size(); ++i) {
      for (auto& pass : passes_) pass.push_back(std::make_unique<Tensor>(device_, gradients_[i]->bytes()));
    }
  }

  absl::Status GradientReady(size_t parameter) override {
    ready_.push_back(parameter);
    return absl::OkStatus();
  }

  absl::Status EndStep(double gradient_scale, double max_grad_norm) override {
    const std::vector<size_t> ready = std::exchange(ready_, {});
    std::vector<std::vector<bool>> comes(ready.size(), std::vector<bool>(kPasses));
    for (size_t i = 0; i < ready.size(); ++i) {
      for (size_t pass = 0; pass < kPasses; ++pass) comes[i][pass] = random_() % 4 > 0;
      comes[i][random_() % kPasses] = true;
      Divide(ready[i], comes[i]);
    }
    for (size_t pass = 0; pass < kPasses; ++pass) {
      for (size_t i = 0; i < ready.size(); ++i) {
        if (absl::Status status = Bring(ready[i], pass, comes[i][pass]); !status.ok()) return status;
      }
    }
    return GpuTrainer::EndStep(gradient_scale, max_grad_norm);
  }

 private:
  static constexpr size_t kPasses = 3;

  void Divide(size_t parameter, const std::vector<bool>& comes) {
    Tensor& whole = *gradients_[parameter];
    const size_t width = whole.bytes() / elements_[parameter];
    for (size_t pass = 0; pass < kPasses; ++pass) {
      std::byte* const part = passes_[pass][parameter]->host();
      std::fill_n(part, whole.bytes(), std::byte{});
      for (size_t i = 0; i < elements_[parameter]; ++i) part[(i + 1) * width - 1] = std::byte{0x80};  // -0
    }
    for (size_t i = 0; i < elements_[parameter]; ++i) {
      size_t pass = random_() % kPasses;
      while (!comes[pass]) pass = (pass + 1) % kPasses;
      std::memcpy(passes_[pass][parameter]->host() + i * width, whole.host() + i * width, width);
    }
  }

  absl::Status Bring(size_t parameter, size_t pass, bool comes) {
    const bool last = pass + 1 == kPasses;
    superoffload_gradients source{};
    source.more_follow = last ? 0 : 1;
    if (comes) return HandOver(parameter, *passes_[pass][parameter], source);
    return last ? HandOverAt(parameter, 0, stream(), source) : absl::OkStatus();
  }

  std::mt19937 random_;
  std::array<std::vector<std::unique_ptr<Tensor>>, kPasses> passes_;
  std::vector<size_t> ready_;
};

class GpuTest : public ::testing::Test {
 protected:
  ~GpuTest() override {
    for (const char* name :
         {"FAKE_CUDA_FAIL", "FAKE_CUDA_DELAY", "FAKE_CUDA_MACHINE", "FAKE_CUDA_UUID", "FAKE_CUDA_OOM", "FAKE_CUDA_SLOW",
          "FAKE_CUDA_REFUSE_PAGEABLE", "SUPEROFFLOAD_RECONNECT_SECONDS"}) {
      ::unsetenv(name);
    }
  }

  // Those of the daemon are as they are now; those of this process can change later.
  void StartDaemon() {
    daemon_ = std::make_unique<test::DaemonProcess>(std::vector<std::string>{"--worker_threads=2"});
    client_ = *Client::Connect(daemon_->endpoint());
  }

  // `log_slots`: of the logs of all buckets, or of the last `logged`; 0: none.
  void Attach(v1::Speculation speculation, const test::Dtypes& dtypes, uint32_t log_slots = 0,
              uint32_t gradient_slots = 0, uint32_t logged = 1000, bool in_place = false, uint32_t stream_slots = 0) {
    const engine::OptimizerSpec spec = SpecOf(dtypes, stream_slots);
    v1::CreateOptimizerRequest wanted = test::Request(spec, speculation);
    wanted.set_logged_buckets(log_slots == 0 ? 0 : logged);
    wanted.set_log_slots(log_slots);
    wanted.set_gradient_slots(gradient_slots);
    wanted.set_in_place(in_place);
    const absl::Status created = client_->CreateOptimizer(wanted).status();
    ASSERT_TRUE(created.ok()) << created;
    v1::AttachOptimizerRequest request;
    request.set_name("exact");
    request.set_sync(v1::SYNC_PUSH);
    attachment_ = *client_->Attach(request, Streamed(spec, stream_slots));
  }

  // Where there are slots for units, each parameter but the first is one, and streams.
  static engine::OptimizerSpec SpecOf(const test::Dtypes& dtypes, uint32_t stream_slots) {
    engine::OptimizerSpec spec = test::Spec(dtypes);
    for (uint32_t i = 0; stream_slots > 0 && i < spec.parameters.size(); ++i) spec.parameters[i].unit = i;
    return spec;
  }
  static StreamedUnits Streamed(const engine::OptimizerSpec& spec, uint32_t stream_slots) {
    StreamedUnits streamed{.units = {}, .slots = stream_slots};
    for (const engine::ParameterSpec& parameter : spec.parameters) streamed.units.insert(parameter.unit);
    streamed.units.erase(0);
    return streamed;
  }

  // All bytes of all parameters, where the daemon publishes them.
  void FillParameters(std::byte byte) {
    for (int i = 0; i < attachment_->optimizer().parameters_size(); ++i) std::ranges::fill(PublishedBytes(i), byte);
  }
  void ExpectParameters(std::byte byte) {
    for (int i = 0; i < attachment_->optimizer().parameters_size(); ++i) {
      const std::span<std::byte> bytes = PublishedBytes(i);
      EXPECT_EQ(std::ranges::count(bytes, byte), std::ssize(bytes)) << "of parameter " << i;
    }
  }

  // The first elements of some memory on the GPU, as the gradient of a parameter.
  absl::Status HandOver(int parameter, kernels::CudaPointer data, kernels::CudaStream stream) {
    const v1::Parameter& of = attachment_->optimizer().parameters(parameter);
    superoffload_piece piece{data, 0, 1, static_cast<uint32_t>(parameter), static_cast<uint32_t>(of.gradient_dtype())};
    for (const uint64_t extent : of.shape()) piece.elements *= extent;
    superoffload_gradients source{};
    source.on_gpu = 1;
    source.stream = reinterpret_cast<uint64_t>(stream);
    source.stays = SUPEROFFLOAD_STAYS_UNTIL_PACKED;
    return attachment_->HandOver({&piece, 1}, source);
  }

  // No parameter has a gradient: zeros leave the GPU in all buckets.
  absl::Status HandOverNothing() {
    for (int i = 0; i < attachment_->optimizer().parameters_size(); ++i) {
      if (absl::Status status = attachment_->ParameterAbsent(static_cast<size_t>(i)); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Drops the open step, if any.
  void Abandon() {
    if (!attachment_->AbandonStep().ok()) return;
    EXPECT_TRUE(attachment_->WaitStep().ok());
  }

  bool IsFake() const { return std::string(report_.gpu).starts_with("fake GPU"); }

  // False when this was built without GPU kernels.
  bool AttachGpu(superoffload_mover mover) {
    const absl::StatusOr<superoffload_gpu_report> report = attachment_->AttachGpu(0, mover);
    status_ = report.status();
    if (report.ok()) report_ = *report;
    return status_.code() != absl::StatusCode::kUnimplemented;
  }

  std::span<std::byte> PublishedBytes(int parameter) {
    const v1::Parameter& of = attachment_->optimizer().parameters(parameter);
    size_t bytes = kernels::DTypeBytes(static_cast<kernels::DType>(of.dtype() - 1));
    for (const uint64_t extent : of.shape()) bytes *= extent;
    const v1::Placement& place = attachment_->optimizer().layout().placements(parameter);
    return MemoryOf(attachment_->handle(), SUPEROFFLOAD_REGION_PARAMETERS).subspan(place.parameters_offset(), bytes);
  }

  std::unique_ptr<test::DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Attachment> attachment_;
  absl::Status status_;
  superoffload_gpu_report report_{};
};

}  // namespace superoffload

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_GPU_TRAINER_H_
