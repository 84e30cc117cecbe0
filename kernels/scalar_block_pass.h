// The scalar reference of algorithm.h's passes over moments that are stored as dynamic codes (codes/dynamic_code.h),
// from the formula that scalar_pass.h takes. kSigned: of each moment, whether its codes have signs.
#ifndef SUPEROFFLOAD_KERNELS_SCALAR_BLOCK_PASS_H_
#define SUPEROFFLOAD_KERNELS_SCALAR_BLOCK_PASS_H_

#include <algorithm>
#include <cstring>

#include "kernels/algorithm.h"
#include "kernels/codes/dynamic_code.h"
#include "kernels/elements/scalar_element.h"
#include "kernels/scalar_table.h"
#include "kernels/undo_slot.h"

namespace superoffload::kernels {

template <class F, Masters kMasters, bool... kSigned>
struct ScalarBlockPasses
    : ScalarTable<ScalarBlockPasses<F, kMasters, kSigned...>, Format{.masters = kMasters}.TypeOf(0)> {
  static constexpr DType kMasterType = Format{.masters = kMasters}.TypeOf(0);
  static constexpr size_t kMasterBytes = DTypeBytes(kMasterType);
  static constexpr size_t kMoments = sizeof...(kSigned), kKept = UndoElements(kCodeBlock);
  static_assert(F::kArrays == 1 + kMoments);
  static constexpr BlockCodec kCodecs[] = {DynamicCode<kSigned>::Codec(0)...};

  static void* Codes(const StateView& state, size_t moment, size_t first) {
    return static_cast<uint8_t*>(state.arrays[1 + 2 * moment]) + first;
  }
  static float* Scale(const StateView& state, size_t moment, size_t first) {
    return state.Floats(2 + 2 * moment) + first / kCodeBlock;
  }

  // The next state of a block, of which moments are still to be encoded.
  struct Next {
    Next(const StateView& state, size_t first, size_t n, const StepConstants& constants, ConstElements gradient) {
      const auto step = constants.As<typename F::Step>();
      for (size_t i = 0; i < n; ++i) values[0][i] = LoadElement({state.arrays[0], kMasterType}, first + i);
      for (size_t moment = 0; moment < kMoments; ++moment) {
        kCodecs[moment].decode(n, Codes(state, moment, first), Scale(state, moment, first), values[1 + moment]);
      }
      for (size_t i = 0; i < n; ++i) {
        float element[F::kArrays];
        for (size_t a = 0; a < F::kArrays; ++a) element[a] = values[a][i];
        F::Update(step, LoadElement(gradient, first + i), element);
        for (size_t a = 0; a < F::kArrays; ++a) values[a][i] = element[a];
        if constexpr (kMasters == Masters::kRoundedBFloat16) {
          values[0][i] = RoundedMaster(element[0], ElementWord(state.rounding, step.step, first + i, RoundingPair(0)));
        }
      }
    }

    float values[F::kArrays][kCodeBlock];
  };

  template <typename Visit>
  static void ForEachBlock(size_t first, size_t n, Visit visit) {
    for (size_t i = first; i < n; i += kCodeBlock) visit(i, std::min(kCodeBlock, n - i));
  }

  static void Save(const StateView& state, size_t first, size_t n, UndoSlot& undo) {
    const size_t at = first % kKept;
    std::memcpy(undo.OldBytes(0, kKept) + at * kMasterBytes,
                static_cast<const std::byte*>(state.arrays[0]) + first * kMasterBytes, n * kMasterBytes);
    for (size_t moment = 0; moment < kMoments; ++moment) {
      std::memcpy(undo.OldBytes(1 + 2 * moment, kKept) + at, Codes(state, moment, first), n);
      std::memcpy(undo.OldBytes(2 + 2 * moment, kKept) + at / kCodeBlock * sizeof(float), Scale(state, moment, first),
                  sizeof(float));
    }
    KeepOrder();
    undo.torn = TornGranule(first, n);
    KeepOrder();
  }

  static void Absorb(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                     UndoSlot* undo) {
    ForEachBlock(first, n, [&](size_t i, size_t count) {
      const Next next(state, i, count, absorb, pending);
      if (undo != nullptr) Save(state, i, count, *undo);
      for (size_t j = 0; j < count; ++j) StoreElement({state.arrays[0], kMasterType}, i + j, next.values[0][j]);
      for (size_t moment = 0; moment < kMoments; ++moment) {
        kCodecs[moment].encode(count, next.values[1 + moment], Codes(state, moment, i), Scale(state, moment, i));
      }
    });
  }

  static void Publish(size_t first, size_t n, const StateView& state, const StepConstants& publish,
                      ConstElements gradient, MutableElements theta, NormLanes* norm) {
    ForEachBlock(first, n, [&](size_t i, size_t count) {
      const Next next(state, i, count, publish, gradient);
      for (size_t j = 0; j < count; ++j) {
        StoreElement(theta, i + j, next.values[0][j]);
        const double g = LoadElement(gradient, i + j);
        if (norm != nullptr) norm->lanes[(i + j) % kNormLanes] += g * g;
      }
    });
  }
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_SCALAR_BLOCK_PASS_H_
