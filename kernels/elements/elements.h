// Elements of a run-time dtype, and what every optimizer does with them: widen, narrow, and sum squares.
//
// Every function is bit-identical on every instruction set and to the scalar reference. Spans of one call have equal
// length; none may overlap. Alignment is not required; 64 bytes is fastest. Nothing here allocates, locks or fails.
#ifndef SUPEROFFLOAD_KERNELS_ELEMENTS_ELEMENTS_H_
#define SUPEROFFLOAD_KERNELS_ELEMENTS_ELEMENTS_H_

#include <cstddef>
#include <string_view>

#include "kernels/base/dtype.h"

namespace superoffload::kernels {

// Elements of one chunk: the unit of work and of the norm's fixed reduction.
inline constexpr size_t kChunkElements = 64 * 1024;

// An array of elements of a run-time dtype, one that IsFloat.
struct ConstElements {
  const void* data;
  DType dtype;
};
struct MutableElements {
  void* data;
  DType dtype;
};

inline constexpr size_t kNormLanes = 8;

// A sum of squares of one chunk in the making, in fp64: lane i adds the elements whose index in the chunk is i modulo
// 8, in index order. A range of the chunk that is left out counts as zeros; so ranges must start at multiples of 8.
struct NormLanes {
  double lanes[kNormLanes] = {};

  // Lanes 0 to 7 in order. Finite exactly when every element is.
  double Sum() const {
    double sum = 0;
    for (const double lane : lanes) sum += lane;
    return sum;
  }
};

// Adds the squares of elements [first, n) of a chunk.
void AddSquares(size_t first, size_t n, ConstElements gradient, NormLanes& norm);

// Of a whole chunk.
double SumOfSquares(size_t n, ConstElements gradient);

// theta = p in the parameter dtype, rounded to nearest even by integer arithmetic; a NaN becomes the quiet NaN of its
// sign.
void Narrow(size_t n, const float* p, MutableElements theta);

// p = theta, exactly.
void Widen(size_t n, ConstElements theta, float* p);

// Between master weights, in fp32 or in the dtype of the parameters, and these. Pushed elements of masters in fp32 stay
// where theta is narrowed from them: they know more.
void Publish(size_t n, ConstElements masters, MutableElements theta);
void Push(size_t n, ConstElements theta, MutableElements masters);

// Elements ahead of the loop at which the kernels ask for memory: far enough for DRAM, near enough to stay in L1. For
// the whole process, at any time; changes no result. 64 to 16384.
void SetPrefetchElements(size_t elements);
size_t PrefetchElements();

// The instruction set chosen at run time: "AVX512", "AVX2", "SVE2FIXED128", "SVE2", "NEON" or "SCALAR".
std::string_view KernelTarget();

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_ELEMENTS_ELEMENTS_H_
