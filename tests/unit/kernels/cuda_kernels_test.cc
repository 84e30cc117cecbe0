// The sources of the GPU kernels, run on the host: their indexing and their bits against the CPU's kernels. What the
// GPU makes of them is tests/device's to check.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/adam/adam_element.h"
#include "kernels/cuda/kernels.cuh"
#include "tests/support/random_elements.h"
#include "tests/unit/kernels/fake_cuda.h"
// After fake_cuda.h.
#include "kernels/cuda/pack.cu"
#include "kernels/cuda/resident.cu"

namespace superoffload::kernels {
namespace {

constexpr int kLowest = -40;  // exponent of the smallest gradients
constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

TEST(CudaPackTest, PacksCastsAndSumsAsTheCpuDoes) {
  std::mt19937 random(7);
  for (const DType dtype : kDTypes) {
    for (const DType slot_dtype : {dtype, DType::kFloat32}) {
      // Tensors of many sizes with gaps between them, over chunk borders.
      const uint64_t elements = 2 * kChunkElements + 12345;
      std::vector<std::vector<std::byte>> data;
      std::vector<PackedTensor> tensors;
      std::vector<float> expected(elements, 0.0f);
      for (uint64_t first = 0; first + 64 < elements;) {
        const uint64_t n = std::min<uint64_t>(1 + random() % 30000, elements - first);
        data.push_back(test::RandomElements(n, dtype, kLowest, random));
        tensors.push_back({data.back().data(), first, n});
        for (uint64_t i = 0; i < n; ++i) expected[first + i] = LoadElement({data.back().data(), dtype}, i);
        first = (first + n + 63) / 64 * 64;
      }
      std::vector<std::byte> slot(elements * DTypeBytes(slot_dtype), std::byte{0xff});
      std::vector<double> sums(3, -1);
      const PackArguments arguments{tensors.data(), static_cast<uint32_t>(tensors.size()),
                                    dtype,          {slot.data(), slot_dtype},
                                    elements,       sums.data()};
      LaunchFake(superoffload_pack, 3, kPackThreads, arguments);
      for (uint64_t i = 0; i < elements; ++i) {
        const float actual = LoadElement({slot.data(), slot_dtype}, i);
        ASSERT_EQ(std::memcmp(&actual, &expected[i], sizeof(float)), 0) << "element " << i;
      }
      for (size_t chunk = 0; chunk < sums.size(); ++chunk) {
        const uint64_t first = chunk * kChunkElements;
        const uint64_t n = std::min<uint64_t>(kChunkElements, elements - first);
        EXPECT_EQ(sums[chunk], SumOfSquares(n, {&expected[first], DType::kFloat32})) << "chunk " << chunk;
      }
    }
  }
}

TEST(CudaPackTest, ANonFiniteGradientMakesTheSumNonFinite) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> gradient(3000, 0.5f), slot(3000);
    gradient[2999] = bad;
    const PackedTensor tensor{gradient.data(), 0, gradient.size()};
    double sum = 0;
    LaunchFake(superoffload_pack, 1, kPackThreads,
               PackArguments{&tensor, 1, DType::kFloat32, {slot.data(), DType::kFloat32}, 3000, &sum});
    EXPECT_FALSE(std::isfinite(sum));
  }
}

TEST(CudaPackTest, ABucketWithoutGradientsIsZeroWhateverTheTableStillHolds) {
  std::vector<float> gradient(3000, 0.5f), slot(3000, 1.0f);
  const PackedTensor stale{gradient.data(), 0, gradient.size()};  // of the bucket that had the slot before
  double sum = -1;
  LaunchFake(superoffload_pack, 1, kPackThreads,
             PackArguments{&stale, 0, DType::kFloat32, {slot.data(), DType::kFloat32}, 3000, &sum});
  EXPECT_EQ(sum, 0);
  EXPECT_EQ(slot, std::vector<float>(3000, 0.0f));
}

TEST(CudaResidentTest, HasTheBitsOfTheCpuKernels) {
  std::mt19937 random(11);
  constexpr size_t kElements = 70'001;
  for (const DType dtype : kDTypes) {
    for (const WeightDecay form : {WeightDecay::kDecoupled, WeightDecay::kL2}) {
      std::vector<float> p(kElements, 0.25f), m(kElements), v(kElements);
      std::vector<float> expected_p = p, expected_m = m, expected_v = v;
      std::vector<std::byte> theta(kElements * DTypeBytes(dtype)), expected_theta(theta.size());
      for (uint64_t t = 1; t <= 4; ++t) {
        const std::vector<std::byte> gradient = test::RandomElements(kElements, dtype, kLowest, random);
        const AdamStep step = MakeAdamStep({.lr = 1e-2, .weight_decay = 0.1, .decay_form = form}, t, 0.5);
        LaunchFakeInTurn(
            superoffload_resident_adam, 2, kResidentThreads,
            ResidentArguments{
                {p.data(), m.data(), v.data()}, step, {gradient.data(), dtype}, {theta.data(), dtype}, kElements});
        for (size_t first = 0; first < kElements; first += kChunkElements) {
          const size_t bytes = first * DTypeBytes(dtype);
          Plain(std::min(kChunkElements, kElements - first),
                {expected_p.data() + first, expected_m.data() + first, expected_v.data() + first}, step,
                {gradient.data() + bytes, dtype}, {expected_theta.data() + bytes, dtype});
        }
      }
      EXPECT_EQ(std::memcmp(p.data(), expected_p.data(), kElements * sizeof(float)), 0);
      EXPECT_EQ(std::memcmp(m.data(), expected_m.data(), kElements * sizeof(float)), 0);
      EXPECT_EQ(std::memcmp(v.data(), expected_v.data(), kElements * sizeof(float)), 0);
      EXPECT_EQ(theta, expected_theta);
    }
  }
}

}  // namespace
}  // namespace superoffload::kernels
