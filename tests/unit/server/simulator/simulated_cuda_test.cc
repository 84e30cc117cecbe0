// The real mover over the simulated driver.
#include "server/simulator/simulated_cuda.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/gpu/mover.h"

namespace superoffload::simulator {
namespace {

using kernels::CudaStatus;
using kernels::Mover;
using ::testing::ElementsAre;

constexpr uint32_t kBuckets = 4;
constexpr uint64_t kBytes = 64;  // of a bucket
constexpr kernels::CudaPointer kGpu = 1 << 20;

class SimulatedCudaTest : public ::testing::Test {
 protected:
  std::unique_ptr<Mover> Open(Mover::Options options = {}) {
    kernels::MoverMemory memory{.gradients = gradients_, .parameters = parameters_, .buckets = {}, .slots = {}};
    for (uint64_t i = 0; i < kBuckets; ++i) {
      memory.buckets.push_back({.gradient_offsets = {2 * i * kBytes, (2 * i + 1) * kBytes},
                                .gradient_bytes = kBytes,
                                .parameters_offset = i * kBytes,
                                .gpu_offset = i * kBytes,
                                .parameters_bytes = kBytes,
                                .chunks = 1});
    }
    memory.slots = {2, kBuckets * kBytes, kBytes, (kBuckets + 2) * kBytes, sizeof(double)};
    options.make_queue = [this](const auto&, const char*) { return cuda_.MakeQueue(); };
    const kernels::CurrentDevice current(*cuda_.device());
    std::unique_ptr<Mover> mover;
    EXPECT_TRUE(Mover::Open(cuda_.device(), kGpu, std::move(memory), std::move(options), &mover).ok());
    return mover;
  }

  // Every copy takes a second; one at a time per stream.
  void BeginCopy(const GpuCopy& copy, std::function<void()> done) {
    const uint64_t at = copy.gpu - kGpu;
    log_.push_back(absl::StrCat(time_.now(), copy.to_gpu ? " up " : " down ", at / kBytes));
    time_.After(1, std::move(done));
  }

  VirtualTime time_;
  std::vector<std::string> log_;
  std::vector<std::byte> gradients_{2 * kBuckets * kBytes}, parameters_{kBuckets * kBytes};
  SimulatedCuda cuda_{&time_,
                      [this](const GpuCopy& copy, std::function<void()> done) { BeginCopy(copy, std::move(done)); },
                      [this](std::function<void()> event) { time_.After(0.25, std::move(event)); }};
};

TEST_F(SimulatedCudaTest, TheMoverMovesInVirtualTime) {
  const std::unique_ptr<Mover> mover = Open();
  {
    const kernels::CurrentDevice current(*cuda_.device());
    const auto arrived = [this](const CudaStatus&, double) { log_.push_back(absl::StrCat(time_.now(), " arrived")); };
    ASSERT_TRUE(mover->CopyDown(3, 1, 0, Mover::What::kGradientAndSums, arrived).ok());
  }
  mover->arrivals().Then([this](const CudaStatus&) { log_.push_back(absl::StrCat(time_.now(), " then")); });
  ASSERT_TRUE(mover->VerdictReached(1, true, false).ok());
  for (const uint32_t bucket : {0, 1, 2}) ASSERT_TRUE(mover->Published(1, bucket, false).ok());
  time_.After(0.5, [&mover] { ASSERT_TRUE(mover->Published(1, 3, false).ok()); });
  EXPECT_THAT(log_, ElementsAre()) << "nothing happens inside of a call";
  time_.Run();
  EXPECT_THAT(log_,
              ElementsAre("0 down 5", "0 up 0", "1 down 6", "1 up 1", "2 up 3", "2.25 arrived", "2.5 then", "3 up 2"));
}

TEST_F(SimulatedCudaTest, AStreamWaitsForWhatItAskedFor) {
  const std::unique_ptr<Mover> mover = Open();
  ASSERT_TRUE(mover->VerdictReached(1, true, false).ok());
  for (const uint32_t bucket : {3, 2, 1, 0}) ASSERT_TRUE(mover->Published(1, bucket, false).ok());
  GpuStream reader(&time_, nullptr);
  {
    const kernels::CurrentDevice current(*cuda_.device());
    ASSERT_TRUE(mover->WaitLanded(0, SimulatedCuda::HandleOf(&reader)).ok());
  }
  reader.HostCall([this] { log_.push_back(absl::StrCat(time_.now(), " read")); });
  time_.Run();
  EXPECT_THAT(log_, ElementsAre("0 up 3", "1 up 2", "2 up 0", "3 read", "3 up 1"));
}

TEST_F(SimulatedCudaTest, NothingOfAProcessThatWasKilledHappens) {
  std::unique_ptr<Mover> mover = Open(
      {.upload_thread = true, .landed = [this](uint64_t, uint32_t, const CudaStatus&) { log_.push_back("landed"); }});
  ASSERT_TRUE(mover->VerdictReached(1, true, false).ok());
  for (const uint32_t bucket : {3, 2, 1, 0}) ASSERT_TRUE(mover->Published(1, bucket, false).ok());
  time_.After(0.75, [&] {
    cuda_.Kill();
    mover.reset();
  });
  time_.Run();
  EXPECT_THAT(log_, ElementsAre("0.25 up 3"));
}

}  // namespace
}  // namespace superoffload::simulator
