// The passes of algorithm.h over one chunk, for any algorithm that updates element by element: one source, compiled
// once per instruction set. An algorithm gives its formula, a struct with
//
//   using Step                 its constants, as StepConstants holds them; `step` among them is the step count of the
//                              parameter, where state is rounded stochastically
//   using State                its arrays, a StateWith
//   static void Update(d, step, gradient, p, ...)    one vector of every array, in place
//   static bool Fits(step)     whether it does what these constants ask for; if not,
//   using Full                 does
//
// Usual pairs of dtypes of gradients and parameters have loops of their own. Others are converted block by block, which
// takes a few percent longer and saves most of the code.
#ifndef SUPEROFFLOAD_KERNELS_VECTOR_PASS_INL_H_
#define SUPEROFFLOAD_KERNELS_VECTOR_PASS_INL_H_

#include <utility>

#include "kernels/vector/block_loop-inl.h"
#include "kernels/vector/element_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

// A master weight and kMoments others, stored as `format` says; of codes, those of the first have signs.
template <Format format, size_t kMoments>
using StateWith = decltype([]<size_t... kArrays>(std::index_sequence<kArrays...>) {
  if constexpr (format.moments == Moments::kDynamic8) {
    return CodedState<StoredMaster<format.masters>, kArrays == 0 ...>();
  } else {
    return StoredState<StoredMaster<format.masters>, StoredMoment<format.moments, kArrays + 1>...>();
  }
}(std::make_index_sequence<kMoments>()));

// With loops of their own: bf16 and fp32, and fp32 gradients of bf16 parameters, as the GPU casts them.
template <Kind kKind, class Loop>
void RunInDTypes(const Call& call) {
  const DType gradient = kKind.publish ? call.gradient.dtype : call.pending.dtype;
  const DType theta = kKind.theta ? call.theta.dtype : gradient;
  using F = typename Loop::Formula;
  if (F::Fits(call.absorb.As<typename F::Step>()) && F::Fits(call.publish.As<typename F::Step>())) {
    if (gradient == DType::kBFloat16 && theta == DType::kBFloat16) {
      return Loop::template Run<kKind, BFloat16, BFloat16>(call);
    }
    if constexpr (!F::State::kRoundsMasters || !kKind.theta) {
      if (gradient == DType::kFloat32 && theta == DType::kFloat32) {
        return Loop::template Run<kKind, Float32, Float32>(call);
      }
    }
    if constexpr (kKind.theta) {
      if (gradient == DType::kFloat32 && theta == DType::kBFloat16) {
        return Loop::template Run<kKind, Float32, BFloat16>(call);
      }
    }
  }
  Loop::Full::template Run<kKind, AnyDType, AnyDType>(call);
}

// The passes of formula F as algorithm.h declares them.
template <class F>
struct Passes {
  using Loop = typename F::State::template LoopOf<F>;

  // What is to be undone by nobody is saved all the same: it costs next to nothing, and one loop is enough.
  template <Kind kKind>
  static void RunWithUndo(Call& call) {
    struct {
      UndoSlot slot;
      std::byte old[Loop::kUndoBytes];
    } own;
    if (call.undo == nullptr) call.undo = &own.slot;
    RunInDTypes<kKind, Loop>(call);
  }

  static void Absorb(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                     UndoSlot* undo) {
    Call call{first, n, state, absorb, pending};
    call.undo = undo;
    RunWithUndo<Kind{.absorb = true}>(call);
  }

  static void Publish(size_t first, size_t n, const StateView& state, const StepConstants& publish,
                      ConstElements gradient, MutableElements theta, NormLanes* norm) {
    const Call call{first, n, state, {}, {}, publish, gradient, theta, norm};
    norm == nullptr ? RunInDTypes<Kind{.publish = true, .theta = true}, Loop>(call)
                    : RunInDTypes<Kind{.publish = true, .norm = true, .theta = true}, Loop>(call);
  }

  static void AbsorbAndPublish(size_t first, size_t n, const StateView& state, const StepConstants& absorb,
                               ConstElements pending, const StepConstants& publish, ConstElements gradient,
                               MutableElements theta, NormLanes* norm, UndoSlot* undo) {
    Call call{first, n, state, absorb, pending, publish, gradient, theta, norm, undo};
    norm == nullptr ? RunWithUndo<Kind{.absorb = true, .publish = true, .theta = true}>(call)
                    : RunWithUndo<Kind{.absorb = true, .publish = true, .norm = true, .theta = true}>(call);
  }

  static void Plain(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                    MutableElements theta) {
    Call call{first, n, state, absorb, pending};
    call.theta = theta;
    RunWithUndo<Kind{.absorb = true, .theta = true}>(call);
  }

  static constexpr AlgorithmKernels Table(const char* target) {
    return {target, Absorb, Publish, AbsorbAndPublish, Plain};
  }
};

}  // namespace
}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();

#endif  // SUPEROFFLOAD_KERNELS_VECTOR_PASS_INL_H_
