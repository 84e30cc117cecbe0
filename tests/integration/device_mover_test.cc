// The daemon's mover against a trainer that asks for what does not exist. With the fake driver (gpu_exactness_test.cc).
#include "server/transport/device_mover.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace superoffload::transport {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr uint32_t kSlots = 2;
constexpr uint64_t kGradientBytes = 8192, kParametersBytes = 8192;
constexpr uint64_t kPieces = 2, kPieceBytes = uint64_t{8} << 20;  // the second one is shorter

class RecordingRings final : public Rings {
 public:
  absl::Status Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares) override {
    absl::MutexLock lock(&mu_);
    calls_.push_back(absl::StrCat("deliver ", entry.opcode, " ", sum_of_squares.value_or(-1)));
    if (entry.opcode == SUPEROFFLOAD_SUBMIT_BEGIN_STEP && entry.step == 13) {
      return absl::FailedPreconditionError("not now");
    }
    return absl::OkStatus();
  }
  void Reject(const superoffload_ring_entry&, const absl::Status& status) override { Record(status.ToString()); }
  void GradientTaken(uint64_t, uint32_t slot) override { Record(absl::StrCat("taken ", slot)); }
  void Landed(uint64_t, uint32_t bucket) override { Record(absl::StrCat("landed ", bucket)); }
  void Fail(const absl::Status& status) override { Record(absl::StrCat("failed ", status.ToString())); }

  void AwaitCalls(size_t count) {
    const auto enough = [this, count] {
      mu_.AssertHeld();
      return calls_.size() >= count;
    };
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&enough));
  }

  std::vector<std::string> Take() {
    absl::MutexLock lock(&mu_);
    return std::exchange(calls_, {});
  }

 private:
  void Record(std::string call) {
    absl::MutexLock lock(&mu_);
    calls_.push_back(std::move(call));
  }

  absl::Mutex mu_;
  std::vector<std::string> calls_ ABSL_GUARDED_BY(mu_);
};

class DeviceMoverTest : public ::testing::Test {
 protected:
  DeviceMoverTest() {
    memory_.gradients = gradients_ = std::as_writable_bytes(std::span(gradient_pages_));
    memory_.parameters = parameters_ = std::as_writable_bytes(std::span(parameter_pages_));
    for (uint64_t i = 0; i < 2; ++i) {
      memory_.buckets.push_back({.gradient_offsets = {2 * i * kGradientBytes, (2 * i + 1) * kGradientBytes},
                                 .gradient_bytes = kGradientBytes,
                                 .parameters_offset = i * kParametersBytes,
                                 .gpu_offset = 0,
                                 .parameters_bytes = kParametersBytes,
                                 .chunks = 1});
    }
    memory_.committed_steps = [] { return 1u; };
    EXPECT_EQ(kernels::GpuDevice::Open(0, &device_).code, 0);
    const kernels::CurrentDevice current(*device_);
    EXPECT_EQ(kernels::SharedGpuMemory::Reserve(device_, kPieceBytes + (1 << 20), kPieces,
                                                kernels::Export::kAsDescriptors, {}, &trainers_)
                  .code,
              0);
    EXPECT_EQ(trainers_->Back(trainers_->bytes()).code, 0);
    EXPECT_EQ(kernels::MakeStream(*device_, &stream_).code, 0);
    EXPECT_EQ(kernels::PinnedMemory::Allocate(device_, trainers_->bytes(), &staging_).code, 0);
    std::memset(staging_.data(), 0, trainers_->bytes());
    Write(0, trainers_->bytes());
    EXPECT_EQ(trainers_->ExportTo(&descriptors_).code, 0);
    EXPECT_EQ(descriptors_.size(), kPieces);
    std::memcpy(good_.device_uuid, device_->uuid().bytes, sizeof(good_.device_uuid));
    good_.slots = kSlots;
    good_.memory_bytes = trainers_->bytes();
    good_.piece_bytes = trainers_->piece_bytes();
    good_.slots_offset = 2 * kParametersBytes;
    good_.slot_bytes = kGradientBytes;
    good_.sums_offset = good_.slots_offset + kSlots * kGradientBytes;
    good_.sums_bytes = 4096;
  }

  ~DeviceMoverTest() override {
    stream_ = {};
    for (const int descriptor : descriptors_) ::close(descriptor);
  }

  absl::StatusOr<std::unique_ptr<DeviceMover>> Open(const superoffload_device_request& request) {
    return DeviceMover::Open(request, descriptors_, memory_, &rings_);
  }

  // The trainer's GPU memory, from and to the same place of `staging_`.
  void Write(uint64_t offset, uint64_t bytes) {
    const kernels::CurrentDevice current(*device_);
    const kernels::CudaDriver& driver = device_->driver();
    EXPECT_EQ(driver.MemcpyHtoDAsync(trainers_->data() + offset, staging_.data() + offset, bytes, stream_.get()), 0);
    EXPECT_EQ(driver.StreamSynchronize(stream_.get()), 0);
  }
  std::byte* Read(uint64_t offset, uint64_t bytes) {
    const kernels::CurrentDevice current(*device_);
    const kernels::CudaDriver& driver = device_->driver();
    EXPECT_EQ(driver.MemcpyDtoHAsync(staging_.data() + offset, trainers_->data() + offset, bytes, stream_.get()), 0);
    EXPECT_EQ(driver.StreamSynchronize(stream_.get()), 0);
    return staging_.data() + offset;
  }

  static superoffload_ring_entry Entry(uint16_t opcode, uint64_t step, uint32_t bucket = 0, uint32_t slot = 0) {
    superoffload_ring_entry entry{};
    entry.opcode = opcode;
    entry.flags = opcode == SUPEROFFLOAD_SUBMIT_GRADIENT_READY ? SUPEROFFLOAD_FLAG_DEVICE_SLOT : 0;
    entry.step = step;
    entry.index = bucket;
    entry.payload.gradient.slot = slot;
    entry.payload.gradient.gpu_offset = (1 - bucket % 2) * kParametersBytes;
    return entry;
  }

  static superoffload_ring_entry ParametersAt(uint64_t offset) {
    superoffload_ring_entry entry = Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 1);
    entry.payload.gradient.gpu_offset = offset;
    return entry;
  }

  struct alignas(4096) Page {
    std::byte bytes[4096];
  };
  std::vector<Page> gradient_pages_{4 * kGradientBytes / sizeof(Page)};
  std::vector<Page> parameter_pages_{2 * kParametersBytes / sizeof(Page)};
  std::span<std::byte> gradients_, parameters_;
  MovedMemory memory_;
  std::shared_ptr<const kernels::GpuDevice> device_;
  std::unique_ptr<kernels::SharedGpuMemory> trainers_;
  std::vector<int> descriptors_;
  kernels::OwnedStream stream_;
  kernels::PinnedMemory staging_;
  superoffload_device_request good_{};
  RecordingRings rings_;
};

TEST_F(DeviceMoverTest, MemoryThatDoesNotHoldTheOptimizerIsRefused) {
  ASSERT_TRUE(Open(good_).ok());
  constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
  const std::pair<uint64_t superoffload_device_request::*, std::vector<uint64_t>> bad[] = {
      {&superoffload_device_request::memory_bytes, {0, kParametersBytes, (10 << 20) + 1, kHuge}},
      {&superoffload_device_request::slots_offset, {10 << 20, kHuge}},
      {&superoffload_device_request::slot_bytes, {0, kGradientBytes - 1, 10 << 20, kHuge, kHuge / 2}},
      {&superoffload_device_request::sums_offset, {10 << 20, kHuge - 7}},
      {&superoffload_device_request::sums_bytes, {0, 10 << 20, kHuge}}};
  for (const auto& [field, values] : bad) {
    for (const uint64_t value : values) {
      superoffload_device_request request = good_;
      request.*field = value;
      EXPECT_EQ(Open(request).status().code(), absl::StatusCode::kInvalidArgument) << value;
    }
  }
  for (const uint32_t slots : {0u, SUPEROFFLOAD_MAX_DEVICE_SLOTS + 1, ~0u}) {
    superoffload_device_request request = good_;
    request.slots = slots;
    EXPECT_EQ(Open(request).status().code(), absl::StatusCode::kInvalidArgument) << slots;
  }
}

TEST_F(DeviceMoverTest, MemoryIsAsManyDescriptorsAsItSays) {
  for (const uint64_t piece_bytes : {uint64_t{0}, uint64_t{1}, kPieceBytes / 2, 2 * kPieceBytes, kPieceBytes + 1}) {
    superoffload_device_request request = good_;
    request.piece_bytes = piece_bytes;
    EXPECT_EQ(Open(request).status().code(), absl::StatusCode::kInvalidArgument) << piece_bytes;
  }
  std::swap(descriptors_.front(), descriptors_.back());  // the last one is the shortest
  const absl::Status swapped = Open(good_).status();     // driver 580.159 takes it for something else than a wrong size
  EXPECT_THAT(swapped.code(), AnyOf(absl::StatusCode::kInvalidArgument, absl::StatusCode::kFailedPrecondition))
      << swapped;
  const int last = descriptors_.back();
  descriptors_.pop_back();
  const absl::Status fewer = Open(good_).status();
  EXPECT_EQ(fewer.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(fewer.message(), HasSubstr("LimitNOFILE="));
  descriptors_.push_back(last);
}

TEST_F(DeviceMoverTest, GarbageForARequestIsAStatus) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 300; ++i) {
    superoffload_device_request request = good_;
    auto* const bytes = reinterpret_cast<uint8_t*>(&request);
    for (uint64_t edits = 1 + random() % 16; edits > 0; --edits) {
      bytes[random() % sizeof(request)] = static_cast<uint8_t>(random());
    }
    const absl::StatusOr<std::unique_ptr<DeviceMover>> mover = Open(request);
    if (!mover.ok()) {
      EXPECT_FALSE(mover.status().message().empty());
    }
  }
}

TEST_F(DeviceMoverTest, WhatDoesNotExistIsRejectedAndNothingIsWritten) {
  struct {
    superoffload_ring_entry entry;
    const char* sentence;
  } const cases[] = {
      {Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 1, 2), "bucket 2 does not exist"},
      {Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 1, ~0u), "does not exist"},
      {Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 1, 0, kSlots), "device slot 2 does not exist"},
      {Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 2), "without an open step"},
      {Entry(SUPEROFFLOAD_SUBMIT_PROBE, 1), "PROBE while step 1 is open"},
      {ParametersAt(trainers_->bytes() - kParametersBytes + 1), "do not lie at byte"},
      {ParametersAt(~uint64_t{0}), "do not lie at byte"},
  };
  std::memset(gradients_.data(), 7, gradients_.size());
  const std::vector<std::byte> before(gradients_.begin(), gradients_.end());
  absl::StatusOr<std::unique_ptr<DeviceMover>> mover = Open(good_);
  ASSERT_TRUE(mover.ok()) << mover.status();
  (*mover)->Submit(Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 1));  // before the step
  (*mover)->Submit(Entry(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, 13));     // which the engine refuses
  (*mover)->Submit(Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 13));
  (*mover)->Submit(Entry(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, 1));
  for (const auto& c : cases) (*mover)->Submit(c.entry);
  (*mover)->Submit(Entry(SUPEROFFLOAD_SUBMIT_ABANDON_STEP, 1));
  (*mover)->Submit(Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 1));  // after it
  mover->reset();
  std::vector<std::string> calls = rings_.Take();
  // A slot is free again whatever became of its gradient: all name slot 0 but one, which does not exist.
  EXPECT_EQ(std::erase(calls, "taken 0"), 3 + std::size(cases) - 1);
  ASSERT_EQ(calls.size(), 5u + std::size(cases) + 2);
  EXPECT_THAT(calls[0], HasSubstr("without an open step"));
  EXPECT_THAT(calls[2], HasSubstr("not now"));
  EXPECT_THAT(calls[3], HasSubstr("without an open step"));
  for (size_t i = 0; i < std::size(cases); ++i) EXPECT_THAT(calls[5 + i], HasSubstr(cases[i].sentence));
  EXPECT_THAT(calls.back(), HasSubstr("without an open step"));
  EXPECT_TRUE(std::ranges::equal(gradients_, before));
}

TEST_F(DeviceMoverTest, ParametersGoToWhereTheirGradientSaid) {
  absl::StatusOr<std::unique_ptr<DeviceMover>> mover = Open(good_);
  ASSERT_TRUE(mover.ok()) << mover.status();
  for (uint64_t bucket = 0; bucket < 2; ++bucket) {
    std::memset(parameters_.data() + bucket * kParametersBytes, static_cast<int>(10 + bucket), kParametersBytes);
  }
  (*mover)->Submit(Entry(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, 1));
  for (uint32_t bucket = 0; bucket < 2; ++bucket) {
    (*mover)->Submit(Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 1, bucket, bucket));
  }
  (*mover)->Submit(Entry(SUPEROFFLOAD_SUBMIT_END_STEP, 1));
  (*mover)->VerdictReached(1, /*commits=*/true, /*speculation_stands=*/true);
  for (uint32_t bucket = 0; bucket < 2; ++bucket) (*mover)->Published(1, bucket, /*speculative=*/false);
  rings_.AwaitCalls(8);  // four are delivered, two taken, two landed
  mover->reset();
  EXPECT_EQ(*Read(0, kParametersBytes), std::byte{11});
  EXPECT_EQ(*Read(kParametersBytes, kParametersBytes), std::byte{10});
}

// A trainer may die while its copies are being timed.
TEST_F(DeviceMoverTest, ItEndsWhenProbesThatAreUnderWayAreAnswered) {
  constexpr int kProbes = 200;
  absl::StatusOr<std::unique_ptr<DeviceMover>> mover = Open(good_);
  ASSERT_TRUE(mover.ok()) << mover.status();
  for (int i = 0; i < kProbes; ++i) (*mover)->Submit(Entry(SUPEROFFLOAD_SUBMIT_PROBE, 1));
  mover->reset();
  std::vector<std::string> calls = rings_.Take();
  EXPECT_EQ(std::erase(calls, "taken 0"), kProbes);
  EXPECT_EQ(std::erase(calls, "landed 0"), kProbes);
  EXPECT_TRUE(calls.empty());
}

TEST_F(DeviceMoverTest, ParametersComeWhenTheStepHasCommittedTheLastBucketFirst) {
  std::memset(parameters_.data(), 5, parameters_.size());
  absl::StatusOr<std::unique_ptr<DeviceMover>> mover = Open(good_);
  ASSERT_TRUE(mover.ok()) << mover.status();
  const auto published = [&](uint64_t step, bool speculative) {
    for (const uint32_t bucket : {0, 1}) (*mover)->Published(step, bucket, speculative);
  };
  const auto expect_unchanged = [&](const char* when) {
    const std::byte* const gpu = Read(0, 2 * kParametersBytes);
    EXPECT_TRUE(std::all_of(gpu, gpu + 2 * kParametersBytes, [](std::byte b) { return b == std::byte{0}; })) << when;
  };
  published(1, /*speculative=*/true);
  expect_unchanged("before the verdict");
  (*mover)->VerdictReached(1, /*commits=*/false, /*speculation_stands=*/false);
  published(1, /*speculative=*/false);  // what the step found, again
  expect_unchanged("after a skip");
  published(2, /*speculative=*/true);
  (*mover)->VerdictReached(2, /*commits=*/true, /*speculation_stands=*/false);
  expect_unchanged("clipped, and not yet published again");
  published(3, /*speculative=*/true);
  (*mover)->VerdictReached(3, /*commits=*/true, /*speculation_stands=*/true);
  rings_.AwaitCalls(2);
  EXPECT_THAT(rings_.Take(), ::testing::ElementsAre("landed 1", "landed 0"));
  EXPECT_EQ(Read(0, 1)[0], std::byte{5});
}

// The engine tells while it holds its lock.
TEST_F(DeviceMoverTest, WhoTellsOfParametersDoesNotWaitForTheDriver) {
  auto* const stall =
      reinterpret_cast<void (*)(const char*)>(::dlsym(::dlopen("libcuda.so.1", RTLD_NOW), "fakeCudaStall"));
  if (stall == nullptr) GTEST_SKIP() << "a real driver cannot be told to wait";
  absl::StatusOr<std::unique_ptr<DeviceMover>> mover = Open(good_);
  ASSERT_TRUE(mover.ok()) << mover.status();
  stall("cuMemcpyHtoDAsync_v2");
  std::future<void> told = std::async(std::launch::async, [&] {
    (*mover)->VerdictReached(1, /*commits=*/true, /*speculation_stands=*/true);
    for (const uint32_t bucket : {0, 1}) (*mover)->Published(1, bucket, /*speculative=*/false);
  });
  const bool returned = told.wait_for(std::chrono::minutes(2)) == std::future_status::ready;
  stall(nullptr);
  EXPECT_TRUE(returned);
  told.wait();
  rings_.AwaitCalls(2);
  EXPECT_THAT(rings_.Take(), ::testing::UnorderedElementsAre("landed 1", "landed 0"));
}

TEST_F(DeviceMoverTest, AGradientIsCopiedOnceAndItsParametersUnlessTheyAreNotWanted) {
  std::memset(staging_.data() + good_.slots_offset + kGradientBytes, 3, kGradientBytes);
  const double sum = 42;
  std::memcpy(staging_.data() + good_.sums_offset + good_.sums_bytes, &sum, sizeof(sum));
  Write(0, trainers_->bytes());
  std::memset(parameters_.data(), 5, parameters_.size());
  absl::StatusOr<std::unique_ptr<DeviceMover>> mover = Open(good_);
  ASSERT_TRUE(mover.ok()) << mover.status();
  (*mover)->Submit(Entry(SUPEROFFLOAD_SUBMIT_BEGIN_STEP, 1));
  (*mover)->Submit(Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 1, 0, 1));
  (*mover)->Submit(Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 1, 0, 1));
  superoffload_ring_entry unwanted = Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, 1, 1, 0);
  unwanted.flags |= SUPEROFFLOAD_FLAG_NO_COPY_BACK;
  (*mover)->Submit(unwanted);
  (*mover)->VerdictReached(1, /*commits=*/true, /*speculation_stands=*/false);
  (*mover)->Published(1, 1, /*speculative=*/false);
  (*mover)->Published(1, 0, /*speculative=*/false);
  rings_.AwaitCalls(8);
  mover->reset();
  std::vector<std::string> calls = rings_.Take();
  EXPECT_THAT(calls,
              ::testing::IsSupersetOf({std::string("taken 1"), std::string("deliver 3 42"), std::string("landed 0")}));
  EXPECT_THAT(calls, ::testing::Contains(HasSubstr("already submitted")));
  EXPECT_THAT(calls, ::testing::Not(::testing::Contains("landed 1")));
  EXPECT_EQ(gradients_[kGradientBytes], std::byte{3}) << "in the slot that the step fills";
  EXPECT_EQ(gradients_[0], std::byte{0});
  const std::byte* const gpu = Read(0, 2 * kParametersBytes);
  EXPECT_EQ(gpu[kParametersBytes], std::byte{5}) << "where its gradient said";
  EXPECT_EQ(gpu[0], std::byte{0});
}

}  // namespace
}  // namespace superoffload::transport
