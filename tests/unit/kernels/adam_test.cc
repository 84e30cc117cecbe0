// Adam is close to Adam in fp64, and has the same bits everywhere. algorithm_test.cc has what holds of every algorithm.
#include "kernels/adam/adam.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "tests/support/kernel_arrays.h"

namespace superoffload::kernels {
namespace {

// 200 steps in fp32 drift from the same steps in fp64 by at most two roundings per step: of the weight and of the decay
// factor.
TEST(AdamTest, IsCloseToAdamInDoublePrecision) {
  const size_t n = 512;
  const Arrays arrays(kAdamW.arrays, n, DType::kFloat32, DType::kFloat32);
  Generator generator(5);
  std::vector<double> p(n), m(n), v(n);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < n; ++i) p[i] = arrays.floats(0)[i] = normal(random);
  const double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.1;
  const double scalars[] = {lr, beta1, beta2, eps, weight_decay};
  auto* gradient = reinterpret_cast<float*>(arrays.pending.data());
  for (uint64_t t = 1; t <= 200; ++t) {
    for (size_t i = 0; i < n; ++i) gradient[i] = normal(random);
    kAdamW.best().plain(0, n, arrays.state(), kAdamW.make_constants(scalars, t, 1), arrays.Pending(), arrays.Theta());
    for (size_t i = 0; i < n; ++i) {
      const double g = gradient[i];
      m[i] = beta1 * m[i] + (1 - beta1) * g;
      v[i] = beta2 * v[i] + (1 - beta2) * g * g;
      const double m_hat = m[i] / (1 - std::pow(beta1, t)), v_hat = v[i] / (1 - std::pow(beta2, t));
      p[i] = p[i] * (1 - lr * weight_decay) - lr * m_hat / (std::sqrt(v_hat) + eps);
    }
  }
  for (size_t i = 0; i < n; ++i) {
    EXPECT_NEAR(arrays.floats(0)[i], p[i], 200 * 2 * 0x1p-24 * std::max(1.0, std::fabs(p[i])));
  }
}

// Gradients so small that the limits of adam.h would take them for zero, which is zero as in torch.optim: where there
// was none, 0 / 0.
TEST(AdamTest, FlushesNothingWithATinyEps) {
  const size_t n = 512;
  for (const double eps : {0.0, 1e-16}) {
    std::vector<Arrays> all;
    for (const AlgorithmKernels* kernels : kAdamW.supported()) {
      const Arrays& arrays = all.emplace_back(kAdamW.arrays, n, DType::kFloat32, DType::kFloat32);
      const double scalars[] = {1e-3, 0.9, 0.999, eps, 0};
      auto* gradient = reinterpret_cast<float*>(arrays.pending.data());
      std::fill_n(arrays.floats(0), n, 1.0f);
      for (uint64_t t = 1; t <= 5; ++t) {
        for (size_t i = 0; i < n; ++i) gradient[i] = i == 7 ? 0.0f : (i % 2 == 0 ? 1e-19f : -1e-17f);
        kernels->plain(0, n, arrays.state(), kAdamW.make_constants(scalars, t, 1), arrays.Pending(), arrays.Theta());
      }
      for (size_t i = 0; i < n; ++i) {
        const double size = i % 2 == 0 ? 1e-19 : 1e-17, sign = i % 2 == 0 ? 1 : -1;
        const double expected = 1 - 5e-3 * sign * size / (size + eps);
        if (i == 7) {
          EXPECT_EQ(std::isnan(arrays.floats(0)[i]), eps == 0) << kernels->target;
        } else {
          EXPECT_NEAR(arrays.floats(0)[i], expected, 2e-5) << kernels->target << " element " << i;
        }
      }
      arrays.ExpectSameAs(all.front());
    }
  }
}

// One fixed workload whose bits must be the same on every machine this is compiled for.
TEST(AdamTest, GoldenHashOfAFixedWorkload) {
  const double scalars[] = {1e-3, 0.9, 0.999, 1e-8, 1e-2};
  for (const AlgorithmKernels* kernels : kAdamW.supported()) {
    uint64_t hash = 14695981039346656037u;
    for (DType dtype : kDTypes) {
      const size_t n = 4099;
      const Arrays arrays(kAdamW.arrays, n, dtype, dtype);
      uint32_t x = 12345;
      const auto next = [&x] {  // xorshift: no library's distribution is portable
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        return static_cast<float>(static_cast<int32_t>(x)) * 0x1p-31f;
      };
      std::vector<float> values(n);
      for (size_t i = 0; i < n; ++i) arrays.floats(0)[i] = next();
      for (uint64_t t = 1; t <= 20; ++t) {
        std::swap_ranges(arrays.pending.data(), arrays.pending.data() + n * DTypeBytes(dtype), arrays.gradient.data());
        for (float& value : values) value = next() * 0.01f;
        kScalarElementKernels.narrow(n, values.data(), {arrays.gradient.data(), dtype});
        if (dtype == DType::kFloat32) std::memcpy(arrays.gradient.data(), values.data(), 4 * n);
        NormLanes norm;
        kernels->absorb_and_publish(0, n, arrays.state(), kAdamW.make_constants(scalars, t, 0.5), arrays.Pending(),
                                    kAdamW.make_constants(scalars, t + 1, 1), arrays.Gradient(), arrays.Theta(), &norm,
                                    nullptr);
        hash = (hash ^ std::bit_cast<uint64_t>(norm.Sum())) * 1099511628211u;
      }
      const std::pair<const std::byte*, size_t> outputs[] = {{arrays.state_arrays[0].data(), 4 * n},
                                                             {arrays.state_arrays[1].data(), 4 * n},
                                                             {arrays.state_arrays[2].data(), 4 * n},
                                                             {arrays.theta.data(), n * DTypeBytes(dtype)}};
      for (const auto& [bytes, count] : outputs) {
        for (size_t i = 0; i < count; ++i) hash = (hash ^ static_cast<uint64_t>(bytes[i])) * 1099511628211u;
      }
    }
    EXPECT_EQ(hash, 3219593499223417110u) << kernels->target;
  }
}

}  // namespace
}  // namespace superoffload::kernels
