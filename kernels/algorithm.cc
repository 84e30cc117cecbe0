#include "kernels/algorithm.h"

namespace superoffload::kernels {

#define X(name) extern const Algorithm name;
#include "kernels/algorithms.inc"
#undef X

namespace {

constexpr const Algorithm* kAlgorithms[] = {
#define X(name) &name,
#include "kernels/algorithms.inc"
#undef X
};

}  // namespace

std::span<const Algorithm* const> Algorithms() { return kAlgorithms; }

const Algorithm* FindAlgorithm(std::string_view name) {
  for (const Algorithm* algorithm : kAlgorithms) {
    if (algorithm->name == name) return algorithm;
  }
  return nullptr;
}

}  // namespace superoffload::kernels
