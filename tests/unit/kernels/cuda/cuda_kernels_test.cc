// The sources of the GPU kernels, run on the host: their indexing and their bits against the CPU's kernels. What the
// GPU makes of them is tests/device's to check.
#include "kernels/cuda/cuda_kernels.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/algorithm.h"
#include "tests/support/random_elements.h"
#include "tests/unit/kernels/cuda/fake_cuda.h"
// After fake_cuda.h.
#include "kernels/cuda/pack.cu"
#include "kernels/cuda/product.cu"
#include "kernels/cuda/resident.cu"

namespace superoffload::kernels {
namespace {

constexpr int kLowest = -40;  // exponent of the smallest gradients
constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

struct PackKernel {
  DType from, to;
  void (*run)(PackArguments);
};
constexpr PackKernel kPack[] = {
#define X(kernel, from, to) {DType::from, DType::to, kernel},
    SUPEROFFLOAD_FOR_EACH_PACK_KERNEL(X)
#undef X
};

// A bucket and the tensors that are packed into it.
class PackedBucket {
 public:
  PackedBucket(const PackKernel& kernel, uint64_t elements)
      : kernel_(kernel), elements_(elements), expected(elements, 0.0f) {}

  // `shift` bytes from where its memory is aligned.
  void Add(uint64_t first, uint64_t n, std::mt19937& random, size_t shift = 0) {
    std::vector<std::byte> data = test::RandomElements(n, kernel_.from, kLowest, random);
    data.insert(data.begin(), shift, std::byte{});
    data_.push_back(std::move(data));
    const std::byte* const begin = data_.back().data() + shift;
    tensors_.push_back({begin, first, n});
    for (uint64_t i = 0; i < n; ++i) {
      const float value = LoadElement({begin, kernel_.from}, i);
      const float held = held_.empty() ? 0 : LoadElement({held_.data(), kernel_.to}, first + i);
      StoreElement({&expected[first + i], kernel_.to}, 0, held_.empty() ? value : held + value);
      expected[first + i] = LoadElement({&expected[first + i], kernel_.to}, 0);
    }
  }

  // What comes is added to that from now on.
  void Hold(std::mt19937& random) {
    held_ = test::RandomElements(elements_, kernel_.to, kLowest, random);
    for (uint64_t i = 0; i < elements_; ++i) expected[i] = LoadElement({held_.data(), kernel_.to}, i);
  }

  void ExpectPacked(unsigned blocks = 1) {
    const size_t chunks = (elements_ + kChunkElements - 1) / kChunkElements;
    std::vector<std::byte> slot(elements_ * DTypeBytes(kernel_.to), std::byte{0xff});
    if (!held_.empty()) slot = held_;
    std::vector<double> sums(chunks, -1);
    std::vector<uint32_t> begins(chunks + 1);
    IndexChunks(tensors_, elements_, begins.data());
    LaunchFake(kernel_.run, blocks, kPackThreads,
               PackArguments{{tensors_.data(), begins.data(), static_cast<uint32_t>(tensors_.size())},
                             kernel_.from,
                             {slot.data(), kernel_.to},
                             elements_,
                             sums.data(),
                             !held_.empty()});
    for (uint64_t i = 0; i < elements_; ++i) {
      const float actual = LoadElement({slot.data(), kernel_.to}, i);
      ASSERT_EQ(std::memcmp(&actual, &expected[i], sizeof(float)), 0) << "element " << i;
    }
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
      const uint64_t first = chunk * kChunkElements;
      const uint64_t n = std::min<uint64_t>(kChunkElements, elements_ - first);
      EXPECT_EQ(sums[chunk], SumOfSquares(n, {&expected[first], DType::kFloat32})) << "chunk " << chunk;
    }
  }

 private:
  const PackKernel kernel_;
  const uint64_t elements_;
  std::vector<std::vector<std::byte>> data_;
  std::vector<std::byte> held_;
  std::vector<PackedTensor> tensors_;

 public:
  std::vector<float> expected;
};

TEST(CudaPackTest, PacksCastsAndSumsAsTheCpuDoes) {
  std::mt19937 random(7);
  for (const PackKernel& kernel : kPack) {
    // Tensors of many sizes with gaps between them, over chunk borders.
    const uint64_t elements = 2 * kChunkElements + 12345;
    PackedBucket bucket(kernel, elements);
    for (uint64_t first = 0; first + 64 < elements;) {
      const uint64_t n = std::min<uint64_t>(1 + random() % 30000, elements - first);
      bucket.Add(first, n, random);
      first = (first + n + 63) / 64 * 64;
    }
    bucket.ExpectPacked();
  }
}

TEST(CudaPackTest, TensorsThatAreNotAlignedAreCopiedElementByElement) {
  std::mt19937 random(8);
  for (const PackKernel& kernel : kPack) {
    PackedBucket bucket(kernel, kChunkElements);
    bucket.Add(8, 30000, random);  // where it begins no tile does
    bucket.Add(30016, 30001, random, DTypeBytes(kernel.from));
    bucket.ExpectPacked();
  }
}

TEST(CudaPackTest, AddsToWhatTheSlotHolds) {
  std::mt19937 random(11);
  for (const PackKernel& kernel : kPack) {
    PackedBucket bucket(kernel, 2 * kChunkElements + 12345);
    bucket.Hold(random);
    bucket.Add(0, kChunkElements + 4096, random);
    bucket.Add(kChunkElements + 4160, 999, random, DTypeBytes(kernel.from));  // between gaps
    bucket.ExpectPacked(2);
  }
}

TEST(CudaPackTest, AChunkOfMoreTensorsThanAreCachedIsPackedAllTheSame) {
  std::mt19937 random(9);
  PackedBucket bucket(kPack[0], kChunkElements + 100);
  for (uint64_t first = 0; first < kChunkElements + 64; first += 64) bucket.Add(first, 1 + random() % 64, random);
  bucket.ExpectPacked();
}

TEST(CudaPackTest, AnyNumberOfBlocksGivesTheSameBits) {
  std::mt19937 random(10);
  const uint64_t elements = (2 * kPackRows + 1) * kChunkElements + 4321;
  for (const unsigned blocks : {1, 2, 3, 5}) {
    PackedBucket bucket(kPack[0], elements);
    bucket.Add(0, kChunkElements + 17, random);
    bucket.Add(2 * kChunkElements + 64, 5 * kChunkElements, random);  // the rows' first tensors differ
    bucket.Add(elements - 3 * kChunkElements / 2, 3 * kChunkElements / 2, random);
    bucket.ExpectPacked(blocks);
  }
}

TEST(CudaPackTest, BlocksAreEnoughToOutrunTheCopyDownAndNoMore) {
  constexpr double kLink = 300e9, kClock = 1.98e9;
  const uint64_t blocks = PackBlocks(kLink, kClock, DType::kBFloat16);
  EXPECT_EQ(blocks, 76u) << "fewer than an H100's 132 multiprocessors";
  EXPECT_EQ(PackBlocks(kLink, kClock, DType::kFloat32), (blocks + 1) / 2) << "elements of twice the bytes";
  EXPECT_EQ(PackBlocks(kLink / 10, kClock, DType::kBFloat16), 8u);
  EXPECT_GT(PackBlocks(kLink, 0, DType::kBFloat16), uint64_t{1} << 32) << "an unknown clock";
}

TEST(CudaPackTest, ANonFiniteGradientMakesTheSumNonFinite) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> gradient(5000, 0.5f), slot(5000);
    gradient[2999] = bad;
    const PackedTensor tensor{gradient.data(), 0, gradient.size()};
    const uint32_t begins[] = {0, 1};
    double sum = 0;
    LaunchFake(superoffload_pack_fp32_to_fp32, 1, kPackThreads,
               PackArguments{{&tensor, begins, 1}, DType::kFloat32, {slot.data(), DType::kFloat32}, 5000, &sum});
    EXPECT_FALSE(std::isfinite(sum));
  }
}

TEST(CudaPackTest, ABucketWithoutGradientsIsZeroWhateverTheTableStillHolds) {
  std::vector<float> gradient(3000, 0.5f), slot(3000, 1.0f);
  const PackedTensor stale{gradient.data(), 0, gradient.size()};  // of the bucket that had the slot before
  const uint32_t begins[] = {0, 1};
  double sum = -1;
  LaunchFake(superoffload_pack_fp32_to_fp32, 1, kPackThreads,
             PackArguments{{&stale, begins, 0}, DType::kFloat32, {slot.data(), DType::kFloat32}, 3000, &sum});
  EXPECT_EQ(sum, 0);
  EXPECT_EQ(slot, std::vector<float>(3000, 0.0f));
}

TEST(CudaProductTest, MultipliesMatrices) {
  constexpr uint32_t kN = 2 * kProductTile;
  std::vector<float> a(kN * kN), b(kN * kN), c(kN * kN);
  for (uint32_t i = 0; i < kN * kN; ++i) {
    a[i] = static_cast<float>(i % 7);
    b[i] = static_cast<float>(i % 5);
  }
  LaunchFake(superoffload_product, 4, kProductTile * kProductTile, ProductArguments{a.data(), b.data(), c.data(), kN});
  for (uint32_t row = 0; row < kN; ++row) {
    for (uint32_t column = 0; column < kN; ++column) {
      float expected = 0;
      for (uint32_t k = 0; k < kN; ++k) expected += a[row * kN + k] * b[k * kN + column];
      ASSERT_EQ(c[row * kN + column], expected) << row << ", " << column;
    }
  }
}

using ResidentKernel = void (*)(ResidentArguments);

ResidentKernel FindResident(std::string_view name) {
#define X(kernel, ...) \
  if (name == #kernel) return kernel;
  SUPEROFFLOAD_FOR_EACH_RESIDENT_KERNEL(X)
#undef X
  return nullptr;
}

// Each in its own format; a range that begins at `first`, of a shard of a tensor.
StateView View(const Algorithm& algorithm, std::vector<std::vector<std::byte>>& arrays, uint64_t first,
               const BoxElements* box) {
  StateView view;
  for (size_t a = 0; a < arrays.size(); ++a) view.arrays[a] = arrays[a].data() + algorithm.arrays[a].Bytes(first);
  view.rounding = {{{5, 6}}, box, first};
  return view;
}

TEST(CudaResidentTest, HasTheBitsOfTheCpuKernels) {
  std::mt19937 random(11);
  constexpr uint64_t kRows = 280, kColumns = 250, kElements = kRows * kColumns;
  static_assert(kElements % 256 != 0 && kElements > kChunkElements);
  BoxElements box;
  ASSERT_TRUE(BoxElements::Make({{kRows, kColumns}}, {{300, 1000}}, {{7, 99}}, &box));
  for (const Algorithm* algorithm : Algorithms()) {
    if (algorithm->resident_kernel == nullptr) continue;
    SCOPED_TRACE(algorithm->name);
    const ResidentKernel kernel = FindResident(algorithm->resident_kernel);
    ASSERT_NE(kernel, nullptr);
    const bool waits = algorithm->block_elements > 1;  // its threads, for each other
    for (const DType dtype : kDTypes) {
      std::vector<std::vector<std::byte>> state;
      for (const StateArray& array : algorithm->arrays) state.emplace_back(array.Bytes(kElements));
      for (size_t i = 0; i < kElements; ++i) {
        StoreElement({state[0].data(), algorithm->arrays[0].dtype}, i, 0.25f);
      }
      std::vector<std::vector<std::byte>> expected = state;
      std::vector<std::byte> theta(kElements * DTypeBytes(dtype)), expected_theta(theta.size());
      std::vector<double> scalars = algorithm->DefaultScalars();
      scalars.back() = 0.1;  // weight decay, in either form
      for (uint64_t t = 1; t <= 4; ++t) {
        const std::vector<std::byte> gradient = test::RandomElements(kElements, dtype, kLowest, random);
        const StepConstants constants = algorithm->make_constants(scalars.data(), t, 0.5);
        ResidentArguments arguments{View(*algorithm, state, 0, nullptr),
                                    constants,
                                    {gradient.data(), dtype},
                                    {theta.data(), dtype},
                                    kElements,
                                    box};
        waits ? LaunchFake(kernel, 2, t == 1 ? 8 : 1, arguments)
              : LaunchFakeInTurn(kernel, 2, kResidentThreads, arguments);
        for (size_t first = 0; first < kElements; first += kChunkElements) {
          const size_t bytes = first * DTypeBytes(dtype);
          algorithm->best().plain(0, std::min<size_t>(kChunkElements, kElements - first),
                                  View(*algorithm, expected, first, &box), constants, {gradient.data() + bytes, dtype},
                                  {expected_theta.data() + bytes, dtype});
        }
      }
      EXPECT_EQ(state, expected);
      EXPECT_EQ(theta, expected_theta);
    }
  }
}

std::atomic<bool> first_block_was_here = false;

// As a scan that looks back does: fine where blocks run in order, or all at once.
void WaitForTheBlockBefore(int) {
  if (blockIdx.x == 0) first_block_was_here = true;
  while (!first_block_was_here) std::this_thread::yield();
}

TEST(FakeCudaDeathTest, ABlockThatWaitsForAnotherIsFoundOut) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        fake_block_patience = std::chrono::milliseconds(50);
        LaunchFakeInTurn(WaitForTheBlockBefore, 2, 1, 0);
      },
      "block 1 of 2 does not end");
  EXPECT_DEATH(
      {
        fake_block_patience = std::chrono::milliseconds(50);
        LaunchFake(WaitForTheBlockBefore, 3, 2, 0);
      },
      "block 2 of 3 does not end");
  LaunchFake(WaitForTheBlockBefore, 1, 2, 0);
}

}  // namespace
}  // namespace superoffload::kernels
