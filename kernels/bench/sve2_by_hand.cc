// The two stages that do the arithmetic, for bf16, written with SVE2 intrinsics by hand and for vectors of 128 bits:
// what the compiler makes of kernels/adam/adam_vector.cc is compared with this, instruction by instruction (README.md).
// Compiled for aarch64 only and never run by the daemon.
#include <arm_sve.h>

#include <cstddef>
#include <cstdint>

#include "kernels/adam/adam.h"
#include "kernels/bench/baselines.h"
#include "kernels/undo_slot.h"

namespace superoffload::kernels {

struct ByHandPass {
  AdamArrays state;
  AdamStep step;
  const uint16_t* gradient;
  float* published;
  size_t ahead;
};

namespace {

constexpr size_t kLanes = 4;

inline svfloat32_t Widen(svbool_t all, const uint16_t* from) {
  return svreinterpret_f32_u32(svlsl_n_u32_x(all, svld1uh_u32(all, from), 16));
}

inline void Update(svbool_t all, const AdamStep& s, svfloat32_t gradient, svfloat32_t& p, svfloat32_t& m,
                   svfloat32_t& v) {
  const svfloat32_t g = svmul_n_f32_x(all, gradient, s.gradient_scale);
  const svbool_t large = svacge_n_f32(all, g, 0x1p-62f);
  const svfloat32_t square = svmul_f32_z(large, g, g);
  m = svmla_f32_x(all, svmul_n_f32_x(all, g, s.one_minus_beta1), m, svdup_n_f32(s.beta1));
  v = svmla_f32_x(all, svmul_n_f32_x(all, square, s.one_minus_beta2), v, svdup_n_f32(s.beta2));
  m = svsel_f32(svacge_n_f32(all, m, 0x1p-100f), m, svdup_n_f32(0));
  v = svsel_f32(svcmpge_n_f32(all, v, 0x1p-120f), v, svdup_n_f32(0));
  const svfloat32_t denominator =
      svmad_n_f32_x(all, svsqrt_f32_x(all, v), svdup_n_f32(s.inv_sqrt_bias_correction2), s.eps);
  p = svmls_f32_x(all, svmul_n_f32_x(all, p, s.decay), svdiv_f32_x(all, m, denominator), svdup_n_f32(s.step_size));
}

}  // namespace

// Absorbs a pending gradient.
void AbsorbByHand(size_t n, ByHandPass pass) {
  const svbool_t all = svptrue_b32();
  for (size_t i = 0; i < n; i += kLanes) {
    __builtin_prefetch(pass.state.p + i + pass.ahead);
    __builtin_prefetch(pass.gradient + i + pass.ahead);
    svfloat32_t p = svld1_f32(all, pass.state.p + i);
    svfloat32_t m = svld1_f32(all, pass.state.m + i);
    svfloat32_t v = svld1_f32(all, pass.state.v + i);
    Update(all, pass.step, Widen(all, pass.gradient + i), p, m, v);
    svst1_f32(all, pass.state.p + i, p);
    svst1_f32(all, pass.state.m + i, m);
    svst1_f32(all, pass.state.v + i, v);
  }
}

// Publishes into a buffer, with the sum of squares in eight lanes of fp64.
double PublishByHand(size_t n, ByHandPass pass) {
  const svbool_t all = svptrue_b32();
  const auto vector = [&](size_t i, svfloat64_t& lower_sum, svfloat64_t& upper_sum) {
    __builtin_prefetch(pass.gradient + i + pass.ahead);
    __builtin_prefetch(pass.state.m + i + pass.ahead);
    __builtin_prefetch(pass.state.v + i + pass.ahead);
    const svfloat32_t gradient = Widen(all, pass.gradient + i);
    svfloat32_t p = svld1_f32(all, pass.state.p + i);
    svfloat32_t m = svld1_f32(all, pass.state.m + i);
    svfloat32_t v = svld1_f32(all, pass.state.v + i);
    Update(all, pass.step, gradient, p, m, v);
    svst1_f32(all, pass.published + i, p);
    const svfloat64_t lower = svcvt_f64_f32_x(all, svzip1_f32(gradient, gradient));
    const svfloat64_t upper = svcvt_f64_f32_x(all, svzip2_f32(gradient, gradient));
    lower_sum = svmla_f64_x(all, lower_sum, lower, lower);
    upper_sum = svmla_f64_x(all, upper_sum, upper, upper);
  };
  svfloat64_t lanes0 = svdup_n_f64(0), lanes1 = lanes0, lanes2 = lanes0, lanes3 = lanes0;
  for (size_t i = 0; i < n; i += 2 * kLanes) {
    vector(i, lanes0, lanes1);
    vector(i + kLanes, lanes2, lanes3);
  }
  return svaddv_f64(all, svadd_f64_x(all, svadd_f64_x(all, lanes0, lanes1), svadd_f64_x(all, lanes2, lanes3)));
}

}  // namespace superoffload::kernels
