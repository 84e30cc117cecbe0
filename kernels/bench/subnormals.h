// Do kernels stay fast when moments that get no gradient decay towards the subnormal range?
#ifndef SUPEROFFLOAD_KERNELS_BENCH_SUBNORMALS_H_
#define SUPEROFFLOAD_KERNELS_BENCH_SUBNORMALS_H_

namespace superoffload::kernels {

// 5,000 steps of one chunk without gradients on every instruction set; prints the time of the slowest 250 steps over
// that of the first 250.
int RunSubnormals();

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_BENCH_SUBNORMALS_H_
