// The publish pass beside what reading its arrays costs.
#ifndef SUPEROFFLOAD_KERNELS_BENCH_PUBLISH_H_
#define SUPEROFFLOAD_KERNELS_BENCH_PUBLISH_H_

#include <cstddef>
#include <string>

#include "kernels/bench/baselines.h"

namespace superoffload::kernels {

// A table: for every algorithm, median nanoseconds per element of read_stream over its arrays, and of its publish pass
// with and without the norm on every instruction set, with the ratio of the former to the latter. One thread. Each
// chunk is timed by itself and the kernels take turns, so that a machine that others use distorts all of them alike: a
// chunk takes less time than a scheduler's slice, and whoever is interrupted is no median.
std::string MeasurePublish(const Baselines& baselines, size_t elements, DType dtype, int repetitions);

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_BENCH_PUBLISH_H_
