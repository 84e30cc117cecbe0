// Of every algorithm: each instruction set equals the scalar reference bit for bit, and the deferred commit equals the
// plain step.
#include "kernels/algorithm.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/undo_slot.h"
#include "tests/support/kernel_arrays.h"

namespace superoffload::kernels {
namespace {

class EveryTargetTest : public ::testing::TestWithParam<TestedTarget> {
 protected:
  const Algorithm& algorithm() const { return *GetParam().algorithm; }
  const AlgorithmKernels& kernels() const { return *GetParam().kernels; }
  Arrays MakeArrays(size_t n, DType gradient_dtype, DType theta_dtype) const {
    return Arrays(algorithm().arrays, n, gradient_dtype, theta_dtype);
  }

  // Where a range may begin.
  size_t alignment() const { return std::max<size_t>(kRangeAlignment, algorithm().block_elements); }

  // Runs both on copies of the same random input of each length and dtype, and compares every bit.
  template <typename Run>
  void Compare(Run run) {
    const uint64_t seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    Generator generator(seed);
    for (int round = 0; round < 300 && !HasFailure(); ++round) {
      const size_t n = 1 + (round < 100 ? static_cast<size_t>(round) : generator.Below(1100));
      const bool wild = round % 3 == 0;
      Arrays expected = MakeArrays(n, kDTypes[generator.Below(3)], kDTypes[generator.Below(3)]);
      generator.FillRounding(expected);
      generator.FillState(expected, wild);
      generator.FillGradient(expected.pending, n, expected.gradient_dtype, wild);
      generator.FillGradient(expected.gradient, n, expected.gradient_dtype, wild);
      const Arrays actual(expected);
      const StepConstants absorb = generator.Step(algorithm()), publish = generator.Step(algorithm());
      const size_t first = generator.Below(n / alignment() + 1) * alignment();
      NormLanes expected_norm, actual_norm;
      run(algorithm().scalar(), expected, first, absorb, publish, expected_norm);
      run(kernels(), actual, first, absorb, publish, actual_norm);
      actual.ExpectSameAs(expected);
      EXPECT_TRUE(SameNorms(expected_norm, actual_norm)) << expected_norm.Sum() << " " << actual_norm.Sum();
    }
  }

  static bool SameNorms(const NormLanes& a, const NormLanes& b) {
    for (size_t i = 0; i < kNormLanes; ++i) {
      if (a.lanes[i] != b.lanes[i] && !(std::isnan(a.lanes[i]) && std::isnan(b.lanes[i]))) return false;
    }
    return true;
  }
};

TEST_P(EveryTargetTest, AbsorbAndPublish) {
  Compare([](const AlgorithmKernels& k, const Arrays& a, size_t first, const StepConstants& absorb,
             const StepConstants& publish, NormLanes& norm) {
    k.absorb_and_publish(first, a.n, a.state(), absorb, a.Pending(), publish, a.Gradient(), a.Theta(), &norm, nullptr);
  });
}

TEST_P(EveryTargetTest, SavingOldStateChangesNothing) {
  OwnedUndoSlot slot(algorithm());
  Compare([&](const AlgorithmKernels& k, const Arrays& a, size_t first, const StepConstants& absorb,
              const StepConstants& publish, NormLanes& norm) {
    BeginUndo(*slot, 1);
    k.absorb_and_publish(first, a.n, a.state(), absorb, a.Pending(), publish, a.Gradient(), a.Theta(), &norm,
                         slot.get());
    if (first < a.n) {
      EXPECT_EQ((slot->torn >> 16) + (slot->torn & 0xffff), a.n);
    }
    BeginUndo(*slot, 2);
    k.absorb(first, a.n, a.state(), publish, a.Gradient(), slot.get());
  });
}

TEST_P(EveryTargetTest, Publish) {
  Compare([](const AlgorithmKernels& k, const Arrays& a, size_t first, const StepConstants&,
             const StepConstants& publish,
             NormLanes& norm) { k.publish(first, a.n, a.state(), publish, a.Gradient(), a.Theta(), &norm); });
}

TEST_P(EveryTargetTest, PublishWithoutNorm) {
  Compare([](const AlgorithmKernels& k, const Arrays& a, size_t first, const StepConstants&,
             const StepConstants& publish,
             NormLanes&) { k.publish(first, a.n, a.state(), publish, a.Gradient(), a.Theta(), nullptr); });
}

TEST_P(EveryTargetTest, AbsorbAndPublishWithoutNorm) {
  OwnedUndoSlot slot(algorithm());
  Compare([&](const AlgorithmKernels& k, const Arrays& a, size_t first, const StepConstants& absorb,
              const StepConstants& publish, NormLanes&) {
    k.absorb_and_publish(first, a.n, a.state(), absorb, a.Pending(), publish, a.Gradient(), a.Theta(), nullptr,
                         nullptr);
    BeginUndo(*slot, 1);
    k.absorb_and_publish(first, a.n, a.state(), absorb, a.Pending(), publish, a.Gradient(), a.Theta(), nullptr,
                         slot.get());
  });
}

TEST_P(EveryTargetTest, Absorb) {
  Compare([](const AlgorithmKernels& k, const Arrays& a, size_t first, const StepConstants& absorb,
             const StepConstants&, NormLanes&) { k.absorb(first, a.n, a.state(), absorb, a.Pending(), nullptr); });
}

TEST_P(EveryTargetTest, Plain) {
  Compare([](const AlgorithmKernels& k, const Arrays& a, size_t first, const StepConstants& absorb,
             const StepConstants&, NormLanes&) { k.plain(first, a.n, a.state(), absorb, a.Pending(), a.Theta()); });
}

// A chunk in runs has the bits, and the norm, of the chunk in one.
TEST_P(EveryTargetTest, RunsOfAChunkEqualTheWhole) {
  Generator generator(13);
  const size_t n = 2000;
  const Arrays whole = MakeArrays(n, DType::kBFloat16, DType::kBFloat16);
  generator.FillState(whole, false);
  generator.FillGradient(whole.pending, n, DType::kBFloat16, false);
  generator.FillGradient(whole.gradient, n, DType::kBFloat16, false);
  const Arrays cut(whole);
  const StepConstants absorb = generator.Step(algorithm()), publish = generator.Step(algorithm());
  const auto run = [&](const Arrays& a, size_t first, size_t end, NormLanes& norm) {
    kernels().absorb_and_publish(first, end, a.state(), absorb, a.Pending(), publish, a.Gradient(), a.Theta(), &norm,
                                 nullptr);
  };
  NormLanes expected, norm;
  run(whole, 0, n, expected);
  for (size_t first = 0; first < n; first += 3 * alignment()) {
    run(cut, first, std::min(n, first + 3 * alignment()), norm);
  }
  cut.ExpectSameAs(whole);
  EXPECT_EQ(norm.Sum(), expected.Sum());
}

// Of a tensor in two shards, wherever it is cut, each element is rounded as it is in the whole.
TEST_P(EveryTargetTest, ShardsEqualTheWhole) {
  Generator generator(19);
  const uint64_t rows = 9, columns = 131;
  Arrays whole = MakeArrays(rows * columns, DType::kFloat32, DType::kFloat32);
  generator.FillState(whole, false);
  generator.FillGradient(whole.pending, whole.n, DType::kFloat32, false);
  if (algorithm().block_elements > 1) GTEST_SKIP() << "blocks are cut";
  const Arrays before(whole);
  const StepConstants absorb = generator.Step(algorithm());
  kernels().absorb(0, whole.n, whole.state(), absorb, whole.Pending(), nullptr);
  for (const uint64_t cut : {uint64_t{1}, uint64_t{63}, uint64_t{64}, uint64_t{65}, uint64_t{130}}) {
    for (const uint64_t from : {uint64_t{0}, cut}) {
      const uint64_t width = from == 0 ? cut : columns - cut;
      Arrays shard = MakeArrays(rows * width, DType::kFloat32, DType::kFloat32);
      Arrays expected(shard);
      const auto take = [&](const std::byte* tensor, std::byte* part, size_t bytes) {
        for (uint64_t row = 0; row < rows; ++row) {
          std::memcpy(part + row * width * bytes, tensor + (row * columns + from) * bytes, width * bytes);
        }
      };
      for (size_t a = 0; a < algorithm().arrays.size(); ++a) {
        const size_t bytes = DTypeBytes(algorithm().arrays[a].dtype);
        take(before.state_arrays[a].data(), shard.state_arrays[a].data(), bytes);
        take(whole.state_arrays[a].data(), expected.state_arrays[a].data(), bytes);
      }
      take(before.pending.data(), shard.pending.data(), sizeof(float));
      const uint64_t shape[] = {rows, width}, global[] = {rows, columns}, offset[] = {0, from};
      ASSERT_TRUE(BoxElements::Make(shape, global, offset, &shard.box));
      kernels().absorb(0, shard.n, shard.state(), absorb, shard.Pending(), nullptr);
      shard.ExpectSameAs(expected);
    }
  }
}

TEST_P(EveryTargetTest, PublishingOnlyReadsState) {
  const Arrays arrays = MakeArrays(1000, DType::kBFloat16, DType::kBFloat16);
  Generator generator(7);
  generator.FillState(arrays, false);
  generator.FillGradient(arrays.gradient, arrays.n, DType::kBFloat16, false);
  const Arrays before(arrays);
  NormLanes norm;
  kernels().publish(0, arrays.n, arrays.state(), generator.Step(algorithm()), arrays.Gradient(), arrays.Theta(), &norm);
  for (size_t a = 0; a < algorithm().arrays.size(); ++a) {
    EXPECT_EQ(std::memcmp(arrays.floats(a), before.floats(a), algorithm().arrays[a].Bytes(arrays.n)), 0);
  }
}

// 100 steps of the deferred commit, some clipped, some skipped, against the plain step.
TEST_P(EveryTargetTest, DeferredCommitEqualsPlainSteps) {
  const AlgorithmKernels& k = kernels();
  const std::vector<double> scalars = algorithm().DefaultScalars();
  for (DType dtype : kDTypes) {
    const size_t n = 1003;
    Generator generator(11);
    const Arrays plain = MakeArrays(n, dtype, dtype);
    generator.FillState(plain, false);
    for (size_t a = 1; a < algorithm().arrays.size(); ++a) {
      std::memset(plain.state_arrays[a].data(), 0, algorithm().arrays[a].Bytes(n));
    }
    const Arrays deferred(plain);
    NormLanes norm;
    bool has_pending = false;
    StepConstants absorb;
    for (uint64_t t = 1, attempt = 0; attempt < 100; ++attempt) {
      generator.FillGradient(deferred.gradient, n, dtype, false);
      const StepConstants speculative = algorithm().make_constants(scalars.data(), t, 1);
      if (has_pending) {
        k.absorb_and_publish(0, n, deferred.state(), absorb, deferred.Pending(), speculative, deferred.Gradient(),
                             deferred.Theta(), &norm, nullptr);
      } else {
        k.publish(0, n, deferred.state(), speculative, deferred.Gradient(), deferred.Theta(), &norm);
      }
      has_pending = false;
      if (generator.Below(5) == 0) {  // skipped
        for (size_t i = 0; i < n; ++i) StoreElement(deferred.Theta(), i, LoadElement(deferred.Array(0), i));
        continue;
      }
      const double clip = generator.Below(2) ? 1 : 0.25;
      absorb = algorithm().make_constants(scalars.data(), t++, clip);
      if (clip != 1) k.publish(0, n, deferred.state(), absorb, deferred.Gradient(), deferred.Theta(), &norm);
      k.plain(0, n, plain.state(), absorb, deferred.Gradient(), plain.Theta());
      ASSERT_EQ(std::memcmp(deferred.theta.data(), plain.theta.data(), n * DTypeBytes(dtype)), 0) << attempt;
      std::memcpy(deferred.pending.data(), deferred.gradient.data(), n * DTypeBytes(dtype));
      has_pending = true;
    }
    if (has_pending) k.absorb(0, n, deferred.state(), absorb, deferred.Pending(), nullptr);
    deferred.ExpectSameAs(plain);
  }
}

// Parameters whose gradients are zero: their moments must not linger among the subnormals, on any instruction set.
TEST_P(EveryTargetTest, MomentsOfZeroGradientsReachZero) {
  const Arrays arrays = MakeArrays(64, DType::kFloat32, DType::kFloat32);
  Generator generator(3);
  generator.FillState(arrays, false);
  std::memset(arrays.pending.data(), 0, arrays.n * 4);
  std::vector<double> scalars;
  for (const Scalar& scalar : algorithm().scalars) scalars.push_back(scalar.below == 1 ? 0.9 : scalar.default_value);
  for (uint64_t t = 1; t <= 3000; ++t) {
    kernels().absorb(0, arrays.n, arrays.state(), algorithm().make_constants(scalars.data(), t, 1), arrays.Pending(),
                     nullptr);
  }
  for (size_t a = 1; a < algorithm().arrays.size(); ++a) {
    const std::byte* const bytes = arrays.state_arrays[a].data();
    const uint64_t count = algorithm().arrays[a].Bytes(arrays.n);
    EXPECT_TRUE(std::all_of(bytes, bytes + count, [](std::byte byte) { return byte == std::byte{0}; })) << a;
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryTargetTest, ::testing::ValuesIn(EveryTarget()), TargetName);

TEST(AlgorithmTest, EachSaysWhatItIs) {
  for (const Algorithm* algorithm : Algorithms()) {
    EXPECT_EQ(FindAlgorithm(algorithm->name), algorithm);
    EXPECT_LE(algorithm->arrays.size(), kMaxStateArrays);
    EXPECT_LE(algorithm->scalars.size(), kMaxScalars);
    EXPECT_EQ(algorithm->arrays[0].name, "model");
    for (const StateArray& array : algorithm->arrays) {
      EXPECT_TRUE(array.elements_per_entry == 1 || array.elements_per_entry == algorithm->block_elements) << array.name;
      if (array.codec == nullptr) continue;
      ASSERT_LT(array.codec->scales, algorithm->arrays.size());
      EXPECT_EQ(algorithm->arrays[array.codec->scales].elements_per_entry, algorithm->block_elements);
    }
    EXPECT_EQ(kChunkElements % algorithm->block_elements, 0u);
    for (const Scalar& scalar : algorithm->scalars) {
      EXPECT_GE(scalar.default_value, scalar.least) << scalar.name;
      EXPECT_LT(scalar.default_value, scalar.below) << scalar.name;
    }
  }
  EXPECT_EQ(FindAlgorithm("no such algorithm"), nullptr);
}

class EveryElementTargetTest : public ::testing::TestWithParam<const ElementKernels*> {};

TEST_P(EveryElementTargetTest, NarrowWidenAndAddSquares) {
  Generator generator(17);
  for (int round = 0; round < 300 && !HasFailure(); ++round) {
    const size_t n = 1 + generator.Below(3000), first = generator.Below(n / kNormLanes + 1) * kNormLanes;
    static constexpr StateArray kOne[] = {{"model"}};
    const Arrays expected(kOne, n, kDTypes[generator.Below(3)], kDTypes[generator.Below(3)]);
    generator.FillState(expected, round % 3 == 0);
    generator.FillGradient(expected.gradient, n, expected.gradient_dtype, round % 3 == 0);
    const Arrays actual(expected);
    NormLanes expected_norm, actual_norm;
    const auto run = [first](const ElementKernels& k, const Arrays& a, NormLanes& norm) {
      k.narrow(a.n, a.floats(0), a.Theta());
      k.widen(a.n, {a.theta.data(), a.theta_dtype}, a.floats(0));
      k.add_squares(first, a.n, a.Gradient(), norm);
      k.add_squares(0, first, a.Gradient(), norm);
    };
    run(kScalarElementKernels, expected, expected_norm);
    run(*GetParam(), actual, actual_norm);
    actual.ExpectSameAs(expected);
    EXPECT_TRUE(expected_norm.Sum() == actual_norm.Sum() ||
                (std::isnan(expected_norm.Sum()) && std::isnan(actual_norm.Sum())));
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryElementTargetTest, ::testing::ValuesIn(SupportedElementKernels()),
                         [](const auto& info) { return std::string(info.param->target); });

}  // namespace
}  // namespace superoffload::kernels
