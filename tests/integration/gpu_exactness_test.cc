// A trainer on a GPU is exact, too: whoever copies, however many buckets are resident, and however late the GPU's
// streams are. The GPU is a fake whose streams dawdle (tests/support/fake_cuda_driver.cc), so that a missing wait shows
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

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/pinned_memory.h"
#include "superoffload/client.hpp"
#include "superoffload/v1/descriptor_socket.h"
#include "tests/support/daemon_process.h"
#include "tests/support/exact_training.h"

namespace superoffload {
namespace {

using ::testing::HasSubstr;

constexpr int kSteps = 40;  // random; of 24 now and then too few were clipped
constexpr std::chrono::milliseconds kPause{10};  // between control calls, of which users may not make too many

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

class GpuTrainer final : public test::ExactTrainer {
 public:
  // `residents(step)`: how many buckets are resident from that step on.
  GpuTrainer(Client* client, Attachment* attachment, std::function<uint32_t(int)> residents)
      : client_(*client), attachment_(*attachment), handle_(attachment->handle()), residents_(std::move(residents)) {
    Tensor::Require(kernels::GpuDevice::Open(0, &device_).code);
    Tensor::Require(kernels::MakeStream(*device_, &stream_).code);
    Tensor::Require(kernels::MakeStream(*device_, &busy_stream_).code);
    work_ = std::make_unique<Tensor>(device_, 8);
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
    const auto pack_stream = reinterpret_cast<kernels::CudaStream>(superoffload_gpu_stream(handle_));
    for (const kernels::CudaStream stream : {stream_.get(), busy_stream_.get(), pack_stream}) {
      driver().StreamSynchronize(stream);
    }
  }

  std::byte* Parameter(size_t index) override { return parameters_[index]->host(); }
  std::byte* Gradient(size_t index) override { return gradients_[index]->host(); }

  absl::Status PushParameters() override {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      Tensor::Require(
          driver().MemcpyHtoDAsync(ParameterOnGpu(i), parameters_[i]->host(), parameters_[i]->bytes(), stream_.get()));
    }
    if (superoffload_gpu_push(handle_, stream()) != 0) return LastError();
    return attachment_.PushParameters();
  }

  absl::Status SetGroup(uint32_t group, const v1::ParameterGroup& hyperparameters) override {
    return attachment_.SetGroup(group, hyperparameters);
  }

  absl::Status BeginStep(double gradient_scale) override {
    if (const uint32_t residents = std::min(residents_(++step_), static_cast<uint32_t>(layout().buckets_size()));
        residents != present_residents_) {
      if (step_ > 1 && superoffload_wait_step(handle_, -1, nullptr) != 0) return LastError();
      if (absl::Status status = client_.SettleOptimizer(attachment_.optimizer().name()).status(); !status.ok()) {
        return status;
      }
      if (superoffload_gpu_set_resident(handle_, residents) != 0) return LastError();
      present_residents_ = residents;
    }
    ready_.assign(parameters_.size(), false);
    return superoffload_begin_step(handle_, gradient_scale) != 0 ? LastError() : absl::OkStatus();
  }

  // Backward: the gradient appears some time later, every other one on a stream that has more to do before.
  absl::Status GradientReady(size_t parameter) override {
    const bool busy = parameter % 2 == 1;
    const kernels::CudaStream stream = (busy ? busy_stream_ : stream_).get();
    for (int i = 0; i < (busy ? 4 : 0); ++i) {
      Tensor::Require(driver().MemcpyDtoHAsync(work_->host(), work_->device(), work_->bytes(), stream));
    }
    Tensor& gradient = *gradients_[parameter];
    Tensor::Require(driver().MemcpyHtoDAsync(gradient.device(), gradient.host(), gradient.bytes(), stream));
    ready_[parameter] = true;
    const v1::Placement& place = layout().placements(static_cast<int>(parameter));
    for (uint32_t i = 0; i < place.bucket_count(); ++i) {
      if (absl::Status status = HandOver(place.first_bucket() + i); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status EndStep(double gradient_scale, double max_grad_norm) override {
    return superoffload_end_step(handle_, gradient_scale, max_grad_norm) != 0 ? LastError() : absl::OkStatus();
  }

  // The verdict, and then a forward pass, which reads all parameters as they become ready.
  absl::StatusOr<superoffload_verdict> WaitStep() override {
    superoffload_verdict verdict;
    if (superoffload_wait_verdict(handle_, -1, &verdict) != 0) return LastError();
    for (uint32_t bucket = static_cast<uint32_t>(layout().buckets_size()); bucket > 0; --bucket) {
      if (superoffload_gpu_await_parameters(handle_, bucket - 1, -1, stream()) != 0) return LastError();
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      Tensor::Require(
          driver().MemcpyDtoHAsync(parameters_[i]->host(), ParameterOnGpu(i), parameters_[i]->bytes(), stream_.get()));
    }
    Tensor::Require(driver().StreamSynchronize(stream_.get()));
    return verdict;
  }

 private:
  const kernels::CudaDriver& driver() const { return device_->driver(); }
  const v1::Layout& layout() const { return attachment_.optimizer().layout(); }
  uint64_t stream() const { return reinterpret_cast<uint64_t>(stream_.get()); }
  kernels::CudaPointer ParameterOnGpu(size_t i) const {
    return superoffload_gpu_parameters(handle_) + layout().placements(static_cast<int>(i)).parameters_offset();
  }
  static absl::Status LastError() { return absl::InternalError(superoffload_last_error()); }

  // Once all its gradients are there.
  absl::Status HandOver(uint32_t index) {
    const v1::Bucket& bucket = layout().buckets(static_cast<int>(index));
    std::vector<superoffload_tensor> pieces;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const v1::Placement& place = layout().placements(static_cast<int>(i));
      if (index < place.first_bucket() || index >= place.first_bucket() + place.bucket_count()) continue;
      if (!ready_[i]) return absl::OkStatus();
      const uint64_t begin = std::max(place.state_offset(), bucket.state_offset());
      const uint64_t end = std::min(place.state_offset() + elements_[i], bucket.state_offset() + bucket.elements());
      const uint64_t element_bytes = gradients_[i]->bytes() / elements_[i];
      pieces.push_back({gradients_[i]->device() + (begin - place.state_offset()) * element_bytes,
                        begin - bucket.state_offset(), end - begin});
    }
    std::sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    if (superoffload_gpu_pack_after(handle_, reinterpret_cast<uint64_t>(busy_stream_.get())) != 0) return LastError();
    const int code = superoffload_gpu_gradient_ready(
        handle_, index, pieces.data(), static_cast<uint32_t>(pieces.size()), bucket.gradient_dtype(), stream());
    return code != 0 ? LastError() : absl::OkStatus();
  }

  Client& client_;
  Attachment& attachment_;
  superoffload_attachment* const handle_;
  const std::function<uint32_t(int)> residents_;
  std::shared_ptr<const kernels::GpuDevice> device_;
  kernels::OwnedStream stream_, busy_stream_;
  std::unique_ptr<Tensor> work_;
  std::vector<uint64_t> elements_;
  std::vector<std::unique_ptr<Tensor>> parameters_, gradients_;
  std::vector<bool> ready_;
  int step_ = 0;
  uint32_t present_residents_ = 0;
};

uint32_t NoResidents(int) { return 0; }

class GpuTest : public ::testing::Test {
 protected:
  ~GpuTest() override {
    for (const char* name : {"FAKE_CUDA_FAIL", "FAKE_CUDA_DELAY", "FAKE_CUDA_COHERENT", "FAKE_CUDA_UUID"}) {
      ::unsetenv(name);
    }
  }

  // Those of the daemon are as they are now; those of this process can change later.
  void StartDaemon() {
    daemon_ = std::make_unique<test::DaemonProcess>(std::vector<std::string>{"--worker_threads=2"});
    client_ = *Client::Connect(daemon_->endpoint());
  }

  void Attach(v1::Speculation speculation, const test::Dtypes& dtypes) {
    const absl::Status created = client_->CreateOptimizer(test::Request(test::Spec(dtypes), speculation)).status();
    ASSERT_TRUE(created.ok()) << created;
    v1::AttachOptimizerRequest request;
    request.set_name("exact");
    request.set_sync(v1::SYNC_PUSH);
    attachment_ = *client_->Attach(request);
  }

  bool IsFake() const { return std::string(report_.gpu) == "fake GPU"; }

  // False when this was built without GPU kernels.
  bool AttachGpu(superoffload_mover mover) {
    constexpr uint32_t kMostTensors = 8;
    const absl::StatusOr<superoffload_gpu_report> report = attachment_->AttachGpu(0, kMostTensors, mover);
    status_ = report.status();
    if (report.ok()) report_ = *report;
    return status_.code() != absl::StatusCode::kUnimplemented;
  }

  std::unique_ptr<test::DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Attachment> attachment_;
  absl::Status status_;
  superoffload_gpu_report report_{};
};

struct GpuCase {
  const char* name;
  superoffload_mover mover;
  v1::Speculation speculation;
  test::Dtypes dtypes;
  std::function<uint32_t(int)> residents = NoResidents;
  const char* fail_daemon = nullptr;   // calls that fail there
  const char* fail_trainer = nullptr;  // and here
  const char* coherent = nullptr;
  uint32_t expected_mover = 0;  // 0: the one asked for
  uint32_t expected_sharing = 0;
};

constexpr test::Dtypes kBFloat16{"BFloat16", test::DType::kBFloat16, test::DType::kBFloat16, 1};
constexpr test::Dtypes kFloat16{"Float16", test::DType::kFloat16, test::DType::kFloat16, 1024};
constexpr test::Dtypes kFloat32Gradients{"Float32", test::DType::kBFloat16, test::DType::kFloat32, 1};

// Grows, stays, takes in everything and goes back to nothing.
uint32_t ChangingResidents(int step) { return step < 4 ? 0 : step < 10 ? 3 : step < 15 ? 1 : step < 20 ? 1000 : 0; }

const GpuCase kCases[] = {
    {"DaemonDescriptor", SUPEROFFLOAD_MOVER_DAEMON, v1::SPECULATION_ALWAYS, kBFloat16, NoResidents, nullptr, nullptr,
     nullptr, 0, SUPEROFFLOAD_SHARING_DESCRIPTOR},
    {"DaemonLegacy", SUPEROFFLOAD_MOVER_DAEMON, v1::SPECULATION_ADAPTIVE, kFloat16, NoResidents,
     "cuMemImportFromShareableHandle=801", nullptr, nullptr, 0, SUPEROFFLOAD_SHARING_LEGACY},
    {"DaemonResident", SUPEROFFLOAD_MOVER_DAEMON, v1::SPECULATION_ADAPTIVE, kFloat16, ChangingResidents, nullptr,
     nullptr, nullptr, 0, SUPEROFFLOAD_SHARING_DESCRIPTOR},
    {"DaemonCoherent", SUPEROFFLOAD_MOVER_DAEMON, v1::SPECULATION_NEVER, kFloat32Gradients, NoResidents, nullptr,
     nullptr, "1", 0, SUPEROFFLOAD_SHARING_DESCRIPTOR},
    {"Trainer", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_ALWAYS, kFloat32Gradients},
    {"TrainerNeverSpeculating", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_NEVER, kBFloat16},
    {"TrainerResident", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_ALWAYS, kBFloat16, ChangingResidents},
    {"TrainerStaged", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_ADAPTIVE, kFloat16, NoResidents, nullptr,
     "cuMemHostRegister_v2=304"},
    {"Direct", SUPEROFFLOAD_MOVER_DIRECT, v1::SPECULATION_ADAPTIVE, kFloat16},
    {"DirectCoherentResident", SUPEROFFLOAD_MOVER_DIRECT, v1::SPECULATION_ALWAYS, kBFloat16, ChangingResidents, nullptr,
     nullptr, "1"},
    // The daemon sees no GPU: whoever asks for what is best gets what works.
    {"AutoWithoutTheDaemon", SUPEROFFLOAD_MOVER_AUTO, v1::SPECULATION_ADAPTIVE, kBFloat16, NoResidents, "cuInit=100",
     "cuMemHostRegister_v2=304", nullptr, SUPEROFFLOAD_MOVER_TRAINER},
};

void PrintTo(const GpuCase& c, std::ostream* out) { *out << c.name; }

class GpuExactnessTest : public GpuTest, public ::testing::WithParamInterface<GpuCase> {};

TEST_P(GpuExactnessTest, EqualsTheScalarReferenceInEveryStep) {
  const GpuCase& c = GetParam();
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  ::setenv("FAKE_CUDA_DELAY", "400", 1);
  if (c.coherent != nullptr) ::setenv("FAKE_CUDA_COHERENT", c.coherent, 1);
  if (c.fail_daemon != nullptr) ::setenv("FAKE_CUDA_FAIL", c.fail_daemon, 1);
  StartDaemon();
  ::unsetenv("FAKE_CUDA_FAIL");
  if (c.fail_trainer != nullptr) ::setenv("FAKE_CUDA_FAIL", c.fail_trainer, 1);
  ASSERT_NO_FATAL_FAILURE(Attach(c.speculation, c.dtypes));
  if (!AttachGpu(c.mover)) GTEST_SKIP() << status_;
  ASSERT_TRUE(status_.ok()) << status_;
  ::unsetenv("FAKE_CUDA_FAIL");
  if (IsFake()) {
    EXPECT_EQ(report_.mover, c.expected_mover != 0 ? c.expected_mover : static_cast<uint32_t>(c.mover));
    EXPECT_EQ(report_.sharing, c.expected_sharing);
    EXPECT_EQ(report_.coherent, c.coherent != nullptr);
    EXPECT_EQ(report_.staged, c.fail_trainer != nullptr);
  }
  {
    GpuTrainer trainer(client_.get(), attachment_.get(), c.residents);
    test::ExactTraining(&trainer, test::Spec(c.dtypes), c.dtypes, seed).Train(kSteps);
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
    // Where a loader is started to start this, as in tests/device/bundle.sh, what it runs has another name.
    const char* const wrapper = std::getenv("GPU_TEST_PROGRAM");
    std::string words[] = {wrapper != nullptr ? wrapper : "/proc/self/exe", "--gtest_also_run_disabled_tests",
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
  } const cases[] = {
      {"cuInit=100", "", "0", SUPEROFFLOAD_MOVER_DAEMON, "no GPU is visible; check CUDA_VISIBLE_DEVICES"},
      {"", "", "1", SUPEROFFLOAD_MOVER_DAEMON, "no GPU-01000000-0000-0000-0000-000000000000 among the 1 GPUs"},
      {"cuMemImportFromShareableHandle=801,cuIpcOpenMemHandle_v2=201", "", "0", SUPEROFFLOAD_MOVER_DAEMON,
       "share the host's (hostPID, --pid=host)"},
      {"", "cuMemExportToShareableHandle=801,cuIpcGetMemHandle=801", "0", SUPEROFFLOAD_MOVER_DAEMON,
       "this driver or container does not allow it"},
      {"cuDevicePrimaryCtxRetain=46", "", "0", SUPEROFFLOAD_MOVER_DAEMON, "use an instance"},
      {"", "cuMemHostRegister_v2=304", "0", SUPEROFFLOAD_MOVER_DIRECT, "raise RLIMIT_MEMLOCK"},
      {"", "cuDevicePrimaryCtxRetain=100", "0", SUPEROFFLOAD_MOVER_AUTO, "no GPU is visible",
       absl::StatusCode::kUnavailable},
      {"", "cuMemCreate=2", "0", SUPEROFFLOAD_MOVER_AUTO, "free GPU memory", absl::StatusCode::kResourceExhausted},
      {"", "cuStreamSynchronize=214", "0", SUPEROFFLOAD_MOVER_AUTO, "out of service", absl::StatusCode::kDataLoss},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.sentence);
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

// Every rank has the optimizer of its share: gradients are reduced and scattered before the hand-over, parameters
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
    *request.add_groups() = test::ToProto(kernels::AdamHyperparameters{.lr = kLearningRate, .weight_decay = 0});
    v1::Parameter* share = request.add_parameters();
    share->set_name("share");
    share->add_shape(kShare);
    share->set_dtype(v1::DATA_TYPE_FLOAT32);
    ASSERT_TRUE(client->CreateOptimizer(request).ok());
    v1::AttachOptimizerRequest attach;
    attach.set_name(request.name());
    attach.set_sync(v1::SYNC_PULL);
    std::unique_ptr<Attachment> attachment = *client->Attach(attach);
    ASSERT_TRUE(attachment->AttachGpu(0, 1, SUPEROFFLOAD_MOVER_TRAINER).ok()) << superoffload_last_error();
    superoffload_attachment* const handle = attachment->handle();
    ASSERT_EQ(superoffload_gpu_pull(handle), 0);

    std::shared_ptr<const kernels::GpuDevice> device;
    Tensor::Require(kernels::GpuDevice::Open(0, &device).code);
    const kernels::CudaDriver& driver = device->driver();
    kernels::OwnedStream owned;
    Tensor::Require(kernels::MakeStream(*device, &owned).code);
    const auto stream = reinterpret_cast<uint64_t>(owned.get());
    Tensor whole(device, ranks * kShare * sizeof(float)), reduced(device, kShare * sizeof(float));
    // The mean over ranks is positive in every second element, and negative in the others.
    auto* const gradient = reinterpret_cast<float*>(whole.host());
    for (uint64_t i = 0; i < ranks * kShare; ++i)
      gradient[i] = (i % 2 == 0 ? 1.0f : -1.0f) * static_cast<float>(rank + 1);
    Tensor::Require(driver.MemcpyHtoDAsync(whole.device(), whole.host(), whole.bytes(), owned.get()));
    ASSERT_EQ(superoffload_reduce_scatter(collective, whole.device(), reduced.device(), kShare, v1::DATA_TYPE_FLOAT32,
                                          /*average=*/1, stream),
              0);
    const superoffload_tensor piece{reduced.device(), 0, kShare};
    ASSERT_EQ(superoffload_begin_step(handle, 1), 0);
    ASSERT_EQ(superoffload_gpu_gradient_ready(handle, 0, &piece, 1, v1::DATA_TYPE_FLOAT32, stream), 0);
    ASSERT_EQ(superoffload_end_step(handle, 1, 0), 0);
    superoffload_verdict verdict;
    ASSERT_EQ(superoffload_wait_verdict(handle, -1, &verdict), 0);
    const double mean = (ranks + 1) / 2.0;
    EXPECT_DOUBLE_EQ(verdict.global_norm, mean * std::sqrt(static_cast<double>(kShare)));
    ASSERT_EQ(superoffload_gpu_await_parameters(handle, 0, -1, stream), 0);
    ASSERT_EQ(superoffload_all_gather(collective, superoffload_gpu_parameters(handle), whole.device(), kShare,
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
  for (const uint32_t mover : {SUPEROFFLOAD_MOVER_DAEMON, SUPEROFFLOAD_MOVER_TRAINER, SUPEROFFLOAD_MOVER_DIRECT}) {
    EXPECT_GT(report_.seconds[mover], 0);
    EXPECT_LE(report_.seconds[report_.mover], report_.seconds[mover]);
  }
  EXPECT_STRNE(report_.gpu, "");
}

}  // namespace
}  // namespace superoffload
