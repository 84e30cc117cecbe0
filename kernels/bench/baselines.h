// What our kernels are measured against: the memory's limits, and the formula peers use.
#ifndef SUPEROFFLOAD_KERNELS_BENCH_BASELINES_H_
#define SUPEROFFLOAD_KERNELS_BENCH_BASELINES_H_

#include <cstddef>
#include <cstdint>

#include "kernels/adam/adam.h"

namespace superoffload::kernels {

// The constants of a step as DeepSpeed's CPUAdam computes them (csrc/adam/cpu_adam_impl.cpp, decoupled weight decay).
struct PeerStep {
  float beta1, beta2, eps;
  float weight_decay;      // -lr * weight_decay
  float bias_correction2;  // 1 / sqrt(1 - beta2^t)
  float step_size;         // -lr / (1 - beta1^t)
};

// The state of AdamW, one array each.
struct AdamArrays {
  float *p, *m, *v;

  StateView view() const { return {.arrays = {p, m, v}}; }
};

struct Baselines {
  // a, b, c = one multiply-add of themselves: what any update in place of three arrays costs. 24 bytes per element.
  void (*update_in_place)(size_t n, AdamArrays arrays);

  // STREAM's triad, a = b + 3 c, with ordinary stores. 16 bytes per element, 4 of them write-allocate.
  void (*triad)(size_t n, float* a, const float* b, const float* c);

  // What any publish pass does to memory: reads three fp32 arrays, or two where `v` is null, and a gradient, and
  // streams parameters, the latter two of `width` bytes per element, 2 or 4. One addition for each array that is read.
  void (*read_stream)(size_t n, AdamArrays state, const void* gradient, void* theta, size_t width);

  // fp32 AdamW with an fp32 gradient, eight vectors at a time, without prefetch, as published. 28 bytes per element.
  void (*peer_step)(size_t n, AdamArrays state, const PeerStep& step, const float* gradient);

  // The separate pass that makes bf16 parameters of the masters. 8 bytes per element, 2 of them write-allocate.
  void (*peer_cast)(size_t n, const float* p, uint16_t* theta);
};

// Those for the instruction set that the kernels run on; null when they run on none (the scalar reference).
const Baselines* BaselinesForThisMachine();

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_BENCH_BASELINES_H_
