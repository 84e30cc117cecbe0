// GraceAdam: Adam and AdamW in the commit-and-speculate form of the deferred commit.
//
// At rest, state (p, m, v) lacks the last step's gradient, which is pending. When the next gradient arrives, one
// pass absorbs the pending one and publishes the parameters of the new step without writing that step into the state:
//
//   (p, m, v) = Adam(p, m, v, pending)          written
//   theta     = Adam(p, m, v, gradient).p       published in the parameter dtype
//
// One element of Adam, with every product that feeds an addition fused, in this order on every ISA:
//
//   g = widen(gradient) * gradient_scale;   L2 form: g = fma(l2, p, g)
//   m = fma(beta1, m, (1-beta1) * g)
//   v = fma(beta2, v, (1-beta2) * (g2 * g2))         g2 = |g| < 2^-62 ? 0 : g
//   m = |m| < 2^-100 ? 0 : m;   v = v < 2^-120 ? 0 : v
//   p = fma(-step_size, m / fma(sqrt(v), inv_sqrt_bias_correction2, eps), p * decay)
//
// That is torch.optim.AdamW's update (Loshchilov & Hutter 2019, algorithm 2) up to the last few ulps. The flushes keep
// moments of parameters without gradients out of the subnormal range; with eps >= 1e-15 they change no parameter. theta
// is rounded to nearest even by integer arithmetic; a NaN becomes the quiet NaN of its sign.
//
// Every function is bit-identical for every ISA and to the scalar reference in adam_reference.h. Spans of one call
// have equal length; none may overlap unless said. Alignment is not required; 64 bytes is fastest. Nothing here
// allocates, locks or fails. A call covers at most kChunkElements and starts at a chunk boundary where it returns a
// sum.
#ifndef SUPEROFFLOAD_KERNELS_ADAM_ADAM_H_
#define SUPEROFFLOAD_KERNELS_ADAM_ADAM_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/dtype.h"

namespace superoffload::kernels {

// Elements of one chunk: the unit of work and of the norm's fixed reduction.
inline constexpr size_t kChunkElements = 64 * 1024;

enum class WeightDecay : uint8_t { kDecoupled, kL2 };  // AdamW, Adam

// As in torch.optim; see ParameterGroup in optimizer.proto for the ranges.
struct AdamHyperparameters {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  WeightDecay decay_form = WeightDecay::kDecoupled;

  bool operator==(const AdamHyperparameters&) const = default;
};

// The fp32 constants of one step of one parameter group.
struct AdamStep {
  float gradient_scale = 1;
  float beta1 = 0;
  float one_minus_beta1 = 0;
  float beta2 = 0;
  float one_minus_beta2 = 0;
  float step_size = 0;                  // lr / (1 - beta1^t)
  float inv_sqrt_bias_correction2 = 0;  // 1 / sqrt(1 - beta2^t)
  float eps = 0;
  float decay = 1;  // 1 - lr * weight_decay when decoupled
  float l2 = 0;     // weight_decay when L2

  bool operator==(const AdamStep&) const = default;
};

// `t` counts steps from 1. `gradient_scale` multiplies every gradient: unscale factor times clip coefficient.
// Computed in fp64 with powers by repeated squaring, then rounded once: the same bits on every machine.
AdamStep MakeAdamStep(const AdamHyperparameters& hyperparameters, uint64_t t, double gradient_scale);

// fp32 master weights and moments of one run of elements.
struct AdamState {
  float* p;
  float* m;
  float* v;
};

// An array of elements of a run-time dtype, as long as the call's `n`.
struct ConstElements {
  const void* data;
  DType dtype;
};
struct MutableElements {
  void* data;
  DType dtype;
};

struct UndoSlot;

// Absorbs `pending` into the state, publishes theta for `gradient`, returns the sum of squares of `gradient`
// (unscaled). With an undo slot (undo_slot.h), which may be null, a kill inside the call can be repaired.
double Deferred(size_t n, AdamState state, const AdamStep& absorb, ConstElements pending, const AdamStep& publish,
                ConstElements gradient, MutableElements theta, UndoSlot* undo);

// Publishes theta for `gradient` without writing state; returns the sum of squares of `gradient` (unscaled).
double Republish(size_t n, AdamState state, const AdamStep& publish, ConstElements gradient, MutableElements theta);

// Absorbs `pending` into the state, from element `first` on. `undo` as above; with the slot of a pass that was cut off
// and with what RestoreTornBlock returned as `first`, it finishes that pass under the same protection.
void Settle(size_t n, AdamState state, const AdamStep& absorb, ConstElements pending, UndoSlot* undo, size_t first = 0);

// Absorbs `pending` and publishes the result: the classic one-pass step.
void Plain(size_t n, AdamState state, const AdamStep& absorb, ConstElements pending, MutableElements theta);

// theta = p in the parameter dtype.
void Narrow(size_t n, const float* p, MutableElements theta);

// p = theta, exactly.
void Widen(size_t n, ConstElements theta, float* p);

// The same, but elements of p stay that theta is narrowed from: they know more.
void Adopt(size_t n, ConstElements theta, float* p);

// Sum of squares in fp64: eight lanes (element index mod 8), each summed in index order, then lanes 0 to 7 in
// order. Finite exactly when every element is.
double SumOfSquares(size_t n, ConstElements gradient);

// Elements ahead of the loop at which the kernels ask for memory: far enough for DRAM, near enough to stay in L1. For
// the whole process, at any time; changes no result. 64 to 16384.
void SetPrefetchElements(size_t elements);
size_t PrefetchElements();

// The instruction set chosen at run time: "AVX512", "AVX2", "SVE2FIXED128", "SVE2", "NEON" or "SCALAR".
std::string_view KernelTarget();

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_ADAM_ADAM_H_
