// Lion's passes for vectors: one source, compiled once per instruction set and format of the state
// (SUPEROFFLOAD_TABLE names the table that it defines, SUPEROFFLOAD_MOMENTS and _MASTERS the format).
#define HWY_COMPILE_ONLY_STATIC
#include "kernels/lion/lion.h"
#include "kernels/vector/pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

struct LionFormula {
  using Step = LionStep;
  using State = StateWith<Format{Moments::SUPEROFFLOAD_MOMENTS, Masters::SUPEROFFLOAD_MASTERS}, 1>;
  using Full = LionFormula;
  static bool Fits(const LionStep&) { return true; }

  // One element of Lion in every lane; the formula of lion.h.
  template <class D, class V>
  static HWY_INLINE void Update(D d, const LionStep& step, V gradient, V& p, V& m) {
    const V g = hn::Mul(gradient, hn::Set(d, step.gradient_scale));
    const V c = hn::MulAdd(hn::Set(d, step.beta1), m, hn::Mul(hn::Set(d, step.one_minus_beta1), g));
    const V one = hn::Set(d, 1.0f), zero = hn::Zero(d);
    const V positive = hn::IfThenElse(hn::Gt(c, zero), one, c);
    const V sign = hn::IfThenElse(hn::Lt(c, zero), hn::Neg(one), hn::IfThenZeroElse(hn::Eq(c, zero), positive));
    p = hn::MulAdd(hn::Set(d, -step.lr), sign, hn::Mul(p, hn::Set(d, step.decay)));
    m = hn::MulAdd(hn::Set(d, step.beta2), m, hn::Mul(hn::Set(d, step.one_minus_beta2), g));
    m = FlushBelow(d, 0x1p-100f, m);
  }
};

}  // namespace

extern const AlgorithmKernels SUPEROFFLOAD_TABLE;
const AlgorithmKernels SUPEROFFLOAD_TABLE = Passes<LionFormula>::Table(SUPEROFFLOAD_TARGET);

}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();
