// Random state and gradients that end where a page begins that must not be touched, for tests of the kernels.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_KERNEL_ARRAYS_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_KERNEL_ARRAYS_H_

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/algorithm.h"
#include "kernels/elements/element_kernels.h"
#include "kernels/elements/scalar_element.h"
#include "tests/support/random_elements.h"

namespace superoffload::kernels {

inline constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

// Zeros that end where the next page begins that must not be touched, at any alignment.
class GuardedBytes {
 public:
  explicit GuardedBytes(size_t bytes) : bytes_(bytes) {
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    mapped_ = (bytes + page - 1) / page * page + page;
    std::vector<std::byte*>& unused = Unused()[mapped_];
    if (unused.empty()) {
      base_ =
          static_cast<std::byte*>(::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      ::mprotect(base_ + mapped_ - page, page, PROT_NONE);
    } else {
      base_ = unused.back();
      unused.pop_back();
    }
    data_ = base_ + mapped_ - page - bytes;
    std::memset(data_, 0, bytes);
  }
  GuardedBytes(const GuardedBytes& other) : GuardedBytes(other.bytes_) { std::memcpy(data_, other.data_, bytes_); }
  ~GuardedBytes() { Unused()[mapped_].push_back(base_); }

  std::byte* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }

 private:
  // By size, for the next that need it: to map and protect pages takes longer than most passes that tests make.
  static std::map<size_t, std::vector<std::byte*>>& Unused() {
    static std::map<size_t, std::vector<std::byte*>> unused;
    return unused;
  }

  size_t bytes_, mapped_;
  std::byte* base_;
  std::byte* data_;
};

// A NaN equals a NaN: the payload of a generated one is the machine's choice.
inline bool SameFloats(const float* a, const float* b, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (std::memcmp(a + i, b + i, sizeof(float)) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  }
  return true;
}

// The same of arrays of a dtype; what is no float must be the same bytes.
inline bool SameElements(ConstElements a, ConstElements b, size_t n) {
  if (a.dtype == DType::kFloat32) {
    return SameFloats(static_cast<const float*>(a.data), static_cast<const float*>(b.data), n);
  }
  if (!IsFloat(a.dtype)) return std::memcmp(a.data, b.data, n * DTypeBytes(a.dtype)) == 0;
  std::vector<float> wide_a(n), wide_b(n);
  kScalarElementKernels.widen(n, a, wide_a.data());
  kScalarElementKernels.widen(n, b, wide_b.data());
  return SameFloats(wide_a.data(), wide_b.data(), n);
}

struct Arrays {
  Arrays(std::span<const StateArray> arrays, size_t n, DType gradient_dtype, DType theta_dtype)
      : n(n),
        gradient_dtype(gradient_dtype),
        theta_dtype(theta_dtype),
        arrays(arrays),
        pending(n * DTypeBytes(gradient_dtype)),
        gradient(n * DTypeBytes(gradient_dtype)),
        theta(n * DTypeBytes(theta_dtype)) {
    for (const StateArray& array : arrays) state_arrays.emplace_back(array.Bytes(n));
  }

  StateView state() const {
    StateView view;
    for (size_t a = 0; a < arrays.size(); ++a) view.arrays[a] = state_arrays[a].data();
    view.rounding = {key, &box, first};
    return view;
  }
  float* floats(size_t array) const { return state_arrays[array].floats(); }
  ConstElements Array(size_t a) const { return {state_arrays[a].data(), arrays[a].dtype}; }
  ConstElements Pending() const { return {pending.data(), gradient_dtype}; }
  ConstElements Gradient() const { return {gradient.data(), gradient_dtype}; }
  MutableElements Theta() const { return {theta.data(), theta_dtype}; }

  void ExpectSameAs(const Arrays& other) const {
    for (size_t a = 0; a < arrays.size(); ++a) {
      EXPECT_TRUE(SameElements(Array(a), other.Array(a), arrays[a].Entries(n))) << a;
    }
    EXPECT_TRUE(SameElements({theta.data(), theta_dtype}, {other.theta.data(), theta_dtype}, n));
  }

  size_t n;
  DType gradient_dtype, theta_dtype;
  std::span<const StateArray> arrays;
  PhiloxKey key{{1, 2}};
  BoxElements box;
  uint64_t first = 0;
  std::vector<GuardedBytes> state_arrays;
  GuardedBytes pending, gradient, theta;
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
    for (size_t a = 0; a < arrays.arrays.size(); ++a) {
      const DType dtype = arrays.arrays[a].dtype;
      for (size_t i = 0; i < arrays.arrays[a].Entries(arrays.n); ++i) {
        const float value = a < 2 ? Value(wild) : std::fabs(Value(wild));  // second moments are not negative
        if (IsFloat(dtype)) {
          StoreElement({arrays.state_arrays[a].data(), dtype}, i, value);
        } else {
          arrays.state_arrays[a].data()[i] = static_cast<std::byte>(Below(256));
        }
      }
    }
  }

  // The elements are a part of those of a random box of a random matrix.
  void FillRounding(Arrays& arrays) {
    arrays.key = {{static_cast<uint32_t>(random_()), static_cast<uint32_t>(random_())}};
    const uint64_t shape[] = {1 + Below(5), 1 + Below(9), 1 + Below(Below(2) ? 9 : 3000)};
    uint64_t global[3], offset[3];
    for (int d = 0; d < 3; ++d) {
      offset[d] = Below(2) * Below(200);
      global[d] = offset[d] + shape[d] + Below(2) * Below(200);
    }
    ASSERT_TRUE(BoxElements::Make(shape, global, offset, &arrays.box));
    arrays.first = Below(3) * Below(1000);
  }

  void FillGradient(const GuardedBytes& bytes, size_t n, DType dtype, bool wild) {
    std::vector<float> values(n);
    for (float& value : values) value = Value(wild);
    kScalarElementKernels.narrow(n, values.data(), {bytes.data(), dtype});
    if (dtype == DType::kFloat32) std::memcpy(bytes.data(), values.data(), n * sizeof(float));  // NaN payloads too
  }

  // Each scalar is its default, or at or near an end of its range.
  StepConstants Step(const Algorithm& algorithm) {
    std::vector<double> scalars;
    for (const Scalar& scalar : algorithm.scalars) {
      const double high = std::isinf(scalar.below) ? scalar.default_value * 10 : scalar.below - 1e-7;
      const double values[] = {scalar.default_value, scalar.default_value, scalar.least, high};
      scalars.push_back(values[Below(4)]);
    }
    const uint64_t steps[] = {1, 2, 1000, 1'000'000'000'000};
    const double scales[] = {1, 1.0 / 65536, -0.37, 1e-20};
    return algorithm.make_constants(scalars.data(), steps[Below(4)], scales[Below(4)]);
  }

 private:
  float Normal() { return test::NearlyNormal(random_); }

  std::mt19937_64 random_;
};

// An algorithm on an instruction set of this machine; those with stages are tested with the engine, which runs them.
struct TestedTarget {
  const Algorithm* algorithm;
  const AlgorithmKernels* kernels;
};

inline std::vector<TestedTarget> EveryTarget() {
  std::vector<TestedTarget> targets;
  for (const Algorithm* algorithm : Algorithms()) {
    if (algorithm->stages != nullptr) continue;
    for (const AlgorithmKernels* kernels : algorithm->supported()) targets.push_back({algorithm, kernels});
  }
  return targets;
}

// The same, but algorithms that share their kernels once.
inline std::vector<TestedTarget> EveryTable() {
  std::vector<TestedTarget> targets;
  for (const TestedTarget& target : EveryTarget()) {
    const auto same = [&](const TestedTarget& other) { return other.kernels == target.kernels; };
    if (std::none_of(targets.begin(), targets.end(), same)) targets.push_back(target);
  }
  return targets;
}

inline std::string TargetName(const ::testing::TestParamInfo<TestedTarget>& info) {
  return std::string(info.param.algorithm->name) + "_" + info.param.kernels->target;
}

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_KERNEL_ARRAYS_H_
