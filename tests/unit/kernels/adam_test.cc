// Every instruction set equals the scalar reference bit for bit, the deferred commit equals the plain step, and both
// are close to Adam in fp64.
#include "kernels/adam/adam.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/adam/adam_kernels.h"
#include "kernels/adam/undo_slot.h"

namespace superoffload::kernels {
namespace {

constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

// Ends where the next page begins that must not be touched, at any alignment.
class GuardedBytes {
 public:
  explicit GuardedBytes(size_t bytes) : bytes_(bytes) {
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    mapped_ = (bytes + page - 1) / page * page + page;
    base_ =
        static_cast<std::byte*>(::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ::mprotect(base_ + mapped_ - page, page, PROT_NONE);
    data_ = base_ + mapped_ - page - bytes;
  }
  GuardedBytes(const GuardedBytes& other) : GuardedBytes(other.bytes_) { std::memcpy(data_, other.data_, bytes_); }
  ~GuardedBytes() { ::munmap(base_, mapped_); }

  std::byte* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }

 private:
  size_t bytes_, mapped_;
  std::byte* base_;
  std::byte* data_;
};

// A NaN equals a NaN: the payload of a generated one is the machine's choice.
bool SameFloats(const float* a, const float* b, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (std::memcmp(a + i, b + i, sizeof(float)) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  }
  return true;
}

struct Arrays {
  Arrays(size_t n, DType gradient_dtype, DType theta_dtype)
      : n(n),
        gradient_dtype(gradient_dtype),
        theta_dtype(theta_dtype),
        p(4 * n),
        m(4 * n),
        v(4 * n),
        pending(n * DTypeBytes(gradient_dtype)),
        gradient(n * DTypeBytes(gradient_dtype)),
        theta(n * DTypeBytes(theta_dtype)) {}

  AdamState state() const { return {p.floats(), m.floats(), v.floats()}; }
  ConstElements Pending() const { return {pending.data(), gradient_dtype}; }
  ConstElements Gradient() const { return {gradient.data(), gradient_dtype}; }
  MutableElements Theta() const { return {theta.data(), theta_dtype}; }

  void ExpectSameAs(const Arrays& other) const {
    EXPECT_TRUE(SameFloats(p.floats(), other.p.floats(), n));
    EXPECT_TRUE(SameFloats(m.floats(), other.m.floats(), n));
    EXPECT_TRUE(SameFloats(v.floats(), other.v.floats(), n));
    if (theta_dtype == DType::kFloat32) {
      EXPECT_TRUE(SameFloats(theta.floats(), other.theta.floats(), n));
      return;
    }
    std::vector<float> a(n), b(n);
    kScalarKernels.widen(n, {theta.data(), theta_dtype}, a.data());
    kScalarKernels.widen(n, {other.theta.data(), theta_dtype}, b.data());
    EXPECT_TRUE(SameFloats(a.data(), b.data(), n));
  }

  size_t n;
  DType gradient_dtype, theta_dtype;
  GuardedBytes p, m, v, pending, gradient, theta;
};

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed) {}

  uint64_t Below(uint64_t limit) { return random_() % limit; }

  // Mostly ordinary values over many magnitudes, some zeros, subnormals, and with `wild` infinities, NaNs and any bits
  // at all.
  float Value(bool wild) {
    switch (Below(wild ? 12 : 8)) {
      case 0:
        return 0.0f;
      case 1:
        return std::ldexp(Normal(), -130);
      case 2:
        return std::ldexp(Normal(), -60 - static_cast<int>(Below(6)));
      case 8:
        return std::numeric_limits<float>::infinity();
      case 9:
        return -std::numeric_limits<float>::infinity();
      case 10:
        return std::numeric_limits<float>::quiet_NaN();
      case 11:
        return std::bit_cast<float>(static_cast<uint32_t>(random_()));
      default:
        return std::ldexp(Normal(), static_cast<int>(Below(24)) - 16);
    }
  }

  void FillState(const Arrays& arrays, bool wild) {
    for (size_t i = 0; i < arrays.n; ++i) {
      arrays.p.floats()[i] = Value(wild);
      arrays.m.floats()[i] = Value(wild);
      arrays.v.floats()[i] = std::fabs(Value(wild));
    }
  }

  void FillGradient(const GuardedBytes& bytes, size_t n, DType dtype, bool wild) {
    std::vector<float> values(n);
    for (float& value : values) value = Value(wild);
    kScalarKernels.narrow(n, values.data(), {bytes.data(), dtype});
    if (dtype == DType::kFloat32) std::memcpy(bytes.data(), values.data(), n * sizeof(float));  // NaN payloads too
  }

  AdamStep Step() {
    const double betas1[] = {0.0, 0.9, 0.95, 1 - 1e-7}, betas2[] = {0.0, 0.95, 0.999, 1 - 1e-7};
    const uint64_t steps[] = {1, 2, 1000, 1'000'000'000'000};
    const double scales[] = {1, 1.0 / 65536, -0.37, 1e-20};
    return MakeAdamStep({.lr = 1e-3,
                         .beta1 = betas1[Below(4)],
                         .beta2 = betas2[Below(4)],
                         .eps = Below(2) ? 1e-8 : 1e-15,
                         .weight_decay = Below(2) ? 0.1 : 0,
                         .decay_form = Below(2) ? WeightDecay::kDecoupled : WeightDecay::kL2},
                        steps[Below(4)], scales[Below(4)]);
  }

 private:
  float Normal() { return normal_(random_); }

  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
};

class EveryTargetTest : public ::testing::TestWithParam<const AdamKernels*> {
 protected:
  // Runs both on copies of the same random input of each length and dtype, and compares every bit.
  template <typename Run>
  void Compare(Run run) {
    const uint64_t seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    Generator generator(seed);
    for (int round = 0; round < 300 && !HasFailure(); ++round) {
      const size_t n = 1 + (round < 100 ? static_cast<size_t>(round) : generator.Below(3000));
      const bool wild = round % 3 == 0;
      Arrays expected(n, kDTypes[generator.Below(3)], kDTypes[generator.Below(3)]);
      generator.FillState(expected, wild);
      generator.FillGradient(expected.pending, n, expected.gradient_dtype, wild);
      generator.FillGradient(expected.gradient, n, expected.gradient_dtype, wild);
      const Arrays actual(expected);
      const AdamStep absorb = generator.Step(), publish = generator.Step();
      const double expected_sum = run(kScalarKernels, expected, absorb, publish);
      const double actual_sum = run(*GetParam(), actual, absorb, publish);
      actual.ExpectSameAs(expected);
      EXPECT_TRUE(expected_sum == actual_sum || (std::isnan(expected_sum) && std::isnan(actual_sum)))
          << expected_sum << " " << actual_sum;
    }
  }
};

TEST_P(EveryTargetTest, Deferred) {
  Compare([](const AdamKernels& k, const Arrays& a, const AdamStep& absorb, const AdamStep& publish) {
    return k.deferred(a.n, a.state(), absorb, a.Pending(), publish, a.Gradient(), a.Theta(), nullptr);
  });
}

TEST_P(EveryTargetTest, SavingOldStateChangesNothing) {
  const auto slot = std::make_unique<UndoSlot>();
  Compare([&](const AdamKernels& k, const Arrays& a, const AdamStep& absorb, const AdamStep& publish) {
    BeginUndo(*slot, 1);
    const double sum = k.deferred(a.n, a.state(), absorb, a.Pending(), publish, a.Gradient(), a.Theta(), slot.get());
    EXPECT_EQ((slot->torn >> 16) + (slot->torn & 0xffff), a.n);
    BeginUndo(*slot, 2);
    k.settle(a.n, a.state(), publish, a.Gradient(), slot.get(), 0);
    return sum;
  });
}

TEST_P(EveryTargetTest, Republish) {
  Compare([](const AdamKernels& k, const Arrays& a, const AdamStep&, const AdamStep& publish) {
    return k.republish(a.n, a.state(), publish, a.Gradient(), a.Theta());
  });
}

TEST_P(EveryTargetTest, Settle) {
  Compare([](const AdamKernels& k, const Arrays& a, const AdamStep& absorb, const AdamStep&) {
    k.settle(a.n, a.state(), absorb, a.Pending(), nullptr, 0);
    return 0.0;
  });
}

TEST_P(EveryTargetTest, Plain) {
  Compare([](const AdamKernels& k, const Arrays& a, const AdamStep& absorb, const AdamStep&) {
    k.plain(a.n, a.state(), absorb, a.Pending(), a.Theta());
    return 0.0;
  });
}

TEST_P(EveryTargetTest, NarrowAndSumOfSquares) {
  Compare([](const AdamKernels& k, const Arrays& a, const AdamStep&, const AdamStep&) {
    k.narrow(a.n, a.p.floats(), a.Theta());
    return k.sum_of_squares(a.n, a.Gradient());
  });
}

TEST_P(EveryTargetTest, RepublishOnlyReadsState) {
  Arrays arrays(1000, DType::kBFloat16, DType::kBFloat16);
  Generator generator(7);
  generator.FillState(arrays, false);
  generator.FillGradient(arrays.gradient, arrays.n, DType::kBFloat16, false);
  const Arrays before(arrays);
  GetParam()->republish(arrays.n, arrays.state(), generator.Step(), arrays.Gradient(), arrays.Theta());
  EXPECT_EQ(std::memcmp(arrays.p.data(), before.p.data(), 4 * arrays.n), 0);
  EXPECT_EQ(std::memcmp(arrays.m.data(), before.m.data(), 4 * arrays.n), 0);
  EXPECT_EQ(std::memcmp(arrays.v.data(), before.v.data(), 4 * arrays.n), 0);
}

// 100 steps of the deferred commit, some clipped, some skipped, against the plain step.
TEST_P(EveryTargetTest, DeferredCommitEqualsPlainSteps) {
  const AdamKernels& k = *GetParam();
  for (DType dtype : kDTypes) {
    const size_t n = 1003;
    Generator generator(11);
    Arrays plain(n, dtype, dtype);
    generator.FillState(plain, false);
    std::fill_n(plain.m.floats(), n, 0.0f);
    std::fill_n(plain.v.floats(), n, 0.0f);
    const Arrays deferred(plain);
    const AdamHyperparameters hyperparameters{.lr = 1e-2};
    bool has_pending = false;
    AdamStep absorb;
    for (uint64_t t = 1, attempt = 0; attempt < 100; ++attempt) {
      generator.FillGradient(deferred.gradient, n, dtype, false);
      const AdamStep speculative = MakeAdamStep(hyperparameters, t, 1);
      if (has_pending) {
        k.deferred(n, deferred.state(), absorb, deferred.Pending(), speculative, deferred.Gradient(), deferred.Theta(),
                   nullptr);
      } else {
        k.republish(n, deferred.state(), speculative, deferred.Gradient(), deferred.Theta());
      }
      has_pending = false;
      if (generator.Below(5) == 0) {  // skipped
        k.narrow(n, deferred.p.floats(), deferred.Theta());
        continue;
      }
      const double clip = generator.Below(2) ? 1 : 0.25;
      absorb = MakeAdamStep(hyperparameters, t++, clip);
      if (clip != 1) k.republish(n, deferred.state(), absorb, deferred.Gradient(), deferred.Theta());
      k.plain(n, plain.state(), absorb, deferred.Gradient(), plain.Theta());
      ASSERT_EQ(std::memcmp(deferred.theta.data(), plain.theta.data(), n * DTypeBytes(dtype)), 0) << attempt;
      std::memcpy(deferred.pending.data(), deferred.gradient.data(), n * DTypeBytes(dtype));
      has_pending = true;
    }
    if (has_pending) k.settle(n, deferred.state(), absorb, deferred.Pending(), nullptr, 0);
    deferred.ExpectSameAs(plain);
  }
}

// Parameters that stop getting gradients: their moments must not linger among the subnormals, on any instruction set.
TEST_P(EveryTargetTest, MomentsWithoutGradientsReachZero) {
  Arrays arrays(64, DType::kFloat32, DType::kFloat32);
  Generator generator(3);
  generator.FillState(arrays, false);
  std::memset(arrays.pending.data(), 0, arrays.n * 4);
  for (uint64_t t = 1; t <= 3000; ++t) {
    GetParam()->settle(arrays.n, arrays.state(), MakeAdamStep({.beta2 = 0.95}, t, 1), arrays.Pending(), nullptr, 0);
  }
  for (size_t i = 0; i < arrays.n; ++i) {
    EXPECT_EQ(arrays.m.floats()[i], 0.0f);
    EXPECT_EQ(arrays.v.floats()[i], 0.0f);
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryTargetTest, ::testing::ValuesIn(SupportedAdamKernels()),
                         [](const auto& info) { return std::string(info.param->target); });

// 200 steps in fp32 drift from the same steps in fp64 by at most two roundings per step: of the weight and of the decay
// factor.
TEST(AdamTest, IsCloseToAdamInDoublePrecision) {
  const size_t n = 512;
  Arrays arrays(n, DType::kFloat32, DType::kFloat32);
  Generator generator(5);
  std::vector<double> p(n), m(n), v(n);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < n; ++i) p[i] = arrays.p.floats()[i] = normal(random);
  const AdamHyperparameters h{.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1};
  auto* gradient = reinterpret_cast<float*>(arrays.pending.data());
  for (uint64_t t = 1; t <= 200; ++t) {
    for (size_t i = 0; i < n; ++i) gradient[i] = normal(random);
    Plain(n, arrays.state(), MakeAdamStep(h, t, 1), arrays.Pending(), arrays.Theta());
    for (size_t i = 0; i < n; ++i) {
      const double g = gradient[i];
      m[i] = h.beta1 * m[i] + (1 - h.beta1) * g;
      v[i] = h.beta2 * v[i] + (1 - h.beta2) * g * g;
      const double m_hat = m[i] / (1 - std::pow(h.beta1, t)), v_hat = v[i] / (1 - std::pow(h.beta2, t));
      p[i] = p[i] * (1 - h.lr * h.weight_decay) - h.lr * m_hat / (std::sqrt(v_hat) + h.eps);
    }
  }
  for (size_t i = 0; i < n; ++i) {
    EXPECT_NEAR(arrays.p.floats()[i], p[i], 200 * 2 * 0x1p-24 * std::max(1.0, std::fabs(p[i])));
  }
}

// One fixed workload whose bits must be the same on every machine this is compiled for.
TEST(AdamTest, GoldenHashOfAFixedWorkload) {
  for (const AdamKernels* kernels : SupportedAdamKernels()) {
    uint64_t hash = 14695981039346656037u;
    for (DType dtype : kDTypes) {
      const size_t n = 4099;
      Arrays arrays(n, dtype, dtype);
      uint32_t x = 12345;
      const auto next = [&x] {  // xorshift: no library's distribution is portable
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        return static_cast<float>(static_cast<int32_t>(x)) * 0x1p-31f;
      };
      std::vector<float> values(n);
      for (size_t i = 0; i < n; ++i) arrays.p.floats()[i] = next();
      for (uint64_t t = 1; t <= 20; ++t) {
        std::swap_ranges(arrays.pending.data(), arrays.pending.data() + n * DTypeBytes(dtype), arrays.gradient.data());
        for (float& value : values) value = next() * 0.01f;
        kScalarKernels.narrow(n, values.data(), {arrays.gradient.data(), dtype});
        if (dtype == DType::kFloat32) std::memcpy(arrays.gradient.data(), values.data(), 4 * n);
        const double sum = kernels->deferred(n, arrays.state(), MakeAdamStep({}, t, 0.5), arrays.Pending(),
                                             MakeAdamStep({}, t + 1, 1), arrays.Gradient(), arrays.Theta(), nullptr);
        hash = (hash ^ std::bit_cast<uint64_t>(sum)) * 1099511628211u;
      }
      const std::pair<const std::byte*, size_t> outputs[] = {{arrays.p.data(), 4 * n},
                                                             {arrays.m.data(), 4 * n},
                                                             {arrays.v.data(), 4 * n},
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
