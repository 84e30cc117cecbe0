// Adam's passes for vectors: one source, compiled once per instruction set and format of the state
// (SUPEROFFLOAD_TABLE names the table that it defines, SUPEROFFLOAD_MOMENTS and _MASTERS the format).
#define HWY_COMPILE_ONLY_STATIC
#include "kernels/adam/adam.h"
#include "kernels/vector/pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

// kL2: weight decay may be a term of the gradient.
template <bool kL2>
struct AdamFormula {
  using Step = AdamStep;
  using State = StateWith<Format{Moments::SUPEROFFLOAD_MOMENTS, Masters::SUPEROFFLOAD_MASTERS}, 2>;
  using Full = AdamFormula<true>;
  static bool Fits(const AdamStep& step) { return kL2 || step.l2 == 0; }

  // One element of Adam in every lane; the formula of adam.h.
  template <class D, class V>
  static HWY_INLINE void Update(D d, const AdamStep& step, V gradient, V& p, V& m, V& v) {
    V g = hn::Mul(gradient, hn::Set(d, step.gradient_scale));
    if (kL2 && step.l2 != 0) g = hn::MulAdd(hn::Set(d, step.l2), p, g);
    const V g2 = FlushBelow(d, step.least_gradient, g);
    m = hn::MulAdd(hn::Set(d, step.beta1), m, hn::Mul(hn::Set(d, step.one_minus_beta1), g));
    v = hn::MulAdd(hn::Set(d, step.beta2), v, hn::Mul(hn::Set(d, step.one_minus_beta2), hn::Mul(g2, g2)));
    m = FlushBelow(d, step.least_exp_avg, m);
    v = hn::IfThenZeroElse(hn::Lt(v, hn::Set(d, step.least_exp_avg_sq)), v);
    const V denominator = hn::MulAdd(hn::Sqrt(v), hn::Set(d, step.inv_sqrt_bias_correction2), hn::Set(d, step.eps));
    p = hn::MulAdd(hn::Set(d, -step.step_size), hn::Div(m, denominator), hn::Mul(p, hn::Set(d, step.decay)));
  }
};

}  // namespace

extern const AlgorithmKernels SUPEROFFLOAD_TABLE;
const AlgorithmKernels SUPEROFFLOAD_TABLE = Passes<AdamFormula<false>>::Table(SUPEROFFLOAD_TARGET);

}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();
