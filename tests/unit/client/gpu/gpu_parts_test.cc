// What a GPU plane is made of: packing, residents, and who copies. With the fake driver.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/src/gpu/choose_mover.h"
#include "client/src/gpu/gradient_packer.h"
#include "client/src/gpu/pack_stream.h"
#include "client/src/gpu/resident_buckets.h"
#include "kernels/gpu/mover.h"
#include "tests/support/gpu_buffer.h"

namespace superoffload::client {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kElements = 64;
constexpr uint32_t kBuckets = 3, kSlots = 2, kTensors = 4;
constexpr uint64_t kBucketBytes = kElements * sizeof(float), kParametersBytes = kBuckets * kBucketBytes;

class GpuPartsTest : public ::testing::Test {
 protected:
  GpuPartsTest() {
    for (uint64_t i = 0; i < kBuckets; ++i) {
      buckets_.push_back({.elements = kElements,
                          .parameters_offset = i * kBucketBytes,
                          .gpu_offset = (kBuckets - 1 - i) * kBucketBytes,
                          .gradient_offsets = {2 * i * kBucketBytes, (2 * i + 1) * kBucketBytes},
                          .state_offset = i * kElements,
                          .dtype = kernels::DType::kFloat32,
                          .gradient_dtype = kernels::DType::kFloat32,
                          .group = 0});
    }
    layout_ = PlanGpu(buckets_, kSlots, kTensors);
    gpu_ = std::make_unique<test::GpuBuffer>(device_, layout_.bytes);
    const kernels::CurrentDevice current(*device_);
    EXPECT_TRUE(pack_stream_.Take(device_).ok());
    opened_ = packer_.Open(device_, layout_, gpu_->data(), pack_stream_.get());
    kernels::MoverMemory memory{
        .gradients = gradients_.bytes(), .parameters = parameters_.bytes(), .buckets = {}, .slots = layout_.slots};
    for (const GpuBucket& bucket : buckets_) memory.buckets.push_back(bucket.moved());
    EXPECT_TRUE(kernels::Mover::Open(device_, gpu_->data(), std::move(memory),
                                     {.process = "the test", .kernels_reach_host = true}, &mover_)
                    .ok());
  }
  void SetUp() override {
    if (opened_.code == Code::kUnimplemented) GTEST_SKIP() << opened_.message;
    ASSERT_TRUE(opened_.ok()) << opened_.message;
  }
  ~GpuPartsTest() override {
    if (opened_.ok()) (void)packer_.Synchronize();
  }

  std::span<float> OnGpu(uint64_t offset) { return gpu_->At<float>(offset, kElements); }
  MoverTrial Trial() {
    return {*device_, buckets_, packer_, *mover_, gpu_->data(), 0, [this](uint32_t) { return ++probes_, Status{}; }};
  }

  std::shared_ptr<const kernels::GpuDevice> device_ = test::OpenGpu();
  std::vector<GpuBucket> buckets_;
  GpuLayout layout_;
  std::unique_ptr<test::GpuBuffer> gpu_;
  test::HostPages gradients_{2 * kParametersBytes}, parameters_{kParametersBytes};
  std::unique_ptr<kernels::Mover> mover_;
  PackStream pack_stream_;
  GradientPacker packer_;
  Status opened_;
  int probes_ = 0;
};

TEST_F(GpuPartsTest, PackingPutsTensorsInTheirPlacesAndZeroesTheGaps) {
  test::GpuBuffer tensors(device_, 4096);
  std::ranges::fill(tensors.At<float>(0, 8), 2.0f);
  std::ranges::fill(tensors.At<float>(1024, 8), 3.0f);
  tensors.Upload();
  std::ranges::fill(OnGpu(layout_.slots.slot_offset(1)), 9.0f);
  gpu_->Upload();
  const BucketTensor table[] = {{tensors.data(), 4, 8}, {tensors.data() + 1024, 40, 8}};
  {
    const kernels::CurrentDevice current(*device_);
    ASSERT_TRUE(packer_.Check(0, kElements, table).ok());
    void* const slot = reinterpret_cast<void*>(gpu_->data() + layout_.slots.slot_offset(1));
    ASSERT_TRUE(packer_.Pack(buckets_[0], 1, table, kernels::DType::kFloat32, slot).ok());
    ASSERT_TRUE(packer_.Synchronize().ok());
  }
  gpu_->Download();
  const std::span<float> packed = OnGpu(layout_.slots.slot_offset(1));
  EXPECT_THAT(packed.subspan(4, 8), Each(2.0f));
  EXPECT_THAT(packed.subspan(40, 8), Each(3.0f));
  EXPECT_THAT(packed.first(4), Each(0.0f));
  EXPECT_THAT(packed.subspan(48), Each(0.0f));
  EXPECT_EQ(gpu_->At<double>(layout_.slots.sums_of(1), 1)[0], 8 * 4 + 8 * 9);
}

TEST_F(GpuPartsTest, TensorsThatDoNotFitTheBucketAreRefused) {
  const auto check = [this](const std::vector<BucketTensor>& tensors) {
    return packer_.Check(0, kElements, tensors).code;
  };
  EXPECT_EQ(check({{0, 0, 32}, {0, 32, 32}}), Code::kOk);
  EXPECT_EQ(check({{0, 0, 32}, {0, 31, 4}}), Code::kInvalidArgument) << "overlap";
  EXPECT_EQ(check({{0, 32, 4}, {0, 0, 4}}), Code::kInvalidArgument) << "order";
  EXPECT_EQ(check({{0, 60, 5}}), Code::kInvalidArgument) << "beyond the end";
  EXPECT_EQ(check({{0, ~uint64_t{0}, 2}}), Code::kInvalidArgument) << "far beyond it";
  EXPECT_EQ(check(std::vector<BucketTensor>(kTensors + 1)), Code::kInvalidArgument) << "too many";
}

// Each bucket is one parameter, of which `elements` are left without the gap behind it.
ModelLayout Model(uint64_t elements = kElements) {
  superoffload_bucket buckets[kBuckets]{};
  superoffload_parameter parameters[kBuckets]{};
  for (uint32_t i = 0; i < kBuckets; ++i) {
    buckets[i].elements = kElements;
    parameters[i].name = "";
    parameters[i].elements = elements;
    parameters[i].first_bucket = i;
    parameters[i].bucket_count = 1;
    parameters[i].dtype = parameters[i].gradient_dtype = 3;  // FLOAT32 of DataType
    parameters[i].state_offset = buckets[i].state_offset = i * kElements;
  }
  ModelLayout model;
  EXPECT_TRUE(ModelLayout::Create(
                  {parameters, buckets, kBuckets, kBuckets, /*group_count=*/1, /*scalar_count=*/5, 1, 0}, &model)
                  .ok());
  return model;
}

// AdamW with a learning rate of 0.
std::unique_ptr<ResidentSteps> Steps(const ModelLayout& model = Model()) {
  const double scalars[] = {0, 0.9, 0.999, 1, 0};
  uint64_t arrays[3];
  for (size_t i = 0; i < 3; ++i) arrays[i] = i * kBuckets * kElements * sizeof(float);
  superoffload_gpu_options options{};
  options.array_count = 3;
  options.algorithm = "adamw";
  options.scalars = scalars;
  options.array_offsets = arrays;
  auto steps = std::make_unique<ResidentSteps>();
  EXPECT_TRUE(steps->Open(model, options).ok());
  return steps;
}

TEST(ResidentStepsTest, ARunGoesOnOverTheGapBehindAParameter) {
  const std::unique_ptr<ResidentSteps> steps = Steps(Model(kElements - 3));
  superoffload_ring_entry end{};
  end.opcode = SUPEROFFLOAD_SUBMIT_END_STEP;
  end.payload.f64[0] = 1;
  steps->OnSubmission(end);
  ASSERT_TRUE(steps->OnCommit(1).ok());
  const std::vector<ResidentSteps::Run> runs = steps->RunsOf(1);
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0].first, 0u);
  EXPECT_EQ(runs[0].elements, kElements);
}

// A learning rate of 0 leaves the masters as they are: what comes out shows where it came from.
TEST_F(GpuPartsTest, ResidentBucketsAreTheLastAndWriteTheirOwnParameters) {
  std::vector<float> state(3 * kBuckets * kElements, 0.0f);
  for (size_t i = 0; i < kBuckets * kElements; ++i) state[i] = static_cast<float>(100 + i / kElements);
  const kernels::CurrentDevice current(*device_);
  ResidentBuckets residents(device_, &buckets_, Steps());
  const auto* const bytes = reinterpret_cast<const std::byte*>(state.data());
  EXPECT_EQ(residents.SetCount(kBuckets + 1, bytes, mover_->up_stream()).code, Code::kInvalidArgument);
  ASSERT_TRUE(residents.SetCount(2, bytes, mover_->up_stream()).ok());
  EXPECT_FALSE(residents.contains(0));
  EXPECT_TRUE(residents.contains(1));
  const kernels::CudaPointer slot = gpu_->data() + layout_.slots.slot_offset(0);
  for (const uint32_t bucket : {1, 2}) ASSERT_TRUE(residents.KeepGradient(bucket, slot, mover_->up_stream()).ok());
  superoffload_ring_entry end{};
  end.opcode = SUPEROFFLOAD_SUBMIT_END_STEP;
  end.payload.f64[0] = 1;
  residents.OnSubmission(end);
  superoffload_verdict_payload verdict{};
  verdict.clip_coefficient = 1;
  verdict.committed_steps = 1;
  ASSERT_TRUE(residents.Update(verdict, packer_.kernels(), gpu_->data(), mover_.get()).ok());
  ASSERT_EQ(device_->driver().StreamSynchronize(mover_->up_stream()), 0);
  gpu_->Download();
  EXPECT_THAT(OnGpu(buckets_[0].gpu_offset), Each(0.0f)) << "not resident";
  EXPECT_THAT(OnGpu(buckets_[1].gpu_offset), Each(101.0f));
  EXPECT_THAT(OnGpu(buckets_[2].gpu_offset), Each(102.0f));
  ASSERT_TRUE(residents.SetCount(0, bytes, mover_->up_stream()).ok());
  EXPECT_FALSE(residents.contains(2));
}

TEST_F(GpuPartsTest, ResidentsThatDoNotFitLeaveThoseThatDo) {
  const std::vector<float> state(3 * kBuckets * kElements, 0.0f);
  const kernels::CurrentDevice current(*device_);
  ResidentBuckets residents(device_, &buckets_, Steps());
  const test::FakeCudaSetting out_of_memory("FAKE_CUDA_OOM", "2");
  EXPECT_EQ(residents.SetCount(3, reinterpret_cast<const std::byte*>(state.data()), mover_->up_stream()).code,
            Code::kResourceExhausted);
  EXPECT_TRUE(residents.contains(2));
  EXPECT_FALSE(residents.contains(1));
}

TEST_F(GpuPartsTest, EveryMoverThatMayBeTakenIsMeasuredBesideMatrixProducts) {
  const kernels::CurrentDevice current(*device_);
  for (const bool coherent : {true, false}) {
    const test::FakeCudaSetting machine("FAKE_CUDA_MACHINE", coherent ? "gh200" : "h100-pcie");
    superoffload_gpu_report report{};
    report.shared = 1;
    ASSERT_TRUE(ChooseMover(Trial(), SUPEROFFLOAD_MOVER_AUTO, &report).ok());
    EXPECT_GT(probes_, 1);
    EXPECT_GT(report.seconds[SUPEROFFLOAD_MOVER_DAEMON], 0);
    EXPECT_GT(report.seconds[SUPEROFFLOAD_MOVER_TRAINER], 0);
    EXPECT_EQ(report.seconds[SUPEROFFLOAD_MOVER_DIRECT] > 0, coherent) << "stores over PCIe are not to be tried";
    EXPECT_GT(report.seconds[report.mover], 0);
  }
}

struct Launched {
  std::string kernel;
  unsigned blocks, shared_bytes;
};
std::vector<Launched>* launched = nullptr;

// Kernels that are launched while it lives.
class Launches {
 public:
  Launches() {
    launched = &seen;
    OnLaunch([](const char* kernel, unsigned blocks, unsigned bytes) { launched->push_back({kernel, blocks, bytes}); });
  }
  ~Launches() { OnLaunch(nullptr); }
  size_t Count(const char* prefix) const {
    return static_cast<size_t>(
        std::ranges::count_if(seen, [=](const Launched& l) { return l.kernel.starts_with(prefix); }));
  }
  std::vector<Launched> seen;

 private:
  static void OnLaunch(void (*hook)(const char*, unsigned, unsigned)) {
    test::OfFakeDriver<void(decltype(hook))>("fakeCudaOnLaunch")(hook);
  }
};

TEST_F(GpuPartsTest, EachMoverIsChargedThePackingOfItsGradients) {
  const kernels::CurrentDevice current(*device_);
  for (const uint32_t mover : {SUPEROFFLOAD_MOVER_TRAINER, SUPEROFFLOAD_MOVER_DAEMON, SUPEROFFLOAD_MOVER_DIRECT}) {
    Launches launches;
    ASSERT_TRUE(ProbeRound(Trial(), mover, 0).ok());
    EXPECT_EQ(launches.Count("superoffload_pack"), 1u) << "mover " << mover;
    EXPECT_EQ(probes_, mover == SUPEROFFLOAD_MOVER_DAEMON ? 1 : 0);
    probes_ = 0;
  }
}

TEST_F(GpuPartsTest, ProductsTakeTheSharedMemoryOfALibrarys) {
  const kernels::CurrentDevice current(*device_);
  for (const auto& [machine, least] : {std::pair("gh200", 198u << 10), std::pair("hmm", 97u << 10)}) {
    const test::FakeCudaSetting setting("FAKE_CUDA_MACHINE", machine);
    GradientPacker packer;
    ASSERT_TRUE(packer.Open(device_, layout_, gpu_->data(), pack_stream_.get()).ok());
    Launches launches;
    ASSERT_TRUE(packer.Multiply(1, packer.stream()).ok());
    ASSERT_TRUE(packer.Synchronize().ok());
    ASSERT_EQ(launches.seen.size(), 1u);
    EXPECT_EQ(launches.seen[0].shared_bytes, least) << machine;
  }
}

TEST_F(GpuPartsTest, ALargeBucketIsPackedByAsFewBlocksAsOutrunTheLink) {
  const kernels::CurrentDevice current(*device_);
  const uint64_t elements = uint64_t{40} << 20;
  test::GpuBuffer memory(device_, elements * 2 + elements / kernels::kChunkElements * sizeof(double));
  kernels::CudaKernels kernels;
  kernels::OwnedStream stream;
  ASSERT_TRUE(kernels::MakeStream(*device_, &stream).ok());
  ASSERT_TRUE(kernels.Load(device_->driver(), device_->handle()).ok());
  for (const uint64_t packed : {elements, 4 * kernels::kChunkElements}) {
    Launches launches;
    ASSERT_TRUE(kernels
                    .Pack({.table = {},
                           .dtype = kernels::DType::kBFloat16,
                           .slot = {reinterpret_cast<void*>(memory.data()), kernels::DType::kBFloat16},
                           .elements = packed,
                           .chunk_sums = reinterpret_cast<double*>(memory.data() + elements * 2)},
                          stream.get())
                    .ok());
    ASSERT_EQ(device_->driver().StreamSynchronize(stream.get()), 0);
    EXPECT_EQ(launches.seen[0].blocks, packed == elements ? 17u : 1u) << "over PCIe";
  }
  kernels.Unload();
}

TEST(BestMoverTest, TheTrainerCopiesUnlessAnotherCostsItsKernelsLess) {
  constexpr uint32_t kTrainer = SUPEROFFLOAD_MOVER_TRAINER, kDaemon = SUPEROFFLOAD_MOVER_DAEMON,
                     kDirect = SUPEROFFLOAD_MOVER_DIRECT;
  const auto best = [](std::vector<MoverTiming> timings) { return BestMover(timings, /*kernel_seconds=*/1); };
  EXPECT_EQ(best({{kTrainer, 0.5, 1}}), kTrainer);
  EXPECT_EQ(best({{kTrainer, 0.5, 1}, {kDaemon, 0.5, 1}}), kTrainer) << "a tie";
  EXPECT_EQ(best({{kTrainer, 0.5, 1}, {kDaemon, 0.49, 0.1}}), kTrainer) << "noise, however fast the copies are";
  EXPECT_EQ(best({{kTrainer, 0.5, 1}, {kDaemon, 0.3, 1}, {kDirect, 0.4, 1}}), kDaemon);
  EXPECT_EQ(best({{kTrainer, 0.5, 1}, {kDaemon, 0.3, 1}, {kDirect, 0.1, 1.4}}), kDirect);
  EXPECT_EQ(best({{kTrainer, 0.5, 1}, {kDaemon, 0, 2}}), kTrainer) << "copies that last cost nothing meanwhile";
}

TEST_F(GpuPartsTest, WhatCannotWorkIsNotMeasured) {
  superoffload_gpu_report report{};
  report.staged = 1;
  const kernels::CurrentDevice current(*device_);
  ASSERT_TRUE(ChooseMover(Trial(), SUPEROFFLOAD_MOVER_AUTO, &report).ok());
  EXPECT_EQ(report.mover, static_cast<uint32_t>(SUPEROFFLOAD_MOVER_TRAINER));
  EXPECT_THAT(report.seconds, Each(0.0));
  EXPECT_EQ(probes_, 0);
  const Status refused = ChooseMover(Trial(), SUPEROFFLOAD_MOVER_DIRECT, &report);
  EXPECT_EQ(refused.code, Code::kFailedPrecondition);
  EXPECT_THAT(refused.message, HasSubstr("cannot store"));
}

}  // namespace
}  // namespace superoffload::client
